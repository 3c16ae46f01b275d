"""Steps before the whole gradient is known equal steps after it, to the bit.

Float64. In the steps named below gradients are made so large that they are clipped, or infinite, on
one pipeline rank or another, so that ranks before it have stepped by then and later ranks have not.
"""

from __future__ import annotations

import math
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moemesh.comm.collectives import all_reduce_, barrier
from moemesh.comm.mesh import Mesh
from moemesh.comm.point_to_point import Channels
from moemesh.config.layout import Layout
from moemesh.parallel.pipeline import messenger as messenger_module
from moemesh.parallel.pipeline.post_validation import Chain, ValidatedExecutor
from moemesh.parallel.pipeline.program import Forward
from moemesh.schedule.action import Op, Schedule, messages
from moemesh.schedule.build import build
from moemesh.trace.timeline import TimelineRecorder
from tests.parallel.pipelining import SYNCHRONOUS, Relay, make
from tests.parallel.post_validating import Case, Fault, Outcome, error_on_rank, stop_on_rank, train
from tests.parity.models import MODEL, MODELS
from tests.parity.training import Shape
from tests.ranks import mesh_on_ranks

SMALL: dict[str, Any] = {"num_layers": 4, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 4}
SMALL |= {"num_experts": 4, "router_groups": 1, "router_groups_kept": 1}
DEEP: dict[str, dict[str, Any]] = {
    "moe": MODEL | SMALL,
    "tied": MODELS["grouped"] | SMALL,
    "sigmoid": MODELS["sigmoid"] | SMALL,
}
TRAIN: dict[str, Any] = {
    "steps": 6, "dtype": "float64", "optimizer": "adamw", "lr": 0.01, "warmup_steps": 0,
    "weight_decay": 0.01, "clip": 100.0,
}  # fmt: skip
SGD = TRAIN | {"optimizer": "sgd", "momentum": 0.9, "lr": 0.002}
SHAPE = Shape(global_batch=5, seq_len=4)

LARGE, INFINITE = 1e4, math.inf
#: Faults of the first layer, the last, and between; three in a row; in the last step.
FAULTS = (Fault(2, 0, LARGE), Fault(4, 3, INFINITE), Fault(5, 1, LARGE), Fault(6, 2, INFINITE))
#: Steps after those faults, whose warm-ups are redone; none comes after the last step.
REDONE = [3, 5, 6]
#: Faults from the first step on; on four ranks of a layer each, the other kind than above.
SWAPPED = (Fault(1, 1, INFINITE), Fault(2, 2, LARGE), Fault(4, 0, INFINITE), Fault(6, 3, LARGE))


@cache
def expected(
    model: str, microbatches: int, optimizer: str, faults: tuple[Fault, ...] = FAULTS
) -> Outcome:
    """Outcome of one process, which knows its gradient before it steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a product over two threads adds in another order
    try:
        keys = TRAIN if optimizer == "adamw" else SGD
        return train(Case(DEEP[model], {"microbatches": microbatches}, keys, SHAPE, faults))
    finally:
        torch.set_num_threads(threads)


def assert_same(got: Outcome, wanted: Outcome) -> None:
    assert got.losses == wanted.losses
    assert str(got.norms) == str(wanted.norms)  # two NaN are the same here
    assert (got.skipped, got.loads) == (wanted.skipped, wanted.loads)
    assert got.aux == pytest.approx(wanted.aux, rel=1e-14)  # added up stage by stage
    assert got.num_updates == wanted.num_updates
    assert got.state.keys() == wanted.state.keys()
    for name, tensor in wanted.state.items():
        assert torch.equal(got.state[name], tensor), name


def after(plan: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return plan | keys | {"optimizer_validation": "after"}


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("moe", "adamw", {"pp": 2, "schedule": "zb_h2", "microbatches": 4}),
    ("tied", "sgd", {"pp": 2, "schedule": "1f1b", "microbatches": 3}),
    ("sigmoid", "sgd", {"pp": 4, "schedule": "zb_h1", "microbatches": 4}),
    ("moe", "adamw", {"pp": 4, "schedule": "1f1b", "microbatches": 5}),
    ("tied", "sgd", {"pp": 4, "schedule": "zb_h2", "microbatches": 5}),
    ("sigmoid", "adamw", {"pp": 2, "schedule": "zb_v", "microbatches": 4}),
    (
        "moe",
        "adamw",
        {"pp": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2, "microbatches": 4},
    ),
    ("moe", "sgd", {"pp": 2, "schedule": "dualpipe_v", "microbatches": 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "optimizer", "plan"), CASES, ids=str)
def test_faults_on_any_rank_end_as_in_one_process(
    model: str, optimizer: str, plan: dict[str, Any]
) -> None:
    keys = TRAIN if optimizer == "adamw" else SGD
    if model == "tied":  # its gradient is added up in another order, on two ranks
        wanted = train(Case(DEEP[model], plan, keys, SHAPE, FAULTS))
    else:
        wanted = expected(model, plan["microbatches"], optimizer)
    got = train(Case(DEEP[model], after(plan), keys, SHAPE, FAULTS))
    assert_same(got, wanted)
    assert all(got.redone(rank) == REDONE for rank in range(plan["pp"]))
    # The faults are what they are meant to be, and nothing else is one.
    assert [step for step, skip in enumerate(wanted.skipped, 1) if skip] == [4, 6]
    assert [step for step, norm in enumerate(wanted.norms, 1) if norm > 100] == [2, 4, 5, 6]
    assert wanted.num_updates == 4


@pytest.mark.slow
@pytest.mark.parametrize("faults", [(), SWAPPED], ids=["no fault", "faults"])
def test_clean_runs_step_early_and_redo_nothing(faults: tuple[Fault, ...]) -> None:
    """By default a rank steps early after three steps without a clip or a skip."""
    plan = {"pp": 2, "schedule": "zb_h2", "microbatches": 4}
    case = Case(DEEP["moe"], after(plan), TRAIN, SHAPE, faults, arm_after=3)
    got = train(case)
    assert_same(got, expected("moe", 4, "adamw", faults))
    settled = [(r.step, r.name) for r in got.records[0] if r.name in ("validate", "optimizer")]
    if faults:
        # Never three clean steps in a row: each step waits for its own validation.
        assert settled == [(step, n) for step in range(1, 7) for n in ("validate", "optimizer")]
    else:
        # From step 4 on a step is validated in the next one's warm-up.
        waits = [(step, name) for step in (1, 2, 3) for name in ("validate", "optimizer")]
        early = [(step, name) for step in (5, 6) for name in ("validate", "optimizer")]
        assert settled == [*waits, (4, "optimizer"), *early, (6, "validate")]
    assert got.redone() == []


def test_ranks_step_before_the_whole_gradient_is_known(tmp_path: Path) -> None:
    """The last rank does not begin its sum before it has seen that all others have stepped."""
    plan = {"pp": 4, "schedule": "zb_h2", "microbatches": 4}
    keys = TRAIN | {"steps": 3}
    got = train(Case(DEEP["moe"], after(plan), keys, SHAPE), tmp_path)
    for step in (1, 2, 3):
        known = min(r.end for r in got.records[3] if r.step == step and r.name == "reduce")
        for rank in range(3):
            stepped = [r.end for r in got.records[rank] if r.step == step and r.name == "optimizer"]
            assert stepped and min(stepped) < known
    assert len(list(tmp_path.iterdir())) == 9


def test_a_bad_router_stops_every_rank_with_one_message() -> None:
    keys = TRAIN | {"steps": 4}
    plan = {"pp": 2, "schedule": "zb_h2", "microbatches": 2}
    case = Case(DEEP["moe"], after(plan), keys, SHAPE, broken=(2, 3))
    said = mesh_on_ranks(Layout(pp=2), error_on_rank, case)
    assert said[0] == said[1] != "nothing"
    assert "layer 3" in said[0]


@pytest.mark.representative("0")
@pytest.mark.parametrize("arm_after", [0, 9])
def test_a_wish_to_stop_reaches_every_rank_with_the_same_step(arm_after: int) -> None:
    """With the next step's validation, or, where each step waits for its own, at once."""
    plan = {"pp": 2, "schedule": "zb_h2", "microbatches": 2}
    case = Case(DEEP["moe"], after(plan), TRAIN | {"steps": 4}, SHAPE, arm_after=arm_after)
    stopping = mesh_on_ranks(Layout(pp=2), stop_on_rank, case, 1, 2)
    stops = 3 if arm_after == 0 else 2
    assert stopping == [[step >= stops for step in range(1, 5)]] * 2


# Without a model.


class Marked(Relay):
    """Messages that also carry the number of their warm-up."""

    def __init__(self, schedule: Schedule, mark: int) -> None:
        super().__init__(schedule)
        self.mark = 1_000_000 * mark

    def forward(self, op: Op, inputs: list[Tensor]) -> Forward:
        if inputs:
            inputs = [inputs[0], inputs[1] - self.mark]
        forward = super().forward(op, inputs)
        if forward.outputs:
            forward.outputs[1] += self.mark
        return forward


def _take_back(mesh: Mesh, schedules: list[Schedule], ahead: int) -> list[list[Op]]:
    """Three steps of each, the warm-ups of two of them run twice; what this rank ran last."""
    messenger_module.AHEAD = ahead
    logs = []
    for schedule in schedules:
        pairs = [(m.source, m.destination) for m in messages(schedule).values()]
        executor = ValidatedExecutor(schedule, Channels(mesh, "pp", pairs))
        recorder = TimelineRecorder(mesh.rank)
        for step in range(3):
            program = Marked(schedule, 2 * step)
            executor.warm_up(program, recorder)
            if step != 1:
                executor.take_back(program)
                program = Marked(schedule, 2 * step + 1)
                executor.warm_up(program, recorder)
            executor.finish(program, recorder)
        logs.append(program.ran)
    return logs


@pytest.mark.representative("2-2")
@pytest.mark.parametrize(("num_ranks", "ahead"), [(2, 2), (4, 0)])
def test_the_warm_up_of_any_schedule_can_be_taken_back(num_ranks: int, ahead: int) -> None:
    """Cases with receives that have already been posted, and with none."""
    schedules = [make(name, num_ranks) for name in SYNCHRONOUS]
    ranks = mesh_on_ranks(Layout(pp=num_ranks), _take_back, schedules, ahead)
    for rank, found in enumerate(ranks):
        for schedule, ran in zip(schedules, found, strict=True):
            assert ran == list(schedule.ops(rank)), schedule.name


def _sums(mesh: Mesh) -> list[list[float]]:
    chain, sums = Chain(mesh), []
    rank = mesh["pp"].index
    for step in range(3):
        own = torch.tensor([2.0**-rank, float(rank == step)], dtype=torch.float64)
        sums += [chain.pass_on(own).tolist(), chain.answer().tolist()]
    return sums


def test_a_chain_adds_up_in_the_order_of_ranks() -> None:
    ranks = mesh_on_ranks(Layout(pp=3, dp=2), _sums)
    for place, found in enumerate(ranks):
        rank = place // 2
        for step in range(3):
            assert found[2 * step] == [2 - 2.0**-rank, float(rank >= step)]
            assert found[2 * step + 1] == [1.75, 1.0]


def _seconds(mesh: Mesh, num_steps: int, seconds: float) -> dict[str, float]:
    """Wall time of sleeping stages that reduce before a step, and of those that validate after."""
    schedule = build("zb_h2", mesh["pp"].size, 2 * mesh["pp"].size - 1)
    pairs = [(m.source, m.destination) for m in messages(schedule).values()]
    executor = ValidatedExecutor(schedule, Channels(mesh, "pp", pairs))
    chain, recorder = Chain(mesh), TimelineRecorder(mesh.rank)
    program, own = Relay(schedule, dict.fromkeys("FIW", seconds)), torch.ones(1).double()
    measured: dict[str, float] = {}
    for way in ("before", "after"):
        barrier(mesh["pp"])
        start = time.monotonic()
        for step in range(num_steps):
            executor.warm_up(program, recorder)
            if way == "after" and step > 0:
                chain.answer()
            executor.finish(program, recorder)
            if way == "after":
                chain.pass_on(own)
            else:
                all_reduce_(own, mesh["pp"], phase="optimizer", caller="test")
        if way == "after":
            chain.answer()
        barrier(mesh["pp"])
        measured[way] = (time.monotonic() - start) / num_steps / seconds
    return measured


@pytest.mark.slow
def test_the_drain_of_each_step_is_saved() -> None:
    """ZB-H2 with F = I = W = 1, p = 4, m = 7: a rank is busy for 21 in every step and starts one
    after the one before it; with a barrier a step takes 24, without one 21 (the last: 24)."""
    for unit in (0.05, 0.1, 0.2):  # ranks wake up late on a busy machine, by less than a unit
        seconds = mesh_on_ranks(Layout(pp=4), _seconds, 4, unit)[0]
        if abs(seconds["before"] / 24 - 1) <= 0.1 and seconds["after"] <= seconds["before"] - 1.5:
            return
    raise AssertionError(seconds)
