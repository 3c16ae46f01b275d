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
from tests.parity.training import Shape, alone, assert_same, microbatches, name_of, train
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
ODD = Shape(global_batch=3, seq_len=13)
PADDED = ODD._replace(padding=True)
PACKED = ODD._replace(packed=True)
BOTH = ODD._replace(padding=True, packed=True)
SHORT = Shape(global_batch=3, seq_len=5)
LONELY = Shape(global_batch=1, seq_len=11, packed=True)

RING, GATHER, HEADS = ({"context": name} for name in CONTEXTS)
#: Three sequences in four microbatches: one is empty.
PIPES = {"pp": 2, "cp": 2, "microbatches": 4}

Case = tuple[str, dict[str, Any], Shape]
CASES: list[Case] = [
    # Every way of the keys, on every number of ranks, with every scope of the losses.
    *(
        (scope, {"cp": cp, "context": name}, shape)
        for scope, shape in (("sequence", ODD), ("microbatch", BOTH), ("global", PACKED))
        for cp in (2, 4)
        for name in CONTEXTS
    ),
    # Fewer positions than chunks, a number of ranks that is no power of two.
    *(("dense", {"cp": 3, "context": name}, SHORT) for name in CONTEXTS[:2]),
    *(("microbatch", {"cp": 4, "context": name, "ep": 4}, SHORT) for name in CONTEXTS),
    ("across", {"cp": 3} | HEADS, PACKED),
    # Groups of heads.
    *(("grouped", {"cp": 4, "context": name}, PACKED) for name in CONTEXTS),
    ("one_kv_head", {"cp": 4} | HEADS, ODD),
    ("across", {"cp": 4} | HEADS, ODD),
    # Choices that compare the tokens of a sequence.
    *(
        (model, {"cp": 2, "tp": tp, "ep": 2, "context": name}, PADDED)
        for model in ("expert_choice", "sinkhorn", "capacity")
        for tp, name in ((1, "ring"), (2, "all_gather"))
    ),
    # With tensor parallelism: heads are cut twice.
    *(
        ("sequence", {"cp": 2, "tp": 2, "ep": 4, "attention_exit": exit, "context": name}, BOTH)
        for exit, name in zip(("reduce_scatter", "all_reduce", "all_to_all"), CONTEXTS, strict=True)
    ),
    ("grouped", {"cp": 2, "tp": 4, "ep": 8} | HEADS, ODD),
    ("global", {"cp": 4, "tp": 2, "ep": 2, "etp": 2} | RING, SHORT),
    # Experts over dp, cp and tp; every dispatcher; experts that are summed in one order.
    ("sigmoid", {"dp": 2, "cp": 2, "ep": 4} | RING, PADDED),
    ("sequence", {"dp": 2, "cp": 2, "tp": 2, "ep": 8, "dispatcher": "all_gather"} | HEADS, ODD),
    (
        "global",
        {"dp": 2, "cp": 2, "ep": 4, "dispatcher": "hierarchical", "ranks_per_node": 2} | GATHER,
        ODD,
    ),
    ("sequence", {"cp": 4, "ep": 4, "dispatcher": "low_latency"} | RING, PADDED),
    ("microbatch", {"cp": 4, "ep": 2, "combine": "exact"} | RING, PADDED),
    ("sequence", {"cp": 4, "ep": 4, "spare_slots": 1} | HEADS, PACKED),
    ("sequence", {"dp": 2, "cp": 2, "ep": 4, "dispatch_chunks": 2} | GATHER, LONELY),
    ("sigmoid", {"dp": 3, "cp": 2, "ep": 2, "microbatches": 2} | RING, ODD),
    # Latent attention, windows, sinks, norms over all heads.
    *(("latent", {"cp": 2, "tp": 2, "ep": 4, "context": name}, BOTH) for name in CONTEXTS),
    *(("latent_plain", {"cp": 4, "context": name, "recompute": "full"}, ODD) for name in CONTEXTS),
    *(("windows", {"cp": 4, "ep": 2, "context": name}, PACKED) for name in CONTEXTS),
    ("windows", {"pp": 2, "cp": 2, "microbatches": 2, "schedule": "zb_h1"} | RING, BOTH),
    ("over_projection", {"cp": 2, "tp": 2, "recompute": "selective"} | HEADS, ODD),
    # States that are sharded over the ranks of dp and cp.
    *(
        ("grouped", {"cp": 2, "dp": 2, "ep": 4, "microbatches": 2, "data": data} | name, BOTH)
        for data, name in (("zero1", HEADS), ("zero2", GATHER), ("zero3", RING), ("zero3", GATHER))
    ),
    ("latent", {"cp": 4, "ep": 4, "data": "zero3", "reshard": "step"} | RING, PACKED),
    ("sequence", {"pp": 2, "cp": 2, "microbatches": 3, "data": "zero1"} | GATHER, ODD),
    # Extra prediction layers look beyond the positions of a rank.
    *(("ahead", {"cp": 4, "ep": 2, "context": name}, BOTH) for name in CONTEXTS),
    ("ahead", {"pp": 2, "cp": 2, "tp": 2, "microbatches": 2, "schedule": "zb_h1"} | RING, PACKED),
    # Activations computed again.
    *(
        ("sequence", {"cp": 2, "ep": 2, "recompute": recompute, "context": name}, PACKED)
        for recompute in ("selective", "full")
        for name in CONTEXTS
    ),
    # Every pipeline.
    *(
        ("sequence", PIPES | {"schedule": schedule, "context": name, "ep": 2}, BOTH)
        for schedule, name in zip(
            ("1f1b", "gpipe", "zb_h1", "zb_h2", "dualpipe_v", "zb_v"), CONTEXTS * 2, strict=True
        )
    ),
    ("global", PIPES | {"schedule": "interleaved_1f1b", "stages_per_rank": 2} | RING, ODD),
    ("global", PIPES | {"schedule": "dualpipe", "ep": 2} | RING, ODD),
    ("microbatch", PIPES | {"schedule": "chimera"} | HEADS, ODD),
    ("grouped", PIPES | {"recompute": "full", "schedule": "zb_h1"} | RING, PACKED),
    ("sequence", {"pp": 2, "cp": 2, "tp": 2, "ep": 4, "microbatches": 2} | GATHER, BOTH),
]


@pytest.mark.representative(
    "microbatch-cp=2-context=ring-padded-packed",
    "global-cp=4-context=all_gather-packed",
    "across-cp=4-context=all_to_all",
    "windows-cp=4-ep=2-context=all_gather-packed",
    "latent-cp=2-tp=2-ep=4-context=ring-padded-packed",
    "ahead-cp=4-ep=2-context=ring-padded-packed",
    "sequence-cp=2-tp=2-ep=4-attention_exit=reduce_scatter-context=ring-padded-packed",
    "sequence-cp=2-ep=2-recompute=full-context=ring-packed",
    "sequence-pp=2-cp=2-microbatches=4-schedule=zb_h1-context=all_to_all-ep=2-padded-packed",
)
@pytest.mark.parametrize(("model", "plan", "shape"), CASES, ids=map(name_of, CASES))
def test_context_parallel_equals_one_device(model: str, plan: dict[str, Any], shape: Shape) -> None:
    got = train(DEEP[model], plan, TRAIN, shape)
    assert_same(got, alone(DEEP[model], TRAIN, shape, plan.get("microbatches", 1)))


ASYNCHRONOUS: list[dict[str, Any]] = [
    {"schedule": "pipedream", "context": "ring"},
    {"schedule": "pipedream_2bw", "update_window": 2, "context": "all_gather", "ep": 2},
    # One microbatch at a time: the order does not depend on who is faster.
    {"schedule": "ampnet", "update_window": 2, "max_in_flight": 1, "context": "all_to_all"},
]


@pytest.mark.representative("schedule=pipedream_2bw-update_window=2-context=all_gather-ep=2")
@pytest.mark.parametrize("plan", ASYNCHRONOUS, ids=name_of)
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
