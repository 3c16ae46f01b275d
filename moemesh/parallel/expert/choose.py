"""`dispatcher = auto`: predict each dispatcher from its bytes and the measured links.

Legend: P = ep ranks, cut into R nodes of N ranks; T tokens a rank, K experts a token, E experts.

Rows that one rank sends in one direction, uniform routing (moe layers are timed as dispatch and
combine, forward and backward: four directions):

| dispatcher | to ranks of its node | to other nodes | exchanges |
|---|---|---|---|
| all_to_all | K T (N-1)/P | K T (P-N)/P | counts, weights, rows |
| all_gather | T (N-1) | T (P-N) | sizes, ids, weights, rows |
| hierarchical | d T (N-1)/N | n T (R-1)/R | counts, ids, weights, rows, twice |
| low_latency | C (N-1) | C (P-N) | header, weights, rows |

with d distinct ranks and n distinct nodes of a token, C slots per pair of ranks. What a link costs
is measured on the real groups, once, at start.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moemesh.comm import transfers
from moemesh.comm.collectives import gather_json
from moemesh.comm.mesh import Axis, Mesh

#: Bytes of the probe that measures bandwidth, per pair of ranks.
PROBE_BYTES = 1 << 18
PROBE_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Link:
    """One exchange among the ranks of an axis costs ``latency + bytes sent * seconds_per_byte``."""

    latency: float = 0.0
    seconds_per_byte: float = 0.0

    def seconds(self, num_bytes: float, num_exchanges: int) -> float:
        return num_exchanges * self.latency + num_bytes * self.seconds_per_byte


@dataclass(frozen=True, kw_only=True)
class CallSite:
    """Everything about an MoE layer that a prediction needs; `row_bytes` of one dispatched row,
    `result_bytes` of one combined row, `capacity` the low-latency slots per pair of ranks (0: that
    dispatcher is no candidate)."""

    tokens: int
    experts_per_token: int
    num_experts: int
    row_bytes: int
    result_bytes: int
    ranks: int
    ranks_per_node: int
    capacity: int = 0


def expected_distinct(parts: int, num_experts: int, experts_per_token: int) -> float:
    """Expected number of distinct parts (ranks, nodes) that hold a token's experts, if uniform.

    ``parts * (1 - C(E - E/parts, K) / C(E, K))``.
    """
    rest = num_experts - num_experts // parts
    if rest < experts_per_token:
        return float(parts)
    missing = math.comb(rest, experts_per_token) / math.comb(num_experts, experts_per_token)
    return parts * (1 - missing)


def predict_seconds(site: CallSite, inside: Link, across: Link) -> dict[str, float]:
    """Seconds of one layer's exchanges (dispatch and combine, forward and backward), by name."""
    ranks, here = site.ranks, site.ranks_per_node
    nodes, tokens, chosen = ranks // here, site.tokens, site.experts_per_token
    away = ranks - here
    visited = expected_distinct(ranks, site.num_experts, chosen)
    visited_nodes = expected_distinct(nodes, site.num_experts, chosen)
    #: name -> rows inside, rows across, exchanges of the forward that carry no rows
    table: dict[str, tuple[float, float, int]] = {
        "all_to_all": (chosen * tokens * (here - 1) / ranks, chosen * tokens * away / ranks, 2),
        "all_gather": (tokens * (here - 1), tokens * away, 3),
        "hierarchical": (
            visited * tokens * (here - 1) / here,
            visited_nodes * tokens * (nodes - 1) / nodes,
            3 * (1 + (nodes > 1)),
        ),
    }
    if site.capacity:
        table["low_latency"] = (site.capacity * (here - 1), site.capacity * away, 2)
    seconds = {}
    for name, (rows_inside, rows_across, small) in table.items():
        # Back and forth twice; coded rows only on the way to the experts in the forward.
        per_row = site.row_bytes + 3 * site.result_bytes
        exchanges = 4 + small
        seconds[name] = inside.seconds(rows_inside * per_row, exchanges if here > 1 else 0)
        seconds[name] += across.seconds(rows_across * per_row, exchanges if nodes > 1 else 0)
    return seconds


def measure_link(axis: Axis) -> Link:
    """Latency and bandwidth of an all-to-all over `axis`; every rank of it calls."""
    if axis.size == 1:
        return Link()

    def exchange(num_bytes: int) -> float:
        rows = torch.zeros(axis.size, num_bytes, dtype=torch.uint8, device=axis.device)
        return _best(
            lambda: float(transfers.all_to_all(rows, axis, phase="control", caller="auto")[0, 0])
        )

    with axis.ledger.paused():
        exchange(8)  # connections are made at the first use
        small, large = exchange(8), exchange(PROBE_BYTES)
    sent = PROBE_BYTES * (axis.size - 1)
    return Link(latency=small, seconds_per_byte=max(large - small, 0.0) / sent)


def _best(run: Callable[[], float]) -> float:
    times = []
    for _ in range(PROBE_ROUNDS):
        start = time.perf_counter()
        run()  # the read of one value waits for the device
        times.append(time.perf_counter() - start)
    return min(times)


def choose(site: CallSite, mesh: Mesh) -> tuple[str, dict[str, float]]:
    """The dispatcher predicted to be fastest, and all predictions; rank 0's word on every rank."""
    inside, across = measure_link(mesh["ep_node"]), measure_link(mesh["ep_rail"])
    predictions = predict_seconds(site, inside, across)
    predictions = gather_json(predictions, mesh.control)[0]
    return min(predictions, key=lambda name: predictions[name]), predictions
