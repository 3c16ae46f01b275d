"""One dispatch and combine under every dispatcher: copies, bytes, seconds and rate on a cluster.

Every rank has `tokens` tokens of `hidden` channels, each for `chosen` of `experts`, which may lie
in at most `groups_kept` of `groups` groups (node-limited routing). Bytes are those of one rank.

    all_to_all     a row for each choice: k T
    low_latency    the same into fixed slots, twice the mean for every pair of ranks
    all_gather     every token to every rank: (P - 1) T
    hierarchical   a token once to each node it visits, and there once to each rank

What stays on the rank, or (across) in its node, crosses no wire. A direct exchange takes the longer
of its part over the network card and its part over the links of the node, a ring the rate of its
group; both begin with their latencies. Rates are the cluster's times the calibrated share of them,
or measured ones. The rate is the bytes over the slower kind of link in the time of the exchange, as
DeepEP prints it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb
from typing import Any

import numpy as np

from moemesh.config.cluster import Cluster
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.section import LARGEST_SIZE
from moemesh.config.suggest import nearest_divisors
from moemesh.planner.timing.columns import hardware_row
from moemesh.planner.timing.links import Links, visited_nodes
from moemesh.planner.timing.price import pricing
from moemesh.sharding.dispatchers import packed_bytes, slots_per_pair

#: Names of the dispatchers, in the order of the table.
DISPATCHERS = ("all_to_all", "all_gather", "hierarchical", "low_latency")


@dataclass(frozen=True, kw_only=True)
class DispatchLoad:
    """The dispatched tokens. Defaults are DeepEP's published settings: DeepSeek-V3's pre-training
    batch, in fp8 there and in bfloat16 back. `groups` = 0: no limit."""

    tokens: int = 4096
    hidden_size: int = 7168
    experts: int = 256
    experts_per_token: int = 8
    groups: int = 8
    groups_kept: int = 4
    fp8: bool = True

    def check(self, ep: int) -> list[Problem]:
        """Every broken rule for `ep` ranks."""
        sizes = ("tokens", "hidden_size", "experts", "experts_per_token")
        found = [
            Problem.of("out-of-range", name, value, f"it must be between 1 and {LARGEST_SIZE}", "")
            for name in sizes
            if not 1 <= (value := getattr(self, name)) <= LARGEST_SIZE
        ]
        if found:
            return found
        if ep < 2 or self.experts % ep:
            message = f"ep ({ep}) must be at least 2 and divide the {self.experts} experts"
            fix = f"ep = {nearest_divisors(self.experts, max(ep, 2))}"
            found.append(Problem.of("not-divisible", "ep", ep, message, fix))
        if self.groups and (self.experts % self.groups or not 1 <= self.groups_kept <= self.groups):
            message = (
                f"groups ({self.groups}) must divide the experts ({self.experts}), and a token "
                f"keeps 1 to {self.groups} of them, not {self.groups_kept}"
            )
            fix = f"groups = {nearest_divisors(self.experts, self.groups)}"
            found.append(Problem.of("not-divisible", "groups", self.groups, message, fix))
        reach = self.experts * self.groups_kept // self.groups if self.groups else self.experts
        if not found and self.experts_per_token > reach:
            message = f"a token cannot choose {self.experts_per_token} of {reach} experts"
            fix = f"experts_per_token = {reach}"
            key, value = "experts_per_token", self.experts_per_token
            found.append(Problem.of("too-large", key, value, message, fix))
        return found

    @property
    def row_out(self) -> float:
        """Bytes of a row on its way to the experts."""
        return packed_bytes(self.hidden_size) if self.fp8 else 2 * self.hidden_size

    @property
    def row_back(self) -> float:
        """Bytes of a result, in bfloat16."""
        return 2 * self.hidden_size

    def visited(self, places: int) -> float:
        """Nodes, or ranks, out of `places` that a token visits: its groups, then its experts in
        them, are drawn evenly."""
        groups, kept = (self.groups, self.groups_kept) if self.groups else (1, 1)
        if groups % places and places % groups:
            smooth = visited_nodes(self.experts, self.experts_per_token, places, groups, kept)
            return float(smooth)
        each = max(groups // places, 1)  # groups that a place holds, or has a part of
        reach, size = self.experts * kept // groups, self.experts // max(places, groups)
        found = 0.0
        for here in range(1, min(each, kept) + 1):
            ways = comb(each, here) * comb(groups - each, kept - here) / comb(groups, kept)
            missed = comb(reach - here * size, self.experts_per_token)
            found += ways * (1 - missed / comb(reach, self.experts_per_token))
        return places * found


@dataclass(frozen=True)
class Exchanged:
    """One direction: bytes that a rank sends over its network card and inside its node, seconds,
    and bytes a second over the kind of link that is the slower."""

    across_bytes: float
    inside_bytes: float
    seconds: float
    rate: float


@dataclass(frozen=True, kw_only=True)
class DispatchTime:
    """One dispatcher on `ep` ranks; `copies` of a token leave its rank, `copies_across` its node.
    ``link``: "network" or "node", whichever is slower."""

    ep: int
    dispatcher: str
    copies: float
    copies_across: float
    link: str
    dispatch: Exchanged
    combine: Exchanged

    def to_json(self) -> dict[str, Any]:
        """One row of the table; bytes, seconds, bytes/s."""
        return asdict(self)


def dispatch_times(
    cluster: Cluster, load: DispatchLoad, ep: int, dispatchers: Sequence[str] = DISPATCHERS
) -> list[DispatchTime]:
    """The table for `ep` ranks; a cluster of fewer nodes gets as many more of the same kind.
    Raises ConfigError with every broken rule."""
    problems = load.check(ep)
    node = cluster.gpus_per_node
    if ep > node and ep % node:
        message = f"ep ({ep}) spans nodes of {node} devices and must be a multiple of them"
        problems.append(
            Problem.of("not-divisible", "ep", ep, message, f"ep = {-(-ep // node) * node}")
        )
    if problems:
        raise ConfigError(problems)
    known = pricing(cluster)
    links = Links.of(hardware_row(known.device), known.constants, known.table)
    node = min(node, ep)
    nodes = ep // node
    outside = 1 - 1 / nodes
    slots = slots_per_pair(load.tokens, load.experts_per_token, load.experts, ep) / load.tokens
    chosen = float(load.experts_per_token)
    #: Copies of a token that leave its rank, and its node.
    copies = {
        "all_to_all": (chosen * (1 - 1 / ep), chosen * outside),
        "low_latency": (slots * (ep - 1), slots * (ep - node)),
        "all_gather": (ep - 1.0, float(ep - node)),
        "hierarchical": (load.visited(ep) * (1 - 1 / ep), load.visited(nodes) * outside),
    }
    found: list[DispatchTime] = []
    for name in DISPATCHERS:
        if name not in dispatchers:
            continue
        both, across = copies[name]
        # A node-aware dispatch brings rows into a node once and copies them inside it.
        inside = both if name == "hierarchical" else both - across
        directions: list[Exchanged] = []
        for row in (load.row_out, load.row_back):
            size = load.tokens * row
            seconds = _seconds(links, name, ep, nodes, across * size, inside * size)
            bottleneck = across * size if nodes > 1 else inside * size
            if name == "all_gather":
                bottleneck = both * size
            rate = bottleneck / seconds if seconds else 0.0
            directions.append(Exchanged(across * size, inside * size, seconds, rate))
        found.append(
            DispatchTime(
                ep=ep,
                dispatcher=name,
                copies=both,
                copies_across=across,
                link="network" if nodes > 1 else "node",
                dispatch=directions[0],
                combine=directions[1],
            )
        )
    return found


def _seconds(links: Links, name: str, ep: int, nodes: int, across: float, inside: float) -> float:
    hops = 2 if name == "hierarchical" and nodes > 1 else 1
    if name == "all_gather":
        whole = (across + inside) * ep / (ep - 1)
        found = float(links.measured("all_gather", ep, 1, whole))
        closed = (across + inside) / float(links.bandwidth(ep, 1)) + (ep - 1) * float(links.latency)
        return closed if np.isnan(found) else found
    if name == "all_to_all":
        whole = (across + inside) * ep / (ep - 1)
        found = float(links.measured("all_to_all", ep, 1, whole))
        if not np.isnan(found):
            return found
    return max(across / links.inter, inside / links.intra) + hops * float(links.latency)
