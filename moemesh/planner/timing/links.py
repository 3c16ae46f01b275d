"""Links of a workload: closed forms by the shape of a group, measured collectives where known.

| transfer of the time model | measured operation | bytes | group |
|---|---|---|---|
| tensor, with sequence parallelism | all-gather and reduce-scatter | u h w | tp |
| tensor, without | all-reduce | u h w | tp |
| context | all-gather of keys and values | s b (h_k + h_v) w / t | cp |
| expert exchange (not the node-aware one) | all-to-all | k u/t h w | ep |
| expert tensor | all-gather and reduce-scatter | x k u/t h w | etp |
| gradients, weights | all-reduce, or reduce-scatter and all-gather | 4 Psi, 2 Psi | dp_cp, edp |
| stage to stage | send | u h w, / t where cut | 2 ranks |

A group is looked up by its ranks and by how many of them share a node. What was not measured keeps
its closed form: α and β of the cluster, by the shape of the group. So do units of FSDP and ZeRO
inside groups of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moemesh.config.cluster import LinkOperation
from moemesh.planner.arithmetic import Number, where
from moemesh.planner.timing.columns import HardwareColumns
from moemesh.planner.timing.constants import Constants
from moemesh.planner.timing.network import LinkTable, group_bandwidth, members_per_node


@dataclass(frozen=True, kw_only=True)
class Links:
    """Rates in bytes per second of one device, the seconds of a hop, and what was measured."""

    intra: Number
    inter: Number
    latency: Number
    contention: Number
    node_size: Number
    table: LinkTable = field(default_factory=LinkTable)

    @classmethod
    def of(
        cls, hardware: HardwareColumns, constants: Constants, table: LinkTable | None = None
    ) -> Links:
        """The links of a device, by its data sheet and the calibrated constants."""
        return cls(
            intra=hardware.intra * constants.intra_node_efficiency,
            inter=hardware.inter * constants.inter_node_efficiency,
            latency=constants.collective_latency_us * 1e-6,
            contention=constants.network_contention,
            node_size=hardware.node_size,
            table=table or LinkTable(),
        )

    def bandwidth(self, ranks: Number, stride: Number) -> Number:
        """Useful bandwidth of a group whose members are `stride` ranks apart."""
        return group_bandwidth(
            ranks,
            stride,
            node_size=self.node_size,
            intra=self.intra,
            inter=self.inter,
            contention=self.contention,
        )

    def measured(
        self, operation: LinkOperation, ranks: Number, stride: Number, num_bytes: Number
    ) -> Number:
        """The table's seconds of one collective, nan where it has no answer."""
        if not len(self.table):
            return np.nan
        members = members_per_node(ranks, stride, self.node_size)
        return self.table.column(operation, ranks, members, num_bytes)

    def measured_pair(self, ranks: Number, stride: Number, num_bytes: Number) -> Number:
        """An all-gather and a reduce-scatter of one tensor."""
        gathered = self.measured("all_gather", ranks, stride, num_bytes)
        return gathered + self.measured("reduce_scatter", ranks, stride, num_bytes)


def known(measured: Number, closed: Number) -> Number:
    """The measured seconds where there are any; where nothing is sent the closed form says 0."""
    return where((closed > 0) & ~np.isnan(measured), measured, closed)
