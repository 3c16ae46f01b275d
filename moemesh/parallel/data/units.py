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
from torch import Tensor, nn

from moemesh.comm.transfers import all_gather_start
from moemesh.config.plan import Reshard
from moemesh.model.transformer import ModelPart
from moemesh.parallel.data.buckets import ScatteredBucket, Wait

# Buckets of zero3: weights that are gathered before their use and freed after it.


class GatheredBucket(ScatteredBucket):
    """Weights are sharded, too: all of them are here only from :meth:`gather` to :meth:`free`.

    Parameters stay views of one flat vector, whose memory comes and goes: what autograd has saved
    of them finds it again in the backward.
    """

    def allocate(self) -> None:
        super().allocate()
        self._own_weights = self.weights[self.own.start : self.own.stop]
        self._bytes = self.weights.untyped_storage().nbytes()
        #: Uses at this moment; the gather that has started and was not waited for.
        self.users, self._arriving = 0, None
        self.is_here = self.axis.size == 1
        if not self.is_here:
            self._own_weights = self._own_weights.clone()
            self._release()

    def _clear(self) -> None:
        super()._clear()
        #: Gradients as they came: the vector of all is made when it is sent, behind the sums of the
        #: unit before. Two such vectors at once would be more memory than a rank's share.
        self._waiting_gradients: dict[nn.Parameter, Tensor] = {}

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        if self.axis.size == 1:
            super().add(parameter, gradient)
            return
        before = self._waiting_gradients.get(parameter)
        self._waiting_gradients[parameter] = (
            gradient if before is None else before.to(self.dtype) + gradient
        )

    @property
    def buffer_bytes(self) -> int:
        waiting = self._waiting_gradients.values()
        return super().buffer_bytes + sum(one.numel() * one.element_size() for one in waiting)

    def launch(self) -> None:
        while self._waiting_gradients:
            super().add(*self._waiting_gradients.popitem())
        super().launch()

    def own_flat_weights(self) -> Tensor:
        return self._own_weights

    def whole_weights(self, name: str) -> Tensor:
        parts = {member: place for member, _, place in self.ranges(self.own)}
        part = self._own_weights[parts[name]] if name in parts else self._own_weights[:0]
        return self.whole(name, part)

    @property
    def kept_weights(self) -> range:
        return self.own

    def publish(self) -> Wait | None:
        return None

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the weights that are here beside the own share."""
        return self.weights.untyped_storage().nbytes() if self.axis.size > 1 else 0

    def start_gather(self, phase: str) -> None:
        """Start to gather the weights, unless they are here or on their way."""
        if self.is_here or self._arriving is not None:
            return
        self.weights.untyped_storage().resize_(self._bytes)
        self._arriving = all_gather_start(
            self._own_weights,
            self.axis,
            self.sizes,
            into=self.weights,
            phase=phase,
            caller="weights",
        )

    def gather(self, phase: str) -> None:
        """One more use of the weights begins: they are here when this returns."""
        self.start_gather(phase)
        self.users += 1
        if self._arriving is not None:
            self._arriving()
            self._arriving, self.is_here = None, True

    def free(self, *, keep: bool = False) -> None:
        """A use ends; `keep`: the weights stay for others to come."""
        self.users -= 1
        if not keep:
            self.free_unused()

    def free_unused(self) -> None:
        """Give the memory back if nobody uses the weights; a rank alone keeps them."""
        if self.users == 0 and self._arriving is not None:
            self._arriving()
            self._arriving, self.is_here = None, True
        if self.users == 0 and self.is_here and self.axis.size > 1:
            self._release()

    def _release(self) -> None:
        self.weights.untyped_storage().resize_(0)
        self.is_here = False


# A rank's units, each in a bucket a parameter class.


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
