"""Verdicts from what a supervisor sees, with a clock of the test: no process is started."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from moemesh.monitor import detector
from moemesh.monitor.culprit import find_culprit
from moemesh.monitor.detector import END_SECONDS, GONE, Limits, LostHost, RankStatus
from moemesh.monitor.progress import Collective, ProgressRecord, members_of
from tests.monitor.statuses import GROUP, RESET, Clock, collective, error, record, status, waiting


def lost_contact() -> list[RankStatus]:
    """Four ranks that failed inside of one operation, one after the other."""
    errors = (error("E", RESET, 99.0 + rank) for rank in range(4))
    return [replace(waiting(rank, failed=True), error=one) for rank, one in enumerate(errors)]


class Case(NamedTuple):
    """Ranks that a detector sees for `seconds` after `trained` steps without a fault, and its
    verdict (None: none), `after` these seconds. `more`: settings of the detector."""

    ranks: list[RankStatus]
    kind: str | None
    rank: int = 0
    code: int = 1
    words: str = ""
    seconds: float = 4.0
    trained: int = 0
    after: float | None = None
    waits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    more: Mapping[str, Any] = MappingProxyType({})


def raised(rank: int, text: str, time: float, **more: Any) -> RankStatus:
    """A rank that left with an exception."""
    return status(rank, exit_code=1, error=error("E", text, time), record=record(rank, **more))


def on_device(rank: int, **more: Any) -> RankStatus:
    return status(rank, record=record(rank, on_device=True, **more))


def among(ranks: list[RankStatus], changed: RankStatus) -> list[RankStatus]:
    """`ranks` with one of them replaced."""
    return [changed if one.rank == changed.rank else one for one in ranks]


AT, PAIR, NODE = collective(7), collective(7, "0-1"), {"patience": 30.0, "ranks": 2}
WAITING = [waiting(rank) for rank in range(4)]
NEVER = "never entered all_reduce #7 of dp (gradients), in which ranks 0, 1 and"
JOINING = {"step": 0, "phase": "setup", "at": collective(1, op="rendezvous")}
PEERS = [record(0, at=AT, on_device=True), *(record(r, counts={GROUP: 7}) for r in (1, 2))]
ABORTED = [*(status(r.rank, exit_code=-6, record=r) for r in PEERS), status(3, "R")]
LOST = {"lost": (LostHost(name="b", ranks=(2, 3)),)}
NAMED = {"facts": {"rank": 2}}
STARTING = record(0, step=0, phase="setup")
# fmt: off
CASES = {
    # Ranks that ended, among others that lost them in one operation.
    "killed": Case(among(lost_contact(), status(2, exit_code=-9, record=record(2, at=AT))),
                   "killed", 2, 137, "rank 2 was killed by SIGKILL", after=0.2),
    **{f"exit {code}, {at}": Case(
        among(lost_contact(), status(1, exit_code=code, record=record(1, at=at))),
        "exited", 1, code or 1, f"exit code {code}") for code in (0, 3) for at in (None, AT)},
    "its parent has the exit code": Case(among(lost_contact(), replace(waiting(2), exit_code=GONE)),
                                         "exited", 2),
    "the earliest in user code": Case(
        [raised(0, RESET, 99.1, at=AT), raised(1, "'x'", 99.9), raised(2, "bad", 99.5)],
        "exception", 2, 1, "rank 2 failed with exit code 1: E: bad"),
    "all ranks raise it and name one": Case(
        [status(r, exit_code=1, error=error("E", "x", 99.0 + r, **NAMED)) for r in range(4)],
        "exception", 2, 1, "rank 2 failed with exit code 1: E: x"),
    "never joined": Case([*(status(r, record=record(r, **JOINING)) for r in range(3)),
                          RankStatus(rank=3, exit_code=1)], "exited", 3),
    "timeouts of peers": Case(
        [*(raised(r, "Timed out", 98.0, at=AT) for r in range(3)), status(3, "R")], "busy", 3, 1,
        "never entered all_reduce #7 of dp"),
    "all in the network": Case([raised(r, RESET, 99.0, at=AT) for r in range(2)], "lost-contact"),
    "its own device": Case(
        [raised(0, RESET, 98.0, at=AT), raised(1, "illegal access", 99.0, at=AT, on_device=True)],
        "exception", 1),
    # Hosts of ranks with NCCL are anywhere when their watchdogs abort them.
    "watchdogs abort the peers": Case(ABORTED, "busy", 3, more={"aborts_follow": True}),
    "peers abort": Case(ABORTED, "killed", 1, 134),
    # Ranks that are stopped, do not start, or get no core (R) or disk (D).
    "stopped": Case(among(WAITING, status(1, "T")), "stopped", 1, trained=5,
                    waits=((0, 2, 3), (1,))),
    "stopped inside": Case(among(WAITING, replace(waiting(2), state="T")), "stopped", 2,
                           trained=5, waits=((0, 1, 2, 3), ())),
    "a suspended job": Case([status(r, "T") for r in range(4)], None, seconds=600.0, trained=5),
    "not started": Case([status(0, record=STARTING), RankStatus(rank=1, state="S")],
                        "hung", 1, 1, "did not start", 100.0, more={"patience": 30.0}),
    **{f"no core {state}": Case(among(WAITING, status(2, state, cpu_seconds=5.0)), None,
                                seconds=300.0, trained=20) for state in "RD"},
    # Limits of steps and of other phases.
    "ten usual steps": Case(among(WAITING, status(0)), "hung", seconds=60.0, trained=20, after=20.0,
                            more={"step": 2.0}),
    "first steps": Case(
        [*(waiting(r, step=2) for r in (0, 2, 3)), status(1, record=record(1, step=2))],
        "hung", 1, 1, "", 100.0, 2, 30.0, more={"patience": 30.0}),
    **{f"phase {phase}": Case([*(waiting(r, phase=phase) for r in (0, 2, 3)),
                               status(1, record=record(1, phase=phase))],
                              "hung", 1, 1, "", 100.0, 20, 30.0, more={"patience": 30.0})
       for phase in ("setup", "data", "validate", "save", "finish")},
    "sleeps": Case(among(WAITING, status(2)), "hung", 2, 1, f"{NEVER} 3 wait", 30.0, 20, 3.0,
                   ((0, 1, 3), (2,))),
    # The watcher of ranks 0 and 1 of four gives no verdict on 2 and 3, which another watches.
    "waits for another node": Case(WAITING[:2], None, seconds=100.0, trained=20, more=NODE),
    "one waits for another node": Case([waiting(0), status(1)], "hung", 1, 1, "", 100.0, 20,
                                       more=NODE),
    # Devices. An operation of this node alone may follow a sum over both nodes.
    "devices wait for a rank": Case([*(on_device(r, at=AT) for r in range(3)), status(3)],
                                    "hung", 3, 1, f"{NEVER} 2", 10.0, more={"patience": 5.0}),
    "all devices wait": Case([on_device(r, at=collective(7, "0-2")) for r in range(3)], "hung", 0,
                             1, "s for its device, behind all_reduce #7 of dp", 10.0,
                             more={"patience": 5.0}),
    "one device waits": Case([on_device(0, inside=True, counts={})], "hung", 0, 1, "for its device",
                             10.0, more={"patience": 5.0}),
    "after another node": Case(
        [on_device(r, at=PAIR, counts={"0-1": 7, GROUP: 5}) for r in range(2)],
        None, seconds=100.0, more={"patience": 5.0}),
    "after this node": Case([on_device(r, at=PAIR) for r in range(2)], "hung", seconds=100.0,
                            more={"patience": 5.0}),
    # A host that does not answer.
    "a device waits for it": Case([on_device(0, counts={"0-1": 9, "1,2": 3})], "network-cut",
                                  seconds=9.0, waits=((), (2,)), more=LOST),
    "no device waits for it": Case([on_device(0, counts={"0-1": 9})], None, seconds=9.0, more=LOST),
    "failed because of it": Case([raised(r, "Timed out waiting", 99.0, at=AT) for r in (0, 1)],
                                 "network-cut", waits=((0,), (2, 3)), more=LOST),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_verdicts(name: str) -> None:
    case, more = CASES[name], {"patience": 600.0, "aborts_follow": False, **CASES[name].more}
    clock = Clock(more["patience"])
    clock.train(case.trained, more.get("step", 0.1), more.get("ranks", 4))
    clock.detector.lost = more.get("lost", ())
    clock.detector.limits = replace(clock.detector.limits, aborts_follow=more["aborts_follow"])
    start = clock.now
    verdict = clock.poll(case.ranks, case.seconds)
    if case.kind is None or verdict is None:
        assert verdict is case.kind is None
        return
    assert (verdict.kind, verdict.rank, verdict.exit_code) == (case.kind, case.rank, case.code)
    assert case.words in verdict.message
    has_entered = verdict.rank in verdict.entered
    assert not has_entered or "never entered" not in verdict.message
    assert case.after in (None, pytest.approx(clock.now - start, abs=0.5))
    assert case.waits in (None, (verdict.entered, verdict.missing))


def test_a_rank_that_loops_is_busy() -> None:
    clock = Clock()
    clock.train(20)
    start, used = clock.now, 0.0
    verdict = None
    while verdict is None and clock.now < start + 30:
        used += 0.03
        verdict = clock.poll(among(WAITING, status(2, "R", cpu_seconds=used)))
    assert verdict is not None and (verdict.kind, verdict.rank) == ("busy", 2)
    assert f"{NEVER} 3 wait" in verdict.message
    assert clock.now - start == pytest.approx(3.0, abs=0.3)
    assert on_device(0, inside=True).record.place().endswith("layer 1, waiting for its device")


def test_a_clean_end_is_none() -> None:
    clock = Clock()
    clock.train(3)
    for left in range(1, 5):  # one after the other, as they do
        ranks = [status(r, record=record(r, phase="finish", done=True)) for r in range(4)]
        for r in range(left):
            ranks[r] = status(r, state="", exit_code=0, record=record(r, done=True))
        assert clock.poll(ranks, 2.0) is None and not clock.detector.is_deciding


def test_a_rank_that_gets_no_core_to_leave_keeps_its_exit_code() -> None:
    """The verdict is the exception that it reported; a rank that never leaves is ended."""
    failed = {"error": error("KeyError", "x", 99.0)}
    slow, used = Clock(), 0.0
    for _ in range(100):
        used += 0.01
        assert slow.poll([status(0, "R", cpu_seconds=used, **failed)], 0.1) is None
    verdict = slow.poll([status(0, exit_code=7, **failed)], 1.0)
    assert verdict is not None and (verdict.kind, verdict.exit_code) == ("exception", 7)
    for state, least, most in (("S", 2.5, 3.5), ("D", 19.0, 21.0)):
        clock = Clock()
        assert clock.poll([status(0, state, **failed)], least) is None
        verdict = clock.poll([status(0, state, **failed)], most - least)
        assert verdict is not None and (verdict.kind, verdict.exit_code) == ("exception", 1)


def test_a_supervisor_that_slept_has_seen_nothing() -> None:
    clock = Clock()
    clock.train(5)
    ranks = [waiting(r) for r in range(4)]
    assert clock.poll(ranks) is None
    clock.now += 3600.0
    assert clock.detector.poll(clock.now, ranks) is None


def test_no_verdict_on_ranks_that_leave_as_they_were_asked_to() -> None:
    clock = Clock()
    clock.detector.stopping = 15
    ranks = [
        RankStatus(rank=0, exit_code=-15, record=record(0)),
        status(1, exit_code=143, record=record(1)),
    ]
    assert clock.poll(ranks, 5.0) is None
    ranks[1] = RankStatus(
        rank=1, exit_code=1, record=record(1), error=error("OSError", "disk", 99.0)
    )
    verdict = clock.poll(ranks, 5.0)
    assert verdict is not None and verdict.rank == 1


def test_no_alarm_in_ten_thousand_seconds_of_uneven_steps() -> None:
    generator = random.Random(0)
    clock = Clock()
    for step in range(1, 4000):
        phase = "save" if step % 50 == 0 else "step"
        for _ in range(3):
            clock.changes += 1
            clock.now += generator.expovariate(1.0) * (20.0 if phase == "save" else 0.8)
            ranks = [
                status(r, record=record(r, step=step, phase=phase, changes=clock.changes))
                for r in range(4)
            ]
            for _ in range(3):
                clock.now += 0.03
                assert clock.detector.poll(clock.now, ranks) is None
    assert clock.now > 10_000 and detector.LONGEST_GAP > 0


def test_a_rank_that_has_said_goodbye_has_left_after_a_while() -> None:
    word_ = record(0, done=True, code=130, moved=1000.0)
    blocked = status(0, record=word_)
    assert not blocked.has_left(1000.0 + END_SECONDS)
    assert blocked.has_left(1001.0 + END_SECONDS)
    assert not status(0, record=record(0, moved=0.0)).has_left(1e6)
    gone = status(0, exit_code=3, record=word_)
    assert gone.has_left(1000.0)


def test_chains_end_at_the_rank_in_user_code() -> None:
    """3 waits for a message of 2, which waits in a group of 0, which computes."""
    counts = {"0,2": 4, "2>3": 8}
    records = [
        record(0, counts={"0,2": 4}),
        record(2, at=collective(5, "0,2"), counts={"0,2": 5, "2>3": 8}),
        record(3, at=collective(9, "2>3", "send_receive"), counts={"2>3": 9}),
    ]
    suspect = find_culprit(records)
    assert suspect is not None and suspect.rank == 0 and counts
    assert suspect.collective is not None and suspect.collective.group == "0,2"
    assert (suspect.entered, suspect.missing) == ((2,), (0,))


def test_a_circle_names_the_rank_that_came_least_far() -> None:
    """0 and 1 wait for each other, in operations of two groups: one of them left one out."""
    records = [
        record(0, at=collective(5, "0-1"), counts={"0-1": 5, "0-3": 2}, number=40),
        record(1, at=collective(3, "0-3"), counts={"0-1": 4, "0-3": 3}, number=39),
        record(2, at=collective(3, "0-3"), counts={"0-3": 3}, number=41),
        record(3, at=collective(3, "0-3"), counts={"0-3": 3}, number=41),
    ]
    suspect = find_culprit(records)
    assert suspect is not None and suspect.rank == 1


def test_who_waits_nowhere_is_compared_by_counts() -> None:
    """A host with a GPU does not wait in collectives: it starts them and continues."""
    records = [record(r, counts={GROUP: 9}, collective=collective(9)) for r in range(4)]
    records[3] = record(3, counts={GROUP: 7}, collective=collective(7))
    suspect = find_culprit(records)
    assert suspect is not None and suspect.rank == 3


def test_any_single_culprit_of_any_group_is_found() -> None:
    """Ranks of a random mesh; one stays in user code, the rest run until they wait for it."""
    generator = random.Random(1)
    for _ in range(200):
        world = generator.choice((2, 4, 8))
        culprit = generator.randrange(world)
        records = _hung(generator, world, culprit)
        suspect = find_culprit(records)
        assert suspect is not None and suspect.rank == culprit, (world, culprit, records)


def _hung(generator: random.Random, world: int, culprit: int) -> list[ProgressRecord]:
    """Each rank goes through one list of collectives, over pairs and over all."""
    groups = [f"0-{world - 1}", *(f"{r}-{r + 1}" for r in range(0, world, 2))]
    program = [generator.choice(groups) for _ in range(40)] + groups * 2
    stop = generator.randrange(30)
    place, counts = [0] * world, [dict.fromkeys(groups, 0) for _ in range(world)]
    at: list[Collective | None] = [None] * world
    for _ in range(len(program) * world * 2):
        for rank in range(world):
            if at[rank] is not None:
                one = at[rank]
                if all(counts[m][one.group] >= one.number for m in one.members):
                    at[rank] = None
                    place[rank] += 1
            elif place[rank] < len(program) and not (rank == culprit and place[rank] >= stop):
                group = program[place[rank]]
                if rank not in members_of(group):
                    place[rank] += 1
                    continue
                counts[rank][group] += 1
                at[rank] = collective(counts[rank][group], group)
    return [
        record(r, at=at[r], counts=counts[r], number=sum(counts[r].values())) for r in range(world)
    ]


def test_ranks_that_wait_for_a_host_that_does_not_answer() -> None:
    """No verdict while they move, while they wait for one another, and after the host answers."""
    waiting_ranks = [status(r, record=record(r, at=collective(7), changes=200)) for r in (0, 1)]
    host = LostHost(name="b (10.0.0.2)", ranks=(2, 3))
    clock = Clock()
    clock.detector.lost = (host,)
    clock.train(5, seconds=4.0, ranks=2)
    among = [status(r, record=record(r, at=collective(7, "0-1"))) for r in (0, 1)]
    clock.detector.limits = Limits(patience=600.0, floor=100.0)
    assert clock.poll(among, 30.0) is None
    assert clock.poll(waiting_ranks, 2.5) is None
    clock.detector.lost = ()
    assert clock.poll(waiting_ranks, 30.0) is None
    clock.detector.lost = (host,)
    verdict = clock.poll(waiting_ranks, 0.1)
    assert verdict is not None and (verdict.kind, verdict.rank, verdict.exit_code) == (
        "network-cut",
        0,
        1,
    )
    assert (verdict.entered, verdict.missing, verdict.lost) == ((0, 1), (2, 3), (host,))
    assert "b (10.0.0.2) with ranks 2 and 3 cannot be reached" in verdict.message
    assert "rank 0 waits for ranks 2 and 3 in all_reduce #7 of dp" in verdict.message
