"""Ledger entries once a step: counts before it; gradient sums, norms and reports after it.

Three ways for a step to end (D extra prediction layers, s numbers of the gradient norm, one a
logical tensor and one an expert of a stack):

| way | sums |
|---|---|
| validation before the optimizer | losses, loads over stage and pp; s squares over the world |
| validation behind it | one vector of 3 + D + loads + s over stage, then along pp and back |
| a stream | s squares of its stage for every update; one report a step over the world |

Buckets of gradients are the same in all, once an update; under ZeRO 2 and 3 behind every backward.
Where states are sharded, weights are gathered behind the update, or (ZeRO 3) before their use. A
step that is taken back (its norm was clipped behind an early update) runs its warm-up twice: that
is not in it.
"""

from __future__ import annotations

from collections import Counter

from moemesh.config.buckets import Bucket, owned_sizes
from moemesh.config.parameters import ParameterTensor
from moemesh.config.plan import Plan
from moemesh.planner.traffic.gathered_units import GatheredUnits
from moemesh.planner.traffic.ledger_lines import LedgerLines
from moemesh.planner.traffic.tensors import StagePlacement, data_buckets

_INT64, _FLOAT64 = 8, 8


class StepEnd:
    """Enters the lines of one rank; `element` bytes of a weight."""

    def __init__(self, lines: LedgerLines, placement: StagePlacement, element: int) -> None:
        self.lines, self.placement, self.element = lines, placement, element
        self.plan: Plan = placement.plan
        self.model = placement.model
        self.layout = lines.layout
        self.at = lines.here["pp"]
        #: Numbers of the loads: tokens of each expert, of every MoE layer.
        #: Losses of extra prediction layers, beside the main and the auxiliary one.
        self.ahead = self.model.num_mtp_layers
        self.layers = len(self.model.routed_layers)
        self.loads = self.layers * self.model.num_experts
        #: Tokens that every rank has computed: where replicas make them differ from the loads.
        replicas = self.plan.spare_slots > 0 and self.plan.ep > 1
        self.rank_tokens = self.layers * self.plan.ep if replicas else 0

    def enter(self) -> None:
        """Enter the end of a step in the way that the plan names."""
        if self.placement.schedule.update is not None:
            self._stream()
        elif self.plan.optimizer_validation == "after":
            self._counts(self.plan.microbatches)
            self._gradients()
            # A stop request, the losses, loads, choices dropped, squares: one vector.
            squares = self._squares()
            numbers = 3 + self.ahead + self.loads + self.layers + self.rank_tokens + squares
            self.lines.all_reduce("stage", numbers, _FLOAT64, "optimizer", "step.report")
            neighbours = (self.at > 0) + (self.at < self.plan.pp - 1)
            for sends in (True, False):
                # The sum so far goes up the pipeline, the whole sum comes down.
                size = numbers * _FLOAT64
                self.lines.message("pp", size, "optimizer", "validation", neighbours, sends=sends)
        else:
            self._counts(self.plan.microbatches)
            self._gradients()
            lines, model = self.lines, self.model
            for axis in ("stage", "pp"):
                lines.all_reduce(axis, 2 + self.ahead, _FLOAT64, "optimizer", "step.losses")
                for numbers in (self.loads, self.rank_tokens):
                    if numbers:
                        lines.all_reduce(axis, numbers, _INT64, "optimizer", "step.loads")
                if model.capacity_factor:
                    lines.all_reduce(axis, self.layers, _INT64, "optimizer", "step.dropped")
            squares = self._squares()
            lines.all_reduce("world", squares, _FLOAT64, "optimizer", "gradient_norm")

    def _counts(self, microbatches: int, times: int = 1) -> None:
        """Loss-bearing tokens and auxiliary scopes of a step, or of an update window."""
        scopes = microbatches if self.model.aux_loss_scope == "global" else 1
        numbers = 1 + self.ahead + scopes
        self.lines.all_reduce("dp_cp", numbers, _INT64, "forward", "step.counts", times)

    def _gradients(self, times: int = 1) -> None:
        """Sums of gradients and, where their owners alone update, the weights that they send."""
        lines, plan = self.lines, self.plan
        backwards: Counter[int] | None = None
        if plan.data in ("zero2", "zero3"):
            # Of each stage the operations behind which its gradients are summed over ranks.
            ops = self.placement.schedule.ops(self.at)
            backwards = Counter(op.stage for op in ops if op.kind in ("B", "W"))
        for bucket in data_buckets(self.placement, self.layout, lines.rank, self.element):
            axis, size, own = bucket.axis, bucket.gradient_bytes, bucket.numbers
            if not bucket.trains:
                continue
            if plan.data == "replicate":
                lines.all_reduce(axis, own, size, "backward", "gradients", times)
            else:
                shared, copies = self.layout.sharding_axes(axis)
                sizes = self._owned(bucket)
                own = sizes[lines.index(shared)]
                sums = times
                if backwards is not None:
                    sums = sum(backwards[stage] for stage in bucket.stages)
                gradients = [float(numbers * size) for numbers in sizes]
                lines.reduce_scatter(shared, gradients, "backward", "gradients", sums)
                lines.all_reduce(copies, own, size, "backward", "gradients", times)
                if plan.data != "zero3":
                    self._weights(bucket, "optimizer", times)
            if bucket.mirrored:
                lines.all_reduce("mirror", own, size, "backward", "gradients", times)
        if plan.data == "zero3":
            units = GatheredUnits(self.placement, self.layout, lines.rank, self.element)
            for (bucket, phase), count in units.gathers.items():
                self._weights(bucket, phase, count)

    def _weights(self, bucket: Bucket, phase: str, times: int) -> None:
        """Weights are gathered from those that own them."""
        parts = [float(numbers * bucket.weight_bytes) for numbers in self._owned(bucket)]
        shared, _ = self.layout.sharding_axes(bucket.axis)
        self.lines.all_gather(shared, parts, phase, "weights", times)

    def _owned(self, bucket: Bucket) -> tuple[int, ...]:
        ranks = self.lines.size(self.layout.sharding_axes(bucket.axis)[0])
        return owned_sizes(bucket.numbers, ranks, self.plan.owners(bucket.axis, ranks))

    def _squares(self, tensors: list[ParameterTensor] | None = None) -> int:
        """Number of sums of squares: of what trains of `tensors`, by default of the whole model."""
        found = self.placement.every_tensor() if tensors is None else tensors
        return sum(one.shape[0] if one.is_expert else 1 for one in found if one.trains)

    def _stream(self) -> None:
        plan, lines = self.plan, self.lines
        window = plan.num_update_microbatches
        updates = plan.microbatches // window
        self._counts(window, updates)
        self._gradients(updates)
        squares = self._squares(self.placement.held(self.at))
        lines.all_reduce("stage", squares, _FLOAT64, "optimizer", "gradient_norm", updates)
        stages = self.placement.stages(self.at)
        here = {index for stage in stages for index in self.placement.layers_of(stage)}
        if self.model.router_selection_bias and any(map(self.model.is_moe_layer, here)):
            numbers = self.loads
            lines.all_reduce("stage", numbers, _INT64, "optimizer", "stream.loads", updates)
        report = 5 + self.ahead + self.loads + self.layers
        lines.all_reduce("world", report, _FLOAT64, "optimizer", "step.report")
        if plan.schedule == "ampnet":
            # A header of two numbers before every message and at the end of the stream, each way;
            # and what the first rank of a stage tells the others to run.
            size, count = 2 * _INT64, self.plan.microbatches + 1
            neighbours = (self.at > 0) + (self.at < self.plan.pp - 1)
            for sends in (True, False):
                times = count * neighbours
                self.lines.message("world", size, "control", "pipeline", times, sends=sends)
            told = 2 * self.plan.microbatches + 1
            self.lines.broadcast("stage", size, "control", "pipeline", told)
