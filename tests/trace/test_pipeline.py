"""Messages, activations and put-off weight gradients, read off the records of a pipeline."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from moemesh.config.schedule_table import SCHEDULES
from moemesh.schedule.action import messages
from moemesh.schedule.build import build
from moemesh.schedule.costs import Costs
from moemesh.schedule.held_activations import peak_memory
from moemesh.schedule.simulate import simulate
from moemesh.trace.pipeline import activations, backlog, flows
from moemesh.trace.timeline import Timeline, WorkRecord


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_and_memory_are_those_of_the_schedule(name: str) -> None:
    """The records alone give the messages and the memory of the schedule."""
    chunks = 3 if name == "interleaved_1f1b" else 1
    schedule = build(name, 4, 8, stages_per_rank=chunks)
    chance = random.Random(name)
    costs = Costs(forward=lambda op: chance.randint(1, 3), message=0.5)
    timeline = simulate(schedule, costs).timeline
    implied = {(str(m.producer), str(m.consumer)) for m in messages(schedule).values()}
    assert {(f.producer.name, f.consumer.name) for f in flows(timeline)} == implied
    assert len(flows(timeline)) == len(implied)
    for held in (1, 0.5):
        peaks = peak_memory(schedule, weight_memory=held)
        steps = activations(timeline, held=held)
        maxima = [max(value for _, value in steps[rank]) for rank in range(4)]
        assert maxima == pytest.approx([peak.activation for peak in peaks])
        assert all(steps[rank][-1][1] == 0 for rank in range(4))
    owed = backlog(timeline)
    most = [max((v for _, v in owed.get(rank, [])), default=0) for rank in range(4)]
    assert most == [peak.weight_backlog for peak in peak_memory(schedule)]


def test_peers_of_a_stage_send_to_their_own() -> None:
    """Two data-parallel replicas of a two-stage pipeline: ranks 0, 1 and 2, 3."""
    records = [
        WorkRecord(
            rank=rank, start=start, end=start + 1, name=name, kind=kind, stage=stage, microbatch=0
        )
        for rank in range(4)
        for stage in [rank // 2]
        for start, name, kind in ((stage, "forward", "F"), (3 - stage, "backward", "B"))
    ]
    # Other work and a step that is only half recorded have no effect.
    records.append(WorkRecord(rank=0, start=9, end=10, name="optimizer"))
    records.append(
        WorkRecord(rank=0, start=5, end=6, name="f", kind="F", stage=0, microbatch=1, step=2)
    )
    timeline = Timeline(ranks=(0, 1, 2, 3), records=tuple(records), source="measured")
    pairs = {(f.producer.rank, f.consumer.rank, f.producer.kind) for f in flows(timeline)}
    assert pairs == {(0, 2, "F"), (1, 3, "F"), (2, 0, "B"), (3, 1, "B")}


def test_work_without_length_gives_back_before_the_next_starts() -> None:
    schedule = build("zb_h1", 3, 6)
    timeline = simulate(schedule, Costs(weight_gradient=0)).timeline
    maxima = [max(value for _, value in steps) for steps in activations(timeline).values()]
    assert maxima == [peak.activation for peak in peak_memory(schedule)]


def test_what_is_no_pipeline_has_nothing_of_it() -> None:
    record = WorkRecord(rank=0, start=0, end=1, name="optimizer")
    timeline = Timeline(ranks=(0, 1), records=(record,), source="measured")
    assert flows(timeline) == ()
    assert activations(timeline) == backlog(timeline) == {}
    assert activations(replace(timeline, records=())) == {}
