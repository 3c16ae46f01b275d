"""The planner against real training steps of the tiny preset on gloo ranks, rank by rank: see
:mod:`tests.twins.predictions`. All runs of `tests/parity` check the same predictions; this file
has the cases without such a run: activations, shorter numbers, other kinds of steps.
"""

from __future__ import annotations

from typing import Any

import pytest

from moemesh.comm.mesh import Mesh
from moemesh.config.data import DataConfig
from moemesh.config.lora import LoraConfig
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.run import RunConfig
from moemesh.config.train import TrainConfig
from moemesh.config.tuning import FULL, Tuning
from moemesh.planner.estimate import estimate_run
from moemesh.planner.memory import RankMemory
from moemesh.planner.traffic.ledger import predict_ledger
from moemesh.planner.traffic.own_memory import predict_memory
from moemesh.trace.memory_profile import MemoryProfile
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.optimizer import Optimizer
from moemesh.train.post_validated import PostValidation
from tests.parity.test_tuning import TUNINGS
from tests.parity.training import Shape, build, keys_of, lines, microbatches, model_of, on_ranks_of
from tests.twins.planned import SEQ_LEN, measure
from tests.twins.predictions import assert_predicted

#: Keys over the preset `tiny` by the names that they have in the tables.
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "dense": {"num_experts": 0, "num_shared_experts": 0},
    # Extra prediction layers, and experts in some layers only.
    "ahead": {"num_mtp_layers": 2, "moe_layers": (1, 4, 7)},
    # One auxiliary loss of all layers.
    "together": {"aux_loss_layers": "together", "aux_loss_scope": "global"},
    "biases": {"expert_bias": True, "router_logit_bias": True, "shared_gate": True},
    "gated": {"shared_gate": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    "latent": {
        "attention": "mla", "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rotary_head_dim": 8, "v_head_dim": 16,
    },
    "narrow": {
        "attention": "mla", "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 4,
        "qk_rotary_head_dim": 2, "v_head_dim": 3,
    },
    "windows": {
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_sinks": True,
        "qkv_bias": True,
        "output_bias": True,
    },
    "over_all": {"qk_norm": True, "qk_norm_over": "projection"},
    "deep": {"num_layers": 4, "first_dense_layers": 1},
    "adapters": {"lora": {"rank": 4}},
    "wide_adapters": {"lora": {"rank": 32}},
    "some_adapters": {"lora": {"rank": 4, "targets": ("q_proj", "down_proj")}},
}  # fmt: skip
DISPATCHERS = "dispatcher=all_to_all/all_gather/hierarchical/low_latency"
NODES = "dp=4 tp=2 ep=4 etp=2 ranks_per_node=4"
EXACT = "dp=4 ep=4 combine=exact ranks_per_node=2"
HALVES = "pp=2 microbatches=4"
AFTER = f"{HALVES} schedule=zb_h2 optimizer_validation=after"
SLICED = "pp=2 schedule=terapipe slices=3 microbatches=2"
STREAM = "pp=2 schedule=pipedream microbatches=4"
MESSAGES = "pp=2 schedule=ampnet microbatches=3"
#: A step of zero3 that keeps its weights, and a parameter server with two servers.
LONGER = {
    "step": {"data": "zero3", "reshard": "step"},
    "two_servers": {"data": "parameter_server", "servers": 2},
}
GROUPED = "data=zero1/zero2/zero3/step"
NARROW = f"{GROUPED}/parameter_server"
WIDE = f"{NARROW}/two_servers"
DEFERRING = "data=zero1/zero2/parameter_server"
SCATTERED = "data=zero2/zero3"

#: Model (names of MODELS and keys), plan, and batch with precision. Odd batches leave ranks with
#: uneven shares.
CASES = f"""
tiny |  | 3 float32
tiny | dp=2 ep=2 | 5 float32
tiny | tp=2 ep=2 | 4 bfloat16
tiny | tp=2 etp=2 attention_exit=all_reduce | 3 float32
tiny | tp=4 ep=4 attention_exit=all_to_all | 3 float64
tiny | dp=2 tp=2 ep=2 etp=2 microbatches=2 | 7 float32
tiny | dp=4 ep=4 dispatcher=all_gather | 6 float32
tiny | dp=4 ep=4 dispatcher=hierarchical ranks_per_node=2 dispatch_chunks=2 | 6 bfloat16
tiny | dp=2 tp=2 ep=4 dispatcher=low_latency | 4 float32
*tiny | dp=2 ep=2 payload=fp8 dispatch_chunks=3 | 4 bfloat16
tiny | dp=4 ep=2 combine=exact | 4 float32
tiny | pp=2 dp=2 ep=2 microbatches=3 | 6 float32
aux_loss_layers=together | pp=2 tp=2 microbatches=2 | 5 float32
dense | dp=2 tp=2 | 3 float32
tiny | recompute=full | 3 float32
*num_mtp_layers=2 | recompute=selective | 3 bfloat16
tiny | recompute=selective dp=2 ep=2 | 5 float32
num_mtp_layers=2 | tp=2 ep=2 | 3 float32
num_mtp_layers=1 tied_embeddings=True | pp=2 microbatches=2 | 4 bfloat16
biases | dp=2 tp=2 ep=2 etp=2 | 4 float32
biases | dp=4 ep=2 combine=exact | 4 float32
gated | tp=2 ep=2 | 3 bfloat16
gated | dp=2 ep=2 | 3 float64
tiny | {NODES} {DISPATCHERS} | 9 float32
tiny | {NODES} {DISPATCHERS} | 9 bfloat16
tiny | {EXACT} {DISPATCHERS} | 5 float64
aux_loss_scope=global z_loss_coefficient=0.001 | dp=2 tp=2 | 4 float32
aux_loss_scope=microbatch | dp=2 tp=2 microbatches=2 | 4 float32
router_score=sigmoid | dp=2 tp=2 ep=4 | 4 float32
capacity_factor=1.0 | dp=2 tp=2 ep=4 | 4 float32
tied_embeddings=True qk_norm=True | {HALVES} dp=2 | 8 float32
router_logit_bias=True num_shared_experts=0 | tp=2 ep=2 | 4 bfloat16
tiny | {HALVES} stages_per_rank=2 schedule=interleaved_1f1b | 4 float32
tiny | {HALVES} schedule=dualpipe dp=2 ep=2 | 9 float32
tiny | {HALVES} schedule=dualpipe_v | 4 float32
deep | {HALVES} schedule=dualpipe_v overlap_blocks=False | 4 float32
*deep | {HALVES} schedule=dualpipe_v dp=2 ep=2 | 9 bfloat16
tiny | pp=4 schedule=gpipe microbatches=4 | 5 bfloat16
hidden_size=256 num_layers=3 | tp=4 ep=2 etp=2 | 2 bfloat16
tiny | recompute=full dp=2 ep=2 dispatcher=low_latency | 5 float32
tiny | recompute=selective recompute_attention=False | 3 float32
tiny | recompute=selective recompute_experts=False | 3 float64
tiny | cp=2 context=all_gather recompute=selective | 4 float32
tiny | cp=2 tp=2 ep=4 | 4 float32
tiny | {HALVES} schedule=zb_h1 recompute=full | 4 bfloat16
tiny | {HALVES} schedule=zb_h2 recompute=selective | 4 float32
router_score=sigmoid z_loss_coefficient=0.001 |  | 3 bfloat16
together | dp=2 tp=2 | 4 bfloat16
together aux_loss_scope=sequence | {HALVES} tp=2 ep=2 | 5 float32
together z_loss_coefficient=0.001 | recompute=full | 3 float32
together router_score=sigmoid aux_loss_probabilities=softmax | dp=2 ep=2 | 4 float32
# Kinds of attention.
latent | tp=2 ep=2 | 4 float32
latent v_head_dim=24 | dp=2 microbatches=2 | 5 float32
latent q_lora_rank=0 | tp=2 ep=2 attention_exit=all_to_all | 3 bfloat16
latent qkv_bias=True attention_sinks=True | tp=2 ep=2 dp=2 | 5 float64
windows | tp=2 ep=2 attention_exit=all_reduce | 3 float32
windows qk_norm=True clip_qkv=1.0 | dp=2 ep=2 | 4 bfloat16
over_all | tp=2 ep=2 dp=2 | 5 float32
over_all clip_qkv=1.0 partial_rotary_factor=0.5 | tp=2 ep=2 | 4 bfloat16
clip_qkv=1.0 | tp=4 | 4 float32
"""
#: Without activations, which the planner does not count tensor by tensor for some schedules (the
#: weight gradients that a split backward still owes); the other ends of a step, recomputed
#: forwards, experts on several ranks. Plans of `tests/parity` are not repeated for their own sake.
TRAFFIC_ONLY = f"""
first_dense_layers=2 | recompute=full {HALVES} tp=2 ep=2 | 4 bfloat16
*tiny | {AFTER} dp=2 ep=2 | 6 float32
tiny | dp=4 ep=4 spare_slots=2 | 6 float32
tiny | {STREAM} dp=2 ep=2 | 5 float32
*tiny | {MESSAGES} tp=2 ep=2 | 4 float32
ahead | {HALVES} tp=2 ep=2 | 4 bfloat16
tiny | recompute=full {NODES} {DISPATCHERS} | 9 bfloat16
tiny | recompute=full {EXACT} {DISPATCHERS} | 5 float64
tiny | recompute=full {HALVES} schedule=zb_h1 tp=2 attention_exit=all_to_all | 4 float32
tiny | recompute=full {HALVES} schedule=dualpipe dp=2 ep=2 dispatch_chunks=2 | 9 float32
capacity_factor=1.0 | recompute=full dp=2 tp=2 ep=4 | 4 float32
tiny | recompute=selective dp=2 tp=2 ep=2 | 4 float32
capacity_factor=1.0 aux_loss_scope=global | {AFTER} tp=2 | 4 float32
tiny | pp=4 microbatches=4 schedule=zb_h2 optimizer_validation=after recompute=full | 4 float32
tied_embeddings=True | {HALVES} schedule=zb_v optimizer_validation=after | 4 float32
tiny | {HALVES} schedule=1f1b optimizer_validation=after dp=2 ep=2 spare_slots=1 | 6 float32
tiny | dp=4 ep=4 spare_slots=1 dispatch_chunks=2 spare_policy=shadow | 6 float32
tiny | dp=4 ep=4 spare_slots=1 recompute=full payload=fp8 | 6 bfloat16
tiny | dp=2 tp=2 ep=2 etp=2 spare_slots=2 | 5 float32
tiny | dp=4 ep=2 spare_slots=1 ranks_per_node=2 microbatches=2 | 9 float32
router_score=sigmoid router_selection_bias=True | {STREAM} tp=2 | 4 float32
tiny | pp=2 schedule=pipedream_2bw microbatches=4 update_window=2 dp=2 | 8 float32
tiny | {STREAM} recompute=full tp=2 ep=2 | 4 float32
tiny | pp=4 schedule=ampnet microbatches=3 ampnet_backward=live | 4 float32
tiny | {MESSAGES} recompute=full dp=2 ep=2 | 6 float32
biases | dp=4 ep=4 spare_slots=1 | 6 float32
biases | dp=4 ep=2 spare_slots=2 etp=2 | 6 bfloat16
ahead tied_embeddings=True | recompute=full {HALVES} dp=2 ep=2 | 4 float32
num_mtp_layers=1 | {AFTER} dp=2 ep=2 | 6 float32
together | {STREAM} dp=2 ep=2 | 4 float32
together | {MESSAGES} tp=2 | 3 float32
num_mtp_layers=1 | schedule=pipedream microbatches=4 tp=2 | 4 float32
num_mtp_layers=1 moe_layers=(0,2) | dp=4 ep=4 spare_slots=1 | 6 float32
# Kinds of attention.
latent | tp=2 ep=2 recompute=full | 4 float32
# States that are sharded over data-parallel ranks, or on servers.
tiny | dp=4 ep=2 microbatches=2 data=zero1 | 8 bfloat16
tiny | dp=4 ep=2 microbatches=2 data=step | 8 bfloat16
tiny | dp=4 ep=2 microbatches=2 data=two_servers | 8 bfloat16
tiny | dp=4 ep=2 microbatches=2 {WIDE} | 8 bfloat16
tiny | dp=4 ep=2 shard_group=2 microbatches=2 {GROUPED} | 8 bfloat16
tiny | dp=4 ep=2 combine=exact ranks_per_node=2 {WIDE} | 5 float64
tiny | dp=2 tp=2 ep=2 etp=2 {NARROW} | 3 bfloat16
tied_embeddings=True qk_norm=True | {HALVES} dp=2 {NARROW} | 8 bfloat16
tiny | {HALVES} dp=2 ep=2 schedule=dualpipe {DEFERRING} | 9 float32
tiny | {HALVES} recompute=full dp=2 tp=2 schedule=zb_h1 {DEFERRING} | 4 bfloat16
num_mtp_layers=1 expert_bias=True | {HALVES} dp=2 {NARROW} | 8 bfloat16
tiny | {AFTER} dp=2 ep=2 {DEFERRING} | 6 float32
tiny | {STREAM} dp=2 ep=2 data=zero1/parameter_server | 5 bfloat16
dense | dp=2 tp=2 {NARROW} | 3 float32
# Gradients that wait for their sums, in pipelines.
tiny | {HALVES} dp=2 schedule=zb_h1 data=zero2 | 8 float32
tiny | {HALVES} dp=2 {SCATTERED} | 8 float32
biases qk_norm=True | pp=2 dp=2 ep=2 microbatches=3 data=zero2 | 7 float32
latent | pp=2 dp=2 microbatches=3 {SCATTERED} | 7 bfloat16
tiny | pp=3 dp=2 ep=2 microbatches=5 {SCATTERED} | 11 float32
tiny | pp=4 dp=2 microbatches=4 {SCATTERED} | 8 float32
tiny | pp=4 dp=2 microbatches=4 schedule=chimera data=zero2 | 8 bfloat16
tiny | pp=4 dp=2 microbatches=6 schedule=zb_h2 data=zero2 | 12 bfloat16
tiny | {HALVES} stages_per_rank=2 schedule=interleaved_1f1b dp=2 {DEFERRING} | 8 float32
tied_embeddings=True | {HALVES} dp=2 schedule=zb_v data=zero2 | 8 float32
num_mtp_layers=2 tied_embeddings=True | {HALVES} dp=2 {SCATTERED} | 9 float32
num_mtp_layers=1 | {HALVES} dp=2 ep=2 schedule=dualpipe data=zero2 | 9 float32
tiny | {HALVES} dp=2 ep=2 schedule=dualpipe spare_slots=1 data=zero2 | 9 float32
tiny | {SLICED} dp=2 ep=2 {SCATTERED} | 6 float32
"""
#: Sequences of 13 tokens: chunks of one and of two.
CONTEXT = """
tiny | cp=2 context=ring/all_gather/all_to_all | 3 float32
tiny | cp=4 context=ring/all_gather/all_to_all | 3 float32
tiny | cp=2 tp=2 ep=4 context=ring | 3 bfloat16
tiny | cp=2 tp=2 ep=4 context=all_gather | 3 bfloat16
tiny | cp=2 tp=2 ep=4 context=all_to_all | 3 bfloat16
tiny | recompute=full cp=2 dp=2 ep=2 context=ring/all_gather/all_to_all | 3 float64
tiny | recompute=selective cp=2 tp=2 context=ring/all_gather/all_to_all | 3 float32
tiny | recompute=selective cp=2 recompute_attention=False | 3 float32
tiny | pp=2 cp=2 microbatches=3 ep=2 context=ring/all_gather/all_to_all | 4 bfloat16
qk_norm=True | cp=2 context=all_to_all | 3 bfloat16
narrow | cp=2 tp=2 context=ring/all_gather/all_to_all | 3 float32
num_kv_heads=1 | cp=4 context=all_to_all | 2 float32
num_kv_heads=2 | cp=8 context=all_to_all | 2 float32
router_selection=expert_choice aux_loss_scope=global | cp=2 tp=2 ep=2 | 3 float32
capacity_factor=1.0 | cp=4 ep=2 | 3 float32
tiny | pp=2 cp=2 microbatches=3 schedule=zb_h1 recompute=full | 4 float32
num_experts=12 | dp=3 cp=2 ep=6 combine=exact | 2 float32
"""
ADAPTERS = f"""
deep adapters | dp=2 tp=2 ep=2 etp=2 | 5 bfloat16
deep adapters | {HALVES} dp=2 schedule=zb_h1 | 4 float32
*deep wide_adapters | {HALVES} dp=2 ep=2 schedule=zb_h1 | 4 float32
deep adapters | dp=4 etp=2 data=zero3 | 5 float32
deep adapters | dp=4 ep=2 data=zero2 shard_group=2 | 5 bfloat16
deep adapters | recompute=full {HALVES} dp=2 ep=2 schedule=dualpipe | 9 float32
deep some_adapters | tp=2 cp=2 ep=2 data=zero1 | 4 float32
deep some_adapters | dp=2 tp=2 ep=2 combine=exact | 4 float32
deep some_adapters | recompute=selective tp=2 dp=2 | 4 bfloat16
deep adapters | {HALVES} dp=2 tp=2 schedule=zb_h1 attention_exit=all_to_all | 4 float32
"""
#: "train=NAME": a choice of `tests/parity/test_tuning.py`.
TUNED = f"""
train=experts deep | dp=2 ep=2 | 5 bfloat16
train=late deep | {HALVES} tp=2 ep=2 | 4 bfloat16
train=late deep | dp=4 ep=2 data=zero3 | 5 float32
train=head deep | {HALVES} dp=2 schedule=zb_h1 | 4 float32
train=late deep | recompute=full {HALVES} dp=2 ep=2 schedule=dualpipe | 9 float32
train=attention deep | dp=2 tp=2 ep=2 data=zero2 | 4 bfloat16
train=ahead deep num_mtp_layers=2 | dp=2 tp=2 ep=2 data=zero3 | 4 float32
train=second_ahead deep num_mtp_layers=2 | {HALVES} tp=2 | 4 bfloat16
train=down deep | dp=4 ep=2 shard_group=2 data=zero1 | 5 float32
train=routers deep | {AFTER} dp=2 ep=2 | 6 float32
train=late deep | {SLICED} tp=2 ep=2 | 3 float32
train=no_experts deep | dp=4 ep=4 spare_slots=1 | 6 float32
train=late deep | dp=4 ep=4 spare_slots=1 | 6 float32
train=late deep | dp=2 data=zero3 reshard=step cp=2 | 4 float32
train=head deep | dp=4 ep=2 data=parameter_server | 5 float32
train=layer deep | dp=2 data=zero3 {HALVES} | 4 float32
*train=uneven_experts deep | dp=4 ep=4 data=zero3 | 6 bfloat16
train=some_experts deep | dp=2 tp=2 ep=2 etp=2 | 4 float32
train=frozen_experts deep | dp=4 ep=2 data=zero1 | 4 bfloat16
train=some_downs deep expert_bias=True | {HALVES} dp=2 ep=2 | 4 float32
"""

#: Enough numbers for the forms that a CPU computes in one pass, which keep less.
LONG = """
num_layers=2 qk_norm=True | | 4 float32
num_layers=2 qk_norm=True num_kv_heads=1 | | 4 float32
num_layers=2 qk_norm=True clip_qkv=4.0 | | 4 float32
dense num_layers=2 qk_norm=True | dp=2 | 8 bfloat16
*latent num_layers=2 | | 4 bfloat16
latent num_layers=2 | dp=2 | 8 float32
"""

#: Vocabularies of one chunk of the loss, two and more, on whole ranks and on shards; the last one
#: with the full moment elsewhere than in the loss.
LOSS = f"""
*num_layers=1 vocab_size=20001 | recompute=full | 1 bfloat16
num_layers=1 vocab_size=9000 | | 2 float64
*num_layers=2 vocab_size=40000 | tp=2 ep=2 recompute=selective | 1 float32
num_layers=2 vocab_size=70000 | {HALVES} tp=2 | 4 bfloat16
num_layers=2 vocab_size=20000 | {HALVES} schedule=zb_h1 | 4 float32
num_layers=1 num_mtp_layers=1 vocab_size=20000 | dp=2 | 2 float32
num_layers=8 vocab_size=300 | | 2 float32
"""


def cases(table: str) -> list[Any]:
    """(model, keys of the plan, data) of each line, as it is; default are those with a star."""
    keys: dict[str, Any] = {}
    for model, plans, data in lines(table):
        marks = () if model.startswith("*") else (pytest.mark.slow,)
        for plan in plans:
            text = f"{model.strip('*')} | {plan} | {data}"
            values = model.strip("*"), keys_of(plan), data
            keys.setdefault(text, pytest.param(*values, id=text, marks=marks))
    return list(keys.values())


def model_keys(model: str) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for word in model.split():
        keys |= keys_of(word) if "=" in word else MODELS[word]
    return keys


def check(
    model: str,
    plan: dict[str, Any],
    data: str,
    *,
    activations: bool = True,
    seq_len: int = SEQ_LEN,
    tuning: Tuning = FULL,
) -> None:
    keys = model_keys(model)
    plan = plan | LONGER.get(plan.get("data", ""), {})
    batch, dtype = int(data.split()[0]), data.split()[1]
    ranks = measure(keys, plan, dtype, batch, seq_len, count_saved=activations, tuning=tuning)
    assert_predicted(
        model_of(keys),
        Plan(**plan),
        ranks,
        TrainConfig(dtype=dtype),
        batch=batch,
        seq_len=seq_len,
        activations=activations,
        tuning=tuning,
    )


#: Vocabularies of one and of several chunks of the loss, short and long sequences, every form of
#: recomputation and of data parallelism: a memory class that the trainer does not hold shows here.
ESTIMATED = """
num_layers=2 vocab_size=20000 | dp=2 ep=2 | 4x64 float32
num_layers=2 vocab_size=70000 | tp=2 ep=2 recompute=selective | 2x64 float32
num_layers=2 vocab_size=40000 | recompute=full | 2x128 bfloat16
num_layers=4 | recompute=full dp=2 ep=2 | 4x512 float32
num_layers=4 | dp=2 ep=2 data=zero1 | 4x128 bfloat16
num_layers=4 vocab_size=9000 | dp=2 ep=2 data=zero2 | 4x64 bfloat16
*num_layers=4 vocab_size=9000 | dp=4 ep=2 data=zero3 recompute=full | 4x128 float32
num_layers=4 | tp=2 ep=2 attention_exit=all_to_all | 4x256 float32
num_layers=4 | cp=2 ep=2 | 4x256 float32
num_layers=4 vocab_size=20000 | pp=2 microbatches=4 | 4x128 float32
num_layers=4 | dp=2 ep=2 dispatcher=all_gather recompute=selective | 4x128 bfloat16
dense num_layers=4 vocab_size=20000 | dp=2 tp=2 data=zero1 | 4x128 float32
"""


@pytest.mark.parametrize(("model", "plan", "data"), cases(ESTIMATED))
def test_estimate_is_the_memory_of_the_run(model: str, plan: dict[str, Any], data: str) -> None:
    """`moemesh estimate --config`, which knows no routing: each class within 10 % of the run, and
    within 1 % of its sum."""
    keys = model_keys(model)
    sizes, dtype = data.split()
    batch, seq_len = map(int, sizes.split("x"))
    ranks = measure(keys, plan, dtype, batch, seq_len, count_saved=True)
    config = RunConfig(
        model=model_of(keys),
        plan=Plan(**plan),
        data=DataConfig(seq_len=seq_len, global_batch=batch),
        train=TrainConfig(dtype=dtype),  # type: ignore[arg-type]
    )
    estimated = estimate_run(config, "laptop_cpu")
    for predicted in estimated.memory.ranks:
        of_rank = ranks[predicted.rank * estimated.layout.stage_ranks]["memory"]
        profile = MemoryProfile(rank=0, peak=0, activation_kinds=of_rank.pop("kinds"), **of_rank)
        measured = RankMemory.of(profile, predicted.rank)
        for name, size in measured.to_json().items():
            near = 0.1 * size + (0.01 * measured.total if name != "total" else 0)
            assert abs(predicted.to_json()[name] - size) <= near, f"{name} of {predicted.rank}"


@pytest.mark.parametrize(("model", "plan", "data"), cases(CASES))
def test_predicted_is_measured(model: str, plan: dict[str, Any], data: str) -> None:
    check(model, plan, data)


@pytest.mark.parametrize(("model", "plan", "data"), cases(LONG))
def test_forms_in_one_pass(model: str, plan: dict[str, Any], data: str) -> None:
    check(model, plan, data, seq_len=1024)


@pytest.mark.parametrize(("model", "plan", "data"), cases(LOSS))
def test_logits_are_those_of_chunks(model: str, plan: dict[str, Any], data: str) -> None:
    check(model, plan, data, seq_len=64)


@pytest.mark.parametrize(("model", "plan", "data"), cases(TRAFFIC_ONLY))
def test_predicted_traffic_is_measured(model: str, plan: dict[str, Any], data: str) -> None:
    check(model, plan, data, activations=False)


@pytest.mark.parametrize(("model", "plan", "data"), cases(CONTEXT))
def test_context_parallelism(model: str, plan: dict[str, Any], data: str) -> None:
    # Nothing is counted of choices that compare tokens; of ranks without a sequence, too little.
    counted = "expert_choice" not in model and "combine" not in plan
    check(model, plan, data, activations=counted, seq_len=13)


@pytest.mark.parametrize(("model", "plan", "data"), cases(ADAPTERS))
def test_adapters_beside_frozen_weights(model: str, plan: dict[str, Any], data: str) -> None:
    lora = MODELS[model.split()[-1]]["lora"]
    check(model, plan, data, tuning=Tuning(train_only=LoraConfig(**lora).trains))


@pytest.mark.parametrize(("model", "plan", "data"), cases(TUNED))
def test_parameters_that_do_not_train(model: str, plan: dict[str, Any], data: str) -> None:
    choice, _, keys = model.removeprefix("train=").partition(" ")
    tuning = Tuning(**TUNINGS[choice])
    check(keys, plan, data, tuning=tuning, activations="spare_slots" not in plan)


def snapshots_on_rank(mesh: Mesh, model_keys: dict[str, Any], plan_keys: dict[str, Any]) -> int:
    """Bytes of a snapshot of the second step, whose norm is below the clip."""
    config, plan = model_of(model_keys), Plan(**plan_keys)
    shape, train = Shape(4, SEQ_LEN), TrainConfig(dtype="float32", steps=2, clip=1e6)
    parallel = build(mesh, config, plan, shape, "float32")
    steps = PostValidation(
        parallel, Optimizer.of(parallel, train), train, lambda: False, arm_after=0
    )
    for number in (1, 2):
        batches = microbatches(config, plan, shape, number, mesh)
        steps.run(number, batches, TimelineRecorder(mesh.rank))
    steps.flush()
    return steps.snapshot_bytes


@pytest.mark.parametrize("keys", [{}, {"num_mtp_layers": 1}])
def test_a_snapshot_has_the_biases_of_all_routers(keys: dict[str, Any]) -> None:
    """Also of an extra prediction layer's."""
    keys |= {"num_layers": 2, "router_score": "sigmoid", "router_selection_bias": True}
    plan = keys_of(AFTER)
    measured = on_ranks_of(model_of(keys), Plan(**plan), snapshots_on_rank, keys, plan)
    sizes = {"seq_len": SEQ_LEN, "global_batch": 4, "dtype": "float32"}
    for rank, size in enumerate(measured):
        assert predict_memory(model_of(keys), Plan(**plan), **sizes, rank=rank).snapshots == size


def test_uniform_routing_is_near_a_run() -> None:
    """Without the choices of a run, bytes are expected ones: the same lines, the same counts."""
    plan = {"dp": 2, "ep": 2}
    config, checked = ModelConfig(), Plan(**plan)
    measured = measure({}, plan, batch=4)[0]["ledger"]
    expected = predict_ledger(
        config, checked, seq_len=SEQ_LEN, global_batch=4, dtype="float32", rank=0
    )
    keys = [(e.axis, e.op, e.phase, e.caller, e.count) for e in expected.entries()]
    assert keys == [(e.axis, e.op, e.phase, e.caller, e.count) for e in measured.entries()]
    rows = {"caller": "moe.dispatch", "phase": "forward"}
    sent, ran = (ledger.total(**rows).wire_bytes for ledger in (expected, measured))
    assert sent == pytest.approx(ran, rel=0.25)
