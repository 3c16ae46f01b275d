"""Router options: scopes of the losses, drops, faults, replayed routings."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.model.faults import RoutingError
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.step import gradients_of_step
from tests.parity.models import LOSSES, MODEL, TRAIN
from tests.parity.training import (
    WHOLE,
    Trained,
    alone,
    assert_same,
    build,
    gradients,
    microbatches,
    train,
)
from tests.ranks import mesh_on_ranks

WIDE = {"tp": 2, "dp": 2, "ep": 4}


def one_device(model: str) -> Trained:
    return alone(LOSSES[model], TRAIN)


@pytest.mark.representative("{'dp': 2, 'microbatches': 3}")
@pytest.mark.parametrize(
    "plan", [{"dp": 5}, {"microbatches": 5}, {"dp": 2, "microbatches": 3}], ids=str
)
def test_microbatches_of_one_sequence_are_sequences(plan: dict[str, Any]) -> None:
    """Every scope is counted once, however microbatches and ranks share them out."""
    trained = train(LOSSES["microbatch"], plan, TRAIN)
    assert_same(trained, one_device("sequence"))


def test_scopes_differ() -> None:
    aux = {scope: one_device(scope).aux[0] for scope in ("sequence", "microbatch")}
    cut = train(LOSSES["microbatch"], {"dp": 2}, TRAIN | {"steps": 1}).aux[0]
    assert len({round(value, 6) for value in (*aux.values(), cut)}) == 3
    assert one_device("global").aux == pytest.approx(one_device("microbatch").aux, rel=1e-12)


def test_options_do_something() -> None:
    """Nothing above is vacuous: the first losses differ from the plain router's."""
    plain = one_device("sequence").losses[0]
    for model in ("expert_choice", "sinkhorn", "jitter", "probability", "position"):
        assert abs(one_device(model).losses[0] / plain - 1) > 1e-6
    total = 5 * 7 * 2
    for model in ("probability", "position"):
        assert all(sum(layer) < total for layer in one_device(model).loads[0])


def drops_on_rank(mesh: Mesh, plan_keys: dict[str, Any]) -> list[int]:
    plan, config = Plan(**plan_keys), ModelConfig(**LOSSES["probability"])
    parallel = build(mesh, config, plan, WHOLE, "float64")
    return gradients(parallel, plan, WHOLE).dropped_L.tolist()


def test_drops_are_counted_once() -> None:
    expected = drops_on_rank(Mesh.single("cpu"), {})
    assert min(expected) > 0
    assert mesh_on_ranks(Plan(**WIDE).layout, drops_on_rank, WIDE) == [expected] * 4


def fault_on_rank(mesh: Mesh, plan_keys: dict[str, Any], culprit: int) -> str:
    """A NaN in one rank's copy of one router's row: only that rank sees it."""
    plan, config = Plan(**plan_keys), ModelConfig(**MODEL)
    parallel = build(mesh, config, plan, WHOLE, "float64")
    if mesh.rank == culprit:
        parallel.model.moe_layers()[2].router.weight.data[5] = torch.nan
    try:
        gradients(parallel, plan, WHOLE)
    except RoutingError as error:
        return str(error)
    return "no error"


@pytest.mark.representative("3")
@pytest.mark.parametrize("culprit", [0, 3])
def test_nan_logits_stop_all_ranks_with_one_message(culprit: int) -> None:
    messages = mesh_on_ranks(Plan(**WIDE).layout, fault_on_rank, WIDE, culprit)
    # dp 0 has sequences 0 to 2: rank 0 the first 11 of 21 tokens; rank 3 the last 7 of 14.
    token = {0: "token 0 (sequence 0, position 0)", 3: "token 28 (sequence 4, position 0)"}
    expected = f"layer 2, {token[culprit]}, expert 5: the router's logit is not finite"
    assert messages == [expected] * 4


def replay_on_rank(mesh: Mesh, plan_keys: dict[str, Any], mistake: str) -> Any:
    """One step with given experts for layer 1; `mistake` is made by the last data rank."""
    plan, config = Plan(**plan_keys), ModelConfig(**MODEL)
    parallel = build(mesh, config, plan, WHOLE, "float64")
    generator = torch.Generator().manual_seed(9)
    table = torch.rand(5 * 7, 8, generator=generator).argsort(1)[:, :2]
    table[3] = -1
    is_culprit = mistake and mesh["dp"].index == plan.dp - 1
    batches = []
    for batch in microbatches(config, plan, WHOLE, 1, mesh):
        given = table.view(5, 7, 2)[batch.sequences_B].view(-1, 2).clone()
        layer = 1
        if is_culprit and mistake == "expert":
            given[1, 0] = 8
        elif is_culprit and mistake == "layer":
            layer = 0
        elif is_culprit and mistake == "rows":
            given = given[1:]
        elif is_culprit and mistake == "width":
            given = given[:, :1].contiguous()
        batches.append(replace(batch, experts={layer: given}))
    try:
        result = gradients_of_step(parallel, batches, TimelineRecorder(mesh.rank))
    except RoutingError as error:
        return str(error)
    assert result.counts_LE[0].tolist() == table[table >= 0].bincount(minlength=8).tolist()
    return result.loss, result.grad_norm


def test_a_routing_is_replayed_in_any_plan() -> None:
    loss, norm = replay_on_rank(Mesh.single("cpu"), {}, "")
    for found in mesh_on_ranks(Plan(**WIDE).layout, replay_on_rank, WIDE, ""):
        assert found == pytest.approx((loss, norm), rel=1e-10)


@pytest.mark.representative("expert")
@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("expert", "rank 2: layer 1, token 22: expert 8 is not one of the experts 0 to 7"),
        ("layer", "rank 2: layer 0 has no experts: layers [1, 2] have"),
        ("rows", "rank 2: layer 1: a routing of 13 tokens for a microbatch of 14"),
        ("width", "replayed routings of one layer differ in experts per token between ranks"),
    ],
    ids=["expert", "layer", "rows", "width"],
)
def test_a_bad_replay_stops_all_ranks_with_one_message(mistake: str, words: str) -> None:
    messages = mesh_on_ranks(Plan(**WIDE).layout, replay_on_rank, WIDE, mistake)
    assert words in messages[0] and messages == [messages[0]] * 4
