"""Mismatches: ranks that called different operations as the same number of a group.

Ranks of a group call its operations in the same order, so that those with the same number are one
operation: everywhere by the same name, and with the same bytes where these are of the whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

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

    Compared are the operations that ranks wait in, or have waited in last. Messages between two
    ranks are not: their tags let them be started in any order.
    """
    by_number: defaultdict[tuple[str, int], list[Word]] = defaultdict(list)
    for word in words:
        one = word.collective
        # Two groups may share a name that was cut.
        if one is not None and 0 < len(one.group) < NAME_BYTES and ">" not in one.group:
            by_number[one.group, one.number].append(word)
    found: list[tuple[Call, ...]] = []
    for same in by_number.values():
        calls: defaultdict[tuple[str, int], list[Word]] = defaultdict(list)
        for word in sorted(same, key=lambda word: word.rank):
            one = word.collective
            assert one is not None
            calls[one.op, one.num_bytes if one.op in _OF_THE_WHOLE else -1].append(word)
        if len(calls) > 1:
            ordered = sorted(calls.values(), key=lambda those: (-len(those), those[0].rank))
            found.append(tuple(map(_call, ordered)))
    return max(found, key=lambda calls: sum(len(call.ranks) for call in calls), default=())


def _call(words: Sequence[Word]) -> Call:
    (first, *_) = words
    assert first.collective is not None
    return Call(collective=first.collective, ranks=tuple(word.rank for word in words))
