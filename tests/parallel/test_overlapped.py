"""Blocks in turns: the same bits and bytes, and exchanges run under the other's work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from moemesh.comm import overlap, transfers
from moemesh.comm.mesh import Mesh
from moemesh.config.plan import Plan
from moemesh.model.experts import Experts
from moemesh.parallel.data.reducer import GradientReducer
from moemesh.parallel.pipeline.program import SteppedModelProgram, is_overlapped
from moemesh.schedule.build import build
from tests.parity.models import MODEL, MODELS, TRAIN
from tests.parity.training import Shape, train_on_rank
from tests.ranks import end_meshes, run_on_ranks

#: Several MoE layers in a stage: what ends one layer begins the next.
DEEP: dict[str, dict[str, Any]] = {
    "moe": MODEL | {"num_layers": 4, "first_dense_layers": 0},
    "eight": MODEL | {"num_layers": 8},
    "dense_first": MODEL | {"num_layers": 6, "first_dense_layers": 3},
    "no_shared": MODELS["no_shared"] | {"num_layers": 6},
    "tied": MODELS["grouped"] | {"num_layers": 6, "shared_combine": "average"},
    "z_loss": MODELS["sigmoid"] | {"num_layers": 6, "aux_loss_scope": "global"},
}
#: 11 sequences: microbatches of unequal size on both data-parallel ranks.
SHAPE = Shape(global_batch=11)
#: Three sequences for two data-parallel ranks: many microbatches have no token on one or both.
FEW = Shape(global_batch=3)

DUALPIPE = {"pp": 2, "schedule": "dualpipe", "microbatches": 6}
DUALPIPE_V = {"pp": 2, "schedule": "dualpipe_v", "microbatches": 5}
DATA = {"dp": 2, "ep": 2}
TENSOR = {"tp": 2, "ep": 2}


@dataclass(frozen=True)
class Case:
    """A model under a plan, on data of a shape."""

    plan: dict[str, Any]
    model: str = "moe"
    dtype: str = "float64"
    shape: Shape = SHAPE


CASES = [Case(DUALPIPE | DATA, dtype="float32")]
MORE_CASES = [
    Case(DUALPIPE_V | TENSOR | {"dispatch_chunks": 2, "dispatcher": "all_gather"}, "z_loss"),
    Case(DUALPIPE | DATA | {"dispatch_chunks": 2}, "dense_first"),
    Case(DUALPIPE_V | DATA | {"dispatcher": "all_gather"}, "no_shared"),
    Case(DUALPIPE_V | DATA, shape=FEW),
    Case(DUALPIPE | TENSOR, "tied"),
    Case(DUALPIPE | DATA),
    Case(DUALPIPE_V | DATA),
    Case(DUALPIPE_V | DATA, dtype="float32"),
    Case(DUALPIPE | DATA, "tied", shape=FEW),
    Case(DUALPIPE | DATA | {"dispatcher": "hierarchical", "ranks_per_node": 1}, shape=FEW),
    Case(DUALPIPE_V | DATA | {"dispatcher": "hierarchical"}, "dense_first"),
    Case(DUALPIPE | DATA | {"dispatcher": "low_latency"}, "z_loss"),
    Case(DUALPIPE_V | DATA | {"dispatcher": "low_latency"}, shape=FEW),
    Case(DUALPIPE_V | DATA | {"payload": "fp8"}, dtype="float32"),
    Case(DUALPIPE | DATA | {"combine": "exact"}),
    Case(DUALPIPE_V | TENSOR | {"combine": "exact", "dispatcher": "all_gather"}),
    Case(DUALPIPE_V | {"tp": 2, "etp": 2}, "tied"),
    Case(DUALPIPE | {"dp": 2, "etp": 2, "dispatcher": "all_gather"}, shape=FEW),
    Case(DUALPIPE_V | TENSOR | {"dispatch_chunks": 3, "dispatcher": "all_gather"}, "z_loss"),
    Case(DUALPIPE | TENSOR | {"recompute": "selective"}, "dense_first"),
    Case(DUALPIPE_V | DATA | {"recompute": "full"}),
    Case(DUALPIPE_V | {"dp": 2}),
    Case(DUALPIPE | DATA | {"spare_slots": 1}),
    Case(DUALPIPE | TENSOR, dtype="bfloat16"),
]


def run_case(rank: int, case: Case, overlap_blocks: bool) -> dict[str, Any]:
    """One step; what it has computed and what it has sent."""
    plan = case.plan | {"overlap_blocks": overlap_blocks}
    keys = TRAIN | {"steps": 1, "dtype": case.dtype}
    mesh = Mesh.create(Plan(**plan).layout, "cpu")
    return train_on_rank(mesh, DEEP[case.model], plan, keys, case.shape)


def compare(rank: int, cases: list[Case]) -> list[str]:
    """Differences on this rank between blocks in turns and blocks one after the other."""
    differences: list[str] = []
    for case in cases:
        expected, got = run_case(rank, case, False), run_case(rank, case, True)
        end_meshes()
        ledgers = [run.pop("ledger") for run in (expected, got)]
        if ledgers[0] != ledgers[1]:
            differences.append(f"{case}: {ledgers[0].rows()}, not {ledgers[1].rows()}")
        if expected["steps"] != got["steps"]:
            differences.append(f"{case}: losses, norms or loads")
        for kind in ("gradients", "weights"):
            for ours, theirs in zip(expected[kind], got[kind], strict=True):
                if ours[:3] != theirs[:3] or not torch.equal(ours[3], theirs[3]):
                    differences.append(f"{case}: {kind} of {ours[0]}")
        assert all(norm > 0 for _, _, norm, *_ in expected["steps"])
    return differences


@pytest.mark.slow
def test_turns_change_no_bit_and_no_byte() -> None:
    for rank, found in enumerate(run_on_ranks(4, compare, CASES)):
        assert found == [], f"rank {rank}"


@pytest.mark.slow
def test_turns_change_nothing_with_other_dispatchers_and_axes() -> None:
    for rank, found in enumerate(run_on_ranks(4, compare, MORE_CASES)):
        assert found == [], f"rank {rank}"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe_v"])
def test_turns_change_nothing_on_eight_ranks(schedule: str) -> None:
    plan = {"pp": 4, "dp": 2, "ep": 2, "schedule": schedule, "microbatches": 10}
    for found in run_on_ranks(8, compare, [Case(plan, "eight")]):
        assert found == []


# What happens in a block, in order.


@dataclass
class Log:
    """Events of one rank: (what, whose turn it is, what else)."""

    turn: str = ""
    events: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, what: str, more: str = "") -> None:
        self.events.append((what, self.turn, more))


@contextlib.contextmanager
def logged() -> Iterator[Log]:
    """Exchanges of rows as they start and are waited for, turns, experts, and weight gradients."""
    log, patch = Log(), pytest.MonkeyPatch()
    start, experts, accumulate = (
        transfers.all_to_all_start,
        Experts.forward,
        GradientReducer.take,
    )

    def start_logged(*args: Any, phase: str, caller: str, **keys: Any) -> Any:
        name = f"{phase} {caller} {len(log.events)}"
        log.add("start", name)
        finish = start(*args, phase=phase, caller=caller, **keys)

        def waited() -> Any:
            log.add("wait", name)
            return finish()

        return waited

    def experts_logged(*args: Any) -> Any:
        log.add("experts")
        return experts(*args)

    def accumulate_logged(*args: Any) -> None:
        log.add("gradient")
        accumulate(*args)

    forward, backward = (
        SteppedModelProgram.forward_with_pauses,
        SteppedModelProgram.backward_steps,
    )

    def forward_logged(self: Any, op: Any, inputs: Any, pause: Any) -> Any:
        def pause_logged() -> None:
            log.turn = ""
            pause()
            log.turn = str(op)
            log.add("turn")

        log.turn = str(op)
        log.add("turn")
        outputs = forward(self, op, inputs, pause_logged)
        log.add("end")
        log.turn = ""
        return outputs

    def backward_logged(self: Any, op: Any, *args: Any) -> Any:
        running = backward(self, op, *args)
        while True:
            log.turn = str(op)
            log.add("turn")
            try:
                next(running)
            except StopIteration as end:
                log.add("end")
                return end.value
            finally:
                log.turn = ""
            yield

    patch.setattr(SteppedModelProgram, "forward_with_pauses", forward_logged)
    patch.setattr(SteppedModelProgram, "backward_steps", backward_logged)
    patch.setattr(overlap.transfers, "all_to_all_start", start_logged)
    patch.setattr(Experts, "forward", experts_logged)
    patch.setattr(GradientReducer, "take", staticmethod(accumulate_logged))
    try:
        yield log
    finally:
        patch.undo()


def log_of(rank: int, case: Case, overlap_blocks: bool = True) -> list[tuple[str, str, str]]:
    with logged() as log:
        run_case(rank, case, overlap_blocks)
    return log.events


def blocks_of(case: Case, rank: int) -> list[tuple[str, str]]:
    """The (forward, backward) blocks of a pipeline rank, by name."""
    plan = Plan(**case.plan)
    schedule = build(plan.schedule, plan.pp, plan.microbatches)
    blocks = [entry for entry in schedule.orders[rank] if is_overlapped(entry)]
    return [
        (str(op), str(other)) for block in blocks for op in block for other in block if op != other
    ]


@pytest.mark.representative("dualpipe")
@pytest.mark.parametrize("schedule", [DUALPIPE, DUALPIPE_V], ids=["dualpipe", "dualpipe_v"])
def test_exchanges_run_under_the_other_microbatchs_work(schedule: dict[str, Any]) -> None:
    """Also where one of the two expert-parallel ranks has no token at all."""
    case = Case(schedule | DATA, shape=FEW)
    logs = run_on_ranks(4, log_of, case)
    for rank, events in enumerate(logs):
        # Peers of a stage (world ranks 2i, 2i + 1) start and wait in one order, whatever they hold.
        peer = [(what, turn, more) for what, turn, more in logs[rank ^ 1] if what != "gradient"]
        assert [event for event in events if event[0] != "gradient"] == peer
        partner = dict(blocks_of(case, rank // 2))
        assert partner
        started = {more: at for at, (what, _, more) in enumerate(events) if what == "start"}
        ends = {turn: at for at, (what, turn, _) in enumerate(events) if what == "end"}
        under: dict[str, int] = {}
        for at, (what, turn, name) in enumerate(events):
            if what != "wait" or turn not in partner:
                continue
            phase, caller, _ = name.split()
            if caller != "moe.dispatch" and caller != "moe.combine":
                continue
            between = [e for e in events[started[name] : at] if e[1] == partner[turn]]
            if ends[partner[turn]] < started[name]:
                assert not between  # the other was through: nothing left to compute
                continue
            assert ("turn", partner[turn], "") in between, f"{turn} waits at once for {name}"
            work = "gradient" if "B" in partner[turn] else "experts"
            under[f"{phase} {caller}"] = under.get(f"{phase} {caller}", 0) + sum(
                event[0] == work for event in between
            )
        # Weight gradients of the one were computed while rows of the other travelled, and experts.
        for direction in ("forward", "backward"):
            assert under[f"{direction} moe.dispatch"] + under[f"{direction} moe.combine"] > 0


@pytest.mark.slow
def test_without_overlap_blocks_nothing_takes_turns() -> None:
    assert Plan().overlap_blocks
    events = run_on_ranks(4, log_of, Case(DUALPIPE | DATA, shape=FEW), False)
    assert not any(what == "turn" for rank in events for what, _, _ in rank)
