"""Rows that dispatchers move under uniform routing, the size of a row, limits of buffers.

The hops of a dispatcher are in :data:`moemesh.config.dispatcher_table.DISPATCHERS`. Legend: T
tokens of a rank, K experts of a token, P ranks in R nodes, d distinct ranks with experts of a token
and n distinct nodes, C slots for each pair of ranks. Rows that a rank sends in one direction, those
to itself included:

| rows of a hop | all ranks | across nodes | inside a node |
|---|---|---|---|
| rows | K T | | |
| tokens | P T | | |
| node_visits, visits | | n T | d T |
| slots | C P | | |

Copied rows are those that a rank reorders or sums. A copy counts its input or its output rows,
whichever are more. On a single node a node-aware exchange has only the hop inside the node (n = 0).
"""

from __future__ import annotations

from math import ceil, comb
from typing import NamedTuple

from moemesh.config.dispatcher_table import DISPATCHERS, PREDICTED, UniformRows

#: Ratio of the fixed slots to the rows of uniform routing.
CAPACITY_FACTOR = 2.0
#: Bytes of rows, most of them unused, that an accelerator prepares so that its host need not wait
#: for the number of used rows: on a simulated H100 the preparation takes about as long as the wait
#: (docs/log.md).
SPARE_BYTES = 1 << 24
#: Largest ratio of predicted costs, node-aware exchange to best other one, at which the former is
#: chosen: the processor time of its second plan and its messages is not predicted.
TWO_HOP_SHARE = 0.8
#: Channels that share an fp32 scale in the payload fp8 (DeepSeek-V3's dispatch format).
FP8_BLOCK = 128
#: A rank computes up to this many times its balanced share of rows at once (Experts.max_rows).
ROWS_SLACK = 2
#: Exact products pad each expert's rows to a multiple of this, and all rows together to a multiple
#: of four times this.
EXACT_ROWS = 16


def rows_at_once(tokens: int, chosen: int, etp: int) -> int:
    """Most rows that a rank computes at once, for `tokens` tokens a rank and `chosen` experts a
    token."""
    return max(ROWS_SLACK * tokens * chosen * etp, 1)


def packed_bytes(hidden: int) -> int:
    """Bytes of a row of `hidden` channels in fp8: a byte a channel, a scale for each block."""
    return hidden + 4 * ceil(hidden / FP8_BLOCK)


def slots_per_pair(
    tokens: int, chosen: int, experts: int, ranks: int, factor: float = CAPACITY_FACTOR
) -> int:
    """Fixed row slots for each pair of ranks: `factor` times the rows of uniform routing of
    `tokens` tokens, but at most the rows that one rank can send to another."""
    most = tokens * min(chosen, experts // ranks)
    return min(most, ceil(tokens * chosen / ranks * factor))


def spare_rows(hidden: int, *, exact: bool) -> int:
    """Largest number of rows, of two bytes a channel, that all_gather prepares on an accelerator
    without waiting for the number of used ones; it then sums them densely. 0 with exact sums, which
    need the owners of the rows."""
    return 0 if exact else SPARE_BYTES // (2 * hidden)


def visit_probability(experts: int, chosen: int, part: int) -> float:
    """Probability that at least one of a token's `chosen` experts is in a given set of `part` of
    all `experts`; 0.0 without experts."""
    if not experts:
        return 0.0
    return 1 - comb(experts - part, chosen) / comb(experts, chosen)


def expected_distinct(
    parts: int, experts: int, chosen: int, groups: int = 1, kept: int = 1
) -> float:
    """Expected number of distinct parts (ranks, nodes) that hold a token's `chosen` experts under
    uniform routing: `kept` of the `groups` are drawn, then experts in them. One of `groups` and
    `parts` must divide the other."""
    each = max(groups // parts, 1)  # groups that a part holds, or shares
    # Experts in all kept groups; experts of a group, or of a part if these are smaller.
    reach, size = experts * kept // groups, experts // max(parts, groups)
    expected = 0.0
    for number in range(1, min(each, kept) + 1):
        ways = comb(each, number) * comb(groups - each, kept - number) / comb(groups, kept)
        expected += ways * visit_probability(reach, chosen, number * size)
    return parts * expected


class RowsMoved(NamedTuple):
    """A dispatcher's rows by axis of the hop (without etp), its copied rows, and its number of
    exchanges without rows (of counts, weights or ids)."""

    by_axis: dict[str, float]
    copied: float
    small_exchanges: int


def rows_moved(
    *, tokens: float, chosen: int, experts: int, ranks: int, ranks_per_node: int, slots: int = 0
) -> dict[str, RowsMoved]:
    """Rows of every predicted dispatcher; of those with fixed slots only if there are `slots`."""
    nodes = ranks // ranks_per_node
    numbers = UniformRows(
        tokens=tokens,
        chosen=chosen,
        ranks=ranks,
        nodes=nodes,
        distinct=expected_distinct(ranks, experts, chosen),
        distinct_nodes=expected_distinct(nodes, experts, chosen) if nodes > 1 else 0.0,
        slots=slots,
    )
    table: dict[str, RowsMoved] = {}
    for name in PREDICTED:
        row = DISPATCHERS[name]
        if row.has_slots and not slots:
            continue
        hops = [hop for hop in row.hops if hop.axis != "etp"]
        # Counts (or sizes, or headers) and weights; ids where rows are tokens.
        small = sum(2 + hop.is_of_tokens for hop in hops if nodes > 1 or hop.axis != "ep_rail")
        by_axis = {hop.axis: numbers.of(hop) for hop in hops}
        table[name] = RowsMoved(by_axis, row.copied(numbers), small)
    return table
