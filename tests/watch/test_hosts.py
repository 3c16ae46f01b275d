"""Verdicts of one node on ranks that wait for those of other hosts, with a clock of the test."""

from __future__ import annotations

from moemesh.watch.verdict import Limits, LostHost
from tests.watch.looks import GROUP, Clock, collective, seen, told, waiting, word


def test_a_rank_that_waits_for_another_node_is_not_at_fault() -> None:
    """Ranks 0 and 1 of four are seen here; 2 or 3 has not come, and the watcher there says so."""
    clock = Clock(patience=30.0)
    clock.train(20, ranks=2)
    assert clock.look([waiting(0), waiting(1)], 100.0) is None
    found = clock.look([waiting(0), seen(1)], 100.0)
    assert found is not None and found.rank == 1


def test_a_device_may_stand_behind_an_operation_with_another_node() -> None:
    """The last operation is one of this node alone; the sum over both was begun before it."""
    at = collective(7, "0-1")
    counts = {"0-1": 7, GROUP: 5}
    ranks = [seen(r, word=word(r, at=at, on_device=True, counts=counts)) for r in range(2)]
    assert Clock(patience=5.0).look(ranks, 100.0) is None
    alone = [seen(r, word=word(r, at=at, on_device=True)) for r in range(2)]
    assert Clock(patience=5.0).look(alone, 100.0) is not None


def test_ranks_that_wait_for_a_host_that_does_not_answer() -> None:
    """None while they move, while they wait for one another, and once it answers again."""
    here = [seen(r, word=word(r, at=collective(7), changes=200)) for r in (0, 1)]
    host = LostHost(name="b (10.0.0.2)", ranks=(2, 3))
    clock = Clock()
    clock.judge.lost = (host,)
    clock.train(5, seconds=4.0, ranks=2)
    among = [seen(r, word=word(r, at=collective(7, "0-1"))) for r in (0, 1)]
    clock.judge.limits = Limits(patience=600.0, floor=100.0)
    assert clock.look(among, 30.0) is None
    assert clock.look(here, 2.5) is None
    clock.judge.lost = ()
    assert clock.look(here, 30.0) is None
    clock.judge.lost = (host,)
    found = clock.look(here, 0.1)
    assert found is not None and (found.kind, found.rank, found.exit_code) == ("network-cut", 0, 1)
    assert (found.entered, found.missing, found.lost) == ((0, 1), (2, 3), (host,))
    assert "b (10.0.0.2) with ranks 2 and 3 cannot be reached" in found.message
    assert "rank 0 waits for ranks 2 and 3 in all_reduce #7 of dp" in found.message


def test_a_device_waits_for_a_host_that_does_not_answer() -> None:
    clock = Clock()
    clock.judge.lost = (LostHost(name="b", ranks=(2, 3)),)
    on_device = {"on_device": True, "counts": {"0-1": 9, "1,2": 3}}
    assert clock.look([seen(0, word=word(0, **on_device | {"counts": {"0-1": 9}}))], 9.0) is None
    found = clock.look([seen(0, word=word(0, **on_device))], 9.0)
    assert found is not None and (found.kind, found.missing) == ("network-cut", (2,))


def test_ranks_that_failed_in_the_network_because_a_host_does_not_answer() -> None:
    clock = Clock()
    clock.judge.lost = (LostHost(name="b", ranks=(2, 3)),)
    failed = {"told": told("E", "Timed out waiting", 99.0), "exit_code": 1}
    found = clock.look([seen(r, word=word(r, at=collective(7)), **failed) for r in (0, 1)], 3.0)
    assert found is not None and (found.kind, found.missing) == ("network-cut", (2, 3))
