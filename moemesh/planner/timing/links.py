"""Link times of a workload: closed forms by the shape of a group, or measured collectives.

| transfer of the time model | measured operation | bytes | group |
|---|---|---|---|
| tensor, with sequence parallelism | all-gather and reduce-scatter | u h w | tp |
| tensor, without | all-reduce | u h w | tp |
| context | all-gather of keys and values | s b (h_k + h_v) w / t | cp |
| expert exchange (no node-aware one across nodes) | all-to-all | load k u/t h w | ep |
| expert exchange by gathers | all-gather and reduce-scatter, half of both | e x u/t h w | ep_etp |
| expert tensor | all-gather and reduce-scatter | x k u/t h w | etp |
| gradients, weights | all-reduce, or reduce-scatter and all-gather | 4 Psi, 2 Psi | dp_cp, edp |
| stage to stage | send | u h w, / t where cut | 2 ranks |

u = s b / c tokens (b sequences of s positions), h hidden, h_k and h_v widths of keys and values, w
bytes of a number, k experts per token, Psi weights of a rank; load: rows of the busiest rank over
the mean; t, c, e, x are the degrees of tp, cp, ep, etp.

A group is looked up by its number of ranks and by the number of them that share a node. Collectives
without a measurement keep the closed form: α and β of the cluster, by the shape of the group. The
closed form is used in any case for units of FSDP, ZeRO inside smaller groups, parameter servers,
sums of two pipes and Ulysses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from moemesh.config.cluster import LinkCurve, LinkOperation
from moemesh.planner.arithmetic import FloatArray, Number, maximum, minimum, where
from moemesh.planner.timing.calibration import Constants
from moemesh.planner.timing.columns import HardwareColumns

# Shape of a group, nodes that a token visits, tables of measured links.


def members_per_node(ranks: Number, stride: Number, node_size: Number) -> Number:
    """Number of ranks of a group that share a node, if its members are `stride` ranks apart."""
    return minimum(maximum(np.floor(node_size / stride + 1e-9), 1), ranks)


def visited_nodes(
    experts: Number, per_token: Number, nodes: Number, groups: Number, kept: Number
) -> Number:
    """Expected number of nodes (or ranks) that a token visits, with experts from `kept` of `groups`
    groups.

    Of N nodes with E experts, the token can reach n = N kept/groups nodes with E' = E kept/groups
    experts. With k experts it visits n (1 - C(E' - E/N, k) / C(E', k)) nodes. Without a limit,
    kept = groups. DeepSeek-V3 on 8 nodes: 3.6 of at most 4. The product form of the binomials
    accepts arrays and sizes that do not divide.
    """
    share = where((groups > 1) & (kept > 0), minimum(kept / maximum(groups, 1), 1), 1)
    reach, experts = maximum(nodes * share, 1), experts * share
    missing: Number = 1.0
    part = experts / maximum(reach, 1)
    for chosen in range(int(np.max(per_token, initial=0))):
        factor = minimum(maximum((experts - part - chosen) / maximum(experts - chosen, 1), 0), 1)
        missing = missing * where(chosen < per_token, factor, 1.0)
    return reach * (1 - missing)


class LinkTable:
    """Measured collectives, interpolated in log size; constant below the smallest size, and above
    the largest extrapolated with the last slope, or with 1 if that is less.

    NCCL's time is not affine in the size, so measurements are better than closed forms. A group
    without measurements has no entry: the caller falls back to the closed form. Several times of
    one size are replaced by their median.
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
        """Interpolated seconds of groups of this shape; nan for a shape without measurements."""
        columns = np.broadcast_arrays(ranks, members, num_bytes)
        ranks, members, sizes = (np.asarray(column, dtype=np.float64) for column in columns)
        times = np.full(sizes.shape, np.nan)
        for (curve_operation, curve_ranks, curve_members), curve in self._curves.items():
            if curve_operation != operation:
                continue
            rows = (ranks == curve_ranks) & (members == curve_members) & (sizes > 0)
            if rows.any():
                # Seconds are a power of the size between measured sizes, constant (latency) below
                # the smallest; above the largest the last slope continues, at least 1 (bandwidth).
                known, seconds = curve
                logs = np.log(sizes[rows])
                slope = 1.0
                if len(known) > 1:
                    slope = max(float((seconds[-1] - seconds[-2]) / (known[-1] - known[-2])), 1.0)
                times[rows] = np.exp(
                    np.interp(logs, known, seconds) + slope * np.maximum(logs - known[-1], 0.0)
                )
        return times


#: Seconds of one hop of a ring inside a node and between nodes: NCCL's own model of its latencies
#: (src/graph/tuning.cc, protocol "simple").
_NEAR_HOP, _FAR_HOP = 3.4e-6, 14e-6


@dataclass(frozen=True, kw_only=True)
class Links:
    """Rates of one device in bytes per second, latency of a collective in seconds, measurements."""

    intra: Number
    inter: Number
    node_size: Number
    latency: Number = 0.0
    contention: Number = 0.0
    table: LinkTable = field(default_factory=LinkTable)

    @classmethod
    def of(cls, hardware: HardwareColumns, constants: Constants, table: LinkTable) -> Links:
        """The links of a device, from its data sheet and the calibrated constants."""
        return cls(
            intra=hardware.intra * constants.intra_node_efficiency,
            inter=hardware.inter * constants.inter_node_efficiency,
            latency=constants.collective_latency_us * 1e-6,
            contention=constants.network_contention,
            node_size=hardware.node_size,
            table=table,
        )

    def network(self, nodes: Number) -> Number:
        """Bandwidth of one device's network card in a group on `nodes` nodes: it falls with their
        number to the power of `contention`."""
        return self.inter / nodes**self.contention

    def bandwidth(self, ranks: Number, stride: Number) -> Number:
        """Useful bandwidth of a group whose members are `stride` ranks apart: NVLink inside a node,
        else min(NVLink, members per node x NIC).

        A group uses one network card of a node for each of its members there: 8, 4, 2 and 1 members
        a node reached 44.7, 20.8, 16.2 and 8.1 GB/s on 2 x 8 A100.
        """
        members = members_per_node(ranks, stride, self.node_size)
        nodes: Number = maximum(ranks / members, 1)
        shared = members * self.network(nodes)
        return where(ranks * stride <= self.node_size, self.intra, minimum(self.intra, shared))

    def ring_latency(self, ranks: Number, stride: Number) -> Number:
        """Seconds of the hops of a ring through a group: one hop from each of several nodes to the
        next, the others inside nodes. All gathers and scatters are rings: NCCL uses its trees,
        which have fewer hops, only for all-reduce."""
        nodes = ranks / members_per_node(ranks, stride, self.node_size)
        return (ranks - nodes) * _NEAR_HOP + where(nodes > 1, nodes * _FAR_HOP, 0)

    def measured(
        self, operation: LinkOperation, ranks: Number, stride: Number, num_bytes: Number
    ) -> Number:
        """The table's seconds of one collective; nan without a measurement."""
        if not len(self.table):
            return np.nan
        members = members_per_node(ranks, stride, self.node_size)
        return self.table.column(operation, ranks, members, num_bytes)

    def measured_pair(self, ranks: Number, stride: Number, num_bytes: Number) -> Number:
        """The table's seconds of an all-gather and a reduce-scatter of one tensor."""
        gathered = self.measured("all_gather", ranks, stride, num_bytes)
        return gathered + self.measured("reduce_scatter", ranks, stride, num_bytes)


def known(measured: Number, closed: Number) -> Number:
    """The measured seconds, or the closed form where they are nan or where it is 0 (no bytes)."""
    return where((closed > 0) & ~np.isnan(measured), measured, closed)
