"""The contract between a router's choice and the experts: plan, dispatch, combine.

Legend: T tokens, K slots per token, N source rows, R rows grouped by local expert, E (L) experts
(local ones), H hidden. Dispatchers do not inherit from one another; all pass one shared test.

| call | in | out | may communicate |
|---|---|---|---|
| plan | experts [T, K] | rows from and to each rank; no gradient; reusable | ids and counts |
| dispatch | x [T, H], weights [T, K] | the local experts' :class:`ExpertRows` | rows, weights |
| combine | y [R, H] | unweighted sum per token [T, H] | rows |

dispatch and combine start an exchange, and return a :class:`~moemesh.ops.pending.Pending` that
waits for it. The backward of dispatch is a combine with the same plan, that of combine a dispatch.
Rows of an expert ascend by owner (the rank of the row's token), then by token.
An entry -1 of experts [T, K] is a choice without an expert. Any T >= 0, any number of -1 per token
and R = 0 are legal; the same collectives run in all cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Unpack

import torch
from torch import Tensor

from moemesh.ops.expert_mlp import ExpertOptions, expert_mlp
from moemesh.ops.expert_weights import ExpertWeights
from moemesh.ops.pending import Pending
from moemesh.ops.permute import OwnSlots, RowMap, SortedByExpert, linear_map, permute, unpermute


class ExpertRows(Protocol):
    """Rows of the local experts, copied by `map` and grouped by expert."""

    @property
    def map(self) -> RowMap: ...

    def compute(self, experts: ExpertWeights, **options: Unpack[ExpertOptions]) -> Tensor:
        """The experts' weighted outputs [R, H]; see :func:`~moemesh.ops.expert_mlp.expert_mlp`."""
        ...


class DispatchedRows(NamedTuple):
    """The :class:`ExpertRows` of most dispatchers, copied from `source_NH`, with the router's
    weights (fp32 or fp64) and the number of rows of each expert (int64)."""

    source_NH: Tensor
    map: RowMap
    weights_R: Tensor
    counts_L: Tensor

    def compute(self, experts: ExpertWeights, **options: Unpack[ExpertOptions]) -> Tensor:
        return expert_mlp(*self, experts, **options)

    def as_routing(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Arguments of an :data:`~moemesh.ops.expert_kernels.ExpertKernel`, which replaces
        :meth:`compute`: tokens, weights and ids of local experts; each row is a token with one
        slot. None: some rows have no expert."""
        if self.map.has_rest:
            return None
        ids_L = torch.arange(len(self.counts_L), device=self.counts_L.device)
        experts_R = ids_L.repeat_interleave(self.counts_L, output_size=self.map.num_rows)
        return permute(self.source_NH, self.map), self.weights_R[:, None], experts_R[:, None]


class Dispatcher(Protocol):
    """The contract in the module's table. The type of a plan is private to the dispatcher. A
    dispatcher defines `plan`, or `plan_chunks` if it makes the plans of all chunks with one
    exchange and one wait."""

    def plan(self, experts_TK: Tensor) -> Any:
        return self.plan_chunks([experts_TK])[0]

    def plan_complete(self, experts_TK: Tensor) -> Any:
        """:meth:`plan` if the caller knows, on the host, that no entry is -1."""
        return self.plan(experts_TK)

    def plan_chunks(self, chunks: Sequence[Tensor], *, is_complete: bool = False) -> list[Any]:
        """:meth:`plan` of each chunk of the tokens."""
        plan = self.plan_complete if is_complete else self.plan
        return [plan(experts_TK) for experts_TK in chunks]

    def dispatch(self, x_TH: Tensor, weights_TK: Tensor, plan: Any) -> Pending[Any]: ...

    def combine(self, y_RH: Tensor, plan: Any) -> Pending[Tensor]: ...

    def close(self) -> None:
        """Free memory outside of torch; all ranks call it, at the end. Default: nothing."""


class LocalRows(NamedTuple):
    """The :class:`ExpertRows` of a layer whose experts are all local. :meth:`compute` also picks
    the rows' weights and sums the rows of each token: the layer after its router is one node of
    autograd (:func:`~moemesh.model.moe.plain_exchange`). ``map`` is ``slots.tokens``."""

    x_TH: Tensor
    map: RowMap
    weights_TK: Tensor
    slots: OwnSlots

    def as_routing(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """The arguments of a kernel: see :meth:`DispatchedRows.as_routing`."""
        if self.slots.experts_TK is None:
            return None
        return self.x_TH, self.weights_TK, self.slots.experts_TK

    def compute(self, experts: ExpertWeights, **options: Unpack[ExpertOptions]) -> Tensor:
        """Sums [T, H]."""
        x_TH, rows, weights_TK, slots = self
        return expert_mlp(x_TH, rows, weights_TK, slots.counts_E, experts, slots=slots, **options)


class LocalDispatcher(Dispatcher):
    """All experts are local: sort rows by expert, compute, sum by token. The host never waits for
    an accelerator: choices without an expert get padding rows at the end, neither computed nor
    read."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def plan(self, experts_TK: Tensor) -> OwnSlots:
        sorted_ = SortedByExpert(experts_TK, self.num_experts)
        counts_E = sorted_.counts_E
        if experts_TK.device.type == "cpu":
            return OwnSlots(*sorted_.rows(int(counts_E.sum())), counts_E)
        return OwnSlots(*sorted_.rows_and_rest(), counts_E, none_TK=experts_TK < 0)

    def plan_complete(self, experts_TK: Tensor) -> OwnSlots:
        if experts_TK.device.type == "cpu":
            return self.plan(experts_TK)._replace(experts_TK=experts_TK)
        sorted_ = SortedByExpert(experts_TK, self.num_experts, is_complete=True)
        rows = sorted_.rows(experts_TK.numel())
        return OwnSlots(*rows, sorted_.counts_E, experts_TK=experts_TK)

    def dispatch(self, x_TH: Tensor, weights_TK: Tensor, plan: OwnSlots) -> Pending[DispatchedRows]:
        weights_R = pick_own_weights(weights_TK, plan)
        return Pending.ready(DispatchedRows(x_TH, plan.tokens, weights_R, plan.counts_E))

    def combine(self, y_RH: Tensor, plan: OwnSlots) -> Pending[Tensor]:
        return Pending.ready(unpermute(y_RH, plan.tokens))


def pick_own_weights(weights_TK: Tensor, slots: OwnSlots) -> Tensor:
    """:func:`pick_weights` if each (token, slot) has at most one row: the backward writes
    gradients instead of adding them."""
    return linear_map(weights_TK, slots.pick, lambda g: slots.unpick(g, weights_TK.shape))


def pick_weights(weights_TK: Tensor, slot_R: Tensor) -> Tensor:
    """The router's weight of each row [R], with autograd; `slot_R` is ``token * K + slot``."""
    return weights_TK.reshape(-1).gather(0, slot_R)
