"""`dispatcher = auto`: predict each dispatcher from its bytes, the measured links and memory.

Rows that a rank sends in one direction under uniform routing, and rows that it copies, are those of
:mod:`moemesh.sharding.dispatchers`. MoE layers are timed as dispatch and combine, forward and
backward: four directions. The copy from received rows into the experts is equal for all dispatchers
and left out. Costs of a link and of a copied byte are measured on the real groups, once, at start
(of a `MoELayer`: at its first forward), by all ranks at once, since ranks of one machine share its
memory and cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from statistics import median

import torch

from moemesh.comm import transfers
from moemesh.comm.collectives import barrier, gather_json
from moemesh.comm.mesh import Axis, Mesh
from moemesh.config.dispatcher_table import DISPATCHERS, PREDICTED
from moemesh.ops.permute import gather_rows, map_from_sources, permutation, sum_rows
from moemesh.sharding.dispatchers import TWO_HOP_SHARE, RowsMoved, rows_moved

#: Bytes of the probe that measures bandwidth, per pair of ranks, and of the probe that copies.
PROBE_BYTES = 1 << 19
COPY_BYTES = 1 << 22
PROBE_ROUNDS = 7
#: Exchanges of one timed round: the first one waits for ranks that start late.
PROBE_REPEATS = 4


@dataclass(frozen=True, kw_only=True)
class Link:
    """One exchange among the ranks of an axis costs ``latency + bytes sent * seconds_per_byte``."""

    latency: float = 0.0
    seconds_per_byte: float = 0.0

    def seconds(self, num_bytes: float, num_exchanges: int) -> float:
        return num_exchanges * self.latency + num_bytes * self.seconds_per_byte


@dataclass(frozen=True, kw_only=True)
class CallSite:
    """Sizes of a MoE layer for a prediction. `tokens`: those of one rank; `row_bytes`: of one
    dispatched row; `result_bytes`: of one combined row; `capacity`: fixed slots per pair of ranks
    (0 excludes dispatchers with slots); `names`: the dispatchers that can be used."""

    tokens: int
    experts_per_token: int
    num_experts: int
    row_bytes: int
    result_bytes: int
    ranks: int
    ranks_per_node: int
    capacity: int = 0
    names: Collection[str] = PREDICTED

    @property
    def rows(self) -> dict[str, RowsMoved]:
        """Rows of one direction under uniform routing, by dispatcher."""
        table = rows_moved(
            tokens=self.tokens,
            chosen=self.experts_per_token,
            experts=self.num_experts,
            ranks=self.ranks,
            ranks_per_node=self.ranks_per_node,
            slots=self.capacity,
        )
        return {name: moved for name, moved in table.items() if name in self.names}


def predict_seconds(
    site: CallSite, inside: Link, across: Link, seconds_per_copied_byte: float
) -> dict[str, float]:
    """Seconds of one layer's exchanges (dispatch and combine, forward and backward), by name."""
    ranks, per_node = site.ranks, site.ranks_per_node
    nodes = ranks // per_node
    # Shares of the rows of an exchange that go to other ranks of the node, and to other nodes.
    on_ep = (per_node - 1) / ranks, (ranks - per_node) / ranks
    shares = {"ep_rail": (0.0, (nodes - 1) / nodes), "ep_node": ((per_node - 1) / per_node, 0.0)}
    seconds: dict[str, float] = {}
    for name, moved in site.rows.items():
        # Four directions, of which only the dispatch of the forward sends rows of `row_bytes`.
        per_row = site.row_bytes + 3 * site.result_bytes
        exchanges = 4 + moved.small_exchanges
        seconds[name] = 0.0
        for link, side, is_used in ((inside, 0, per_node > 1), (across, 1, nodes > 1)):
            rows = sum(rows * shares.get(axis, on_ep)[side] for axis, rows in moved.by_axis.items())
            seconds[name] += link.seconds(rows * per_row, exchanges if is_used else 0)
        # The backward copies the same number of rows: copies become sums, and sums copies.
        seconds[name] += 2 * moved.copied * site.result_bytes * seconds_per_copied_byte
    return seconds


def measure_copying(row_bytes: int, mesh: Mesh) -> float:
    """Seconds per copied byte, the mean of reordering rows and of summing pairs of rows. Every rank
    of the mesh calls: all copy at once, as they do in a layer."""
    width, device = max(row_bytes // 4, 1), mesh.device
    num_rows = 2 * max(COPY_BYTES // row_bytes // 2, 1)
    rows = torch.ones(num_rows, width, device=device)
    places = torch.arange(num_rows, device=device)
    # Rows of the first and of the second half by turns: neighbours are read from distant places.
    mixed = permutation((places % 2) * (num_rows // 2) + places // 2)
    pairs = map_from_sources(places // 2, num_rows // 2)

    def copy() -> None:
        (gather_rows(rows, mixed)[0, 0] + sum_rows(rows, pairs)[0, 0]).item()

    return _median(copy, mesh) / (2 * num_rows * width * 4)


def measure_link(axis: Axis, mesh: Mesh) -> Link:
    """Latency and bandwidth of an all-to-all over `axis`; every rank of the mesh calls. All groups
    of the axis exchange at the same time, as they do in a layer: they may share a link."""
    if axis.size == 1:
        return Link()

    def exchange(num_bytes: int) -> float:
        rows = torch.zeros(axis.size, num_bytes, dtype=torch.uint8, device=axis.device)

        def run() -> None:
            for _ in range(PROBE_REPEATS):
                # The read of one value waits for the device.
                transfers.all_to_all(rows, axis, phase="control", caller="auto")[0, 0].item()

        return _median(run, mesh) / PROBE_REPEATS

    with axis.ledger.paused():
        exchange(8)  # connections are made at the first use
        small, large = exchange(8), exchange(PROBE_BYTES)
    sent = PROBE_BYTES * (axis.size - 1)
    return Link(latency=small, seconds_per_byte=max(large - small, 0.0) / sent)


def _median(run: Callable[[], None], mesh: Mesh) -> float:
    """Median seconds of `run`, which all ranks of the mesh begin together."""
    times = []
    for _ in range(PROBE_ROUNDS):
        barrier(mesh["world"])
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def choose(site: CallSite, mesh: Mesh) -> tuple[str, dict[str, float]]:
    """The dispatcher predicted to be fastest, and all predictions; every rank gets rank 0's."""
    inside, across = (measure_link(mesh[name], mesh) for name in ("ep_node", "ep_rail"))
    copying = measure_copying(site.result_bytes, mesh)
    predictions = predict_seconds(site, inside, across, copying)
    predictions = gather_json(predictions, mesh.control)[0]
    return fastest(predictions), predictions


def fastest(predictions: dict[str, float]) -> str:
    """The fastest dispatcher; one of two hops must win by the factor TWO_HOP_SHARE."""

    def weighted(name: str) -> float:
        share = TWO_HOP_SHARE if DISPATCHERS[name].is_node_aware else 1.0
        return predictions[name] / share

    return min(predictions, key=weighted)
