"""Verdicts on a run: from what a supervisor sees of its ranks to what went wrong, and where.

No process is started or asked here: :class:`Judge` takes what was seen at one moment after the
other, with the time, and says at most once that the run has failed, and why.

| sign | verdict |
|---|---|
| a rank ended, or told of an exception | that rank, or the one with the strongest sign |
| state T for a while, but not of all ranks | stopped |
| ranks failed inside of operations, or none moves, and their operations differ | mismatch |
| no rank's progress word changes for longer than a phase may | hung or busy |
| none changes, and they wait for ranks of a host that does not answer | network-cut |
"""

from __future__ import annotations

import signal
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from moemesh.watch.progress_words import DATA, NAME_BYTES, STEP, Collective, Word, members_of

#: A rank that leaves as intended is gone within this, or is ended.
END_SECONDS = 120.0
#: In the place of an exit code: the process is gone, and only its parent knows how.
GONE = 256
_PEER_GONE = ("closed by peer", "reset by peer", "broken pipe")


@dataclass(frozen=True, kw_only=True)
class Told:
    """An exception that a rank told of before it left. ``at``: monotonic seconds of this host.

    ``facts``: more keys for the report. ``is_final``: the same would happen again (a mistake of the
    user, a training that diverged).
    """

    kind: str
    message: str
    at: float
    trace: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_final: bool = False


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One rank at one moment. ``exit_code`` None: alive; negative: killed by that signal.

    ``state``: the letter of the kernel, "" where it is not known or the rank has moved since the
    look before; ``cpu_seconds``: of all its threads, where the state is known. ``word`` None: it
    has not come as far as to write one.
    """

    rank: int
    exit_code: int | None = None
    state: str = ""
    cpu_seconds: float = 0.0
    word: Word | None = None
    told: Told | None = None

    @property
    def is_done(self) -> bool:
        """Whether it left, or is about to, as intended."""
        return self.word is not None and self.word.done

    def has_left(self, now: float) -> bool:
        """Whether it has ended, or has said so long ago that it will: NCCL may never come back from
        taking its communicators down."""
        if self.exit_code is not None:
            return True
        return self.is_done and self.word is not None and now - self.word.moved > END_SECONDS

    @property
    def code(self) -> int | None:
        """The exit code that it ended with, or has said it will end with."""
        if self.exit_code is None and self.is_done and self.word is not None:
            return self.word.code
        return self.exit_code

    @property
    def has_failed(self) -> bool:
        """Whether it is a sign of a failure, its own or another rank's."""
        if self.is_done:
            return False
        return self.told is not None or self.exit_code is not None

    @property
    def has_lost_a_peer(self) -> bool:
        """Whether it told of an error of gloo's that a peer's end brings, inside of an operation or
        where it started one."""
        text = self.told.message.lower() if self.told is not None else ""
        return "gloo" in text and any(word in text for word in _PEER_GONE)

    @property
    def is_inside(self) -> bool:
        """Whether it waits, or was waiting when it failed, in an operation of several ranks."""
        return self.word is not None and self.word.inside


@dataclass(frozen=True, kw_only=True)
class LostHost:
    """Another host of the run, `name` with `ranks`, whose kernel does not answer."""

    name: str
    ranks: tuple[int, ...]


def weakness(one: Seen, *, aborts_follow: bool = False) -> int:
    """0: surely a cause; 1: likely one; 2: may have followed from another rank's end.

    `aborts_follow`: a watchdog of the backend aborts ranks whose peers do not come, wherever their
    hosts are.
    """
    if one.exit_code is not None and one.exit_code < 0:
        if -one.exit_code != signal.SIGABRT:
            return 0
        return 2 if one.is_inside or aborts_follow else 0
    if one.exit_code is not None and one.told is None:
        # Whoever meets the end of another rank tells of an exception before it leaves.
        return 0 if one.exit_code == GONE else 1
    if one.has_lost_a_peer:
        return 2
    # An error of its own device comes up where the host waits for it.
    return 2 if one.is_inside and one.word is not None and not one.word.on_device else 1


class StepTimes:
    """Seconds of the newest 100 steps; ``num_seen`` counts all that have passed."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=100)
        self._step: int | None = None
        self._at = 0.0
        self.num_seen = 0
        self.longest = 0.0
        self.median: float | None = None

    def look(self, now: float, words: Sequence[Word]) -> None:
        """Take the step of the rank that is behind."""
        step = min((word.step for word in words), default=0)
        if not step or step == self._step:
            return
        if self._step is not None and step > self._step:
            if self.num_seen:  # the first one may have begun long before
                seconds = (now - self._at) / (step - self._step)
                self._times.append(seconds)
                self.longest = max(self._times)
                self.median = statistics.median(self._times)
            self.num_seen += step - self._step
        self._step, self._at = step, now


#: Operations whose bytes, as the ledger counts them, are those of the whole tensor: equal on all
#: ranks, whatever block each one holds. In an all_to_all every rank counts what it sends.
_OF_THE_WHOLE = frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast"})


@dataclass(frozen=True, kw_only=True)
class Call:
    """Ranks that called the same operation."""

    collective: Collective
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        one = self.collective
        return f"{one.op} of {one.num_bytes} bytes ({one.caller})"


def mismatch(words: Sequence[Word]) -> tuple[Call, ...]:
    """The different calls behind one number of a group, those of the most ranks first and those at
    fault last; of equally many ranks, those of the lowest rank first. Empty where all agree.

    Ranks of a group call its operations in the same order, so that those with the same number are
    one operation: everywhere by the same name, and with the same bytes where these are of the
    whole. Compared are the operations that ranks wait in, or have waited in last, and those before
    them: a rank that receives less than it expects may get past the operation, and fail in the next
    one. Of several numbers of a group the lowest counts: others may follow from it. Messages
    between two ranks are not compared: their tags let them be started in any order.
    """
    by_number: defaultdict[tuple[str, int], list[tuple[int, Collective]]] = defaultdict(list)
    for word in sorted(words, key=lambda word: word.rank):
        for one in (word.collective, word.before):
            # Two groups may share a name that was cut.
            if one is not None and 0 < len(one.group) < NAME_BYTES and ">" not in one.group:
                by_number[one.group, one.number].append((word.rank, one))
    found: dict[str, tuple[Call, ...]] = {}
    for (group, _), same in sorted(by_number.items()):
        alike: dict[tuple[str, int], Call] = {}
        for rank, one in same:
            key = one.op, one.num_bytes if one.op in _OF_THE_WHOLE else -1
            before = alike[key] if key in alike else Call(collective=one, ranks=())
            alike[key] = replace(before, ranks=(*before.ranks, rank))
        if len(alike) > 1:
            ordered = sorted(alike.values(), key=lambda call: (-len(call.ranks), call.ranks[0]))
            found.setdefault(group, tuple(ordered))
    return max(found.values(), key=lambda calls: sum(len(call.ranks) for call in calls), default=())


@dataclass(frozen=True, kw_only=True)
class Blame:
    """Who holds the others up in ``collective`` (None: nobody waits in one)."""

    rank: int
    collective: Collective | None
    entered: tuple[int, ...]
    missing: tuple[int, ...]


def blame(words: Sequence[Word]) -> Blame | None:
    """The rank that the others wait for, from the words of ranks of which none moves.

    From every rank that waits in an operation, on to a member of its group that has not entered it,
    until one that waits in nothing (it is in user code), or in an operation that all have entered.
    None where there are no words.
    """
    if not words:
        return None
    by_rank = {word.rank: word for word in words}
    found: Counter[int] = Counter()
    last: dict[int, Word] = {}
    for word in words:
        here, path = word, list[int]()
        while here.inside and here.collective is not None and here.rank not in path:
            path.append(here.rank)
            missing = _missing(here.collective, by_rank)
            if not missing:
                break
            last[missing[0]] = here
            here = by_rank[missing[0]]
        if word.inside:
            # A circle of ranks that wait for one another: the one that has come least far.
            circle = path[path.index(here.rank) :] if here.rank in path else [here.rank]
            found[min(circle, key=lambda rank: (by_rank[rank].number, rank))] += 1
    if not found:
        # Nobody waits visibly: the rank that has entered the fewest operations of a group.
        for word in words:
            for group, count in word.counts.items():
                behind = [w for w in words if group in w.counts and w.counts[group] < count]
                if behind and word.collective is not None and word.collective.group == group:
                    rank = min(behind, key=lambda w: (w.counts[group], w.rank)).rank
                    return _blame(rank, word.collective, by_rank)
        least = min(words, key=lambda word: (word.number, word.rank))
        return Blame(rank=least.rank, collective=None, entered=(), missing=())
    rank = min(found, key=lambda rank: (-found[rank], by_rank[rank].number, rank))
    if rank not in last:
        return Blame(rank=rank, collective=by_rank[rank].collective, entered=(), missing=())
    collective = last[rank].collective
    assert collective is not None
    return _blame(rank, collective, by_rank)


def _blame(rank: int, collective: Collective, by_rank: Mapping[int, Word]) -> Blame:
    missing = _missing(collective, by_rank)
    members = [member for member in collective.members if member in by_rank]
    entered = tuple(member for member in members if member not in missing)
    return Blame(rank=rank, collective=collective, entered=entered, missing=missing)


def _missing(collective: Collective, by_rank: Mapping[int, Word]) -> tuple[int, ...]:
    """Members that have not entered, those in user code first."""
    missing = [
        rank
        for rank in collective.members
        if rank in by_rank and not by_rank[rank].entered(collective)
    ]
    return tuple(sorted(missing, key=lambda rank: (by_rank[rank].inside, rank)))


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

#: Peers of a rank that died fail milliseconds later: signs are collected for so long.
SETTLE_SECONDS = 0.15
#: Where only follow-up errors were seen, their cause may still come.
LATE_SECONDS = 1.5
#: A rank that has told of an exception leaves within this, or is ended; where it gets no core for
#: it, within the latter.
LEAVE_SECONDS, MOST_LEAVE_SECONDS = 3.0, 20.0
#: A rank in state T for so long was stopped.
STOPPED_SECONDS = 1.0
#: Ranks that wait for a host that does not answer wait in vain after this.
CUT_SECONDS = 3.0
#: A step may take as long, however short the others were; the verdict is there within 3 s.
FLOOR_SECONDS = 2.9
#: One look counts as at most so much: a supervisor that did not run has seen nothing.
LONGEST_LOOK = 0.5
#: Words of errors that follow from a peer that is gone.
_FOLLOW_UP = ("closed by peer", "reset by peer", "timed out", "timeout", "broken pipe")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds without any progress that are a hang.

    A step may take `floor`, ten times the median of the steps so far, or three times the longest;
    the first steps and all other phases `patience`.
    """

    patience: float
    floor: float = FLOOR_SECONDS
    #: Steps of this process that are first ones.
    first_steps: int = 2
    #: See :func:`moemesh.watch.verdict.weakness`.
    aborts_follow: bool = False


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The failure of a run: its kind, the rank at fault and where it was.

    ``entered`` and ``missing``: the ranks that wait in ``collective``, and those that never came.
    ``waited``: seconds without progress. ``calls``: of a mismatch, see
    :func:`moemesh.watch.verdict.mismatch`. ``lost``: hosts that cannot be reached.
    """

    kind: Kind
    rank: int
    message: str
    seen: Seen
    collective: Collective | None = None
    entered: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    waited: float = 0.0
    calls: tuple[Call, ...] = ()
    lost: tuple[LostHost, ...] = ()

    @property
    def exit_code(self) -> int:
        """The exit code of the run: that of the rank, 128 + signal where one killed it, else 1."""
        code = self.seen.exit_code
        if code is None or code in (0, GONE):
            return 1
        return code if code > 0 else 128 - code


class Judge:
    """Looks at all ranks again and again; see the module."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        #: The signal by which the run was asked to stop: ranks may end by it, at their own pace.
        self.stopping: int | None = None
        #: Other hosts of the run that cannot be reached at the moment.
        self.lost: tuple[LostHost, ...] = ()
        self._time: float | None = None
        self._first_sign: float | None = None
        self._order: dict[int, float] = {}
        self._leaving = 0.0
        self._stopped: defaultdict[int, float] = defaultdict(float)
        self._still = 0.0
        self._changes: dict[int, int] = {}
        self._cpu: dict[int, float] = {}
        self._steps = StepTimes()

    @property
    def is_deciding(self) -> bool:
        """Whether a rank has failed, and the verdict is yet to come."""
        return self._first_sign is not None

    def look(self, now: float, seen: Sequence[Seen]) -> Verdict | None:
        """Judge what was seen at `now` (monotonic seconds); the verdict once there is one."""
        passed = 0.0 if self._time is None else min(now - self._time, LONGEST_LOOK)
        self._time = now
        verdict = self._deaths(now, passed, seen)
        if verdict is None and self._first_sign is None:
            verdict = self._stops(passed, seen) or self._hangs(now, passed, seen)
        self._cpu = {one.rank: one.cpu_seconds for one in seen if one.state}
        return verdict

    # Ranks that ended.

    def _deaths(self, now: float, passed: float, seen: Sequence[Seen]) -> Verdict | None:
        # Exit codes of ranks that end because the run was asked to stop.
        asked: tuple[int, ...] = ()
        if self.stopping is not None:
            asked = (-self.stopping, 128 + self.stopping, 130, 143)
        failed = [one for one in seen if one.has_failed and one.exit_code not in asked]
        if not failed:
            return None
        for one in failed:
            self._order.setdefault(one.rank, now)
        if self._first_sign is None:
            self._first_sign = now
        since = now - self._first_sign
        if since < SETTLE_SECONDS:
            return None
        follow = self.limits.aborts_follow
        weak = {one.rank: weakness(one, aborts_follow=follow) for one in failed}
        came = {
            one.rank: one.told.at if one.told is not None else self._order[one.rank]
            for one in failed
        }
        cause = min(failed, key=lambda one: (weak[one.rank], came[one.rank], one.rank))
        if weak[cause.rank] >= 2:
            if (differing := _differing_calls(seen)) is not None:
                return differing
            if since < LATE_SECONDS and not all(one.has_failed for one in seen):
                return None
            if (silent := self._silent_cause(now, seen)) is not None:
                return silent
        self._leaving += passed * self._share(cause, passed)
        if cause.exit_code is None and self._leaving < LEAVE_SECONDS and since < MOST_LEAVE_SECONDS:
            return None
        told, code = cause.told, cause.exit_code
        if code is not None and code < 0:
            message = f"rank {cause.rank} was killed by {signal.Signals(-code).name}"
            return Verdict(kind="killed", rank=cause.rank, message=message, seen=cause)
        if told is not None:
            kind: Kind = "exception"
            text = told.message.lower()
            follows = cause.is_inside and any(word in text for word in _FOLLOW_UP)
            if follows or cause.has_lost_a_peer:
                if (cut := _network_cut([cause], self.lost, 0.0)) is not None:
                    return cut
                kind = "lost-contact"
            shown = 1 if code in (None, 0, GONE) else code
            message = f"rank {cause.rank} failed with exit code {shown}: {told.kind}"
            message += f": {told.message}" if told.message else ""
            at = _collective(cause)
            return Verdict(kind=kind, rank=cause.rank, message=message, seen=cause, collective=at)
        if code == GONE:
            message = f"rank {cause.rank} ended in the middle of the run, nobody knows how"
        elif code == 0:
            message = f"rank {cause.rank} left with exit code 0 before the run was over"
        else:
            message = f"rank {cause.rank} failed with exit code {code}"
        return Verdict(kind="exited", rank=cause.rank, message=message, seen=cause)

    def _silent_cause(self, now: float, seen: Sequence[Seen]) -> Verdict | None:
        """A rank that is alive and did not come to where the others failed."""
        alive = [one for one in seen if not one.has_failed and not one.is_done]
        for one in alive:
            if one.state == "T":
                return self._verdict("stopped", one, seen, 0.0)
        words = [one.word for one in seen if one.word is not None]
        stale = [one for one in alive if one.word is not None and now - one.word.moved >= 2.0]
        outside = [one for one in stale if not one.is_inside]
        if outside and (found := blame(words)) is not None:
            for one in outside:
                if one.rank == found.rank and one.word is not None:
                    kind = "busy" if one.state == "R" else "hung"
                    return self._verdict(kind, one, seen, now - one.word.moved)
        return None

    # Ranks that are alive.

    def _stops(self, passed: float, seen: Sequence[Seen]) -> Verdict | None:
        alive = [one for one in seen if one.exit_code is None]
        stopped = [one for one in alive if one.state == "T"]
        for one in seen:
            if one not in stopped:
                self._stopped.pop(one.rank, None)
        if len(stopped) == len(alive) and len(alive) > 1:
            return None  # whoever suspends a whole job means it
        for one in stopped:
            self._stopped[one.rank] += passed
            if self._stopped[one.rank] >= STOPPED_SECONDS:
                return self._verdict("stopped", one, seen, self._stopped[one.rank])
        return None

    def _hangs(self, now: float, passed: float, seen: Sequence[Seen]) -> Verdict | None:
        if self.stopping is not None:
            return None
        at_work = [one for one in seen if not one.is_done]
        words = [one.word for one in at_work if one.word is not None]
        self._steps.look(now, words)
        changes = {word.rank: word.changes for word in words}
        counted = passed * min((self._share(one, passed) for one in at_work), default=0.0)
        self._still = self._still + counted if changes == self._changes else 0.0
        self._changes = changes
        lost = self.lost if self._still >= CUT_SECONDS else ()
        if (cut := _network_cut(at_work, lost, self._still)) is not None:
            return cut
        limits, steps = self.limits, self._steps
        limit = limits.patience
        in_steps = bool(words) and all(word.phase == STEP for word in words)
        if in_steps and steps.num_seen >= limits.first_steps and steps.median is not None:
            by_steps = max(10 * steps.median, 3 * steps.longest)
            limit = min(max(limits.floor, by_steps), limits.patience)
        if not at_work or self._still < limit:
            return None
        if (differing := _differing_calls(at_work)) is not None:
            return differing
        late = [one for one in at_work if one.word is None]
        found = None if late else blame(words)
        if found is None:
            message = f"rank {late[0].rank} did not start within {self._still:.0f} s"
            return Verdict(kind="hung", rank=late[0].rank, message=message, seen=late[0])
        culprit = next(one for one in at_work if one.rank == found.rank)
        word = culprit.word
        if word is not None and (word.inside or word.on_device):
            # It may wait for ranks of another node, whose watcher sees who is at fault. A device,
            # and a rank inside of an operation, may stand behind any that was begun before.
            groups = set(word.counts) if word.on_device else set[str]()
            waited_for = [at for other in seen if (at := _collective(other)) is not None]
            members = [members_of(group) for group in groups] + [at.members for at in waited_for]
            if any(not set(group) <= {other.rank for other in seen} for group in members):
                return None
        kind: Kind = "busy" if culprit.state == "R" and not culprit.is_inside else "hung"
        return self._verdict(kind, culprit, seen, self._still)

    def _share(self, one: Seen, passed: float) -> float:
        """The share of the time since the last look in which a rank could have moved: none of what
        it waited for the disk, or for a core on a machine that is busy with other things."""
        if one.state in ("D", "T", "t"):
            return 0.0
        if one.state == "R" and passed:
            used = one.cpu_seconds - self._cpu.get(one.rank, one.cpu_seconds)
            return min(1.0, 2.0 * used / passed)
        return 1.0

    def _verdict(self, kind: Kind, one: Seen, seen: Sequence[Seen], waited: float) -> Verdict:
        words = [other.word for other in seen if other.word is not None]
        found, word, start = blame(words), one.word, f"rank {one.rank}"
        if kind == "stopped":
            message = f"{start} was stopped (SIGSTOP)"
            waiting = [w for w in words if w.inside and w.collective and w.rank != one.rank]
            if found is None or found.rank != one.rank:
                # The operation of the first that waits, where this rank is one of its members.
                at = next((w.collective for w in waiting if w.collective is not None), None)
                by_rank = {word.rank: word for word in words}
                is_member = at is not None and one.rank in at.members
                found = _blame(one.rank, at, by_rank) if at is not None and is_member else None
        elif word is not None and word.on_device:
            behind = f", behind {word.collective}" if word.collective is not None else ""
            message = f"{start} has waited for {waited:.0f} s for its device{behind}"
        elif word is not None and word.inside:
            message = f"{start} has waited for {waited:.0f} s in {word.collective}"
        else:
            is_reading = word is not None and word.phase == DATA
            state = "is busy" if one.state == "R" else "sleeps"
            where = "while it read data" if is_reading else "in user code"
            message = f"{start} {state} {where} for {waited:.0f} s without progress"
        is_missed = found is not None and found.rank == one.rank and bool(found.entered)
        if is_missed and found is not None and found.collective is not None:
            entered = _ranks(found.entered)
            message += (
                f": it never entered {found.collective}, in which {entered} "
                f"wait{'s' if len(found.entered) == 1 else ''}"
            )
        return Verdict(
            kind=kind,
            rank=one.rank,
            message=message,
            seen=one,
            collective=found.collective if found else None,
            entered=found.entered if found else (),
            missing=found.missing if found else (),
            waited=waited,
        )


def _differing_calls(seen: Sequence[Seen]) -> Verdict | None:
    """The verdict on ranks that called different operations; None where they agree."""
    calls = mismatch([one.word for one in seen if one.word is not None])
    if not calls:
        return None
    most, *others, least = calls
    right = " and ".join(f"{_ranks(call.ranks)} called {call}" for call in (most, *others))
    at = most.collective
    return Verdict(
        kind="mismatch",
        rank=least.ranks[0],
        message=f"{_ranks(least.ranks)} called {least} as #{at.number} of {at.axis}, where {right}",
        seen=next(one for one in seen if one.rank == least.ranks[0]),
        collective=at,
        entered=most.ranks,
        missing=tuple(rank for call in calls[1:] for rank in call.ranks),
        calls=calls,
    )


def _network_cut(seen: Sequence[Seen], lost: tuple[LostHost, ...], waited: float) -> Verdict | None:
    """The verdict on ranks of which one waits for ranks of a host in `lost`; None where none does.

    An operation of any group may be what a device waits in.
    """
    for one in seen if lost else ():
        word, at = one.word, _collective(one)
        members = set(at.members if at is not None else ())
        if word is not None and word.on_device:
            members.update(rank for group in word.counts for rank in members_of(group))
        missing = sorted(members & {rank for host in lost for rank in host.ranks})
        if not missing:
            continue
        hosts = " and ".join(f"{host.name} with {_ranks(host.ranks)}" for host in lost)
        text = f"host {hosts} cannot be reached: the network is cut, or the host is down"
        place = f" in {at}" if at is not None else ""
        return Verdict(
            kind="network-cut",
            rank=one.rank,
            message=f"{text}; rank {one.rank} waits for {_ranks(missing)}{place}",
            seen=one,
            collective=at,
            entered=tuple(o.rank for o in seen if at and o.word and o.word.entered(at)),
            missing=tuple(missing),
            waited=waited,
            lost=lost,
        )
    return None


def _collective(one: Seen) -> Collective | None:
    return one.word.collective if one.word is not None and one.word.inside else None


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1 and 3``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:-1]))
    return f"ranks {shown} and {ranks[-1]}" if ranks else "no rank"
