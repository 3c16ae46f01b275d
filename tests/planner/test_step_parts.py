"""Predicted seconds of the parts of a step: FLOPs, bytes and operations over given rates."""

import pytest

from moemesh.planner.parameters import attention_products, core_flops, training_flops
from moemesh.planner.shapes.counted import shape_of
from moemesh.planner.step_parts import MEMORY, bandwidth, latency, predicted_seconds
from moemesh.sharding.load_run import load_run
from moemesh.trace import step_seconds as parts
from moemesh.trace.ledger import Ledger
from moemesh.trace.memory_profile import MemoryProfile
from moemesh.trace.step_seconds import communication

#: One FLOP a second.
ONE = dict.fromkeys((*parts.PASSES, parts.TOGETHER), 1.0)
NOTHING = MemoryProfile(rank=0)


def config(*overrides: str):
    return load_run([], list(overrides), environ={}).config


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.preset=tiny",),
        ("plan.dp=2", "plan.ep=2"),
        ("plan.pp=2", "plan.microbatches=4", "model.num_experts=16"),
    ],
)
def test_the_passes_are_the_flops_of_training_on_the_mean_rank(overrides):
    run = config(*overrides)
    seconds = predicted_seconds(run, ONE, Ledger(), NOTHING, 0.0)
    tokens = run.data.global_batch * run.data.seq_len / run.plan.world_size
    assert sum(seconds.values()) == pytest.approx(
        tokens * training_flops(shape_of(run.model), run.data.seq_len), rel=1e-12
    )
    assert set(seconds) == set(parts.PASSES)


def test_recomputation_is_a_fourth_forward_or_one_of_its_parts():
    plain, full, core, gates = (
        predicted_seconds(config(*overrides), ONE, Ledger(), NOTHING, 0.0)
        for overrides in (
            (),
            ("plan.recompute=full",),
            ("plan.recompute=selective", "plan.recompute_experts=false"),
            ("plan.recompute=selective", "plan.recompute_attention=false"),
        )
    )
    for part in (parts.ATTENTION, parts.EXPERTS, parts.DENSE_MLPS):
        assert full[part] == pytest.approx(plain[part] * 4 / 3)
    assert full[parts.HEAD] == plain[parts.HEAD]
    run = config()
    shape, tokens = shape_of(run.model), run.data.global_batch * run.data.seq_len
    cores = run.model.num_layers * tokens * core_flops(shape, run.data.seq_len, 0, "causal")
    assert core[parts.ATTENTION] - plain[parts.ATTENTION] == pytest.approx(cores)
    assert gates[parts.ATTENTION] == plain[parts.ATTENTION]
    assert plain[parts.EXPERTS] < gates[parts.EXPERTS] < full[parts.EXPERTS]


def test_communication_has_the_rates_of_its_axis_and_the_bubble_is_that_of_the_schedule():
    ledger = Ledger()
    amounts = {"caller": "x", "payload_bytes": 0, "received_bytes": 0}
    for axis, phase in (("ep", "forward"), ("ep", "evaluate"), ("tp", "forward")):
        ledger.record(axis=axis, op="all_to_all", phase=phase, wire_bytes=600, count=4, **amounts)
    rates = ONE | {latency("ep"): 0.5, bandwidth("ep"): 100.0, MEMORY: 2.0}
    memory = MemoryProfile(rank=0, dense_weights=10, expert_weights=20, gradients=30, optimizer=60)
    seconds = predicted_seconds(config(), rates, ledger, memory, 0.2)
    assert seconds[communication("ep")] == 4 * 0.5 + 600 / 100
    assert communication("tp") not in seconds  # no rate
    assert seconds[parts.OPTIMIZER] == (2 * 30 + 3 * 30 + 2 * 60) / 2
    # A fifth of the time idle is a quarter of the time that is busy.
    busy = sum(seconds[part] for part in parts.PASSES)
    assert seconds[communication("pp")] == pytest.approx(busy / 4)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_frozen_weights_below_adapters_have_no_gradient_of_their_own(recompute):
    keys = [f"plan.recompute={recompute}"]
    whole, adapted = (
        predicted_seconds(config(*keys, *more), ONE, Ledger(), NOTHING, 0.0)
        for more in ((), ("lora.rank=4",))
    )
    for part in (parts.EXPERTS, parts.DENSE_MLPS):
        assert adapted[part] / whole[part] == pytest.approx(3 / 4 if recompute == "full" else 2 / 3)
    assert adapted[parts.HEAD] == pytest.approx(whole[parts.HEAD] * 2 / 3)
    run = config()
    tokens = run.data.global_batch * run.data.seq_len
    products = 2.0 * sum(attention_products(shape_of(run.model))) * tokens * run.model.num_layers
    assert whole[parts.ATTENTION] - adapted[parts.ATTENTION] == pytest.approx(products)


@pytest.mark.parametrize(
    "keys", [["lora.rank=4", "lora.base=nf4"], ['train.freeze=["layers.0.*"]']]
)
def test_a_run_of_some_of_the_weights_has_no_prediction_of_its_passes(keys):
    assert predicted_seconds(config(*keys), ONE, Ledger(), NOTHING, 0.0) == {}
