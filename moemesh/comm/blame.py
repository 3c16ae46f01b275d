"""Blame: the rank that others wait for, from the progress words of ranks of which none moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moemesh.trace.word_file import Collective, Word


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
        return _behind(words, by_rank)
    rank = min(found, key=lambda rank: (-found[rank], by_rank[rank].number, rank))
    if rank not in last:
        return Blame(rank=rank, collective=by_rank[rank].collective, entered=(), missing=())
    collective = last[rank].collective
    assert collective is not None
    return _blame(rank, collective, by_rank)


def _behind(words: Sequence[Word], by_rank: Mapping[int, Word]) -> Blame:
    """Nobody waits visibly: the rank that has entered the fewest operations of a group."""
    for word in words:
        for group, count in word.counts.items():
            behind = [w for w in words if group in w.counts and w.counts[group] < count]
            if behind and word.collective is not None and word.collective.group == group:
                rank = min(behind, key=lambda w: (w.counts[group], w.rank)).rank
                return _blame(rank, word.collective, by_rank)
    first = min(words, key=lambda word: (word.number, word.rank))
    return Blame(rank=first.rank, collective=None, entered=(), missing=())


def _blame(rank: int, collective: Collective, by_rank: Mapping[int, Word]) -> Blame:
    missing = _missing(collective, by_rank)
    members = [member for member in collective.members if member in by_rank]
    entered = tuple(member for member in members if member not in missing)
    return Blame(rank=rank, collective=collective, entered=entered, missing=missing)


def wait_for(waiting: Word, words: Sequence[Word], rank: int) -> Blame | None:
    """The operation in which `waiting` waits, where `rank` is one that it may wait for."""
    collective = waiting.collective
    if collective is None or rank not in collective.members:
        return None
    return _blame(rank, collective, {word.rank: word for word in words})


def _missing(collective: Collective, by_rank: Mapping[int, Word]) -> tuple[int, ...]:
    """Members that have not entered, those in user code first."""
    missing = [
        rank
        for rank in collective.members
        if rank in by_rank and not by_rank[rank].entered(collective)
    ]
    return tuple(sorted(missing, key=lambda rank: (by_rank[rank].inside, rank)))
