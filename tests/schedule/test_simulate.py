"""The simulator: small cases by hand, an obvious second simulator, both bubble metrics, memory."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moemesh.config.schedule_table import SCHEDULES
from moemesh.schedule.action import Op, Schedule
from moemesh.schedule.build import build
from moemesh.schedule.costs import Costs
from moemesh.schedule.held_activations import peak_memory
from moemesh.schedule.program import Deadlock
from moemesh.schedule.simulate import simulate
from moemesh.schedule.text import digest, from_text

TWO_RANKS = """\
pipeline-schedule v1  name=hand ranks=2 stages=2 slices=1 microbatches=2
place 0: 0 1
rank 0: 0F0 0F1 0B0 0B1
rank 1: 1F0 1B0 1F1 1B1
"""


def obvious(schedule: Schedule, costs: Costs) -> tuple[list[list[float]], list[list[float]]]:
    """Starts and ends by the formula: a loop that picks any head whose dependencies have ended."""
    bound = costs.bind(schedule)
    ended: dict[Op, float] = {}
    clock: list[float] = [0] * schedule.num_ranks
    starts: list[list[float]] = [[] for _ in schedule.orders]
    ends: list[list[float]] = [[] for _ in schedule.orders]
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(schedule.orders):
            if len(ends[rank]) == len(order):
                continue
            entry = order[len(ends[rank])]
            needed = [(d, op) for op in entry for d in schedule.dependencies(op)]
            if any(d not in ended for d, _ in needed):
                continue
            arrivals = [
                ended[d] + (bound.message(d, op) if schedule.rank_of(d) != rank else 0)
                for d, op in needed
            ]
            start = max([clock[rank], *arrivals])
            clock[rank] = start + bound.entry(entry)
            starts[rank].append(start)
            ends[rank].append(clock[rank])
            ended.update(dict.fromkeys(entry, clock[rank]))
            progress = True
    return starts, ends


def random_costs(schedule: Schedule, seed: int) -> Costs:
    """Numbers, lists or functions; block cost sometimes."""
    random_ = random.Random(seed)
    stages = schedule.num_stages

    def cost() -> Any:
        kind = random_.randrange(4)
        if kind == 0:
            return random_.randint(0, 5)
        if kind == 1:
            return random_.uniform(0, 2)
        if kind == 2:
            return [random_.uniform(0, 2) for _ in range(stages)]
        table = [random_.uniform(0, 2) for _ in range(7)]
        return lambda op: table[(3 * op.stage + op.microbatch + op.pipe) % 7]

    messages: list[Any] = [
        random_.uniform(0, 1),
        [random_.uniform(0, 1) for _ in range(stages - 1)],
        lambda a, b: 0.1 * ((a.stage + b.microbatch) % 5),
    ]
    return Costs(
        forward=cost(),
        input_gradient=cost(),
        weight_gradient=cost(),
        backward=random_.choice([None, cost()]),
        overlapped=random_.choice([None, random_.uniform(0, 3), lambda entry: len(entry) * 0.7]),
        message=random_.choice(messages),
    )


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=12)
@given(ranks=st.sampled_from([1, 2, 3, 4]), rounds=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_equals_the_obvious_simulator(name: str, ranks: int, rounds: int, seed: int) -> None:
    ranks += ranks % 2 if name in ("chimera", "dualpipe") else 0
    chunks = 1 + seed % 3 if name == "interleaved_1f1b" else 1
    schedule = build(name, ranks, 2 * ranks * rounds, stages_per_rank=chunks)
    costs = random_costs(schedule, seed)
    starts, ends = obvious(schedule, costs)
    simulation = simulate(schedule, costs)
    assert [list(row) for row in simulation.starts] == starts
    assert [list(row) for row in simulation.ends] == ends


def test_a_case_by_hand() -> None:
    # rank 0: F 0-2, F 2-4, idle, B 7-10 (1B0 ends at 6, message 1), B 12-15 (1B1 ends at 11).
    # tF = 2, tB = 3, messages 1: 1F0 waits until 2 + 1, 0B0 until 8 + 1, 0B1 until 13 + 1.
    simulation = simulate(
        from_text(TWO_RANKS), Costs(forward=2, input_gradient=1, weight_gradient=2, message=1)
    )
    assert simulation.starts == ((0, 2, 9, 14), (3, 5, 8, 10))
    assert simulation.ends == ((2, 4, 12, 17), (5, 8, 10, 13))
    assert simulation.makespan == 17 and isinstance(simulation.makespan, int)
    assert simulation.spans == (17, 10)
    assert simulation.busy == (10, 10)
    assert simulation.span_bubble == 7
    assert simulation.rank_idle == 7
    assert simulation.bubble_rate == 7 / 17


def test_stagger_counts_in_rank_idle_only() -> None:
    simulation = simulate(build("zb_h2", 4, 12))
    assert simulation.span_bubble == 0
    assert simulation.rank_idle == 3
    assert simulation.bubble_rate == 0
    assert simulation.makespan == 36 + 3


def test_uneven_stages_are_judged_by_the_busiest_rank() -> None:
    simulation = simulate(from_text(TWO_RANKS), Costs(forward=[1, 3]))
    assert simulation.busy == (6, 10)
    assert simulation.span_bubble == simulation.span - 10


def test_a_chunk_costs_its_part_of_the_share_and_lists_are_per_stage() -> None:
    schedule = build("interleaved_1f1b", 2, 2, stages_per_rank=3)
    bound = Costs(forward=6, input_gradient=[1, 2, 3, 4, 5, 6], weight_gradient=1).bind(schedule)
    assert bound.op(Op("F", 5, 0)) == 2 and isinstance(bound.op(Op("F", 5, 0)), int)
    assert bound.op(Op("I", 4, 1)) == 5
    assert bound.op(Op("W", 0, 0)) == 1 / 3
    assert bound.op(Op("B", 1, 0)) == 2 + 1 / 3


def test_a_slice_costs_its_part() -> None:
    schedule = build("terapipe", 2, 2, num_slices=4)
    bound = Costs(forward=8, backward=[4, 8], message=3).bind(schedule)
    assert bound.op(Op("F", 0, 0, 0, 3)) == 2
    assert bound.op(Op("B", 1, 0, 0, 3)) == 2
    assert bound.message(Op("F", 0, 0), Op("F", 1, 0)) == 3


def test_a_block_costs_its_own_time_when_it_has_one() -> None:
    schedule = build("dualpipe_v", 2, 4)
    block = (Op("F", 0, 3), Op("B", 3, 0))
    assert Costs(forward=2).bind(schedule).entry(block) == 1 + 0.5 + 0.5
    assert Costs(overlapped=3).bind(schedule).entry(block) == 1.5
    assert Costs(overlapped=lambda entry: 7).bind(schedule).entry(block) == 7
    forwards = (Op("F", 0, 3), Op("F", 3, 0))
    assert Costs(overlapped=9).bind(schedule).entry(forwards) == 1


def test_functions_see_operations_and_edges() -> None:
    schedule = from_text(TWO_RANKS)
    names: list[str] = []

    def forward(op: Op) -> float:
        names.append(str(op))
        return 1

    def message(producer: Op, consumer: Op) -> float:
        names.append(f"{producer}>{consumer}")
        return 0

    simulate(schedule, Costs(forward=forward, message=message))
    assert {"0F0", "1F1", "0F0>1F0", "1B1>0B1"} <= set(names)
    assert not any("1F" in name and ">" in name and name.startswith("1F") for name in names)


def test_a_full_backward_of_functions_is_the_sum_of_its_halves() -> None:
    kinds: list[str] = []

    def half(op: Op) -> float:
        kinds.append(op.kind)
        return op.stage + 1

    bound = Costs(input_gradient=half, weight_gradient=5).bind(from_text(TWO_RANKS))
    assert bound.op(Op("B", 1, 0)) == 2 + 5
    assert kinds == ["I"]


def test_numbers_stay_exact() -> None:
    schedule = build("zb_v", 4, 8)
    simulation = simulate(schedule, Costs(forward=np.int64(2), input_gradient=np.float32(0.5)))
    assert all(type(end) is not np.float32 for row in simulation.ends for end in row)
    thirds = simulate(
        build("interleaved_1f1b", 2, 4, stages_per_rank=3),
        Costs(forward=Fraction(1), input_gradient=Fraction(1), weight_gradient=Fraction(1)),  # type: ignore[arg-type]
    )
    assert thirds.span_bubble == 1 and isinstance(thirds.makespan, Fraction)


@pytest.mark.parametrize(
    "costs, message",
    [
        (Costs(forward=-1), "forward is -1"),
        (Costs(weight_gradient=float("nan")), "weight_gradient is nan"),
        (Costs(message=float("inf")), "message is inf"),
        (Costs(forward=[1, 2, 3]), "3 costs for 2 stages"),
        (Costs(message=[1, 2]), "2 costs for 1 boundaries"),
        (Costs(forward=lambda op: -1), "0F0 is -1"),
        (Costs(bandwidth=0), "bandwidth 0"),
    ],
)
def test_costs_that_do_not_fit_are_refused(costs: Costs, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        simulate(from_text(TWO_RANKS), costs)
    assert message in str(caught.value)


@pytest.mark.parametrize("cost", ["1", None, 1j, np.ones(2), ["1", "1"]])
def test_costs_that_are_no_numbers_are_named(cost: Any) -> None:
    """Texts and arrays are refused, though Python can iterate over them."""
    with pytest.raises(TypeError, match="cost forward must be a number, a list of numbers"):
        simulate(from_text(TWO_RANKS), Costs(forward=cost))


def test_transports() -> None:
    schedule = from_text(TWO_RANKS)
    costs = Costs(message=2, message_size=3, bandwidth=0.5)
    # A blocking rank 0 starts its second forward only when the first has left.
    blocking = simulate(schedule, costs, transport="blocking")
    assert blocking.starts[0][:2] == (0, 3)
    assert blocking.starts[1][0] == 3
    # A link takes size / bandwidth = 6 for each message, one after the other, then the latency.
    link = simulate(schedule, costs, transport="link")
    assert link.starts[0][:2] == (0, 1)
    assert link.starts[1][0] == 1 + 6 + 2
    assert link.starts[1][2] == max(link.ends[1][1], 1 + 6 + 6 + 2)
    assert simulate(schedule, costs).starts[1][0] == 3
    with pytest.raises(ValueError, match="transport cannot be 'pigeon'"):
        simulate(schedule, costs, transport="pigeon")  # type: ignore[arg-type]


def test_outputs_of_a_block_leave_one_after_the_other_when_blocking() -> None:
    schedule = from_text(
        "pipeline-schedule v1  name=block ranks=2 stages=2 slices=1 microbatches=1,1\n"
        "place 0: 0 1\nplace 1: 1 0\n"
        "rank 0: 0F0+1F0p1\nrank 1: 0F0p1 1F0\n"
    )
    with pytest.raises(Deadlock):
        orders = (schedule.orders[0], schedule.orders[1][::-1])
        simulate(replace(schedule, orders=orders))
    simulation = simulate(schedule, Costs(message=2), transport="blocking")
    # 0F0p1 ends at 1, arrives at 3; the block runs 3-5, its message to rank 1 leaves until 7.
    assert simulation.starts == ((3,), (0, 7))


def test_relaxed_wrap_around_is_the_same_without_latency_and_shorter_with() -> None:
    schedule = build("interleaved_1f1b", 4, 8, stages_per_rank=2)
    assert simulate(schedule, relax_wrap=True).ends == simulate(schedule).ends
    costs = Costs(forward=4, input_gradient=4, weight_gradient=4, message=1)
    strict, relaxed = simulate(schedule, costs), simulate(schedule, costs, relax_wrap=True)
    assert relaxed.span < strict.span
    assert relaxed.relaxed and not strict.relaxed
    with pytest.raises(ValueError, match="relax_wrap needs one pipe"):
        simulate(build("zb_v", 4, 8), relax_wrap=True)


def test_the_timeline_holds_every_operation() -> None:
    schedule = build("dualpipe_v", 2, 4)
    simulation = simulate(schedule, Costs(message=0.25), unit="seconds")
    timeline = simulation.timeline
    assert timeline.source == "simulated" and timeline.unit == "seconds"
    assert timeline.digest == digest(schedule)
    assert len(timeline.records) == sum(len(entry) for order in schedule.orders for entry in order)
    assert timeline.end == simulation.makespan
    for rank, statistics in enumerate(timeline.statistics()):
        assert statistics.busy == pytest.approx(simulation.busy[rank])
        assert statistics.span == pytest.approx(simulation.spans[rank])
        assert statistics.idle + simulation.starts[rank][0] == pytest.approx(statistics.wait)
    record = timeline.by_rank()[1][0]
    assert (record.name, record.kind, record.stage, record.start) == ("1F0", "F", 1, 0.75)
    assert record.wait == 0.75


def test_a_deadlock_shows_where_every_rank_stands() -> None:
    text = TWO_RANKS.replace("0F0 0F1 0B0", "0F0 0B0 0F1").replace("1F0 1B0 1F1", "1F0 1F1 1B0")
    with pytest.raises(Deadlock) as caught:
        simulate(from_text(text))
    message = str(caught.value)
    assert "0B0 (rank 0, entry 1) waits for 1B0 (rank 1, entry 2)" in message
    assert "1F1 (rank 1, entry 1) waits for 0F1 (rank 0, entry 2)" in message
    assert "rank 0 waits at 0B0" in message and "rank 1 waits at 1F1" in message
    assert caught.value.heads == (1, 5) and len(caught.value.cycle) == 2


def test_slices_depend_on_the_slice_before() -> None:
    schedule = build("terapipe", 1, 1, num_slices=2)
    first, second, *rest = schedule.orders[0]
    with pytest.raises(Deadlock, match=r"0F0\.1 \(rank 0, entry 0\) waits for 0F0 "):
        simulate(replace(schedule, orders=((second, first, *rest),)))


def test_a_missing_producer_is_no_ring() -> None:
    with pytest.raises(Deadlock) as caught:
        simulate(from_text(TWO_RANKS.replace(" 0F1", "")))
    assert caught.value.cycle == ()


def test_operations_outside_the_schedule_are_refused() -> None:
    for stranger in ("2F0", "0F2", "0F0p1", "0F0.1"):
        with pytest.raises(ValueError, match="outside the schedule"):
            simulate(from_text(TWO_RANKS.replace("0F1", stranger)))


def test_nothing_takes_no_time() -> None:
    empty = from_text(
        "pipeline-schedule v1 name=x ranks=1 stages=1 microbatches=0\nplace 0: 0\nrank 0:"
    )
    simulation = simulate(empty)
    assert simulation.makespan == simulation.bubble_rate == 0
    assert simulation.timeline.records == ()
    free = simulate(from_text(TWO_RANKS), Costs(forward=0, backward=0))
    assert free.bubble_rate == 0.0


def test_memory_counts_forwards_first_and_keeps_what_weight_gradients_need() -> None:
    text = TWO_RANKS.replace("0F0 0F1 0B0 0B1", "0F0 0I0 0F1+0W0 0I1 0W1")
    text = text.replace("1F0 1B0 1F1 1B1", "1F0 1I0 1W0 1F1 1B1")
    peaks = peak_memory(from_text(text), activation=2, weight_memory=0.5)
    assert peaks[0] == (1, 2.5, 1)
    assert peaks[1] == (1, 2.0, 1)
    assert peak_memory(from_text(text))[0] == (1, 2, 1)


def test_memory_of_chunks_and_lists() -> None:
    schedule = build("interleaved_1f1b", 2, 2, stages_per_rank=3)
    peaks = peak_memory(schedule)
    assert [peak.activation for peak in peaks] == [peak.contexts / 3 for peak in peaks]
    # By stage: rank 0 has 0, 2, 4.
    listed = peak_memory(schedule, activation=[1, 0, 10, 0, 100, 0], weight_memory=3)
    assert listed[0].activation == 222 and listed[1].activation == 0
    with pytest.raises(ValueError, match="2 amounts for 6 stages"):
        peak_memory(schedule, activation=[1, 2])
