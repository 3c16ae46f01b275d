"""The rows that every dispatcher moves, the size of a row, and the limits of fixed buffers.

The dispatchers themselves, `auto`, the planner's traffic and the benchmarks read them here.

Legend: T tokens a rank, K experts a token, E experts over P ranks in R nodes of N ranks, d distinct
ranks of a token and n distinct nodes under uniform routing, C slots per pair of ranks. Rows of one
direction, a rank's rows to itself among them:

| dispatcher | over all ranks | across nodes | inside a node | copied, there and back |
|---|---|---|---|---|
| all_to_all | K T | | | 3 K T |
| all_gather | P T | | | T + (K + d) T |
| hierarchical | | n T | d T | (K + 2 d + 2 n (R-1)/R) T |
| low_latency | C P | | | 3 C P |

Copied are rows that a rank reorders or sums, each counted on the side where there are more of them.
A hierarchical exchange on a single node has the inner hop alone (n = 0 there).
"""

from __future__ import annotations

from math import ceil, comb
from typing import Literal, NamedTuple

#: Slots of low_latency over those that uniform routing fills.
CAPACITY_FACTOR = 2.0
#: An accelerator prepares rows of this many bytes, most of them for nobody, where its host would
#: wait for their number: about as long as moving them takes on an H100 (docs/log.md).
SPARE_BYTES = 1 << 24
#: Channels that share an fp32 scale in the payload fp8 (DeepSeek-V3's dispatch format).
FP8_BLOCK = 128
#: A rank computes up to this many times its balanced share of rows at once (Experts.max_rows).
ROWS_SLACK = 2
#: Exact products pad each expert's rows to a multiple of this, all rows to one of four times it.
EXACT_ROWS = 16


def rows_at_once(tokens: int, chosen: int, etp: int) -> int:
    """The bound on the rows that a rank computes at once; a rank brings at most `tokens` of them,
    each with `chosen` experts."""
    return max(ROWS_SLACK * tokens * chosen * etp, 1)


def packed_bytes(hidden: int) -> int:
    """Bytes of a row of `hidden` channels in fp8: a byte a channel, a scale for each block."""
    return hidden + 4 * ceil(hidden / FP8_BLOCK)


def slots_per_pair(
    tokens: int, chosen: int, experts: int, ranks: int, factor: float = CAPACITY_FACTOR
) -> int:
    """Row slots of low_latency for each pair of ranks: `factor` times the uniform share of at most
    `tokens` tokens, at most what can come at all."""
    most = tokens * min(chosen, experts // ranks)
    return min(most, ceil(tokens * chosen / ranks * factor))


def spare_rows(hidden: int, *, exact: bool) -> int:
    """Rows that all_gather prepares at most on an accelerator to spare its host a wait, each of two
    bytes a channel; it sums them densely then. None of exact sums, which need the rows' owners."""
    return 0 if exact else SPARE_BYTES // (2 * hidden)


def visit_probability(experts: int, chosen: int, part: int) -> float:
    """That a token has at least one of its experts among `part` of them; 0 of no experts."""
    if not experts:
        return 0.0
    return 1 - comb(experts - part, chosen) / comb(experts, chosen)


def expected_distinct(
    parts: int, experts: int, chosen: int, groups: int = 1, kept: int = 1
) -> float:
    """Expected number of distinct parts (ranks, nodes) that hold a token's experts, if uniform: its
    `kept` groups of `groups`, then its experts in them, are drawn evenly. One of `groups` and
    `parts` must divide the other."""
    each = max(groups // parts, 1)  # groups that a part holds, or has a piece of
    reach, size = experts * kept // groups, experts // max(parts, groups)
    found = 0.0
    for here in range(1, min(each, kept) + 1):
        ways = comb(each, here) * comb(groups - each, kept - here) / comb(groups, kept)
        found += ways * visit_probability(reach, chosen, here * size)
    return parts * found


class HopRows(NamedTuple):
    """One exchange of rows on their way to the experts, which their results take backwards.

    Each rank sends its `rows` (a field of the planner's `SentRows`; "slots": a fixed number) to
    the ranks of `axis` that they are for, by all-to-all; where `is_gathered`, all ranks of the
    axis gather them, and reduce and scatter the results.
    """

    axis: str
    rows: Literal["rows", "visits", "node_visits", "tokens", "slots"]
    is_gathered: bool = False

    @property
    def is_of_tokens(self) -> bool:
        """Whether a row is a token with all its experts, not one (token, expert) pair."""
        return self.rows not in ("rows", "slots")


#: The exchanges of rows of every dispatcher, in the order of the dispatch.
HOPS: dict[str, tuple[HopRows, ...]] = {
    "all_to_all": (HopRows("ep", "rows"), HopRows("etp", "rows", True)),
    "all_gather": (HopRows("ep_etp", "tokens", True),),
    "hierarchical": (
        HopRows("ep_rail", "node_visits"),
        HopRows("ep_node", "visits"),
        HopRows("etp", "visits", True),
    ),
    "low_latency": (HopRows("ep", "slots"), HopRows("etp", "slots", True)),
}


class RowsMoved(NamedTuple):
    """The table above for one dispatcher: rows by the axis of the hop, and its exchanges of a
    forward that carry no rows."""

    by_axis: dict[str, float]
    copied: float
    small_exchanges: int


def rows_moved(
    *, tokens: float, chosen: int, experts: int, ranks: int, ranks_per_node: int, slots: int = 0
) -> dict[str, RowsMoved]:
    """The table above by dispatcher; low_latency where there are `slots`."""
    nodes = ranks // ranks_per_node
    d = expected_distinct(ranks, experts, chosen)
    n = expected_distinct(nodes, experts, chosen) if nodes > 1 else 0.0
    crossed = 2 * n * (nodes - 1) / nodes
    hops = 1 + (nodes > 1)
    routed, copied = chosen * tokens, (chosen + 2 * d + crossed) * tokens
    two_hops = {"ep_rail": n * tokens, "ep_node": d * tokens}
    table = {
        # counts, weights
        "all_to_all": RowsMoved({"ep": routed}, 3.0 * routed, 2),
        # sizes, ids, weights
        "all_gather": RowsMoved({"ep_etp": ranks * tokens}, (1 + chosen + d) * tokens, 3),
        # counts, ids, weights, for each hop
        "hierarchical": RowsMoved(two_hops, copied, 3 * hops),
    }
    if slots:
        # header, weights
        table["low_latency"] = RowsMoved({"ep": slots * ranks}, 3.0 * slots * ranks, 2)
    return table
