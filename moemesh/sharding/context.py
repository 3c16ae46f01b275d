"""Positions and heads that a context-parallel rank holds.

The positions of a sequence are cut into 2c chunks; rank i of c holds chunk i and chunk 2c-1-i.
Under a causal mask late positions see more keys than early ones, but each such pair of chunks sees
about the same number, so the ranks have equal work. With c = 4::

    chunk   0   1   2   3   4   5   6   7
    rank    0   1   2   3   3   2   1   0
"""

from __future__ import annotations

from typing import NamedTuple

from moemesh.config.layout import shard_range


def context_runs(length: int, ranks: int, index: int) -> tuple[range, ...]:
    """The positions of a sequence of `length` that rank `index` holds, as ascending runs. Any
    `length` is legal: chunks may differ by one position, and may be empty. Neighbouring chunks make
    one run."""
    chunks = 2 * ranks
    early = shard_range(length, chunks, index)
    late = shard_range(length, chunks, chunks - 1 - index)
    runs = (range(early.start, late.stop),) if early.stop == late.start else (early, late)
    return tuple(run for run in runs if run)


def context_sizes(length: int, ranks: int) -> tuple[int, ...]:
    """Number of positions of a sequence on each rank."""
    return tuple(sum(map(len, context_runs(length, ranks, index))) for index in range(ranks))


class HeadShare(NamedTuple):
    """The query heads that a rank attends with, and the key/value heads that they read."""

    queries: range
    keys: range

    def is_even(self, group: int) -> bool:
        """Whether each of these key heads is read by the same number of these query heads. `group`:
        query heads of a key head in the whole model."""
        share = len(self.queries) // len(self.keys)
        keys_read = [head // group - self.keys.start for head in self.queries]
        return keys_read == [i // share for i in range(len(keys_read))]


def head_share(num_heads: int, num_kv_heads: int, ranks: int, index: int) -> HeadShare:
    """The heads of rank `index` of `ranks` that share attention by heads. `ranks` must divide
    `num_heads`. A key/value head that query heads of several ranks read is in the share of each of
    these ranks, so there may be fewer such heads than ranks."""
    queries = shard_range(num_heads, ranks, index)
    group = num_heads // num_kv_heads
    return HeadShare(queries, range(queries.start // group, (queries.stop - 1) // group + 1))
