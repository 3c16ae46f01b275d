"""Ranks that call different operations as the same number of a group: from words, and for real."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moemesh.monitor import progress
from moemesh.monitor.culprit import mismatch
from moemesh.monitor.detector import RankStatus
from moemesh.monitor.progress import RANK_BYTES, Collective, ProgressRecord, read_record
from moemesh.monitor.supervisor import SupervisorResult
from moemesh.train.records.failure import write_verdict
from tests.monitor.statuses import RESET, Clock, collective, error, record, status


def call(op: str = "all_reduce", num_bytes: int = 8, number: int = 7, group: str = "0-3"):
    return replace(collective(number, group, op), num_bytes=num_bytes)


def records(*calls: Collective, inside: bool = True) -> list[ProgressRecord]:
    """Records of ranks 0, 1, ..., each in one of `calls`."""
    return [record(rank, at=one, inside=inside) for rank, one in enumerate(calls)]


def ranks_of(at_hang: list[ProgressRecord]) -> list[tuple[int, ...]]:
    return [party.ranks for party in mismatch(at_hang)]


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_another_size_is_a_mismatch_where_bytes_are_of_the_whole(op: str) -> None:
    ranks = records(call(op), call(op), call(op, 16), call(op))
    assert ranks_of(ranks) == [(0, 1, 3), (2,)]
    assert ranks_of(records(*[call(op)] * 4)) == []


@pytest.mark.parametrize("op", ["all_to_all", "send_receive"])
def test_other_sizes_are_none_where_every_rank_has_its_own(op: str) -> None:
    assert ranks_of(records(call(op), call(op, 0), call(op, 16), call(op, 99))) == []


def test_another_operation_is_a_mismatch_whether_the_rank_still_waits_or_not() -> None:
    calls = [call("all_to_all", 5), call("barrier", 0), call("all_to_all", 7)]
    for inside in (True, False):
        assert ranks_of(records(*calls, inside=inside)) == [(0, 2), (1,)]


def test_of_two_halves_the_one_of_the_lowest_rank_counts_as_right() -> None:
    assert ranks_of(records(call("all_reduce"), call("barrier"))) == [(0,), (1,)]
    ranks = records(call(num_bytes=1), call(num_bytes=2), call(num_bytes=2), call(num_bytes=4))
    assert ranks_of(ranks) == [(1, 2), (0,), (3,)]


def test_other_numbers_other_groups_and_messages_are_not_compared() -> None:
    assert ranks_of(records(call(number=7), call("barrier", number=8))) == []
    assert ranks_of(records(call(group="0-3"), call("barrier", group="0-1"))) == []
    assert ranks_of(records(call("send_receive", group="0>1"), call("barrier", group="0>1"))) == []
    cut = ",".join(map(str, range(0, 400, 7)))[:55]  # may be the text of two groups
    assert ranks_of(records(call(group=cut), call("barrier", group=cut))) == []
    assert ranks_of(records(call(group=""), call("barrier", group=""))) == []
    assert mismatch([record(0), record(1)]) == ()


def test_a_rank_that_got_past_it_is_still_told() -> None:
    """A rank that receives less in an all_gather continues, and loses contact in the next one."""
    right, short = call("all_gather", 64), call("all_gather", 32)
    ranks = [record(rank, at=right) for rank in (0, 1, 2)]
    ranks.append(replace(record(3, at=call("barrier", 0, 8)), before=short))
    assert ranks_of(ranks) == [(0, 1, 2), (3,)]
    # others that continued as well: the first difference counts, whatever differs after it
    ranks[:2] = [replace(record(r, at=call("all_reduce", 8, 8)), before=right) for r in (0, 1)]
    (most, least) = mismatch(ranks)
    assert (most.ranks, least.ranks, least.collective) == ((0, 1, 2), (3,), short)
    assert ranks_of([replace(one, before=call(number=6)) for one in records(*[call()] * 4)]) == []


def test_a_record_shows_the_operation_before() -> None:
    memory = bytearray(RANK_BYTES)
    progress.attach_memory(memory, 0)

    def shown() -> list[tuple[str, int, int] | None]:
        entry = read_record(memory, 0)
        assert entry is not None
        both = (entry.before, entry.collective)
        return [one and (one.op, one.number, one.num_bytes) for one in both]

    try:
        assert shown() == [None, None]
        for number, op in enumerate(("barrier", "all_gather", "broadcast"), start=1):
            ticket = progress.entered(op, "dp", "test", (0, 1), 8 * number)
            assert ticket is not None and shown()[1] != (op, number, 8 * number)
            for _ in range(2):  # a wait in two parts is one operation
                progress.waiting(ticket)
                progress.left()
        assert shown() == [("all_gather", 2, 16), ("broadcast", 3, 24)]
        progress.entered("all_reduce", "tp", "test", (0, 2), 4)
        progress.failed()
        assert shown() == [("broadcast", 3, 24), ("all_reduce", 1, 4)]
        entry = read_record(memory, 0)
        assert entry is not None and entry.failed and not entry.inside
    finally:
        progress.detach()


MESSAGE = (
    "rank 2 called all_gather of 64 bytes (gradients) as #7 of dp, "
    "where ranks 0, 1 and 3 called all_reduce of 8 bytes (gradients)"
)
CALLS = [call(), call(), call("all_gather", 64), call()]


def lost_contact() -> list[RankStatus]:
    """Ranks that failed in the network, one after the other, each in its call."""
    return [
        RankStatus(
            rank=r, exit_code=1, record=record(r, at=at), error=error("E", RESET, 99.0 + r / 10)
        )
        for r, at in enumerate(CALLS)
    ]


def test_errors_of_the_network_are_the_fault_of_the_rank_that_called_something_else() -> None:
    """gloo ends ranks that get too many bytes by SIGABRT, and others lose contact with them."""
    clock = Clock()
    ranks = lost_contact()
    ranks[0] = RankStatus(rank=0, exit_code=-6, record=record(0, at=CALLS[0]))
    verdict = clock.poll(ranks, 1.0)
    assert verdict is not None and (verdict.kind, verdict.rank) == ("mismatch", 2)
    assert verdict.message == MESSAGE and clock.now < 100.5
    assert (verdict.entered, verdict.missing, verdict.exit_code) == ((0, 1, 3), (2,), 1)


@pytest.mark.parametrize("message", ["[gloo/pair.cc:537] Read error: " + RESET, RESET])
def test_an_operation_that_could_not_be_started_counts_as_the_one_the_rank_is_in(
    message: str,
) -> None:
    """The same words may be an error of the user's own network, outside of operations."""
    ranks = [
        status(
            r, exit_code=1, record=record(r, at=at, inside=False), error=error("E", message, 99.0)
        )
        for r, at in enumerate(CALLS)
    ]
    verdict = Clock().poll(ranks, 1.0)
    assert verdict is not None
    assert verdict.kind == ("mismatch" if "gloo" in message else "exception")


def test_a_hang_is_the_fault_of_the_rank_that_called_something_else() -> None:
    clock = Clock()
    clock.train(20)
    verdict = clock.poll([status(r, record=record(r, at=at)) for r, at in enumerate(CALLS)], 10.0)
    assert verdict is not None and (verdict.kind, verdict.rank) == ("mismatch", 2)
    assert verdict.message == MESSAGE


def test_surer_signs_come_first() -> None:
    ranks = lost_contact()
    ranks[1] = status(1, exit_code=-9, record=record(1, at=CALLS[1]))
    verdict = Clock().poll(ranks, 4.0)
    assert verdict is not None and (verdict.kind, verdict.rank) == ("killed", 1)
    ranks[1] = RankStatus(rank=1, exit_code=1, record=record(1), error=error("KeyError", "x", 99.5))
    verdict = Clock().poll(ranks, 4.0)
    assert verdict is not None and (verdict.kind, verdict.rank) == ("exception", 1)


def test_ranks_that_move_are_left_alone() -> None:
    """The records of ranks that move do not matter: a mismatch explains only failures and hangs."""
    clock = Clock()
    for changes in range(2000):
        ranks = [status(r, record=record(r, at=at, changes=changes)) for r, at in enumerate(CALLS)]
        assert clock.poll(ranks, 0.03) is None


def test_the_report_has_all_calls(tmp_path: Path) -> None:
    ranks = lost_contact()
    verdict = Clock().poll(ranks, 1.0)
    ended = SupervisorResult(code=1, verdict=verdict, stacks={}, traces={})
    write_verdict(tmp_path, ended, epoch=1, action="ended the run", advice="")
    report = json.loads((tmp_path / "failure.json").read_text())
    assert (report["kind"], report["rank"], report["message"]) == ("Mismatch", 2, MESSAGE)
    assert report["collective"]["operation"] == "all_reduce"
    assert report["collective"]["missing"] == [2]
    assert report["calls"] == [
        {"operation": "all_reduce", "bytes": 8, "caller": "gradients", "ranks": [0, 1, 3]},
        {"operation": "all_gather", "bytes": 64, "caller": "gradients", "ranks": [2]},
    ]
