"""Verdicts from what a supervisor sees, with a clock of the test: no process is started."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

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


def test_a_killed_rank_is_blamed_before_those_that_lost_it() -> None:
    clock = Clock()
    ranks = lost_contact()
    ranks[2] = status(2, exit_code=-9, record=record(2, at=collective(7)))
    verdict = clock.poll(ranks, 1.0)
    assert verdict is not None and (verdict.kind, verdict.rank, verdict.exit_code) == (
        "killed",
        2,
        137,
    )
    assert clock.now < 100.5 and verdict.message == "rank 2 was killed by SIGKILL"


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("at", [None, collective(7)])
def test_a_silent_exit_is_blamed_before_those_that_lost_it(code: int, at: Any) -> None:
    clock = Clock()
    ranks = lost_contact()
    ranks[1] = status(1, exit_code=code, record=record(1, at=at))
    verdict = clock.poll(ranks, 1.0)
    assert verdict is not None and (verdict.kind, verdict.rank) == ("exited", 1)
    assert verdict.exit_code == (code or 1) and str(code) in verdict.message


def test_a_clean_end_is_none() -> None:
    clock = Clock()
    clock.train(3)
    for left in range(1, 5):  # one after the other, as they do
        ranks = [status(r, record=record(r, phase="finish", done=True)) for r in range(4)]
        for r in range(left):
            ranks[r] = status(r, state="", exit_code=0, record=record(r, done=True))
        assert clock.poll(ranks, 2.0) is None and not clock.detector.is_deciding


def test_the_earliest_exception_in_user_code_is_the_cause() -> None:
    clock = Clock()
    ranks = [
        RankStatus(
            rank=0, exit_code=1, record=record(0, at=collective(7)), error=error("E", RESET, 99.1)
        ),
        RankStatus(rank=1, exit_code=1, record=record(1), error=error("KeyError", "'x'", 99.9)),
        RankStatus(rank=2, exit_code=1, record=record(2), error=error("ValueError", "bad", 99.5)),
    ]
    verdict = clock.poll(ranks, 1.0)
    assert verdict is not None and (verdict.kind, verdict.rank) == ("exception", 2)
    assert "ValueError: bad" in verdict.message


def test_an_exception_of_all_ranks_names_the_rank_at_fault() -> None:
    facts = {"rank": 2, "layer": 1}
    errors = [replace(error("E", "x", 99.0 + rank), facts=facts) for rank in range(4)]
    ranks = [
        RankStatus(rank=rank, exit_code=1, record=record(rank), error=one)
        for rank, one in enumerate(errors)
    ]
    verdict = Clock().poll(ranks, 1.0)
    assert verdict is not None and verdict.rank == 2
    assert verdict.message == "rank 2 failed with exit code 1: E: x"


def test_a_rank_that_never_joined_is_found_at_once() -> None:
    clock = Clock()
    at = collective(1, op="rendezvous")
    ranks = [status(r, record=record(r, step=0, phase="setup", at=at)) for r in range(4)]
    ranks[3] = RankStatus(rank=3, exit_code=1)
    verdict = clock.poll(ranks, 1.0)
    assert verdict is not None and (verdict.kind, verdict.rank) == ("exited", 3)


def test_a_timeout_of_the_peers_is_the_fault_of_the_rank_that_did_not_come() -> None:
    clock = Clock()
    clock.now = 200.0
    ranks = [
        RankStatus(
            rank=r,
            exit_code=1,
            record=record(r, at=collective(7)),
            error=error("E", "Timed out", 200.0),
        )
        for r in range(3)
    ]
    ranks.append(status(3, state="R", record=record(3, moved=100.0)))
    verdict = clock.poll(ranks, 4.0)
    assert verdict is not None and (verdict.kind, verdict.rank) == ("busy", 3)
    assert "never entered all_reduce #7 of dp" in verdict.message


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


def test_peers_that_all_fail_in_the_network_lost_contact() -> None:
    clock = Clock()
    ranks = [
        RankStatus(
            rank=r, exit_code=1, record=record(r, at=collective(7)), error=error("E", RESET, 99.0)
        )
        for r in range(2)
    ]
    verdict = clock.poll(ranks, 4.0)
    assert verdict is not None and verdict.kind == "lost-contact"


def test_a_stopped_rank() -> None:
    clock = Clock()
    clock.train(5)
    ranks = [waiting(r) for r in range(4)]
    ranks[1] = status(1, state="T")
    verdict = clock.poll(ranks, 5.0)
    assert verdict is not None and (verdict.kind, verdict.rank) == ("stopped", 1)
    assert (
        verdict.collective is not None and verdict.entered == (0, 2, 3) and verdict.missing == (1,)
    )


def test_a_job_that_was_suspended_whole_is_left_alone() -> None:
    clock = Clock()
    clock.train(5)
    assert clock.poll([status(r, state="T") for r in range(4)], 600.0) is None


def test_a_supervisor_that_slept_has_seen_nothing() -> None:
    clock = Clock()
    clock.train(5)
    ranks = [waiting(r) for r in range(4)]
    assert clock.poll(ranks) is None
    clock.now += 3600.0
    assert clock.detector.poll(clock.now, ranks) is None


@pytest.mark.parametrize(("state", "kind"), [("R", "busy"), ("S", "hung")])
def test_who_did_not_enter_is_named_with_those_who_did(state: str, kind: str) -> None:
    clock = Clock()
    clock.train(20)
    start = clock.now
    for n in range(1000):
        ranks = [waiting(r) for r in range(4)]
        ranks[2] = status(2, state=state, cpu_seconds=0.03 * n)
        if (verdict := clock.poll(ranks, 0.03)) is not None:
            break
    else:
        raise AssertionError("no verdict")
    assert (verdict.kind, verdict.rank, verdict.entered, verdict.missing) == (
        kind,
        2,
        (0, 1, 3),
        (2,),
    )
    assert "never entered all_reduce #7 of dp (gradients), in which ranks 0, 1 and 3 wait" in (
        verdict.message
    )
    assert clock.now - start == pytest.approx(3.0, abs=0.3)


def test_a_rank_that_gets_no_core_is_not_busy() -> None:
    """The machine is loaded: the rank is ready to run, and gets no CPU time."""
    clock = Clock()
    clock.train(20)
    ranks = [waiting(r) for r in range(4)]
    ranks[2] = status(2, state="R", cpu_seconds=5.0)
    assert clock.poll(ranks, 300.0) is None
    ranks[2] = status(2, state="D", cpu_seconds=5.0)
    assert clock.poll(ranks, 300.0) is None


def test_steps_have_the_time_that_they_took_before() -> None:
    clock = Clock()
    clock.train(20, seconds=2.0)
    ranks = [waiting(r) for r in range(4)]
    ranks[0] = status(0)
    start = clock.now
    assert clock.poll(ranks, 60.0) is not None
    assert clock.now - start == pytest.approx(20.0, abs=0.5)


@pytest.mark.parametrize("phase", ["setup", "data", "validate", "save", "finish"])
def test_other_phases_have_the_patience_of_the_run(phase: str) -> None:
    clock = Clock(patience=30.0)
    clock.train(20)
    ranks = [waiting(r, phase=phase) for r in range(4)]
    ranks[1] = status(1, record=record(1, phase=phase))
    start = clock.now
    verdict = clock.poll(ranks, 100.0)
    assert verdict is not None and verdict.rank == 1
    assert clock.now - start == pytest.approx(30.0, abs=0.5)


def test_the_first_steps_have_the_patience_of_the_run() -> None:
    clock = Clock(patience=30.0)
    clock.train(2)
    ranks = [waiting(r, step=2) for r in range(4)]
    ranks[1] = status(1, record=record(1, step=2))
    start = clock.now
    assert clock.poll(ranks, 100.0) is not None
    assert clock.now - start == pytest.approx(30.0, abs=0.5)


def test_a_rank_that_is_gone_is_blamed_before_those_that_lost_it() -> None:
    """Its parent has its exit code, and it was inside of an operation, too."""
    ranks = lost_contact()
    ranks[2] = replace(waiting(2), exit_code=GONE)
    verdict = Clock().poll(ranks, 1.0)
    assert verdict is not None and verdict.rank == 2


def test_a_rank_that_does_not_start() -> None:
    clock = Clock(patience=30.0)
    ranks = [status(0, record=record(0, step=0, phase="setup")), RankStatus(rank=1, state="S")]
    verdict = clock.poll(ranks, 100.0)
    assert verdict is not None and (verdict.kind, verdict.rank) == ("hung", 1)
    assert "did not start" in verdict.message


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


def test_a_watchdog_that_aborts_the_peers_is_the_fault_of_the_rank_that_did_not_come() -> None:
    """Hosts of ranks with NCCL are anywhere when their watchdogs abort them."""
    ranks = [
        status(r, state="", exit_code=-6, record=record(r, counts={GROUP: 7})) for r in range(3)
    ]
    ranks[0] = status(0, state="", exit_code=-6, record=record(0, at=collective(7), on_device=True))
    ranks.append(status(3, state="R", record=record(3, moved=100.0)))
    for follows, rank in ((True, 3), (False, 1)):
        clock = Clock()
        clock.now, clock.detector.limits = 200.0, Limits(patience=600.0, aborts_follow=follows)
        verdict = clock.poll(ranks, 4.0)
        assert verdict is not None and verdict.rank == rank


def test_ranks_that_wait_for_their_devices() -> None:
    ranks = [
        status(r, state="R", record=record(r, at=collective(7), on_device=True), cpu_seconds=0.0)
        for r in range(3)
    ]
    late = status(3, record=record(3))
    clock = Clock(patience=5.0)
    verdict = clock.poll([*(replace(one, state="S") for one in ranks), late], 10.0)
    assert verdict is not None and (verdict.kind, verdict.rank) == ("hung", 3)
    assert (
        "never entered all_reduce #7 of dp (gradients), in which ranks 0, 1 and 2"
        in verdict.message
    )
    clock = Clock(patience=5.0)
    at = collective(7, "0-2")
    together = [status(r, record=record(r, at=at, on_device=True)) for r in range(3)]
    verdict = clock.poll(together, 10.0)
    assert verdict is not None and verdict.kind == "hung"
    assert "s for its device, behind all_reduce #7 of dp (gradients)" in verdict.message
    alone = record(0, inside=True, on_device=True, counts={})
    assert (
        Clock(patience=5.0).poll([status(0, record=alone)], 10.0).message.endswith("for its device")
    )
    assert alone.place() == "step 5, microbatch 0, layer 1, waiting for its device"


def test_an_error_of_the_own_device_is_a_cause() -> None:
    failed = error("AcceleratorError", "CUDA error: an illegal memory access", 99.0)
    at = collective(7)
    ranks = [
        RankStatus(rank=0, exit_code=1, record=record(0, at=at), error=error("E", RESET, 98.0)),
        RankStatus(rank=1, exit_code=1, record=record(1, at=at, on_device=True), error=failed),
    ]
    verdict = Clock().poll(ranks, 4.0)
    assert verdict is not None and verdict.rank == 1


def test_a_rank_that_has_said_goodbye_has_left_after_a_while() -> None:
    word_ = record(0, done=True, code=130, moved=1000.0)
    blocked = status(0, record=word_)
    assert blocked.code == 130 and not blocked.has_left(1000.0 + END_SECONDS)
    assert blocked.has_left(1001.0 + END_SECONDS)
    assert not status(0, record=record(0, moved=0.0)).has_left(1e6)
    gone = status(0, exit_code=3, record=word_)
    assert gone.code == 3 and gone.has_left(1000.0)


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


def test_a_rank_that_waits_for_another_node_is_not_at_fault() -> None:
    """The watcher of ranks 0 and 1 of four gives no verdict on 2 and 3, which another watches."""
    clock = Clock(patience=30.0)
    clock.train(20, ranks=2)
    assert clock.poll([waiting(0), waiting(1)], 100.0) is None
    verdict = clock.poll([waiting(0), status(1)], 100.0)
    assert verdict is not None and verdict.rank == 1


def test_a_device_may_stand_behind_an_operation_with_another_node() -> None:
    """The last operation is one of this node alone; the sum over both was begun before it."""
    at = collective(7, "0-1")
    counts = {"0-1": 7, GROUP: 5}
    ranks = [status(r, record=record(r, at=at, on_device=True, counts=counts)) for r in range(2)]
    assert Clock(patience=5.0).poll(ranks, 100.0) is None
    alone = [status(r, record=record(r, at=at, on_device=True)) for r in range(2)]
    assert Clock(patience=5.0).poll(alone, 100.0) is not None


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


def test_a_device_waits_for_a_host_that_does_not_answer() -> None:
    clock = Clock()
    clock.detector.lost = (LostHost(name="b", ranks=(2, 3)),)
    on_device = {"on_device": True, "counts": {"0-1": 9, "1,2": 3}}
    assert (
        clock.poll([status(0, record=record(0, **on_device | {"counts": {"0-1": 9}}))], 9.0) is None
    )
    verdict = clock.poll([status(0, record=record(0, **on_device))], 9.0)
    assert verdict is not None and (verdict.kind, verdict.missing) == ("network-cut", (2,))


def test_ranks_that_failed_in_the_network_because_a_host_does_not_answer() -> None:
    clock = Clock()
    clock.detector.lost = (LostHost(name="b", ranks=(2, 3)),)
    failed = {"error": error("E", "Timed out waiting", 99.0), "exit_code": 1}
    verdict = clock.poll(
        [status(r, record=record(r, at=collective(7)), **failed) for r in (0, 1)], 3.0
    )
    assert verdict is not None and (verdict.kind, verdict.missing) == ("network-cut", (2, 3))
