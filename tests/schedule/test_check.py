"""The checker: its bounds, and one message for every kind of broken schedule."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moemesh.config.schedule_table import SCHEDULES
from moemesh.schedule.action import Entry, Op, Schedule, UpdateRule, messages
from moemesh.schedule.build import build
from moemesh.schedule.check import Caps, ScheduleError, check, rendezvous_deadlock
from moemesh.schedule.costs import Costs
from moemesh.schedule.program import Deadlock
from moemesh.schedule.simulate import simulate
from moemesh.schedule.text import from_text
from moemesh.schedule.versions import versions

GOOD = """\
pipeline-schedule v1  name=hand ranks=2 stages=2 slices=1 microbatches=2
place 0: 0 1
rank 0: 0F0 0F1 0B0 0I1 0W1
rank 1: 1F0 1B0 1F1 1B1
"""


def complaint(schedule: Schedule, caps: Caps | None = None) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(schedule, caps)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def with_orders(schedule: Schedule, orders: list[list[Entry]]) -> Schedule:
    return replace(schedule, orders=tuple(map(tuple, orders)))


def test_the_report_of_a_small_schedule() -> None:
    report = check(from_text(GOOD))
    assert [peak.contexts for peak in report.peaks] == [2, 1]
    assert [peak.weight_backlog for peak in report.peaks] == [1, 0]
    # After 0F0 and 0F1 both gradients may come; rank 1 may get both forwards before it starts.
    assert report.unread_messages == (2, 2)
    assert report.channels == ("ordered_pair",)
    assert report.versions == {}


@pytest.mark.parametrize(
    "old, new, message",
    [
        (" 0F1", "", "rank 0, 0F1: is missing"),
        (" 0B0", "", "rank 0, 0B0: is missing, as is 0I0 with its W"),
        (" 0W1", "", "rank 0, 0W1: is missing"),
        (" 0I1", "", "rank 0, 0I1: is missing"),
        ("0F1 0B0", "0F1 0F1 0B0", "rank 0, entry 2, 0F1: is already at rank 0, entry 1"),
        ("0I1 0W1", "0I1 0W1 0B1", "rank 0, entry 3, 0I1: 0B1 does its work already"),
        ("0I1 0W1", "0I1 0W1 0W0", "rank 0, entry 5, 0W0: 0B0 does its work already"),
        ("1F1 1B1", "1F1 1B1 0F1", "rank 1, entry 4, 0F1: is already at rank 0, entry 1"),
        ("0F0 0F1", "0F0 1F1", "rank 0, entry 1, 1F1: its stage is on rank 1"),
        ("0F1 0B0", "0F1 2F0 0B0", "rank 0, entry 2, 2F0: does not belong to this schedule"),
        ("0F1 0B0", "0F1 0F2 0B0", "rank 0, entry 2, 0F2: does not belong to this schedule"),
        ("0F1 0B0", "0F1 0F0p1 0B0", "0F0p1: does not belong to this schedule"),
        ("0F1 0B0", "0F1 0F0.1 0B0", "0F0.1: does not belong to this schedule"),
        ("0I1 0W1", "0W1 0I1", "rank 0, entry 3, 0W1: needs 0I1, which comes later, at 4"),
        ("1F1 1B1", "1B1 1F1", "rank 1, entry 2, 1B1: needs 1F1, which comes later, at 3"),
        ("1F1 1B1", "1F1+1B1", "rank 1, entry 2, 1B1: needs 1F1 of the same block"),
        ("0I1 0W1", "0I1+0W1", "rank 0, entry 3, 0W1: needs 0I1 of the same block"),
    ],
)
def test_every_finding_names_rank_entry_and_operation(old: str, new: str, message: str) -> None:
    assert message in complaint(from_text(GOOD.replace(old, new)))


def test_all_findings_are_listed() -> None:
    error = complaint(from_text(GOOD.replace(" 0F1", "").replace(" 1F1", " 1F0")))
    assert "0F1: is missing" in error and "1F1: is missing" in error and "1F0: is already" in error


def test_very_many_findings_are_cut_in_the_message_only() -> None:
    schedule = build("gpipe", 4, 40)
    with pytest.raises(ScheduleError) as caught:
        check(with_orders(schedule, [[] for _ in range(4)]))
    assert len(caught.value.findings) == 2 * 4 * 40
    assert "and 270 more" in str(caught.value)


def test_slices_ascend_forward_and_descend_backward() -> None:
    schedule = build("terapipe", 1, 1, num_slices=2)
    assert [str(op) for op in schedule.ops(0)] == ["0F0", "0F0.1", "0B0.1", "0B0"]
    check(schedule)
    (a,), (b,), (c,), (d,) = schedule.orders[0]
    error = complaint(with_orders(schedule, [[(b,), (a,), (c,), (d,)]]))
    assert "0F0.1: slices ascend in F: needs 0F0" in error
    error = complaint(with_orders(schedule, [[(a,), (b,), (d,), (c,)]]))
    assert "0B0: slices descend in backward: needs 0B0.1" in error


def test_a_ring_of_three_is_named_in_full() -> None:
    schedule = build("1f1b", 3, 2)
    ring = [
        ["0F0", "0B0", "0F1", "0B1"],
        ["1F0", "1F1", "1B0", "1B1"],
        ["2F0", "2F1", "2B0", "2B1"],
    ]
    names = {str(op): (op,) for order in schedule.orders for entry in order for op in entry}
    error = complaint(with_orders(schedule, [[names[name] for name in order] for order in ring]))
    assert "0B0 (rank 0, entry 1) waits for 1B0 (rank 1, entry 2)" in error
    assert "1F1 (rank 1, entry 1) waits for 0F1 (rank 0, entry 2)" in error


@pytest.mark.parametrize(
    "change, message",
    [
        ({"orders": ((),)}, "1 lists for 2 ranks"),
        ({"num_microbatches": (1, 1)}, "2 microbatch counts for 1 pipes"),
        ({"num_microbatches": (-1,)}, "below 0"),
        ({"placement": ((0,),)}, "pipe 0 places 1 of 2 stages"),
        ({"placement": ((0, 2),)}, "pipe 0 has stage 1 on rank 2 of 2"),
        ({"num_slices": 0}, "0 slices"),
        ({"update": UpdateRule(kind="newest", window=0)}, "window is 0"),
    ],
)
def test_parts_that_do_not_fit_each_other(change: dict[str, object], message: str) -> None:
    assert message in complaint(replace(from_text(GOOD), **change))  # type: ignore[arg-type]


def test_an_empty_entry_is_found() -> None:
    schedule = from_text(GOOD)
    assert "rank 0, entry 0: an entry without operations" in complaint(
        with_orders(schedule, [[(), *schedule.orders[0]], list(schedule.orders[1])])
    )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [4, 8])
def test_channels_that_do_not_deadlock(name: str, ranks: int) -> None:
    """Only schedules whose ranks never send both ways at once survive shared channels."""
    every = ("ordered_pair", "unordered_pair", "rank")
    expected = every if name in ("gpipe", "terapipe") else every[:1]
    assert check(build(name, ranks, 2 * ranks)).channels == expected


def test_a_rendezvous_deadlock_says_what_is_blocked() -> None:
    blocked = rendezvous_deadlock(from_text(GOOD), "unordered_pair")
    assert "send of 0F1 to rank 1 (on rank 0)" in blocked
    assert "send of 1B0 to rank 0 (on rank 1)" in blocked
    assert "rank 0 at 0B0; rank 1 at 1F1" in blocked
    assert rendezvous_deadlock(from_text(GOOD), "ordered_pair") == ""
    with pytest.raises(ValueError, match="channels 'pair'"):
        rendezvous_deadlock(from_text(GOOD), "pair")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "caps, message",
    [
        (Caps(contexts=1), "rank 0: contexts reaches 2, the cap is 1"),
        (Caps(activation=1.5), "rank 0: activation reaches 2.0, the cap is 1.5"),
        (Caps(weight_backlog=0), "rank 0: weight_backlog reaches 1, the cap is 0"),
        (Caps(unread_messages=1), "rank 1: unread_messages reaches 2, the cap is 1"),
    ],
)
def test_caps(caps: Caps, message: str) -> None:
    assert message in complaint(from_text(GOOD), caps)


def test_caps_that_are_kept() -> None:
    check(from_text(GOOD), Caps(contexts=2, activation=2, weight_backlog=1, unread_messages=2))
    # A sum of fractions may exceed its exact value by a rounding.
    held = Caps(activation=4 - 3 + 3 * 0.1)
    check(build("zb_h1", 4, 8), Caps(activation=4), weight_memory=0.1)
    with pytest.raises(ScheduleError):
        check(build("zb_h1", 4, 8), held, weight_memory=0.1)


SHAPES = [(name, 4, 8) for name in SCHEDULES] + [("zb_v", 3, 5), ("1f1b", 2, 3)]


@settings(max_examples=60)
@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 10**6))
def test_mutants_never_pass_where_they_cannot_run(shape: tuple[str, int, int], seed: int) -> None:
    """Two entries of a rank change places: what passes can be simulated, and the other way round,
    unless order or an update rule forbids it."""
    random_ = random.Random(seed)
    schedule = replace(build(*shape), update=None)
    orders = [list(order) for order in schedule.orders]
    order = random_.choice(orders)
    first, second = random_.sample(range(len(order)), 2)
    order[first], order[second] = order[second], order[first]
    mutant = with_orders(schedule, orders)
    try:
        simulate(mutant)
    except Deadlock as deadlock:
        error = complaint(mutant)
        assert deadlock.cycle and deadlock.ring in error
    else:
        check(mutant)


@settings(max_examples=40)
@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 10**6))
def test_dropped_doubled_and_moved_operations_are_found(
    shape: tuple[str, int, int], seed: int
) -> None:
    random_ = random.Random(seed)
    schedule = build(*shape)
    orders = [list(order) for order in schedule.orders]
    rank = random_.randrange(len(orders))
    index = random_.randrange(len(orders[rank]))
    entry = orders[rank][index]
    what = random_.choice(["drop", "double", "move"])
    if what != "double":
        del orders[rank][index]
    if what == "double":
        orders[rank].insert(random_.randrange(len(orders[rank]) + 1), entry)
    if what == "move":
        orders[(rank + 1) % len(orders)].append(entry)
    assert str(entry[0]) in complaint(with_orders(schedule, orders))


@settings(max_examples=25)
@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 10**6))
def test_unread_messages_bound_every_run(shape: tuple[str, int, int], seed: int) -> None:
    """At most the proved number of messages waits, however long operations and messages take; a
    rank that is slow from one entry on reaches that number."""
    schedule = build(*shape)
    bound = check(schedule).unread_messages
    random_ = random.Random(seed)
    table = [random_.choice([0, 0.1, 1, 30]) for _ in range(17)]

    def cost(op: Op) -> float:
        return table[(op.stage * 5 + op.microbatch * 3 + ord(op.kind)) % 17]

    costs = Costs(forward=cost, backward=cost, input_gradient=cost, weight_gradient=cost)
    for rank, most in enumerate(bound):
        assert _unread(schedule, costs, rank) <= most


def test_unread_messages_are_reached_by_a_late_rank() -> None:
    schedule = build("zb_h2", 4, 8)
    bound = check(schedule).unread_messages
    for rank in range(4):
        reached = 0
        for late in schedule.ops(rank):

            def cost(op: Op, late: Op = late) -> float:
                return 1000 if op == late else 0

            costs = Costs(forward=cost, input_gradient=cost, weight_gradient=cost)
            reached = max(reached, _unread(schedule, costs, rank))
        # What arrives while an entry runs is unread until the next starts.
        assert reached in (bound[rank] - 1, bound[rank])


def _unread(schedule: Schedule, costs: Costs, rank: int) -> int:
    """The most messages that wait unused on a rank in one simulated run."""
    simulation = simulate(schedule, costs)
    starts, ends = {}, {}
    for order, begun, ended in zip(
        schedule.orders, simulation.starts, simulation.ends, strict=True
    ):
        for entry, start, end in zip(order, begun, ended, strict=True):
            starts.update(dict.fromkeys(entry, start))
            ends.update(dict.fromkeys(entry, end))
    changes = []
    for producer, message in messages(schedule).items():
        if message.destination == rank:
            changes += [(ends[producer], 1), (starts[message.consumer], -1)]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    ("schedule", "version", "copies", "updates"),
    [
        (build("pipedream", 4, 10), lambda stage, m: max(0, m - (3 - stage)), (4, 3, 2, 1), 10),
        (build("pipedream_2bw", 4, 12, window=6), lambda stage, m: max(m // 6 - 1, 0), (2,) * 4, 2),
    ],
    ids=["stash", "two versions"],
)
def test_versions_and_copies(
    schedule: Schedule, version: Callable[..., int], copies: tuple[int, ...], updates: int
) -> None:
    seen_versions, breaches = versions(schedule)
    assert not breaches
    for stage in range(4):
        seen = seen_versions[0, stage]
        for microbatch in range(schedule.total_microbatches):
            for kind in "FB":
                used = seen.used[Op(kind, stage, microbatch)]
                assert used == version(stage, microbatch)
        assert (seen.lag, seen.copies, seen.updates) == (copies[stage] - 1, copies[stage], updates)


def test_newest_uses_the_weights_of_the_moment() -> None:
    seen_versions, breaches = versions(build("ampnet", 3, 9, max_in_flight=3, window=2))
    assert not breaches
    for seen in seen_versions.values():
        backwards = [op for op in seen.used if op.kind == "B"]
        assert [seen.used[op] for op in backwards] == [k // 2 for k in range(9)]
        assert seen.copies == 1 and seen.lag <= 1


def test_a_rule_that_the_order_breaks() -> None:
    ahead = replace(build("gpipe", 2, 4), update=UpdateRule(kind="stash"))
    assert "0F2: uses version 0, the rule declares 1" in complaint(ahead)
    window = replace(build("1f1b", 4, 8), update=UpdateRule(kind="two_versions", window=1))
    assert "0F2: needs version 1 of the weights, there are 0" in complaint(window)
    with pytest.raises(ValueError, match="is synchronous"):
        versions(build("1f1b", 4, 8))


def test_post_validation_needs_a_warm_up_of_its_own() -> None:
    for name in ("zb_h1", "zb_h2", "zb_v"):
        check(build(name, 4, 8), post_validation=True)
    schedule = from_text(
        "pipeline-schedule v1  name=hand ranks=2 stages=4 slices=1 microbatches=2\n"
        "place 0: 0 1 0 1\n"
        "rank 0: 0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1\n"
        "rank 1: 1F0 3F0 3B0 1F1 1B0 3F1 3B1 1B1\n"
    )
    check(schedule)
    with pytest.raises(ScheduleError, match=r"2F1: warm-up depends on 1F1 \(rank 1, entry 3\)"):
        check(schedule, post_validation=True)
