"""The exact way home: every (token, expert) row returns by itself and is added in expert order.

Pre-reduced sums depend on which experts share a rank, hence on ep and on the dispatcher. Here all K
weighted rows of a token come back and are added by their owner, in fp32 at least, in ascending
expert id, and cast once; the backward of dispatch takes the same way. Whoever computed a row, and
whoever forwarded it, the bits are the same.

Legend: R rows at the experts, ordered by (expert, owner, token); L local experts; O owners, the
ranks of the ep*etp group; S own (token, slot) rows ordered by expert; T own tokens; H hidden.

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| home | R x H, partial over etp | T x H | reduce_scatter, all_to_all | all_to_all, all_gather |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moemesh.comm import collectives
from moemesh.comm.mesh import Axis
from moemesh.ops.permute import RowMap, group_by_expert, map_from_sources, permutation, unpermute


@dataclass(frozen=True, kw_only=True)
class WayHome:
    """Where the rows of this rank's experts belong, and which rows come to this rank's tokens."""

    ep: Axis
    etp: Axis
    by_owner: RowMap
    lane_rows: list[int]
    input_splits: list[int]
    output_splits: list[int]
    tokens: RowMap

    def bring(self, y_RH: Tensor, caller: str) -> Tensor:
        """Rows in expert order [R, H] -> their sums over own tokens [T, H]."""
        # by_owner's inverse: the row at each place of the (lane, owner, expert, token) order.
        rows = unpermute(y_RH, self.by_owner)
        rows = collectives.reduce_scatter(rows, self.etp, self.lane_rows, caller=caller)
        own_SH = collectives.all_to_all(
            rows, self.ep, self.input_splits, self.output_splits, caller=caller
        )
        wide = torch.promote_types(own_SH.dtype, torch.float32)
        return unpermute(own_SH.to(wide), self.tokens).to(y_RH.dtype)


def plan_way_home(experts_TK: Tensor, counts_LO: Tensor, ep: Axis, etp: Axis) -> WayHome:
    """From what both sides know already: own choices, and rows per local expert and owner.

    Owner o = (ep index) * ETP + (etp index). No communication.
    """
    num_local, num_owners = counts_LO.shape
    owner = torch.arange(num_owners, device=counts_LO.device).expand(num_local, -1)
    expert = torch.arange(num_local, device=counts_LO.device)[:, None]
    place = (owner % etp.size * ep.size + owner // etp.size) * num_local + expert
    place_R = torch.repeat_interleave(place.flatten(), counts_LO.flatten())
    order_R = torch.argsort(place_R, stable=True)
    per_owner = counts_LO.sum(0).view(ep.size, etp.size)
    own, _, own_counts_E = group_by_expert(experts_TK, num_local * ep.size)
    return WayHome(
        ep=ep,
        etp=etp,
        by_owner=permutation(torch.argsort(order_R)),
        lane_rows=per_owner.sum(0).tolist(),
        input_splits=per_owner[:, etp.index].tolist(),
        output_splits=own_counts_E.view(ep.size, num_local).sum(1).tolist(),
        # Bags in ascending row order are bags in ascending expert id.
        tokens=map_from_sources(own.source_R, len(experts_TK)),
    )


class _DispatchExact(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, dispatch: Callable[[Tensor], Tensor], home: WayHome, caller: str
    ) -> Tensor:
        ctx.home, ctx.caller = home, caller
        return dispatch(x_TH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None, None, None]:
        with ctx.home.ep.ledger.scope("backward"):
            return ctx.home.bring(grad_RH, ctx.caller), None, None, None


def dispatch_exact(
    x_TH: Tensor, dispatch: Callable[[Tensor], Tensor], home: WayHome, *, caller: str
) -> Tensor:
    """``dispatch(x)``: rows in expert order [R, H], however they travel; backward: the way home.

    `dispatch` runs without gradient: copies made on the way would sum gradients in another order.
    """
    return _DispatchExact.apply(x_TH, dispatch, home, caller)
