"""Ranks as a supervisor sees them, and a judge who looks at them with a clock of the test."""

from __future__ import annotations

from typing import Any

from moemesh.monitor.detector import FailureDetector, Limits, RankStatus, ReportedError, Verdict
from moemesh.monitor.progress import Collective, ProgressRecord, members_of

GROUP = "0-3"


def collective(number: int, group: str = GROUP, op: str = "all_reduce") -> Collective:
    members = members_of(group)
    return Collective(
        op=op,
        axis="dp",
        group=group,
        members=members,
        number=number,
        caller="gradients",
        num_bytes=8,
    )


def record(
    rank: int, *, step: int = 5, phase: str = "step", at: Any = None, **more: Any
) -> ProgressRecord:
    """A record of a rank in user code, or `at` a collective, which sets the default of `counts`."""
    counts = more.pop("counts", {at.group: at.number} if at is not None else {GROUP: 6})
    values: dict[str, Any] = {
        "rank": rank,
        "changes": 100,
        "pid": 1000 + rank,
        "step": step,
        "phase": phase,
        "microbatch": 0,
        "layer": 1,
        "stage": 0,
        "number": 50,
        "inside": at is not None,
        "done": False,
        "failed": False,
        "code": 0,
        "collective": at,
        "moved": 0.0,
        "waited": 0.0,
        "worked": 0.0,
        "counts": counts,
    }
    return ProgressRecord(**values | more)


def status(rank: int, state: str = "S", **more: Any) -> RankStatus:
    return RankStatus(rank=rank, state=state, **{"record": record(rank), **more})


class Clock:
    """A clock of a detector, which polls every 0.03 s."""

    def __init__(self, patience: float = 600.0) -> None:
        self.detector, self.now = FailureDetector(Limits(patience=patience)), 100.0
        self.changes = 100

    def poll(self, ranks: list[RankStatus], seconds: float = 0.03) -> Verdict | None:
        """Look for `seconds`; the verdict if one comes."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.03
            if (verdict := self.detector.poll(self.now, ranks)) is not None:
                return verdict
        return None

    def train(self, steps: int, seconds: float = 0.1, ranks: int = 4) -> None:
        """Steps that go well."""
        for step in range(1, steps + 1):
            for _ in range(4):
                self.changes += 1
                self.now += seconds / 4
                moving = [
                    status(r, record=record(r, step=step, changes=self.changes))
                    for r in range(ranks)
                ]
                assert self.detector.poll(self.now, moving) is None


def waiting(rank: int, number: int = 7, **more: Any) -> RankStatus:
    return status(rank, record=record(rank, at=collective(number), **more))


def error(kind: str, message: str, at: float, **more: Any) -> ReportedError:
    return ReportedError(kind=kind, message=message, at=at, **more)


RESET = "Connection reset by peer"
