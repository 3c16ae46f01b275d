"""Context parallelism gives one device's results, however keys travel and lengths divide.

Float64 and SGD, as in `test_parity`. 13 positions cannot be cut evenly; of 5, some ranks hold none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.parallel.parallelize import parallelize
from moemesh.train.step import evaluate
from tests.parity.asynchronous import stream
from tests.parity.test_attention import MODELS as KINDS
from tests.parity.test_parity import MODEL, MODELS, TRAIN
from tests.parity.training import Shape, assert_equals_one_device, microbatches, rows, shape_of
from tests.ranks import mesh_on_ranks

LOSSES = {"z_loss_coefficient": 1e-2, "router_jitter": 0.2}
DEEP: dict[str, dict[str, Any]] = (
    {
        scope: MODEL | LOSSES | {"aux_loss_scope": scope, "num_layers": 4}
        for scope in ("sequence", "microbatch", "global")
    }
    | {
        "grouped": MODELS["grouped"],
        "sigmoid": MODELS["sigmoid"],
        "dense": MODELS["dense"],
        # One key/value head for all query heads; groups of two of which a rank has one and a half.
        "one_kv_head": MODEL | {"num_kv_heads": 1},
        "across": MODEL | {"num_heads": 12, "num_kv_heads": 6},
        "ahead": MODEL | {"num_mtp_layers": 2},
        "expert_choice": MODEL | {"router_selection": "expert_choice"},
        "sinkhorn": MODEL | {"router_selection": "sinkhorn", "capacity_factor": 1.0},
        "capacity": MODEL | {"capacity_factor": 0.8, "capacity_policy": "probability"},
    }
    | {name: KINDS[name] for name in ("latent", "latent_plain", "windows", "over_projection")}
)
CONTEXTS = ("ring", "all_gather", "all_to_all")
#: Of 3 sequences in 4 microbatches one is empty; of 5 positions some ranks hold none.
CASES = rows(
    """
    # Every way of the keys, on every number of ranks, with every scope of the losses.
    sequence | cp=2/4 context=ring/all_gather/all_to_all | 3x13
    *microbatch | cp=2 context=ring | 3x13 padded packed
    microbatch | cp=2/4 context=ring/all_gather/all_to_all | 3x13 padded packed
    *global | cp=4 context=all_gather | 3x13 packed
    global | cp=2/4 context=ring/all_gather/all_to_all | 3x13 packed
    # Fewer positions than chunks, a number of ranks that is no power of two.
    dense | cp=3 context=ring/all_gather | 3x5
    microbatch | cp=4 context=ring/all_gather/all_to_all ep=4 | 3x5
    across | cp=3 context=all_to_all | 3x13 packed
    # Groups of heads.
    grouped | cp=4 context=ring/all_gather/all_to_all | 3x13 packed
    one_kv_head *across | cp=4 context=all_to_all | 3x13
    # Choices that compare the tokens of a sequence.
    expert_choice sinkhorn capacity | cp=2 tp=1 ep=2 context=ring | 3x13 padded
    expert_choice sinkhorn capacity | cp=2 tp=2 ep=2 context=all_gather | 3x13 padded
    # With tensor parallelism: heads are cut twice.
    *sequence | cp=2 tp=2 ep=4 attention_exit=reduce_scatter context=ring | 3x13 padded packed
    sequence | cp=2 tp=2 ep=4 attention_exit=all_reduce context=all_gather | 3x13 padded packed
    sequence | cp=2 tp=2 ep=4 attention_exit=all_to_all context=all_to_all | 3x13 padded packed
    grouped | cp=2 tp=4 ep=8 context=all_to_all | 3x13
    global | cp=4 tp=2 ep=2 etp=2 context=ring | 3x5
    # Experts over dp, cp and tp; every dispatcher; experts that are summed in one order.
    sigmoid | dp=2 cp=2 ep=4 context=ring | 3x13 padded
    sequence | dp=2 cp=2 tp=2 ep=8 dispatcher=all_gather context=all_to_all | 3x13
    global | dp=2 cp=2 ep=4 dispatcher=hierarchical ranks_per_node=2 context=all_gather | 3x13
    sequence | cp=4 ep=4 dispatcher=low_latency context=ring | 3x13 padded
    microbatch | cp=4 ep=2 combine=exact context=ring | 3x13 padded
    sequence | cp=4 ep=4 spare_slots=1 context=all_to_all | 3x13 packed
    sequence | dp=2 cp=2 ep=4 dispatch_chunks=2 context=all_gather | 1x11 packed
    sigmoid | dp=3 cp=2 ep=2 microbatches=2 context=ring | 3x13
    # Latent attention, windows, sinks, norms over all heads.
    *latent | cp=2 tp=2 ep=4 context=ring | 3x13 padded packed
    latent | cp=2 tp=2 ep=4 context=all_gather/all_to_all | 3x13 padded packed
    *latent_plain | cp=4 context=all_gather/all_to_all recompute=full | 3x13
    latent_plain | cp=4 context=ring recompute=full | 3x13
    *windows | cp=4 ep=2 context=all_gather | 3x13 packed
    *windows | cp=4 ep=2 context=ring/all_to_all | 3x13 packed
    windows | pp=2 cp=2 microbatches=2 schedule=zb_h1 context=ring | 3x13 padded packed
    over_projection | cp=2 tp=2 recompute=selective context=all_to_all | 3x13
    # States that are sharded over the ranks of dp and cp.
    grouped | cp=2 dp=2 ep=4 microbatches=2 data=zero1 context=all_to_all | 3x13 padded packed
    grouped | cp=2 dp=2 ep=4 microbatches=2 data=zero2/zero3 context=all_gather | 3x13 padded packed
    grouped | cp=2 dp=2 ep=4 microbatches=2 data=zero3 context=ring | 3x13 padded packed
    latent | cp=4 ep=4 data=zero3 reshard=step context=ring | 3x13 packed
    sequence | pp=2 cp=2 microbatches=3 data=zero1 context=all_gather | 3x13
    # Extra prediction layers look beyond the positions of a rank.
    *ahead | cp=4 ep=2 context=ring | 3x13 padded packed
    ahead | cp=4 ep=2 context=all_gather/all_to_all | 3x13 padded packed
    ahead | pp=2 cp=2 tp=2 microbatches=2 schedule=zb_h1 context=ring | 3x13 packed
    # Activations computed again.
    *sequence | cp=2 ep=2 recompute=full context=ring | 3x13 packed
    sequence | cp=2 ep=2 recompute=selective/full context=ring/all_gather/all_to_all | 3x13 packed
    # Every pipeline.
    sequence | pp=2 cp=2 microbatches=4 schedule=1f1b/zb_h2 context=ring ep=2 | 3x13 padded packed
    sequence | pp=2 cp=2 microbatches=4 schedule=gpipe context=all_gather ep=2 | 3x13 padded packed
    *sequence | pp=2 cp=2 microbatches=4 schedule=zb_h1 context=all_to_all ep=2 | 3x13 padded packed
    sequence | pp=2 cp=2 microbatches=4 schedule=dualpipe_v context=all_gather ep=2 | 3x13 packed
    sequence | pp=2 cp=2 microbatches=4 schedule=zb_v context=all_to_all ep=2 | 3x13 padded packed
    global | pp=2 cp=2 microbatches=4 schedule=interleaved_1f1b stages_per_rank=2 | 3x13
    global | pp=2 cp=2 microbatches=4 schedule=dualpipe ep=2 context=ring | 3x13
    microbatch | pp=2 cp=2 microbatches=4 schedule=chimera context=all_to_all | 3x13
    grouped | pp=2 cp=2 microbatches=4 recompute=full schedule=zb_h1 context=ring | 3x13 packed
    sequence | pp=2 cp=2 tp=2 ep=4 microbatches=2 context=all_gather | 3x13 padded packed
    """
)
BOTH = shape_of("3x13 padded packed")


@pytest.mark.parametrize(("model", "plan", "shape"), CASES)
def test_context_parallel_equals_one_device(model: str, plan: dict[str, Any], shape: Shape) -> None:
    assert_equals_one_device(DEEP[model], plan, TRAIN, shape, plan.get("microbatches", 1))


ASYNCHRONOUS: list[dict[str, Any]] = [
    {"schedule": "pipedream", "context": "ring"},
    {"schedule": "pipedream_2bw", "update_window": 2, "context": "all_gather", "ep": 2},
    # One microbatch at a time: the order does not depend on who is faster.
    {"schedule": "ampnet", "update_window": 2, "max_in_flight": 1, "context": "all_to_all"},
]


@pytest.mark.representative("pipedream_2bw")
@pytest.mark.parametrize("plan", ASYNCHRONOUS, ids=lambda plan: plan["schedule"])
def test_a_stream_is_spread_over_contexts(plan: dict[str, Any]) -> None:
    keys = plan | {"pp": 2, "microbatches": 4}
    one = stream(DEEP["sequence"], keys | {"ep": 1}, TRAIN, BOTH)
    two = stream(DEEP["sequence"], keys | {"cp": 2}, TRAIN, BOTH)
    assert two.losses == pytest.approx(one.losses, rel=1e-10)
    assert two.aux == pytest.approx(one.aux, rel=1e-10)
    for name, weight in one.weights.items():
        assert (two.weights[name] - weight).abs().max() <= 1e-10 * weight.abs().max(), name


def losses_on_rank(mesh: Mesh, plan_keys: dict[str, Any], shape: Shape) -> float:
    config, plan = ModelConfig(**DEEP["sequence"]), Plan(**plan_keys)
    tokens = plan.tokens_per_rank(shape.seq_len, shape.global_batch)
    parallel = parallelize(config, plan, mesh, seed=1, dtype=torch.float64, tokens_per_rank=tokens)
    return evaluate(parallel, microbatches(config, plan, shape, 1, mesh))


@pytest.mark.parametrize("context", CONTEXTS)
def test_evaluation_counts_every_token_once(context: str) -> None:
    one = losses_on_rank(Mesh.single("cpu"), {}, BOTH)
    plan = {"dp": 2, "cp": 2, "context": context}
    for loss in mesh_on_ranks(Plan(**plan).layout, losses_on_rank, plan, BOTH):
        assert loss == pytest.approx(one, rel=1e-12)
