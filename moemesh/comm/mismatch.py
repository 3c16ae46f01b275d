"""Mismatches: ranks that called different operations as the same number of a group.

Ranks of a group call its operations in the same order, so that those with the same number are one
operation: everywhere by the same name, and with the same bytes where these are of the whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moemesh.trace.word_file import NAME_BYTES, Collective, Word

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

    Compared are the operations that ranks wait in, or have waited in last, and those before them: a
    rank that receives less than it expects may get past the operation, and fail in the next one.
    Of several numbers of a group the lowest counts, since the others may follow from it. Messages
    between two ranks are not compared: their tags let them be started in any order.
    """
    by_number: defaultdict[tuple[str, int], list[_Called]] = defaultdict(list)
    for word in sorted(words, key=lambda word: word.rank):
        for one in (word.collective, word.before):
            # Two groups may share a name that was cut.
            if one is not None and 0 < len(one.group) < NAME_BYTES and ">" not in one.group:
                by_number[one.group, one.number].append(_Called(word.rank, one))
    found: dict[str, tuple[Call, ...]] = {}
    for (group, _), same in sorted(by_number.items()):
        calls: defaultdict[tuple[str, int], list[_Called]] = defaultdict(list)
        for called in same:
            op, num_bytes = called.collective.op, called.collective.num_bytes
            calls[op, num_bytes if op in _OF_THE_WHOLE else -1].append(called)
        if len(calls) > 1:
            ordered = sorted(calls.values(), key=lambda those: (-len(those), those[0].rank))
            found.setdefault(group, tuple(map(_call, ordered)))
    return max(found.values(), key=lambda calls: sum(len(call.ranks) for call in calls), default=())


class _Called(NamedTuple):
    rank: int
    collective: Collective


def _call(those: Sequence[_Called]) -> Call:
    return Call(collective=those[0].collective, ranks=tuple(one.rank for one in those))
