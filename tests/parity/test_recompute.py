"""Recomputation changes what is kept and sent, and not one bit of a gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.model import router
from moemesh.model.dispatcher import LocalDispatcher
from moemesh.ops.saved import SavedForBackward
from moemesh.parallel.parallelize import RankModel
from moemesh.trace.ledger import Ledger, LedgerTotal
from tests.parity import training
from tests.parity.models import LOSSES, MODEL, MODELS
from tests.parity.training import Shape, build, microbatches, rows, shape_of
from tests.ranks import mesh_on_ranks

SHAPE = shape_of("6x8 padded")
#: The last one repeats a send.
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "attention": {"recompute": "selective", "recompute_experts": False},
    "experts": {"recompute": "selective", "recompute_attention": False},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
}

ALONE: dict[str, dict[str, Any]] = {
    "sigmoid": MODELS["sigmoid"],
    "grouped": MODELS["grouped"] | {"z_loss_coefficient": 1e-2},
    # Noise, and choices that need all tokens of a sequence.
    "jitter": LOSSES["jitter"],
    "probability": LOSSES["probability"],
    "expert_choice": LOSSES["expert_choice"],
    "position": LOSSES["position"],
}
PLANS = rows(
    """
    moe | dp=2 tp=2 ep=4 dispatch_chunks=3 | 6x8 padded
    moe | pp=2 tp=2 ep=2 schedule=zb_h1 microbatches=3 dispatch_chunks=2 | 6x8 padded
    moe | tp=2 ep=2 dispatcher=all_gather | 6x8 padded
    moe | dp=4 ep=4 dispatcher=hierarchical ranks_per_node=2 payload=fp8 | 6x8 padded
    *moe | tp=2 ep=2 dispatcher=low_latency attention_exit=all_to_all | 6x8 padded
    moe | dp=2 ep=2 combine=exact | 6x8 padded
    """
)
#: The only messages that a recomputed layer needs from other ranks.
SENT_AGAIN = {
    "attention.enter",
    "attention.leave",
    "mlp.enter",
    "mlp.leave",  # of shared experts: they lie before the routed ones
    "moe.dispatch",
    "moe.dispatch.weights",
}


def alone(model: dict[str, Any], plan: Plan, dtype: str) -> RankModel:
    """The whole model on one device, under the plan's recomputation."""
    return build(Mesh.single("cpu"), ModelConfig(**model), plan, SHAPE, dtype, seed=1)


def step(parallel: RankModel, plan: Plan) -> dict[str, Any]:
    """Loads, losses and gradients of one step."""
    result = training.gradients(parallel, plan, SHAPE)
    return {
        "numbers": (result.loss, result.aux_loss, result.counts_LE.tolist()),
        "gradients": {name: g.clone() for name, g in parallel.reducer.gradients.items()},
    }


def assert_same_bits(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got["numbers"] == expected["numbers"]
    for name, gradient in expected["gradients"].items():
        assert torch.equal(got["gradients"][name], gradient), name


@pytest.mark.representative("jitter-float64")
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("model", ALONE)
def test_no_bit_changes_and_nothing_is_decided_twice(
    model: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided: list[str] = []

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            decided.append(name)
            return function(*arguments)

        return call

    monkeypatch.setattr(router, "choose", counted("choose", router.choose))
    monkeypatch.setattr(router, "_keep", counted("keep", router._keep))
    monkeypatch.setattr(LocalDispatcher, "plan", counted("plan", LocalDispatcher.plan))
    results: dict[str, dict[str, Any]] = {}
    decisions: dict[str, list[str]] = {}
    for kind, keys in KINDS.items():
        plan = Plan(**keys, microbatches=2, dispatch_chunks=2)
        results[kind] = step(alone(ALONE[model], plan, dtype), plan)
        decisions[kind], decided[:] = decided[:], []
    for kind in KINDS:
        assert_same_bits(results[kind], results["none"])
        assert decisions[kind] == decisions["none"]
    assert decisions["none"].count("plan") == 2 * 2 * ModelConfig(**ALONE[model]).num_moe_layers


def run_all(mesh: Mesh, plan_keys: dict[str, Any], dtype: str) -> list[dict[str, Any]]:
    """One step of each kind; the ledger is that of all so far."""
    results = []
    for keys in KINDS.values():
        plan = Plan(**plan_keys, **keys)
        result = step(build(mesh, ModelConfig(**MODEL), plan, SHAPE, dtype, seed=1), plan)
        results.append(result | {"ledger": mesh.ledger.rows()})
    return results


@pytest.mark.parametrize(("model", "plan", "shape"), PLANS)
def test_on_many_ranks_only_what_is_read_is_sent_again(
    model: str, plan: dict[str, Any], shape: Shape
) -> None:
    dtype = "bfloat16" if "payload" in plan else "float64"
    for runs in mesh_on_ranks(Plan(**plan).layout, run_all, plan, dtype):
        for run in runs[1:]:
            assert_same_bits(run, runs[0])
        first, *others = (by_phase(run["ledger"]) for run in runs)
        times = {(phase, key): total for phase in first for key, total in first[phase].items()}
        for sent in others:
            for (phase, key), total in times.items():
                times[phase, key] = total.plus(first[phase][key])
                assert sent[phase][key] == times[phase, key], key
        assert all("recompute" not in sent for sent in others[:-1])
        again = others[-1]["recompute"]
        assert {caller for _, _, caller in again} <= SENT_AGAIN
        for key, total in again.items():
            if key[2] != "mlp.leave":
                assert total == first["forward"][key], key
        assert ("moe.dispatch" in {caller for _, _, caller in again}) == (Plan(**plan).ep > 1)


def by_phase(rows: Any) -> dict[str, dict[tuple[str, str, str], LedgerTotal]]:
    totals: dict[str, dict[tuple[str, str, str], LedgerTotal]] = {}
    for entry in Ledger.from_rows(rows).entries():
        total = LedgerTotal(
            entry.count, entry.payload_bytes, entry.wire_bytes, entry.received_bytes
        )
        totals.setdefault(entry.phase, {})[entry.axis, entry.op, entry.caller] = total
    return totals


def saved_bytes(model: dict[str, Any], kind: str) -> int:
    plan = Plan(**KINDS[kind])
    parallel = alone(model, plan, "float64")
    with SavedForBackward(parallel.model.parameters()) as saved:
        step(parallel, plan)
    return saved.peak_bytes


@pytest.mark.representative("True")
@pytest.mark.parametrize("dense", [True, False])
def test_saved_bytes_fall_as_predicted(dense: bool) -> None:
    """Per layer, from the difference of two depths; float64 throughout."""
    model = MODEL | {"first_dense_layers": 8 if dense else 0, "num_kv_heads": 4}
    if dense:
        model |= {"num_experts": 0, "num_shared_experts": 0}
    config, tokens, size = ModelConfig(**model), 6 * 8, 8

    def per_layer(kind: str) -> float:
        deep, shallow = (saved_bytes(model | {"num_layers": n}, kind) for n in (4, 2))
        return (deep - shallow) / 2

    none, attention, experts, selective, full = map(per_layer, KINDS)
    assert full == tokens * config.hidden_size * size
    # Rotated queries and keys, the log-sum-exp of every head; the product of gate and up.
    heads = config.num_heads + config.num_kv_heads
    core = heads * config.head_dim + config.num_heads
    width = config.intermediate_size if dense else config.shared_width
    assert none - attention == tokens * size * (core + width)
    # Gate and up of the experts that every token visits; padding visits none.
    (batch,) = microbatches(config, Plan(), SHAPE, 1, Mesh.single("cpu"))
    assert batch.valid_BS is not None
    visited = 0 if dense else config.experts_per_token * int(batch.valid_BS.sum())
    gate_and_up = visited * 2 * config.expert_intermediate_size * size
    assert none - experts == tokens * size * width + gate_and_up
    assert none - selective == tokens * size * (core + width) + gate_and_up
    assert full < selective / 2


def test_rows_beyond_the_bound_are_computed_again_inside() -> None:
    plans = [Plan(recompute=kind) for kind in ("none", "full")]
    models = [alone(MODEL, plan, "float64") for plan in plans]
    for parallel in models:
        for moe in parallel.model.moe_layers().values():
            moe.experts.max_rows = 7
    none, full = (step(parallel, plan) for parallel, plan in zip(models, plans, strict=True))
    assert_same_bits(full, none)


def test_a_result_that_is_not_sent_again_cannot_be_read_unseen() -> None:
    from moemesh.ops.pending import Pending
    from moemesh.parallel.recompute import RecomputeTape

    tape = RecomputeTape(Ledger())
    rows = torch.ones(3, 2)

    def send(y_RH: Tensor, plan: object) -> Pending[Tensor]:
        return Pending.ready(y_RH.sum(0, keepdim=True).expand(4, 2))

    assert tape.unread(send, rows, None, 4).wait().tolist() == [[3.0, 3.0]] * 4
    with tape:
        assert bool(tape.unread(send, rows, None, 4).wait().isnan().all())
