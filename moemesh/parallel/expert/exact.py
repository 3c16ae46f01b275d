"""Deterministic combine: outputs return unreduced and are summed in expert order.

Sums on the experts' rank depend on which experts share it, hence on ep and on the dispatcher. With
this combine all K weighted rows of a token return to its owner, which adds them in ascending expert
id, in fp32 at least, and casts once; the backward of dispatch does the same. The bits do not depend
on the ranks that computed or forwarded a row. Under etp a row is first summed over the shards of
its expert's width: bits depend on etp.

Legend: N rows received; R rows at the experts, ordered by (expert, owner, token); E (L) experts
(local ones); P ranks of ep; O owners, the ranks of the ep*etp group; T own tokens; K slots per
token; S own (token, slot) rows ordered by expert; H hidden.

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| plan | experts T x K | the dispatcher's | as the dispatcher | none |
| dispatch | T x H | R x H | as the dispatcher | as combine |
| combine | R x H, partial over etp | T x H | reduce_scatter, all_to_all | all_to_all, all_gather |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Unpack

import torch
from torch import Tensor

from moemesh.comm import collectives
from moemesh.comm.mesh import Axis
from moemesh.model.dispatcher import Dispatcher
from moemesh.ops.exact_experts import exact_experts
from moemesh.ops.expert_mlp import ExpertOptions
from moemesh.ops.expert_weights import ExpertWeights
from moemesh.ops.host_copy import HostCopy
from moemesh.ops.pending import Pending
from moemesh.ops.permute import (
    RowMap,
    SortedByExpert,
    gather_rows,
    identity,
    linear_map,
    map_from_sources,
    permutation,
    unpermute,
)


class OwnerCounting(Dispatcher, Protocol):
    """A dispatcher that :class:`Exact` can wrap."""

    def rows_per_owner(self, plan: Any) -> Tensor:
        """Rows of each local expert and owner of their tokens, int64 [L, O]. No communication."""


class ExactRows(NamedTuple):
    """:class:`~moemesh.model.dispatcher.ExpertRows` whose experts add their weight gradients in an
    order that the layout does not change; ``counts_LO``: rows per expert and owner."""

    source_NH: Tensor
    map: RowMap
    weights_R: Tensor
    counts_L: Tensor
    counts_LO: Tensor

    def compute(self, experts: ExpertWeights, **options: Unpack[ExpertOptions]) -> Tensor:
        """The experts' output. Sums run over all rows of an expert: `options` that defer gradients
        or cut rows into blocks are ignored."""
        recomputes = options.get("recomputes", False)
        return exact_experts(self.source_NH, self.weights_R, self.counts_LO, experts, recomputes)


@dataclass(frozen=True, kw_only=True)
class ExactPlan:
    """The wrapped dispatcher's plan (`inner`), and the combine: `by_owner` orders rows by lane and
    owner, `lane_rows` and the splits are sizes of its exchanges, `tokens` maps the S rows that
    return to this rank's tokens."""

    inner: Any
    counts_LO: Tensor
    ep: Axis
    etp: Axis
    by_owner: RowMap
    lane_rows: list[int]
    input_splits: list[int]
    output_splits: list[int]
    tokens: RowMap

    def combine(self, y_RH: Tensor, caller: str) -> Tensor:
        """Rows in expert order [R, H] -> their sums over own tokens [T, H]."""
        # unpermute: rows into the order (lane, owner, expert, token).
        rows = unpermute(y_RH, self.by_owner)
        rows = collectives.reduce_scatter(rows, self.etp, self.lane_rows, caller=caller)
        own_SH = collectives.all_to_all(
            rows, self.ep, self.input_splits, self.output_splits, caller=caller
        )
        wide = torch.promote_types(own_SH.dtype, torch.float32)
        return unpermute(own_SH.to(wide), self.tokens).to(y_RH.dtype)


class Exact(Dispatcher):
    """Any dispatcher, with the deterministic combine in place of its own."""

    def __init__(self, inner: OwnerCounting, ep: Axis, etp: Axis) -> None:
        self.inner, self.ep, self.etp = inner, ep, etp

    def plan(self, experts_TK: Tensor) -> ExactPlan:
        inner = self.inner.plan(experts_TK)
        counts_LO = self.inner.rows_per_owner(inner)
        # Both sides derive sizes without an exchange: the owner from its choices, the experts' rank
        # from rows per local expert and owner. An owner's number is (ep index) * ETP + (etp index);
        # `place` orders rows by lane, ep index of the owner and local expert.
        ep, etp, (num_local, num_owners) = self.ep, self.etp, counts_LO.shape
        owner = torch.arange(num_owners, device=counts_LO.device).expand(num_local, -1)
        expert = torch.arange(num_local, device=counts_LO.device)[:, None]
        place = (owner % etp.size * ep.size + owner // etp.size) * num_local + expert
        sorted_ = SortedByExpert(experts_TK, num_local * ep.size)
        sent_P = sorted_.counts_E.view(ep.size, num_local).sum(1)
        numbers: list[int] = HostCopy(torch.cat([counts_LO.sum(0), sent_P])).tolist()
        rows_O, sent = numbers[:num_owners], numbers[num_owners:]
        place_R = torch.repeat_interleave(
            place.flatten(), counts_LO.flatten(), output_size=sum(rows_O)
        )
        order_R = torch.argsort(place_R, stable=True)
        own_rows, _ = sorted_.rows(sum(sent))
        return ExactPlan(
            inner=inner,
            counts_LO=counts_LO,
            ep=ep,
            etp=etp,
            by_owner=permutation(torch.argsort(order_R)),
            lane_rows=[sum(rows_O[lane :: etp.size]) for lane in range(etp.size)],
            input_splits=rows_O[etp.index :: etp.size],
            output_splits=sent,
            # Rows are by expert: the rows of a token are added in ascending expert id.
            tokens=map_from_sources(own_rows.source_R, len(experts_TK)),
        )

    def dispatch(self, x_TH: Tensor, weights_TK: Tensor, plan: ExactPlan) -> Pending[ExactRows]:
        # Rows are sent without gradient: the backward of the exchange would sum the gradients of
        # copies in another order. A weight is sent to one expert only: its gradient has one addend.
        rows = self.inner.dispatch(x_TH.detach(), weights_TK, plan.inner).wait()
        travelled_RH = gather_rows(rows.source_NH, rows.map)

        def back(grad_RH: Tensor) -> Tensor:
            with self.ep.ledger.scope("backward"):
                return plan.combine(grad_RH, "moe.dispatch")

        x_RH = linear_map(x_TH, lambda _: travelled_RH, back)
        order = identity(len(x_RH), x_RH.device)
        return Pending.ready(ExactRows(x_RH, order, rows.weights_R, rows.counts_L, plan.counts_LO))

    def combine(self, y_RH: Tensor, plan: ExactPlan) -> Pending[Tensor]:
        return Pending.ready(plan.combine(y_RH, "moe.combine"))

    def close(self) -> None:
        self.inner.close()
