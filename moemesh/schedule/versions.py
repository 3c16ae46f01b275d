"""Weight versions that the operations of an asynchronous schedule use.

Version 0 is the initial weights; every update of a stage makes its next version. Rules, for
microbatch k on stage s of S (PipeDream, arXiv:1806.03377; PipeDream-2BW, arXiv:2006.09503; AMPNet,
arXiv:1705.09786):

=============  ==================================  ==============  =======================  ========
rule           forward uses                        backward uses   update                   copies
=============  ==================================  ==============  =======================  ========
stash          newest, declared max(0, k-(S-1-s))  its forward's   after every backward     S - s
two_versions   max(k // window - 1, 0)             its forward's   every window backwards   2
newest         newest                              newest          every window backwards   1
=============  ==================================  ==============  =======================  ========

Under ``newest`` at most K microbatches are in flight and updates lag by at most
ceil((K - 1) / window).
"""

from __future__ import annotations

from typing import NamedTuple

from moemesh.schedule.action import Op, Schedule, UpdateRule


class StageVersions(NamedTuple):
    """Weights of one stage of one pipe: the version of each ``F``, ``B`` and ``I``, the largest
    number of updates between a microbatch's forward and the use of its gradient, the most copies
    alive at once, and how many updates were made."""

    used: dict[Op, int]
    lag: int
    copies: int
    updates: int


class ScheduleFault(NamedTuple):
    """One fault; `rank`, `entry` (index in the rank's list) and `op` where it has a place."""

    message: str
    rank: int | None = None
    entry: int | None = None
    op: Op | None = None

    def __str__(self) -> str:
        parts = (("rank ", self.rank), ("entry ", self.entry), ("", self.op))
        place = ", ".join(f"{word}{value}" for word, value in parts if value is not None)
        return f"{place}: {self.message}" if place else self.message


def versions(
    schedule: Schedule,
) -> tuple[dict[tuple[int, int], StageVersions], list[ScheduleFault]]:
    """(pipe, stage) -> versions used there, and every breach of the rule. Raises ValueError for a
    synchronous schedule: it has one version. Expects a schedule that is complete and in order."""
    if schedule.update is None:
        raise ValueError(f"{schedule.name} is synchronous: all operations use one version")
    stages: dict[tuple[int, int], _Stage] = {}
    breaches: list[ScheduleFault] = []
    for rank in range(schedule.num_ranks):
        for pipe, stage in schedule.stages_of(rank):
            stages[pipe, stage] = _Stage(schedule, schedule.update, pipe, stage)
        for index, entry in enumerate(schedule.orders[rank]):
            for op in entry:
                problem = stages[op.pipe, op.stage].run(op)
                if problem:
                    breaches.append(ScheduleFault(problem, rank, index, op))
    versions_ = {
        place: StageVersions(stage.used, stage.lag, stage.copies, stage.newest)
        for place, stage in stages.items()
    }
    return versions_, breaches


class _Stage:
    """Weight versions of one stage, updated with each of its operations in order."""

    def __init__(self, schedule: Schedule, rule: UpdateRule, pipe: int, stage: int) -> None:
        self.kind, self.window = rule.kind, 1 if rule.kind == "stash" else rule.window
        self.distance = schedule.num_stages - 1 - stage
        others = in_flight(schedule, pipe) - 1
        self.allowed_copies, self.allowed_lag = {
            "stash": (self.distance + 1, self.distance),
            "two_versions": (2, 1),
            "newest": (1, -(-others // rule.window)),
        }[rule.kind]
        self.gradients_per_update = self.window * schedule.num_slices
        self.newest = self.gradients = self.lag = 0
        self.copies = 1
        self.stored = {0}
        #: (microbatch, slice) -> version, from the forward until the gradient is complete.
        self.held: dict[tuple[int, int], int] = {}
        self.used: dict[Op, int] = {}

    def run(self, op: Op) -> str:
        """Record the version that `op` uses and any update; returns what breaks the rule, or ""."""
        key, problem = (op.microbatch, op.slice), ""
        if op.kind == "F":
            version = self.newest
            if self.kind == "stash":
                declared = max(0, op.microbatch - self.distance)
                if version != declared:
                    problem = f"uses version {version}, the rule declares {declared}"
            elif self.kind == "two_versions":
                version = max(op.microbatch // self.window - 1, 0)
                if version not in self.stored:
                    stored = ", ".join(map(str, sorted(self.stored)))
                    problem = f"needs version {version} of the weights, there are {stored}"
            self.used[op] = self.held[key] = version
        if op.kind in ("B", "I"):
            forward = self.held.get(key, self.newest)
            self.used[op] = self.newest if self.kind == "newest" else forward
        if op.kind not in ("B", "W"):
            return problem
        # The gradient is complete: it counts, and may update.
        lag = self.newest - self.held.pop(key, self.newest)
        self.lag = max(self.lag, lag)
        if lag > self.allowed_lag:
            problem = f"comes {lag} updates after its forward, the rule allows {self.allowed_lag}"
        self.gradients += 1
        if self.gradients % self.gradients_per_update == 0:
            self.newest += 1
            needed = {self.newest}
            if self.kind == "two_versions":
                needed.add(self.newest - 1)  # for microbatches of this window yet to come
            if self.kind != "newest":
                needed.update(self.held.values())
            self.stored = (self.stored | {self.newest}) & needed
            self.copies = max(self.copies, len(self.stored))
            if len(self.stored) > self.allowed_copies:
                problem = problem or (
                    f"leaves {len(self.stored)} copies of the weights in use, the rule allows "
                    f"{self.allowed_copies}"
                )
        return problem


def in_flight(schedule: Schedule, pipe: int = 0) -> int:
    """The most microbatches of a pipe between their first forward and their last backward. Counted
    on the rank of stage 0, where both happen."""
    now = most = 0
    for op in schedule.ops(schedule.placement[pipe][0]):
        if op.pipe == pipe and op.stage == 0:
            if op.kind == "F" and op.slice == 0:
                now += 1
                most = max(most, now)
            elif op.kind in ("B", "I") and op.slice == 0:
                now -= 1
    return most
