"""Units of weights that are gathered before they are read, and freed behind it (ZeRO-3).

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023: a unit is
gathered before its forward, freed behind it, and gathered once more for its backward; the next unit
in either direction is on its way meanwhile. A backward reaches the units through identities in the
autograd graph, on the residual stream in front of every unit and behind it. An embedding's backward
reads no weights: it is gathered for forwards only.

| plan.reshard | gathers of a step, M microbatches | held at once |
|---|---|---|
| always | 2 M (embedding: M) | the unit in use and the next one |
| step | 1 | every unit, from its first use to the end of the step |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from moemesh.config.plan import Reshard
from moemesh.model.transformer import ModelPart
from moemesh.parallel.data.gathered import GatheredBucket


class GatheredWeights:
    """The weights of all units of one rank, each in one bucket a parameter class."""

    def __init__(
        self,
        buckets: Iterable[GatheredBucket],
        parts: Iterable[ModelPart],
        *,
        ahead: Sequence[int],
        tied: bool,
        reshard: Reshard,
        without_backward: Collection[str] = (),
    ) -> None:
        """`parts`: those that this rank runs; `ahead`: extra prediction layers, which come behind
        the head; `tied`: the head reads the embedding's weights; `without_backward`: units that no
        backward reaches."""
        self._keeps = reshard == "step"
        #: The most bytes of weights that were here, or on their way, at once: of buckets that are
        #: shared by several ranks.
        self.most_bytes = 0
        self._all = list(buckets)
        by_unit: dict[str, list[GatheredBucket]] = {}
        for bucket in self._all:
            assert bucket.rule.unit is not None
            by_unit.setdefault(bucket.rule.unit, []).append(bucket)
        self._buckets = by_unit
        if tied and "head" in by_unit:
            self._buckets = by_unit | {"head": by_unit["head"] + by_unit["embedding"]}
        following: dict[tuple[str, str], set[str]] = {}
        for part in parts:
            # In the order of its forward; extra prediction layers apart, which not every one runs.
            layers = [f"layers.{index}" for index in part.layers]
            sequences = [["embedding"] * part.first + layers + ["head"] * part.last]
            if part.last:
                sequences += [["embedding", f"layers.{index}", "head"] for index in ahead]
            for units in sequences:
                for before, after in pairwise(units):
                    following.setdefault(("forward", before), set()).add(after)
                    if before != "embedding" and before not in without_backward:
                        following.setdefault(("backward", after), set()).add(before)
        #: The unit to gather ahead, where it is always the same one.
        self._next = {key: units.pop() for key, units in following.items() if len(units) == 1}

    def fetch(self, unit: str) -> None:
        self._gather(unit, "forward")

    def enter(self, unit: str, x: Tensor) -> Tensor:
        self.fetch(unit)
        if not torch.is_grad_enabled():
            return x
        return _InBackward.apply(x, lambda: self._free(unit, keep=self._keeps))

    def leave(self, unit: str, x: Tensor, *, read_again: bool = True) -> Tensor:
        self._free(unit, keep=self._keeps and torch.is_grad_enabled())
        if not read_again or not torch.is_grad_enabled():
            return x
        return _InBackward.apply(x, lambda: self._gather(unit, "backward"))

    def free_all(self) -> None:
        """The step is over: give the memory of all weights back."""
        for buckets in self._buckets.values():
            for bucket in buckets:
                bucket.free_unused()

    def _gather(self, unit: str, phase: str) -> None:
        for bucket in self._buckets[unit]:
            bucket.gather(phase)
        # Weights on their way are read soon; those that are kept are here after the first time.
        for bucket in self._buckets.get(self._next.get((phase, unit), ""), ()):
            bucket.start_gather(phase)
        held = sum(bucket.gathered_bytes for bucket in self._all)
        self.most_bytes = max(self.most_bytes, held)

    def _free(self, unit: str, *, keep: bool) -> None:
        for bucket in self._buckets[unit]:
            bucket.free(keep=keep)


class _InBackward(torch.autograd.Function):
    """The identity, which calls `function` when the backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return gradient, None
