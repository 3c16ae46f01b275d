"""Bandwidth by the shape of a group, nodes that a token visits, tables of measured links.

What NCCL reaches is not affine in the size: a measured table (:class:`LinkTable`) replaces closed
forms wherever there is one.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from moemesh.config.cluster import LinkCurve, LinkOperation
from moemesh.planner.arithmetic import FloatArray, Number, floor, log2, maximum, minimum, where


def members_per_node(ranks: Number, stride: Number, node_size: Number) -> Number:
    """The ranks of a group that share a node, when its members are `stride` ranks apart."""
    fitting: Number = floor(node_size / stride + 1e-9)
    return minimum(maximum(fitting, 1), ranks)


def group_bandwidth(
    ranks: Number,
    stride: Number,
    *,
    node_size: Number,
    intra: Number,
    inter: Number,
    contention: Number = 0.0,
) -> Number:
    """Useful bandwidth of a group: NVLink inside a node, else min(NVLink, members per node x NIC).

    Rings of all members leave a node over as many network cards as the group has members there:
    8, 4, 2 and 1 members a node gave 44.7, 20.8, 16.2 and 8.1 GB/s on 2 x 8 A100. `contention` is
    the loss per doubling of the nodes.
    """
    members = members_per_node(ranks, stride, node_size)
    nodes: Number = maximum(ranks / members, 1)
    shared = members * inter / (1 + contention * log2(nodes))
    return where(ranks * stride <= node_size, intra, minimum(intra, shared))


def expected_nodes_smooth(experts: Number, per_token: Number, nodes: Number) -> Number:
    """Nodes that a token visits under uniform routing, N (1 - C(E - E/N, k) / C(E, k)), for arrays
    and for sizes that do not divide: the product form of the binomials."""
    missing: Number = 1.0
    part = experts / maximum(nodes, 1)
    top = int(np.max(per_token, initial=0))
    for chosen in range(top):
        factor = minimum(maximum((experts - part - chosen) / maximum(experts - chosen, 1), 0), 1)
        missing = missing * where(chosen < per_token, factor, 1.0)
    return nodes * (1 - missing)


def visited_nodes(
    experts: Number, per_token: Number, nodes: Number, groups: Number, kept: Number
) -> Number:
    """Nodes (or ranks) that a token visits when its experts come from `kept` of `groups` groups.

    With n = nodes kept/groups of them within reach, n (1 - C(E' - E/N, k) / C(E', k)) of the
    E' = E kept/groups experts; without a limit (kept = groups) all are. DeepSeek-V3 on 8 nodes: 4.
    """
    share = where((groups > 1) & (kept > 0), minimum(kept / maximum(groups, 1), 1), 1)
    reach = maximum(nodes * share, 1)
    return expected_nodes_smooth(experts * share, per_token, reach)


class LinkTable:
    """Measured collectives, interpolated in log size; what lies outside follows the last slope.

    A group that was not measured has no entry: the caller falls back to the closed form. Of several
    times of one size the median counts.
    """

    def __init__(self, curves: Iterable[LinkCurve] = ()) -> None:
        measured: dict[tuple[LinkOperation, int, int], dict[float, list[float]]] = {}
        for curve in curves:
            points = measured.setdefault((curve.operation, curve.ranks, curve.members_per_node), {})
            for size, seconds in zip(curve.bytes, curve.seconds, strict=True):
                points.setdefault(size, []).append(seconds)
        self._curves = {
            key: (
                np.log([size for size, _ in sorted(points.items())]),
                np.log([float(np.median(times)) for _, times in sorted(points.items())]),
            )
            for key, points in measured.items()
        }

    def __len__(self) -> int:
        return len(self._curves)

    def column(
        self, operation: LinkOperation, ranks: Number, members: Number, num_bytes: Number
    ) -> FloatArray:
        """Interpolated seconds of groups of this shape; nan where there is no measured time."""
        columns = np.broadcast_arrays(ranks, members, num_bytes)
        groups, shares, sizes = (np.asarray(column, dtype=np.float64) for column in columns)
        found = np.full(sizes.shape, np.nan)
        for (measured, size, share), curve in self._curves.items():
            if measured != operation:
                continue
            rows = (groups == size) & (shares == share) & (sizes > 0)
            if rows.any():
                # Between measured sizes a power of the size; below all of them latency alone, above
                # all of them the last slope, at least that of bandwidth.
                known, seconds = curve
                logs = np.log(sizes[rows])
                slope = 1.0
                if len(known) > 1:
                    slope = max(float((seconds[-1] - seconds[-2]) / (known[-1] - known[-2])), 1.0)
                found[rows] = np.exp(
                    np.interp(logs, known, seconds) + slope * np.maximum(logs - known[-1], 0.0)
                )
        return found
