"""Dispatchers by name, one row each: exchanges of rows, costs, and the constructor.

A dispatcher is a module with its class and a row of :data:`DISPATCHERS`. Configuration, `auto`, the
planner, the ledger and `moemesh dispatch` read the row. The formulas that follow from the rows are
in :mod:`moemesh.sharding.dispatchers`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moemesh.config.names import Names


class HopRows(NamedTuple):
    """One exchange of rows towards the experts; results return by the reverse exchange.

    An all-to-all over `axis` of the number `rows` of each rank (a field of the planner's
    `SentRows`; "slots": a fixed number). If `is_gathered`, an all-gather, with a reduce-scatter of
    the results.
    """

    axis: str
    rows: Literal["rows", "visits", "node_visits", "tokens", "slots"]
    is_gathered: bool = False

    @property
    def is_of_tokens(self) -> bool:
        """Whether a row is a token with all its experts, not one (token, expert) pair."""
        return self.rows not in ("rows", "slots")

    @property
    def ops(self) -> tuple[str, str]:
        """Collectives that carry rows to the experts, and results back."""
        if self.is_gathered:
            return "all_gather", "reduce_scatter"
        return "all_to_all", "all_to_all"


class UniformRows(NamedTuple):
    """Numbers of a dispatch under uniform routing: `tokens` of a rank, each with `chosen` experts
    on `distinct` of `ranks` ranks and on `distinct_nodes` of `nodes` nodes (0 with a single node),
    and the `slots` for each pair of ranks."""

    tokens: float
    chosen: int
    ranks: int
    nodes: int
    distinct: float
    distinct_nodes: float
    slots: int

    def of(self, hop: HopRows) -> float:
        """Rows that a rank sends in a hop, its rows to itself included."""
        return {
            "rows": self.chosen * self.tokens,
            "tokens": self.ranks * self.tokens,
            "visits": self.distinct * self.tokens,
            "node_visits": self.distinct_nodes * self.tokens,
            "slots": float(self.slots * self.ranks),
        }[hop.rows]


@dataclass(frozen=True, kw_only=True)
class DispatcherRow:
    """Facts on a dispatcher for code outside of its module."""

    #: "module:function" of DispatcherSite (:mod:`moemesh.parallel.expert.site`) -> dispatcher.
    make: str
    #: Exchanges of rows in the order of the dispatch, the gather of etp last.
    hops: tuple[HopRows, ...]
    #: Rows that a rank copies in dispatch and combine.
    copied: Callable[[UniformRows], float]
    #: Whether one exchange sends the counts of all chunks.
    plans_all_chunks: bool = False
    #: Whether rows may go to replicas of experts on other ranks.
    accepts_replicas: bool = False
    #: Whether :class:`moemesh.parallel.expert.exact.Exact` can wrap it, for `combine = exact`.
    sums_exactly: bool = True
    #: Whether dispatched rows pass through `DispatcherSite.codec`, for `payload = fp8`.
    encodes: bool = False
    #: Whether the planner predicts its bytes; `moemesh dispatch` shows only such ones.
    is_predicted: bool = True
    #: Dispatcher of rows beyond the slots.
    fallback: str = ""
    #: "module:function" that returns the reasons why a RunConfig cannot be dispatched on this
    #: machine, one sentence each; empty: it always can.
    obstacles: str = ""
    #: Whether the self-test at start needs rows of the model's width and dtype.
    tested_as_trained: bool = False

    @property
    def has_slots(self) -> bool:
        """Whether the number of rows between two ranks is fixed."""
        return self.hops[0].rows == "slots"

    @property
    def is_gathered(self) -> bool:
        """Whether each rank receives all tokens."""
        return self.hops[0].is_gathered

    @property
    def is_node_aware(self) -> bool:
        """Whether a token crosses to each node once and is copied there."""
        return self.hops[0].rows == "node_visits"


#: Exchanges of one row for each (token, expert) pair; they also return the rows of exact sums.
ROW_HOPS = (HopRows("ep", "rows"), HopRows("etp", "rows", True))
#: Dispatchers by name, in the order of messages and tables.
DISPATCHERS: dict[str, DispatcherRow] = {
    "all_to_all": DispatcherRow(
        make="moemesh.parallel.expert.all_to_all:AllToAllDispatcher.of",
        hops=ROW_HOPS,
        copied=lambda n: 3.0 * n.chosen * n.tokens,
        plans_all_chunks=True,
        accepts_replicas=True,
        encodes=True,
    ),
    "all_gather": DispatcherRow(
        make="moemesh.parallel.expert.all_gather:AllGatherDispatcher.of",
        hops=(HopRows("ep_etp", "tokens", True),),
        copied=lambda n: (1 + n.chosen + n.distinct) * n.tokens,
        encodes=True,
    ),
    "hierarchical": DispatcherRow(
        make="moemesh.parallel.expert.hierarchical:HierarchicalDispatcher.of",
        hops=(
            HopRows("ep_rail", "node_visits"),
            HopRows("ep_node", "visits"),
            HopRows("etp", "visits", True),
        ),
        # Of the rows that cross, (R - 1) / R go to other nodes.
        copied=lambda n: (
            (n.chosen + 2 * n.distinct + 2 * n.distinct_nodes * (n.nodes - 1) / n.nodes) * n.tokens
        ),
        plans_all_chunks=True,
        encodes=True,
    ),
    "low_latency": DispatcherRow(
        make="moemesh.parallel.expert.low_latency:LowLatencyDispatcher.of",
        hops=(HopRows("ep", "slots"), HopRows("etp", "slots", True)),
        copied=lambda n: 3.0 * n.slots * n.ranks,
        encodes=True,
        fallback="all_to_all",
    ),
    "deepep": DispatcherRow(
        make="moemesh.parallel.expert.deepep:DeepEPDispatcher.of",
        # Without the rows that it forwards inside a node, which have no closed form.
        hops=ROW_HOPS,
        copied=lambda n: 3.0 * n.chosen * n.tokens,
        sums_exactly=False,
        is_predicted=False,
        obstacles="moemesh.parallel.expert.deepep_probe:obstacles",
        tested_as_trained=True,
    ),
}
#: Names of the rows that every rank has; a program may add others.
PACKAGED = frozenset(DISPATCHERS)
#: Dispatchers that `moemesh plan` proposes for ranks of one node, and of several.
PROPOSED = ("all_to_all", "hierarchical")
#: Dispatchers whose bytes the planner predicts.
PREDICTED = Names(DISPATCHERS, where=lambda row: row.is_predicted)


def dispatcher_row(name: str) -> DispatcherRow:
    """The row of `name`; that of all_to_all for `auto` and for dispatchers of other trainers."""
    return DISPATCHERS.get(name, DISPATCHERS["all_to_all"])
