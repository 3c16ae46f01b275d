"""`benchmarks.pipeline`: what the executor costs, and how near it comes to its simulation.

Stages without a model: they pass a message on, and sleep as long as they are told. Without sleep a
step measures the executor's own time an action, messages included; with sleep its makespan is set
beside the simulator's. Sleepers need no core each, so more ranks than cores are fine: it measures
order and overhead, not computing.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.ranks import on_ranks
from benchmarks.settings import PipelineSettings
from moemesh.comm import launch
from moemesh.comm.collectives import gather_json
from moemesh.comm.mesh import Mesh
from moemesh.comm.point_to_point import Channels
from moemesh.config.layout import Layout
from moemesh.parallel.pipeline.executor import Executor
from moemesh.parallel.pipeline.program import BackwardState, Forward, TensorSpec
from moemesh.schedule.action import Op, Schedule, messages
from moemesh.schedule.build import build
from moemesh.schedule.costs import Costs
from moemesh.schedule.simulate import simulate
from moemesh.trace.timeline import TimelineRecorder


class SleepingStages:
    """A program of a fixed message and a fixed time: `seconds` for F, I and W of a rank's share."""

    def __init__(self, schedule: Schedule, seconds: float, num_numbers: int = 1024) -> None:
        pieces = schedule.num_stages // schedule.num_ranks * schedule.num_slices
        self.schedule, self._seconds = schedule, seconds / pieces
        self._message = torch.zeros(num_numbers)

    def output_specs(self, op: Op) -> list[TensorSpec]:
        is_last = op.stage == self.schedule.num_stages - 1
        return [] if is_last else [TensorSpec(tuple(self._message.shape), self._message.dtype)]

    def forward(self, op: Op, inputs: list[Tensor]) -> Forward:
        self._sleep(1)
        return Forward([self._message for _ in self.output_specs(op)], None)

    def backward(self, op: Op, context: BackwardState, gradients: list[Tensor]) -> list[Tensor]:
        self._sleep(2 if op.kind == "B" else 1)
        return [self._message] if op.stage else []

    def weight_gradients(self, op: Op, context: BackwardState) -> None:
        self._sleep(1)

    def starting(self, op: Op) -> None: ...

    def finished(self, op: Op) -> None: ...

    def _sleep(self, halves: int) -> None:
        if self._seconds:
            time.sleep(self._seconds * halves)


def run(settings: PipelineSettings, found: Path | None = None) -> dict[str, Any] | None:
    """Measure on the ranks of the pipeline; None where another rank has the result.

    Raises ValueError for an impossible schedule.
    """
    schedule = build(
        settings.schedule,
        settings.ranks,
        settings.microbatches,
        stages_per_rank=settings.stages_per_rank,
    )

    def measured(ranks: launch.Ranks) -> dict[str, Any]:
        mesh = Mesh.create(Layout(pp=ranks.world_size), ranks.device)
        pairs = [(m.source, m.destination) for m in messages(schedule).values()]
        executor = Executor(schedule, Channels(mesh, "pp", pairs))
        steps = {
            seconds: [
                _step(executor, SleepingStages(schedule, seconds), mesh)
                for _ in range(settings.rounds + 1)
            ][1:]  # the first step connects the ranks
            for seconds in dict.fromkeys((0.0, settings.seconds))
        }
        return _result(schedule, settings, steps)

    return on_ranks("pipeline", settings, measured, num_ranks=settings.ranks, found=found)


def _step(executor: Executor, program: SleepingStages, mesh: Mesh) -> float:
    """Seconds from the first start to the last end over all ranks (one machine, one clock)."""
    recorder = TimelineRecorder(mesh.rank)
    gather_json(None, mesh.control)  # start together
    executor.run(program, recorder)
    timeline = recorder.timeline()
    times = gather_json([timeline.start, timeline.end], mesh.control)
    return max(end for _, end in times) - min(start for start, _ in times)


def _result(
    schedule: Schedule, settings: PipelineSettings, steps: dict[float, list[float]]
) -> dict[str, Any]:
    """Per action: of the rank that has most of them."""
    actions = max(len(order) for order in schedule.orders)
    found: dict[str, Any] = {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "microbatches": schedule.total_microbatches,
        "actions_per_rank": actions,
        "rounds": settings.rounds,
        "overhead_seconds_per_action": median(steps[0.0]) / actions,
    }
    if settings.seconds:
        time_of = settings.seconds
        costs = Costs(forward=time_of, input_gradient=time_of, weight_gradient=time_of)
        simulated = simulate(schedule, costs).makespan
        measured = median(steps[settings.seconds])
        found |= {"seconds": measured, "simulated_seconds": simulated}
        found["measured_over_simulated"] = measured / simulated
    return found


if __name__ == "__main__":
    from benchmarks.application import main

    main("pipeline")
