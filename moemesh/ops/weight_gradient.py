"""Deferred weight gradients: a queue that splits a backward into its input and weight halves.

Zero-bubble pipelines (Qi et al., 2024) run the input-gradient half `I` of a microbatch at once and
its weight-gradient half `W` when the pipeline would otherwise idle. The matrix products of
:mod:`moemesh.ops` call :func:`weight_gradient` for their weights' gradients, those of experts for
each stack: usually it is computed at once; inside a :class:`WeightGradientQueue` it is stored as a
closure that holds only what `W` needs. Where no backward will run in a queue
(:attr:`Deferral.is_possible`) autograd computes it, without any Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moemesh.ops.saved import Held
from moemesh.trace.memory_profile import DEFERRED


class Deferral:
    """The state of the whole process, not of a thread: on CUDA the autograd engine runs the
    backward in threads of its own. Only one backward runs at a time."""

    #: The active queue.
    queue: WeightGradientQueue | None = None
    #: Whether the backward of a product that is computed now may run in a queue. The caller that
    #: sets False runs that backward before it sets True.
    is_possible = True


deferral = Deferral()


class WeightGradientQueue:
    """Collects weight gradients while active (a context manager); :meth:`run` computes them, in the
    order of the backward. Additions to a weight's gradient have the same order, and bits, as
    without a queue."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, Callable[[], Tensor], list[Held]]] = []

    def __len__(self) -> int:
        return len(self._pending)

    def __enter__(self) -> WeightGradientQueue:
        assert deferral.queue is None, "weight gradients are already being deferred"
        deferral.queue = self
        return self

    def __exit__(self, *failure: object) -> None:
        deferral.queue = None

    def append(self, weight: Tensor, compute: Callable[[], Tensor], kept: Sequence[Tensor]) -> None:
        """Queue ``compute()`` for `weight`. `kept`: tensors of activation size that it holds."""
        self._pending.append((weight, compute, [Held(tensor, DEFERRED) for tensor in kept]))

    @torch.no_grad()
    def run(self, accumulate: Callable[[Tensor, Tensor], None] | None = None) -> None:
        """Compute every pending gradient and call ``accumulate(weight, gradient)``.

        The default adds to ``weight.grad``. Autograd's accumulation hooks are not called: a reducer
        of gradients passes its own `accumulate`.
        """
        pending, self._pending = self._pending, []
        # Popped in the order of the backward: a closure is freed, with its tensors, after it runs.
        pending.reverse()
        while pending:
            weight, compute, _ = pending.pop()
            (accumulate or add_to_grad)(weight, compute())


def add_to_grad(weight: Tensor, gradient: Tensor) -> None:
    """``weight.grad += gradient``, creating it when absent."""
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad += gradient


def weight_gradient(
    weight: Tensor, compute: Callable[[], Tensor], kept: Sequence[Tensor]
) -> Tensor | None:
    """The gradient of the leaf `weight`: ``compute()``, or None if the active queue has taken it.
    `kept`: the tensors of activation size that `compute` holds."""
    if deferral.queue is None:
        return compute()
    deferral.queue.append(weight, compute, kept)
    return None
