"""A program without a model: every operation passes on what it was given, and one more."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.comm.point_to_point import Channels
from moemesh.parallel.pipeline.executor import Executor, record
from moemesh.parallel.pipeline.messenger import OrderedMessenger
from moemesh.parallel.pipeline.program import BackwardState, Forward, Program, TensorSpec
from moemesh.schedule.action import Entry, Op, Schedule, messages, predecessor
from moemesh.schedule.build import build
from moemesh.schedule.costs import Costs
from moemesh.trace.timeline import TimelineRecorder

#: Every synchronous schedule with microbatches that its conditions allow on p ranks.
SYNCHRONOUS: dict[str, Callable[[int], int]] = {
    "1f1b": lambda p: p + 1,
    "gpipe": lambda p: p + 1,
    "interleaved_1f1b": lambda p: 2 * p,
    "terapipe": lambda p: 3,
    "chimera": lambda p: 2 * p,
    "zb_h1": lambda p: p + 3,
    "zb_h2": lambda p: 2 * p + 1,
    "zb_v": lambda p: 2 * p + 1,
    "dualpipe": lambda p: 2 * p + 2,
    "dualpipe_v": lambda p: 2 * p + 1,
}


def make(name: str, ranks: int) -> Schedule:
    """A schedule of that name; two chunks where it has chunks."""
    chunks = 2 if name == "interleaved_1f1b" else 1
    return build(name, ranks, SYNCHRONOUS[name](ranks), stages_per_rank=chunks)


@dataclass
class Relay:
    """Messages of one number and one integer: who made them, and for whom. `busy` seconds pass in
    every operation of the kinds it names; the operation `fails` raises; `is_timed`: a messenger
    adds a time to every message."""

    schedule: Schedule
    busy: dict[str, float] = field(default_factory=dict)
    fails: Op | None = None
    is_timed: bool = False
    ran: list[Op] = field(default_factory=list)

    def output_specs(self, op: Op) -> list[TensorSpec]:
        if op.stage == self.schedule.num_stages - 1:
            return []
        time = [TensorSpec((1,), torch.float64)] * self.is_timed
        return [TensorSpec((2,), torch.float64), TensorSpec((1,), torch.int64), *time]

    def forward(self, op: Op, inputs: list[Tensor]) -> Forward:
        self._pass(op)
        if inputs:
            sample, identity = self.schedule.sample(op), inputs[1]
            assert identity.tolist() == [1000 * sample + op.slice], "another message's payload"
            assert inputs[0].tolist() == [float(op.stage), float(sample)]
        if op.stage == self.schedule.num_stages - 1:
            return Forward([], inputs[0].sum() if inputs else None)
        number = torch.tensor([op.stage + 1.0, float(self.schedule.sample(op))]).double()
        outputs = [number if not inputs else inputs[0] + torch.tensor([1.0, 0.0])]
        return Forward([*outputs, torch.tensor([1000 * self.schedule.sample(op) + op.slice])], None)

    def backward(self, op: Op, context: BackwardState, gradients: list[Tensor]) -> list[Tensor]:
        self._pass(op)
        if op.stage < self.schedule.num_stages - 1:
            expected = float(self.schedule.num_stages - op.stage)
            assert gradients[0].tolist() == [expected, float(op.microbatch)], "another gradient"
        if op.stage == 0:
            return []
        return [
            torch.tensor(
                [float(self.schedule.num_stages - op.stage + 1), float(op.microbatch)]
            ).double()
        ]

    def weight_gradients(self, op: Op, context: BackwardState) -> None:
        self._pass(op)

    def starting(self, op: Op) -> None: ...

    def finished(self, op: Op) -> None: ...

    def _pass(self, op: Op) -> None:
        if op == self.fails:
            raise RuntimeError("out of luck")
        self.ran.append(op)
        if op.kind in self.busy:
            time.sleep(
                self.busy[op.kind] / self.schedule.stages_per_rank / self.schedule.num_slices
            )


class VirtualClock(OrderedMessenger):
    """A messenger whose messages carry simulated time: each brings the virtual end of its producer.

    An entry starts when its rank is free and its inputs have come, and takes the time of its costs.
    Maxima and sums are the simulator's, in the same order, so that both agree to the last bit: the
    executed order is the simulated one. The program leaves a place for the time in its specs.
    """

    def __init__(self, schedule: Schedule, channels: Channels, costs: Costs) -> None:
        super().__init__(schedule, channels)
        self._costs = costs.bind(schedule)
        self._now: float = 0
        self._ends: dict[Op, float] = {}
        self._entry_of = {op: one for one in schedule.orders[self._rank] for op in one}
        self.recorder = TimelineRecorder(self._rank)

    def take(self, program: Program, op: Op) -> list[Tensor]:
        tensors = super().take(program, op)
        if (producer := predecessor(self._schedule, op)) in self._messages:
            self._ends[producer] = float(tensors.pop())
        return tensors

    def send(self, op: Op, tensors: list[Tensor]) -> None:
        if op == self._entry_of[op][0]:  # all inputs of the entry are here
            self._pass(self._entry_of[op])
        if op in self._messages:
            tensors = [*tensors, torch.tensor([self._ends[op]], dtype=torch.float64)]
        super().send(op, tensors)

    def _pass(self, entry: Entry) -> None:
        start = self._now
        for op in entry:
            for needed in self._schedule.dependencies(op):
                ready = self._ends[needed]
                if self._schedule.rank_of(needed) != self._rank:
                    ready = ready + self._costs.message(needed, op)
                start = max(start, ready)
        end = start + self._costs.entry(entry)
        self._ends.update(dict.fromkeys(entry, end))
        record(self.recorder, self._schedule, entry, start, end, wait=start - self._now)
        self._now = end


def relay(
    mesh: Mesh,
    schedules: list[Schedule],
    costs: Costs | None = None,
    busy: dict[str, float] | None = None,
    fails: Op | None = None,
    steps: int = 1,
) -> list[dict[str, Any]]:
    """Run each schedule on this rank; the timelines, virtual (with `costs`) and measured."""
    operations = []
    for schedule in schedules:
        pairs = [(m.source, m.destination) for m in messages(schedule).values()]
        channels = Channels(mesh, "pp", pairs)
        rank = mesh["pp"].index
        clock = None if costs is None else VirtualClock(schedule, channels, costs)
        program = Relay(schedule, busy or {}, fails, is_timed=clock is not None)
        executor = Executor(schedule, channels, clock)
        recorder = TimelineRecorder(rank)
        for _ in range(steps):
            executor.run(program, recorder)
        assert program.ran == list(schedule.ops(rank)) * steps
        operations.append(
            {
                "virtual": None if clock is None else clock.recorder.timeline().to_json(),
                "measured": recorder.timeline().to_json(),
            }
        )
    return operations
