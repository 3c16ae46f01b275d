"""The predicted activations of a run of our own library on a CPU: what is kept for the backward.

:mod:`.own_layers` says what each part of a forward keeps; here a rank's operations are walked in
their order. A forward keeps, a backward gives back from the last layer to the first: what its
recomputation makes first comes on top, and an input half keeps what its weight half will read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cache

from moemesh.config.layout import Layout
from moemesh.planner.traffic.own_layers import LayerMemory
from moemesh.planner.traffic.routing import Routing
from moemesh.planner.traffic.saved import Layer
from moemesh.planner.traffic.tensors import StagePlacement
from moemesh.schedule.action import Op
from moemesh.trace.memory import DEFERRED


def predict_activations(
    placement: StagePlacement,
    layout: Layout,
    *,
    global_batch: int,
    element: int,
    rank: int = 0,
    routing: Routing | None = None,
) -> dict[str, int]:
    """Bytes by kind that `rank` keeps for its backward at the fullest moment of a step.

    `routing` None: uniform. Replicas of experts are priced as if there were none.
    """
    memory = LayerMemory(placement, layout, global_batch, element, rank, routing)
    schedule, pp_rank = placement.schedule, layout.coordinates(rank)["pp"]
    layers = cache(memory.stage)
    walk = _Walk(placement.plan.recompute == "full")

    def of(op: Op) -> list[Layer]:
        return layers(op.stage, schedule.sample(op) * schedule.num_slices + op.slice)

    for entry in schedule.orders[pp_rank]:
        # In a block the forward counts before anything is given back.
        for op in sorted(entry, key=lambda op: op.kind != "F"):
            match op.kind:
                case "F":
                    walk.forward(of(op))
                case "W":
                    walk.weight_gradients(of(op))
                case kind:
                    walk.backward(of(op), is_split=kind == "I")
    return {kind: round(size) for kind, size in walk.peak.items() if round(size)}


class _Walk:
    """What is kept, operation by operation, and the most so far."""

    def __init__(self, is_full: bool) -> None:
        self._is_full = is_full
        self._kept: defaultdict[str, float] = defaultdict(float)
        self._total = self._most = 0.0
        self.peak: dict[str, float] = {}

    def _add(self, kind: str, size: float) -> None:
        self._kept[kind] += size
        self._total += size
        if self._total > self._most:
            self._most, self.peak = self._total, dict(self._kept)

    def forward(self, layers: Iterable[Layer]) -> None:
        seen: set[str] = set()
        for layer in layers:
            if self._is_full and layer.again is not None:
                self._add("stream", layer.again)
                continue
            for saved in layer.saved:
                if not saved.is_again and not (saved.is_shared and saved.kind in seen):
                    self._add(saved.kind, saved.size)
                if saved.is_shared:
                    seen.add(saved.kind)

    def backward(self, layers: list[Layer], *, is_split: bool) -> None:
        first: dict[str, int] = {}
        for index, layer in enumerate(layers):
            for saved in layer.saved:
                if saved.is_shared:
                    first.setdefault(saved.kind, index)
        for index in reversed(range(len(layers))):
            layer = layers[index]
            is_whole = self._is_full and layer.again is not None
            made = is_whole
            if is_whole:
                self._add(layer.saved[0].kind, -layer.entry)
                for saved in layer.saved:
                    self._add(saved.kind, saved.size)
            for saved in reversed(layer.saved):
                if saved.is_again and not made:
                    made = True
                    for other in layer.saved:
                        if other.is_again:
                            self._add(other.kind, other.size)
                stays = saved.held if is_split else 0.0
                if is_split:
                    self._add(DEFERRED, saved.gradient)
                is_kept_on = saved.is_shared and not saved.is_again and index > first[saved.kind]
                if is_whole or not is_kept_on:
                    self._add(saved.kind, stays - saved.size)
            if is_whole:
                assert layer.again is not None
                self._add("stream", -layer.again)
                self._add(layer.saved[0].kind, layer.entry)

    def weight_gradients(self, layers: Iterable[Layer]) -> None:
        for layer in layers:
            for saved in layer.saved:
                self._add(saved.kind, -saved.held)
                self._add(DEFERRED, -saved.gradient)
