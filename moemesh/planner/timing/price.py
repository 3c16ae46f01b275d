"""Seconds and peak bytes of layouts on one cluster, from the calibrated models."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moemesh.config.cluster import Cluster
from moemesh.planner.accuracy.calibration import Calibration, shipped_calibration
from moemesh.planner.layout import PlannedLayout
from moemesh.planner.peak_memory import Allocation, PeakMemory, peak_memory
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.timing.arithmetic import Number
from moemesh.planner.timing.columns import Software, hardware_columns, layout_columns, model_columns
from moemesh.planner.timing.constants import Constants
from moemesh.planner.timing.hardware import Accelerator, accelerator_of_cluster
from moemesh.planner.timing.step_time import step_time

#: The software stack whose calibration an unnamed cluster gets.
DEFAULT_STACK = "megatron"


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """What is known of a cluster: its device, the constants of its time, the habits of its memory.
    `usable_share` is the part of a device's memory that a job gets."""

    device: Accelerator
    constants: Constants
    allocation: Allocation

    @property
    def usable_share(self) -> float:
        return self.allocation.usable_share

    def allocation_of(self, layout: PlannedLayout) -> Allocation:
        """The layout knows its states better than a stack's habits do."""
        return replace(
            self.allocation,
            gradient_bytes=layout.gradient_bytes,
            optimizer_bytes=layout.optimizer_bytes,
        )

    def price(
        self, shape: ModelShape, layout: PlannedLayout
    ) -> tuple[PeakMemory, dict[str, float]]:
        """(worst rank's peak, seconds of a step by part)."""
        spans_nodes = layout.dispatcher == "hierarchical"
        traits = Software(fsdp=layout.zero >= 2, deduplicated=spans_nodes)
        columns = (
            model_columns([shape]),
            layout_columns([layout], [traits]),
            hardware_columns([self.device], [layout]),
        )
        memory = peak_memory(shape, layout, self.allocation_of(layout))
        seconds = step_time(*columns, self.constants).row(0)
        saved = seconds["tensor"] * (1 - exit_share(shape, layout.attention_exit, layout.tp))
        seconds["tensor"] -= saved
        seconds["total"] -= saved
        return memory, seconds


def exit_share(shape: ModelShape, attention_exit: str, tp: Number) -> Number:
    """Tensor-parallel traffic of an attention exit, of that with a reduce-scatter.

    A layer enters and leaves two blocks, each a collective of (t-1)/t u h; the all-to-all moves
    A/(h t) of one (A the attention's width).
    """
    if attention_exit != "all_to_all":
        return 1.0
    return (3 + shape.output_width / (shape.hidden_size * tp)) / 4


def pricing(cluster: Cluster) -> Pricing:
    """Constants that the cluster names win over those that ship for its device."""
    device = accelerator_of_cluster(cluster)
    known = shipped_calibration()
    key = f"{DEFAULT_STACK}/{device.name}"
    allocation = known.allocation(key)
    if not device.generation:
        # Nothing is known of the libraries of such a device (a CPU, say).
        allocation = replace(allocation, workspace_bytes=0.0, usable_share=1.0)
    return Pricing(device=device, constants=_constants(known, key, cluster), allocation=allocation)


def price(
    shape: ModelShape, layout: PlannedLayout, cluster: Cluster
) -> tuple[PeakMemory, float, dict[str, float]]:
    """(worst rank's peak, usable share of the device's memory, seconds of a step by part)."""
    known = pricing(cluster)
    memory, seconds = known.price(shape, layout)
    return memory, known.usable_share, seconds


def _constants(known: Calibration, key: str, cluster: Cluster) -> Constants:
    return replace(known.constants(key), **cluster.constants)
