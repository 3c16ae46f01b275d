"""Activation recomputation: parts of a forward are recomputed in the backward, not kept.

| plan.recompute | kept of a layer | recomputed | communication repeated |
|---|---|---|---|
| none | all tensors that autograd saves | nothing | nothing |
| selective | inputs of matrix products, and most outputs | see below | heads or keys over cp |
| full | the residual stream before it | its forward | all but its plans and last exchange |

``selective`` recomputes

- with ``recompute_attention`` what lies between the two projections of an attention block (norms,
  rotary positions, scaled dot-product attention; Korthikanti et al., "Reducing Activation
  Recomputation in Large Transformer Models", 2022): the exchange over cp before that attention is
  repeated, of keys and values, or of heads (``context = all_to_all``);
- with ``recompute_experts`` gate and up of the routed experts from their received rows: two of the
  experts' three products with weights are repeated, without any exchange;
- the product ``silu(gate) * up`` of dense and shared MLPs. (Routed experts never keep theirs.)

``full``: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, a layer at a time.
When the backward of a layer begins, its forward is recomputed up to the last tensor that the
backward reads. If the backward is split, this happens in `I`, and the deferred weight gradients
keep the recomputed inputs. Choices of experts, exchanged counts and dispatch plans are replayed: no
token is routed or counted twice. Exchanges after the last saved tensor are not repeated: the
combine of a MoE layer, the exit of a dense MLP. The exit of a shared expert is repeated, since it
comes before the routed experts.

Legend: R rows at the experts, H hidden.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moemesh.config.plan import Plan
from moemesh.model.attention import AttentionBlock
from moemesh.model.batch import Context
from moemesh.model.experts import Experts
from moemesh.model.layers import MLP
from moemesh.model.seams import Flow, Memory
from moemesh.model.transformer import Transformer
from moemesh.ops.linear import SwigluOf
from moemesh.ops.pending import Pending
from moemesh.ops.saved import Held
from moemesh.trace.ledger import Ledger

R = TypeVar("R")
X = TypeVar("X")
P = ParamSpec("P")


def set_recompute(model: Transformer, plan: Plan, ledger: Ledger) -> None:
    """Apply `plan.recompute` to `model`; repeated exchanges enter `ledger` as "recompute"."""
    memory = Recomputation(ledger)
    if plan.recompute == "full":
        model.memory = memory
    if plan.recompute != "selective":
        return
    for module in model.modules():
        if isinstance(module, AttentionBlock) and plan.recompute_attention:
            module.memory = memory
        elif isinstance(module, Experts):
            module.recomputes = plan.recompute_experts
        elif isinstance(module, MLP):
            module.activate = partial(SwigluOf, form=module.form)


class Recomputation(Memory):
    """Keeps the input of a part, and recomputes the part in its backward."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def run(self, part: Callable[[X, Context], R], x: X, context: Context) -> R:
        """``part(x, context)``, recomputed in its backward: until then all else that `part` reads
        must not change."""
        if not torch.is_grad_enabled():
            return part(x, context)
        frame = _Frame(part, x, replace(context, flow=RecomputeTape(self.ledger)))
        with saved_tensors_hooks(frame.pack, lambda place: place.frame.take(place.index)):
            return part(x, frame.context)


class _Place:
    """Placeholder in autograd's graph of a tensor that is recomputed on demand."""

    def __init__(self, frame: _Frame, index: int) -> None:
        self.frame, self.index = frame, index


class _Frame:
    """One run of a part: its input, and the places of the tensors that its backward reads.

    It works like ``torch.utils.checkpoint(use_reentrant=False)`` with early stop, except that
    recomputed tensors enter the memory profile (:class:`~moemesh.ops.saved.Held`), and that the
    state of random number generators is not saved: our random numbers are functions of ids.
    """

    def __init__(self, part: Callable[[Any, Context], Any], x: Any, context: Context) -> None:
        self.part, self.context = part, context
        #: Type of a tuple of inputs; None for a single tensor.
        self._kind = None if isinstance(x, Tensor) else type(x)
        inputs = (x,) if isinstance(x, Tensor) else x
        self._inputs = [None if tensor is None else Held(tensor) for tensor in inputs]
        self._places: list[weakref.ref[_Place]] = []
        self._computed: dict[int, Held] = {}

    def pack(self, tensor: Tensor) -> _Place:
        """The place of the next tensor that the forward saves. This frame has a weak reference to
        it: a tensor whose place autograd has dropped is not kept when it is recomputed."""
        place = _Place(self, len(self._places))
        self._places.append(weakref.ref(place))
        return place

    def take(self, index: int) -> Tensor:
        """The tensor of a place, for the backward; all are computed at the first call."""
        if index not in self._computed:
            number = 0

            def pack(tensor: Tensor) -> Tensor:
                nonlocal number
                if self._places[number]() is not None:
                    self._computed[number] = Held(tensor.detach())
                number += 1
                if number == len(self._places):
                    raise _Enough
                return tensor.detach()

            recomputed = [
                held and held.tensor.detach().requires_grad_(held.tensor.requires_grad)
                for held in self._inputs
            ]
            tape, hooks = self.context.flow, saved_tensors_hooks(pack, lambda tensor: tensor)
            assert isinstance(tape, RecomputeTape)
            with suppress(_Enough), tape, torch.enable_grad(), hooks:
                self.part(
                    recomputed[0] if self._kind is None else self._kind(*recomputed), self.context
                )
        return self._computed.pop(index).tensor


class _Enough(Exception):
    """All saved tensors have been recomputed."""


class RecomputeTape(Flow):
    """Records decisions in the first forward; inside its context, it replays them. ``pause`` and
    ``cut`` of :class:`Flow` do nothing here: a recomputed layer runs at once, in one graph."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._decisions: list[Any] = []
        self._playing: Iterator[Any] | None = None
        self._scope = nullcontext()

    def __enter__(self) -> None:
        self._playing = iter(self._decisions)
        self._scope = self._ledger.scope("recompute")
        self._scope.__enter__()

    def __exit__(self, *failure: object) -> None:
        # Usually left by _Enough, before the end of the part.
        self._scope.__exit__(None, None, None)
        self._playing = None

    def once(self, decide: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if self._playing is not None:
            return next(self._playing)
        self._decisions.append(decide(*args, **kwargs))
        return self._decisions[-1]

    def unread(
        self, send: Callable[[Tensor, Any], Pending[Tensor]], y_RH: Tensor, plan: Any, rows: int
    ) -> Pending[Tensor]:
        if self._playing is None:
            return send(y_RH, plan)
        # NaN, so that a backward that reads it after all gives NaN.
        unread = y_RH.new_full((1, 1), torch.nan)
        return Pending.ready(unread.expand(rows, y_RH.shape[1]))
