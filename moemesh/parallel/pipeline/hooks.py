"""Gradient hooks: the sum over replicas of a gradient starts after its last backward of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor, nn

from moemesh.parallel.data.reducer import GradientReducer
from moemesh.schedule.action import Op, Schedule


class GradientHooks:
    """Passes complete gradients to a reducer, at the positions that the schedule fixes.

    `parameters`: stage -> its parameters on this rank; a tied embedding belongs to two stages. The
    gradient of those `in_parts` comes in several parts: it is complete when the backward is over.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        reducer: GradientReducer,
        in_parts: Collection[nn.Parameter] = (),
    ) -> None:
        self._reducer, self._in_parts = reducer, set(in_parts)
        #: Told of each operation before it begins, where somebody looks on.
        self.watch: Callable[[Op], None] | None = None
        #: Operations behind which gradients are complete, and which: for a step, or each of them.
        self._last: dict[Op, list[nn.Parameter]] = {}
        completing = [op for op in schedule.ops(rank) if op.kind in ("B", "W")]
        if reducer.is_per_backward:
            self._last = {op: list(parameters[op.stage]) for op in completing}
            return
        last: dict[nn.Parameter, Op] = {}
        for op in completing:
            last.update(dict.fromkeys(parameters[op.stage], op))
        for parameter, op in last.items():
            self._last.setdefault(op, []).append(parameter)

    def accumulate(self, weight: Tensor, gradient: Tensor) -> None:
        """Take a weight gradient that did not come through autograd."""
        assert isinstance(weight, nn.Parameter)
        self._reducer.accumulate(weight, gradient)

    def starting(self, op: Op) -> None:
        """A full backward hands its gradients over one by one: sums start while it still runs."""
        if self.watch is not None:
            self.watch(op)
        if op.kind == "B" and op in self._last:
            self._expect(op)
            self._reducer.arm(p for p in self._last[op] if p not in self._in_parts)

    def finished(self, op: Op) -> None:
        """After a weight-gradient half everything of the microbatch has been added."""
        if op not in self._last:
            return
        if op.kind == "W":
            self._expect(op)
            self._reducer.complete(self._last[op])
        elif self._in_parts:
            self._reducer.complete(p for p in self._last[op] if p in self._in_parts)
        if self._reducer.is_per_backward:
            self._reducer.close()

    def _expect(self, op: Op) -> None:
        if self._reducer.is_per_backward:
            self._reducer.expect(self._last[op])
