"""Verdicts on a run: the kind of a failure and the rank at fault, from snapshots of all ranks.

No process is started or inspected here. :class:`FailureDetector` takes one snapshot after another,
each with its time, and returns at most one verdict.

| sign | verdict |
|---|---|
| a rank ended, or reported an exception | that rank, or the one with the strongest sign |
| state T for a while, but not of all of several ranks | stopped |
| that rank's exception follows from a lost peer | lost-contact or network-cut |
| ranks failed inside of operations, or none moves, and their operations differ | mismatch |
| no rank's progress record changes within the limit of its phase | hung or busy |
| no rank moves, and some wait for ranks of a host that does not answer | network-cut |
"""

from __future__ import annotations

import signal
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from moemesh.monitor.culprit import Call, culprit_in, find_culprit, mismatch
from moemesh.monitor.progress import DATA, STEP, Collective, ProgressRecord, members_of

#: Seconds within which a rank that leaves as intended has to end.
END_SECONDS = 120.0
#: Stand-in for an unknown exit code: the process is gone, and only its parent could read the code.
GONE = 256
#: Parts of gloo's messages after the end of a peer.
_PEER_GONE = ("closed by peer", "reset by peer", "broken pipe")


@dataclass(frozen=True, kw_only=True)
class ReportedError:
    """An exception that a rank reported before it left. ``at``: monotonic seconds of this host.

    ``facts``: more keys for the report. ``is_final``: a restart would fail in the same way (a
    mistake of the user, a training that diverged).
    """

    kind: str
    message: str
    at: float
    trace: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_final: bool = False


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Snapshot of one rank. ``exit_code``: None while it lives, negative if a signal killed it.

    ``state``: the kernel's letter, "" if unknown or if the rank has moved since the last snapshot;
    ``cpu_seconds``: CPU time of all its threads, if the state is known. ``record``: None until the
    rank has written one.
    """

    rank: int
    exit_code: int | None = None
    state: str = ""
    cpu_seconds: float = 0.0
    record: ProgressRecord | None = None
    error: ReportedError | None = None

    @property
    def is_done(self) -> bool:
        """Whether the rank has left, or is leaving, as intended."""
        return self.record is not None and self.record.done

    def has_left(self, now: float) -> bool:
        """Whether the rank has ended, or announced its end more than END_SECONDS ago: NCCL may
        hang while it closes its communicators."""
        done = self.record if self.is_done else None
        return self.exit_code is not None or (done is not None and now - done.moved > END_SECONDS)

    @property
    def has_failed(self) -> bool:
        """Whether the rank shows a failure, its own or one that follows from another rank's."""
        return not self.is_done and (self.error is not None or self.exit_code is not None)

    @property
    def has_lost_a_peer(self) -> bool:
        """Whether the rank reported an error of gloo that follows from the end of a peer."""
        text = self.error.message.lower() if self.error is not None else ""
        return "gloo" in text and any(word in text for word in _PEER_GONE)

    @property
    def is_inside(self) -> bool:
        """Whether the rank waits, or waited when it failed, in an operation of several ranks."""
        return self.record is not None and self.record.inside


@dataclass(frozen=True, kw_only=True)
class LostHost:
    """Another host of the run: its `name` and `ranks`. Its kernel does not answer."""

    name: str
    ranks: tuple[int, ...]


def weakness(status: RankStatus, *, aborts_follow: bool = False) -> int:
    """Weakness of a rank's failure as a sign of the cause. 0: it is a cause; 1: a likely one; 2: it
    may follow from the end of another rank.

    `aborts_follow`: a watchdog of the backend aborts ranks whose peers do not come, on every host.
    """
    if status.exit_code is not None and status.exit_code < 0:
        follows = -status.exit_code == signal.SIGABRT and (status.is_inside or aborts_follow)
        return 2 if follows else 0
    if status.exit_code is not None and status.error is None:
        # A rank that loses a peer reports an exception before it exits.
        return 0 if status.exit_code == GONE else 1
    # An error of the device appears where the host waits for it.
    on_device = status.record is not None and status.record.on_device
    return 2 if status.has_lost_a_peer or (status.is_inside and not on_device) else 1


Kind = Literal[
    "killed",
    "exited",
    "exception",
    "stopped",
    "mismatch",
    "hung",
    "busy",
    "lost-contact",
    "network-cut",
]

#: Seconds during which signs are collected: peers of a dead rank fail milliseconds after it.
SETTLE_SECONDS = 0.15
#: Seconds in which a cause may still arrive if all errors so far follow from another rank's.
LATE_SECONDS = 1.5
#: Seconds within which a rank that reported an exception has to leave: seconds in which it could
#: run, and seconds in all.
LEAVE_SECONDS, MOST_LEAVE_SECONDS = 3.0, 20.0
#: Seconds in state T after which a rank counts as stopped.
STOPPED_SECONDS = 1.0
#: Seconds without progress after which ranks that wait for a silent host are cut off.
CUT_SECONDS = 3.0
#: Shortest limit of a step in seconds, however short other steps were: a verdict comes within 3 s.
FLOOR_SECONDS = 2.9
#: First steps of a process, in which code is compiled, files are read and memory grows.
FIRST_STEPS = 2
#: Most seconds between two snapshots that count as observed: a suspended supervisor sees nothing.
LONGEST_GAP = 0.5
#: Parts of messages of errors that follow from a peer that is gone.
_FOLLOW_UP = ("closed by peer", "reset by peer", "timed out", "timeout", "broken pipe")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds without progress after which a run hangs.

    The limit of a step is the largest of `floor`, ten times the median of the last steps and three
    times the longest, but at most `patience`; the limit of the first steps and of all other phases
    is `patience`.
    """

    patience: float
    floor: float = FLOOR_SECONDS
    #: See :func:`moemesh.monitor.detector.weakness`.
    aborts_follow: bool = False


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The failure of a run: its kind, the rank at fault and its position.

    ``entered`` and ``missing``: the ranks that wait in ``collective``, and those that have not
    entered it. ``waited``: seconds without progress. ``calls``: those of a mismatch, see
    :func:`moemesh.monitor.culprit.mismatch`. ``lost``: hosts that cannot be reached.
    """

    kind: Kind
    rank: int
    message: str
    status: RankStatus
    collective: Collective | None = None
    entered: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    waited: float = 0.0
    calls: tuple[Call, ...] = ()
    lost: tuple[LostHost, ...] = ()

    @property
    def exit_code(self) -> int:
        """The exit code of the run: the rank's own, 128 + signal if one killed it, else 1."""
        code = self.status.exit_code
        if code is None or code in (0, GONE):
            return 1
        return code if code > 0 else 128 - code


class FailureDetector:
    """Failure detector, fed with snapshots of all ranks; see the module."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        #: Signal that stops the run: ranks may end by it, at their own pace.
        self.stopping: int | None = None
        #: Other hosts of the run that cannot be reached now.
        self.lost: tuple[LostHost, ...] = ()
        self._time: float | None = None  # of the last snapshot
        #: Times of the first sign of a failure, of all ranks and by rank.
        self._first_sign: float | None = None
        self._first_signs: dict[int, float] = {}
        self._leaving = 0.0  # seconds in which the rank at fault could have left
        self._stopped: defaultdict[int, float] = defaultdict(float)  # seconds in state T, by rank
        self._still = 0.0  # seconds without any progress
        #: Counters of the records, and CPU seconds, in the last snapshot: by rank.
        self._changes: dict[int, int] = {}
        self._cpu: dict[int, float] = {}
        #: Seconds of the last steps, number of steps so far, the last one and its time.
        self._step_seconds: deque[float] = deque(maxlen=100)
        self._num_steps, self._step, self._step_at = 0, 0, 0.0

    @property
    def is_deciding(self) -> bool:
        """Whether a rank has failed and the verdict is pending."""
        return self._first_sign is not None

    def poll(self, now: float, statuses: Sequence[RankStatus]) -> Verdict | None:
        """The verdict on a snapshot at `now` (monotonic seconds); None while the run is healthy."""
        passed = 0.0 if self._time is None else min(now - self._time, LONGEST_GAP)
        self._time = now
        verdict = self._deaths(now, passed, statuses)
        if verdict is None and self._first_sign is None:
            verdict = self._stops(passed, statuses) or self._hangs(now, passed, statuses)
        self._cpu = {status.rank: status.cpu_seconds for status in statuses if status.state}
        return verdict

    # Ranks that ended.

    def _deaths(self, now: float, passed: float, statuses: Sequence[RankStatus]) -> Verdict | None:
        """The verdict on ranks that ended or reported an exception, once enough signs arrived;
        `passed`: seconds since the last snapshot."""
        # Exit codes of ranks that end after a stop signal.
        stop_codes: tuple[int, ...] = ()
        if self.stopping is not None:
            stop_codes = (-self.stopping, 128 + self.stopping, 130, 143)
        failed = [
            status
            for status in statuses
            if status.has_failed and status.exit_code not in stop_codes
        ]
        if not failed:
            return None
        for status in failed:
            self._first_signs.setdefault(status.rank, now)
        if self._first_sign is None:
            self._first_sign = now
        since = now - self._first_sign
        if since < SETTLE_SECONDS:
            return None
        # The likeliest cause: the strongest sign, then the earliest one.
        follow = self.limits.aborts_follow
        weak = {status.rank: weakness(status, aborts_follow=follow) for status in failed}
        times = self._first_signs | {
            status.rank: status.error.at for status in failed if status.error is not None
        }
        cause = min(failed, key=lambda status: (weak[status.rank], times[status.rank], status.rank))
        if cause.error is not None and "rank" in cause.error.facts:
            # All ranks raise the same error, and it names the rank at fault.
            named = cause.error.facts["rank"]
            cause = next((status for status in failed if status.rank == named), cause)
        if weak[cause.rank] >= 2:
            if (differing := _differing_calls(statuses)) is not None:
                return differing
            if since < LATE_SECONDS and not all(status.has_failed for status in statuses):
                return None
            if (silent := self._silent_cause(now, statuses)) is not None:
                return silent
        # Wait for its end: the exit code decides on the kind.
        self._leaving += passed * self._share(cause, passed)
        if cause.exit_code is None and self._leaving < LEAVE_SECONDS and since < MOST_LEAVE_SECONDS:
            return None
        error, code = cause.error, cause.exit_code
        if code is not None and code < 0:
            message = f"rank {cause.rank} was killed by {signal.Signals(-code).name}"
            return Verdict(kind="killed", rank=cause.rank, message=message, status=cause)
        if error is not None:
            kind: Kind = "exception"
            text = error.message.lower()
            follows = cause.is_inside and any(word in text for word in _FOLLOW_UP)
            if follows or cause.has_lost_a_peer:
                if (cut := _network_cut([cause], self.lost, 0.0)) is not None:
                    return cut
                kind = "lost-contact"
            shown = 1 if code in (None, 0, GONE) else code
            message = f"rank {cause.rank} failed with exit code {shown}: {error.kind}"
            message += f": {error.message}" if error.message else ""
            at = _collective(cause)
            return Verdict(kind=kind, rank=cause.rank, message=message, status=cause, collective=at)
        if code == GONE:
            message = f"rank {cause.rank} ended in the middle of the run, with an unknown exit code"
        elif code == 0:
            message = f"rank {cause.rank} left with exit code 0 before the run was over"
        else:
            message = f"rank {cause.rank} failed with exit code {code}"
        return Verdict(kind="exited", rank=cause.rank, message=message, status=cause)

    def _silent_cause(self, now: float, statuses: Sequence[RankStatus]) -> Verdict | None:
        """The verdict on a living rank that is stopped, or did not enter the operation in which the
        others failed; None without such a rank."""
        alive = [status for status in statuses if not status.has_failed and not status.is_done]
        for status in alive:
            if status.state == "T":
                return self._verdict("stopped", status, statuses, 0.0)
        culprit = find_culprit([status.record for status in statuses if status.record is not None])
        for status in alive:
            still = 0.0 if status.record is None else now - status.record.moved
            is_culprit = culprit is not None and culprit.rank == status.rank
            if is_culprit and still >= 2.0 and not status.is_inside:
                kind = "busy" if status.state == "R" else "hung"
                return self._verdict(kind, status, statuses, still)
        return None

    # Ranks that are alive.

    def _stops(self, passed: float, statuses: Sequence[RankStatus]) -> Verdict | None:
        """The verdict on a rank that is stopped while others run."""
        alive = [status for status in statuses if status.exit_code is None]
        stopped = [status for status in alive if status.state == "T"]
        for status in statuses:
            if status not in stopped:
                self._stopped.pop(status.rank, None)
        if len(stopped) == len(alive) and len(alive) > 1:
            return None  # a whole job is suspended on purpose
        for status in stopped:
            self._stopped[status.rank] += passed
            if self._stopped[status.rank] >= STOPPED_SECONDS:
                return self._verdict("stopped", status, statuses, self._stopped[status.rank])
        return None

    def _hangs(self, now: float, passed: float, statuses: Sequence[RankStatus]) -> Verdict | None:
        """The verdict on ranks of which none makes progress."""
        if self.stopping is not None:
            return None
        running = [status for status in statuses if not status.is_done]
        records = [status.record for status in running if status.record is not None]
        # Seconds without progress after which the run hangs, by the steps of the slowest rank.
        step = min((record.step for record in records), default=0)
        if step and step != self._step:
            if 0 < self._step < step:
                if self._num_steps:  # the first step may have begun long before
                    self._step_seconds.append((now - self._step_at) / (step - self._step))
                self._num_steps += step - self._step
            self._step, self._step_at = step, now
        limit, seconds = self.limits.patience, self._step_seconds
        in_steps = bool(records) and all(record.phase == STEP for record in records)
        if in_steps and seconds and self._num_steps >= FIRST_STEPS:
            by_steps = max(10 * statistics.median(seconds), 3 * max(seconds))
            limit = min(max(self.limits.floor, by_steps), limit)
        # Time without progress counts as far as every rank could have moved in it.
        changes = {record.rank: record.changes for record in records}
        counted = passed * min((self._share(status, passed) for status in running), default=0.0)
        self._still = self._still + counted if changes == self._changes else 0.0
        self._changes = changes
        lost = self.lost if self._still >= CUT_SECONDS else ()
        if (cut := _network_cut(running, lost, self._still)) is not None:
            return cut
        if not running or self._still < limit:
            return None
        if (differing := _differing_calls(running)) is not None:
            return differing
        unstarted = [status for status in running if status.record is None]
        culprit = None if unstarted else find_culprit(records)
        if culprit is None:
            first = unstarted[0]
            message = f"rank {first.rank} did not start within {self._still:.0f} s"
            return Verdict(kind="hung", rank=first.rank, message=message, status=first)
        at_fault = next(status for status in running if status.rank == culprit.rank)
        record = at_fault.record
        if record is not None and (record.inside or record.on_device):
            # It may wait for ranks of another node, whose watcher sees the rank at fault: then no
            # verdict. A device may wait for an operation of any group of its rank, a rank for any
            # operation that ranks of this node wait in.
            groups = set(record.counts) if record.on_device else set[str]()
            waited_for = [at for other in statuses if (at := _collective(other)) is not None]
            members = [members_of(group) for group in groups] + [at.members for at in waited_for]
            if any(not set(group) <= {other.rank for other in statuses} for group in members):
                return None
        kind: Kind = "busy" if at_fault.state == "R" and not at_fault.is_inside else "hung"
        return self._verdict(kind, at_fault, statuses, self._still)

    def _share(self, status: RankStatus, passed: float) -> float:
        """The share of the time since the last snapshot in which a rank could have moved: time in
        which it waited for the disk, or for a core of a busy machine, does not count."""
        if status.state in ("D", "T", "t"):
            return 0.0
        if status.state == "R" and passed:
            used = status.cpu_seconds - self._cpu.get(status.rank, status.cpu_seconds)
            return min(1.0, 2.0 * used / passed)
        return 1.0

    def _verdict(
        self, kind: Kind, status: RankStatus, statuses: Sequence[RankStatus], waited: float
    ) -> Verdict:
        """The verdict on a living rank that holds the others up for `waited` seconds."""
        records = [other.record for other in statuses if other.record is not None]
        culprit, record, name = find_culprit(records), status.record, f"rank {status.rank}"
        if kind == "stopped":
            message = f"{name} was stopped (SIGSTOP)"
            if culprit is None or culprit.rank != status.rank:
                # The operation of the first waiting rank, if this rank is one of its members.
                others = (other for other in statuses if other.rank != status.rank)
                at = next((at for other in others if (at := _collective(other))), None)
                by_rank = {record.rank: record for record in records}
                is_member = at is not None and status.rank in at.members
                culprit = culprit_in(status.rank, at, by_rank) if at and is_member else None
        elif record is not None and record.on_device:
            queue = f", behind {record.collective}" if record.collective is not None else ""
            message = f"{name} has waited for {waited:.0f} s for its device{queue}"
        elif record is not None and record.inside:
            message = f"{name} has waited for {waited:.0f} s in {record.collective}"
        else:
            is_reading = record is not None and record.phase == DATA
            state = "is busy" if status.state == "R" else "sleeps"
            where = "while it read data" if is_reading else "in user code"
            message = f"{name} {state} {where} for {waited:.0f} s without progress"
        if culprit is not None and culprit.entered and status.rank in culprit.missing:
            entered = _ranks(culprit.entered)
            message += (
                f": it never entered {culprit.collective}, in which {entered} "
                f"wait{'s' if len(culprit.entered) == 1 else ''}"
            )
        return Verdict(
            kind=kind,
            rank=status.rank,
            message=message,
            status=status,
            collective=culprit.collective if culprit else None,
            entered=culprit.entered if culprit else (),
            missing=culprit.missing if culprit else (),
            waited=waited,
        )


def _differing_calls(statuses: Sequence[RankStatus]) -> Verdict | None:
    """The verdict on ranks that called different operations; None if they agree."""
    calls = mismatch([status.record for status in statuses if status.record is not None])
    if not calls:
        return None
    most, *others, least = calls
    expected = " and ".join(f"{_ranks(call.ranks)} called {call}" for call in (most, *others))
    at = most.collective
    return Verdict(
        kind="mismatch",
        rank=least.ranks[0],
        message=(
            f"{_ranks(least.ranks)} called {least} as #{at.number} of {at.axis}, where {expected}"
        ),
        status=next(status for status in statuses if status.rank == least.ranks[0]),
        collective=at,
        entered=most.ranks,
        missing=tuple(rank for call in calls[1:] for rank in call.ranks),
        calls=calls,
    )


def _network_cut(
    statuses: Sequence[RankStatus], lost: tuple[LostHost, ...], waited: float
) -> Verdict | None:
    """The verdict if a rank waits for ranks of a host in `lost`, else None.

    A device may wait in an operation of any group.
    """
    for status in statuses if lost else ():
        record, at = status.record, _collective(status)
        members = set(at.members if at is not None else ())
        if record is not None and record.on_device:
            members.update(rank for group in record.counts for rank in members_of(group))
        missing = sorted(members & {rank for host in lost for rank in host.ranks})
        if not missing:
            continue
        hosts = " and ".join(f"{host.name} with {_ranks(host.ranks)}" for host in lost)
        text = f"host {hosts} cannot be reached: the network is cut, or the host is down"
        place = f" in {at}" if at is not None else ""
        return Verdict(
            kind="network-cut",
            rank=status.rank,
            message=f"{text}; rank {status.rank} waits for {_ranks(missing)}{place}",
            status=status,
            collective=at,
            entered=tuple(o.rank for o in statuses if at and o.record and o.record.entered(at)),
            missing=tuple(missing),
            waited=waited,
            lost=lost,
        )
    return None


def _collective(status: RankStatus) -> Collective | None:
    """The operation that the rank waits in."""
    return status.record.collective if status.record is not None and status.record.inside else None


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1 and 3``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:-1]))
    return f"ranks {shown} and {ranks[-1]}" if ranks else "no rank"
