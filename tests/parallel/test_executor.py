"""The executor runs what the simulator simulates: order, messages, time, failures."""

from __future__ import annotations

import pytest

from moemesh.config.layout import Layout
from moemesh.schedule.action import Op
from moemesh.schedule.costs import Costs
from moemesh.schedule.simulate import simulate
from moemesh.trace.timeline import Timeline
from tests.parallel.pipelining import SYNCHRONOUS, make, relay
from tests.ranks import RankFailed, mesh_on_ranks

#: Unequal and without a common measure: a wrong maximum or a wrong order would show.
COSTS = Costs(
    forward=1.0 / 3, input_gradient=0.7, weight_gradient=0.411, overlapped=1.3, message=0.0625
)


@pytest.mark.representative("4")
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_the_virtual_clock_equals_the_simulation_exactly(num_ranks: int) -> None:
    """All synchronous schedules, their real messages carrying the time of their sender."""
    schedules = [make(name, num_ranks) for name in SYNCHRONOUS]
    ranks = mesh_on_ranks(Layout(pp=num_ranks), relay, schedules, COSTS)
    for index, schedule in enumerate(schedules):
        parts = [Timeline.from_json(rank[index]["virtual"]) for rank in ranks]
        virtual = {(r.rank, r.name): (r.start, r.end) for part in parts for r in part.records}
        expected = simulate(schedule, COSTS)
        records = expected.timeline.records
        assert len(virtual) == len(records)
        for record in records:
            assert virtual[record.rank, record.name] == (record.start, record.end), (
                f"{schedule.name}: {record.name} on rank {record.rank}"
            )
        assert max(end for _, end in virtual.values()) == expected.makespan


def test_steps_follow_one_another_over_the_same_channels() -> None:
    mesh_on_ranks(Layout(pp=2), relay, [make("zb_v", 2), make("1f1b", 2)], None, None, None, 3)


def test_a_failing_operation_is_named_on_its_rank() -> None:
    schedule = make("zb_h1", 2)
    with pytest.raises(RankFailed, match=r"operation 1I2 \(stage 1, microbatch 2\) failed") as told:
        mesh_on_ranks(Layout(pp=2), relay, [schedule], None, None, Op("I", 1, 2))
    assert told.value.rank == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_wall_clock_of_sleeping_stages_is_within_a_tenth_of_the_simulation(name: str) -> None:
    """Sleepers need no core each: this measures order and overhead, not computing."""
    schedule, seconds = make(name, 4), 0.06
    costs = Costs(forward=seconds, input_gradient=seconds, weight_gradient=seconds)
    busy = {"F": seconds, "I": seconds, "W": seconds, "B": 2 * seconds}
    expected = simulate(schedule, costs).makespan
    for attempt in range(2):
        ranks = mesh_on_ranks(Layout(pp=4), relay, [schedule], None, busy)
        parts = [Timeline.from_json(rank[0]["measured"]) for rank in ranks]
        measured = Timeline.merge(parts)
        if abs((measured.end - measured.start) / expected - 1) <= 0.1:
            return
        assert attempt == 0, f"{measured.end - measured.start:.3f} s, simulated {expected:.3f} s"
