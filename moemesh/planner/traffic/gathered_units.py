"""Gathers of ZeRO-3, by walking the operations of a rank: which weights come when, and how many
are here at once.

It follows `moemesh.parallel.data.units`: a unit is gathered before it is used, the next one with
it, and freed behind its last use, unless `plan.reshard` keeps it for the step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain, pairwise

from moemesh.config.buckets import Bucket
from moemesh.config.layout import Layout
from moemesh.planner.traffic.ledger_lines import members
from moemesh.planner.traffic.tensors import StagePlacement, data_buckets


@dataclass(eq=False)
class _Weights:
    """The weights of one bucket, shared by several ranks."""

    bucket: Bucket
    users: int = 0
    is_here: bool = False


class GatheredUnits:
    """One step of one rank under ``plan.data = zero3``. ``gathers``: (bucket, phase) -> how often
    its weights are gathered; ``most_bytes``: of weights that are here, or on their way, at once."""

    def __init__(
        self, placement: StagePlacement, layout: Layout, rank: int, element_bytes: int
    ) -> None:
        self._placement, self._model = placement, placement.model
        self._keeps = placement.plan.reshard == "step"
        self.gathers: Counter[tuple[Bucket, str]] = Counter()
        self.most_bytes = 0
        self._units: dict[str, list[_Weights]] = {}
        self._all: list[_Weights] = []
        for bucket in data_buckets(placement, layout, rank, element_bytes):
            assert bucket.unit is not None
            if len(members(layout, layout.sharding_axes(bucket.axis)[0], rank)) > 1:
                weights = _Weights(bucket)
                self._all.append(weights)
                self._units.setdefault(bucket.unit, []).append(weights)
        if self._model.tied_embeddings:
            both = [*self._units.get("head", ()), *self._units.get("embedding", ())]
            self._units = self._units | {"head": both}
        schedule, pp_rank = placement.schedule, layout.coordinates(rank)["pp"]
        following: dict[tuple[str, str], set[str]] = {}
        for stage in placement.stages(pp_rank):
            for before, after in chain.from_iterable(map(pairwise, self._sequences(stage))):
                following.setdefault(("forward", before), set()).add(after)
                if before != "embedding" and placement.has_backward(before):
                    following.setdefault(("backward", after), set()).add(before)
        #: The unit to gather ahead, where it is always the same one.
        self._next = {key: units.pop() for key, units in following.items() if len(units) == 1}
        for op in schedule.ops(pp_rank):
            if op.kind == "F":
                for unit in chain.from_iterable(self._sequences(op.stage)):
                    self._gather(unit, "forward")
                    self._free(unit)
            elif op.kind == "B":
                main, *ahead = self._sequences(op.stage)
                reached = [unit for unit in main if placement.has_backward(unit)]
                for _, layer, head in ahead:
                    reached += [layer, head] if placement.has_backward(layer) else []
                for unit in reversed(reached):
                    if unit != "embedding":  # its backward reads no weights
                        self._gather(unit, "backward")
                        self._free(unit)

    def _sequences(self, stage: int) -> list[list[str]]:
        """The units that a forward reads, in their order; each extra prediction layer apart."""
        layers = [f"layers.{index}" for index in self._placement.layers[stage]]
        if stage < self._placement.schedule.num_stages - 1:
            return [["embedding"] * (stage == 0) + layers]
        ahead = [["embedding", f"layers.{index}", "head"] for index in self._model.mtp_layers]
        return [["embedding"] * (stage == 0) + layers + ["head"], *ahead]

    def _gather(self, unit: str, phase: str) -> None:
        for weights in self._units.get(unit, ()):
            self._start(weights, phase)
            weights.users += 1
        for weights in self._units.get(self._next.get((phase, unit), ""), ()):
            self._start(weights, phase)
        here = (one.bucket for one in self._all if one.is_here)
        held = sum(bucket.numbers * bucket.weight_bytes for bucket in here)
        self.most_bytes = max(self.most_bytes, held)

    def _start(self, weights: _Weights, phase: str) -> None:
        if not weights.is_here:
            weights.is_here = True
            self.gathers[weights.bucket, phase] += 1

    def _free(self, unit: str) -> None:
        for weights in self._units.get(unit, ()):
            weights.users -= 1
            if not self._keeps and not weights.users:
                weights.is_here = False
