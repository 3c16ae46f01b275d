"""The rank that the others wait for, and calls that differ, from progress records of all ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moemesh.monitor.progress import NAME_BYTES, Collective, ProgressRecord

#: Operations for which the ledger counts the bytes of the whole tensor: equal on all ranks,
#: whatever block each rank holds. In an all_to_all every rank counts the bytes that it sends.
_WHOLE_TENSOR_OPS = frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast"})


@dataclass(frozen=True, kw_only=True)
class Call:
    """Ranks that called the same operation."""

    collective: Collective
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        call = self.collective
        return f"{call.op} of {call.num_bytes} bytes ({call.caller})"


def mismatch(records: Sequence[ProgressRecord]) -> tuple[Call, ...]:
    """The differing calls of one operation of a group, empty if all ranks agree: the call of the
    most ranks first, the one at fault last; with equal numbers of ranks, that of the lowest rank
    first.

    Ranks of a group call its operations in the same order. So operations with equal numbers must
    have the same name on all ranks, and the same bytes if these are of the whole tensor. Compared
    are the operations that ranks wait in, or waited in last, and those before them: a rank that
    receives less than it expects may pass the operation and fail in the next one. The lowest
    number of a group counts, since later differences may follow from it; of several groups, the
    one with the most ranks. Messages between two ranks are not compared: their tags let them start
    in any order.
    """
    by_number: defaultdict[tuple[str, int], list[tuple[int, Collective]]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.rank):
        for operation in (record.collective, record.before):
            # Two groups may share a name that was truncated.
            if (
                operation is not None
                and 0 < len(operation.group) < NAME_BYTES
                and ">" not in operation.group
            ):
                by_number[operation.group, operation.number].append((record.rank, operation))
    differing: dict[str, tuple[Call, ...]] = {}
    for (group, _), operations in sorted(by_number.items()):
        calls: dict[tuple[str, int], Call] = {}
        for rank, operation in operations:
            key = operation.op, operation.num_bytes if operation.op in _WHOLE_TENSOR_OPS else -1
            call = calls[key] if key in calls else Call(collective=operation, ranks=())
            calls[key] = replace(call, ranks=(*call.ranks, rank))
        if len(calls) > 1:
            ordered = sorted(calls.values(), key=lambda call: (-len(call.ranks), call.ranks[0]))
            differing.setdefault(group, tuple(ordered))
    return max(
        differing.values(), key=lambda calls: sum(len(call.ranks) for call in calls), default=()
    )


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """The rank that the others wait for. ``collective``: the operation in which they wait (None if
    unknown), with the ranks that have ``entered`` it and those that are ``missing``."""

    rank: int
    collective: Collective | None
    entered: tuple[int, ...]
    missing: tuple[int, ...]


def find_culprit(records: Sequence[ProgressRecord]) -> Culprit | None:
    """The rank that the others wait for, from the records of ranks that do not move.

    The search starts at every rank that waits in an operation and moves to a member of its group
    that has not entered it. It ends at a rank that waits in nothing (it is in user code), or in an
    operation that all have entered, or in a circle of ranks that wait for one another. None without
    records.
    """
    if not records:
        return None
    by_rank = {record.rank: record for record in records}
    votes: Counter[int] = Counter()
    waiting: dict[int, ProgressRecord] = {}  # rank -> record of a rank that waits for it
    for record in records:
        current, path = record, list[int]()
        while current.inside and current.collective is not None and current.rank not in path:
            path.append(current.rank)
            missing = _missing(current.collective, by_rank)
            if not missing:
                break
            waiting[missing[0]] = current
            current = by_rank[missing[0]]
        if record.inside:
            # Of ranks that wait for one another in a circle, the one with the fewest operations.
            circle = path[path.index(current.rank) :] if current.rank in path else [current.rank]
            votes[min(circle, key=lambda rank: (by_rank[rank].number, rank))] += 1
    if not votes:
        # No rank is seen waiting: take the one with the fewest operations of the group in which
        # another rank waited last.
        for record in records:
            for group, count in record.counts.items():
                late = [r for r in records if group in r.counts and r.counts[group] < count]
                if late and record.collective is not None and record.collective.group == group:
                    rank = min(late, key=lambda r: (r.counts[group], r.rank)).rank
                    return culprit_in(rank, record.collective, by_rank)
        least = min(records, key=lambda record: (record.number, record.rank))
        return Culprit(rank=least.rank, collective=None, entered=(), missing=())
    rank = min(votes, key=lambda rank: (-votes[rank], by_rank[rank].number, rank))
    if rank not in waiting:
        return Culprit(rank=rank, collective=by_rank[rank].collective, entered=(), missing=())
    collective = waiting[rank].collective
    assert collective is not None
    return culprit_in(rank, collective, by_rank)


def culprit_in(rank: int, collective: Collective, by_rank: Mapping[int, ProgressRecord]) -> Culprit:
    """`rank` as the culprit of `collective`, among the members that have a record."""
    missing = _missing(collective, by_rank)
    members = [member for member in collective.members if member in by_rank]
    entered = tuple(member for member in members if member not in missing)
    return Culprit(rank=rank, collective=collective, entered=entered, missing=missing)


def _missing(collective: Collective, by_rank: Mapping[int, ProgressRecord]) -> tuple[int, ...]:
    """Members that have not entered the operation, those in user code first."""
    missing = [
        rank
        for rank in collective.members
        if rank in by_rank and not by_rank[rank].entered(collective)
    ]
    return tuple(sorted(missing, key=lambda rank: (by_rank[rank].inside, rank)))
