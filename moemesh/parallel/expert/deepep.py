"""DeepEP's kernels as a dispatcher: optional, probed before use, through the V1 `Buffer`.

Legend: T own tokens (at least one: an empty rank sends a row without experts), K slots per token,
N rows received, one per token and rank, R rows by expert, L local experts, H hidden.

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| plan | experts T x K | local layout | none | none |
| dispatch | T x H | N x H | Buffer.dispatch: counts, rows, ids, weights | Buffer.combine(handle) |
| combine | N x H | T x H | Buffer.combine(handle) | Buffer.dispatch(handle) |

V1 exchanges counts inside the dispatch and nowhere else, so a plan is made complete by its first
dispatch; both backwards reuse the handle of that dispatch, and a repeated dispatch repeats the
exchange. A rank receives each token once, not once for each expert: this module groups the rows by
expert, and sums them per token before they return. The order of received rows (source rank, then
token) is observed, not documented by the kernels: the start-up self-test checks it. Calls finish
before they return; nothing overlaps.

**This module has been run against a stand-in for `deep_ep` only**, which follows the contract that
DeepEP documents (https://github.com/deepseek-ai/DeepEP, `Buffer` of version 1.2), and never on the
kernels themselves.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moemesh.comm.mesh import Axis
from moemesh.comm.transfers import record
from moemesh.config.errors import UserError
from moemesh.model.dispatcher import DispatchedRows, Dispatcher, pick_weights
from moemesh.ops.pending import Pending
from moemesh.ops.permute import (
    NoSecondDerivative,
    RowMap,
    at_least_one_row,
    group_by_expert,
    linear_map,
    unpermute,
)
from moemesh.parallel.expert.deepep_probe import INSTEAD, available
from moemesh.parallel.expert.site import DispatcherSite
from moemesh.trace.wire import WireBytes


class DeepEPError(UserError):
    """deepep is the chosen dispatcher and cannot run here."""


def connect(ep: Axis, hidden: int) -> Any:
    """A `deep_ep.Buffer` over the ranks of `ep` for rows of `hidden` bfloat16; one for all layers.
    All ranks call this at the same point, and :meth:`DeepEPDispatcher.close` at the end. Raises
    DeepEPError when the package has no such buffer, or none for this number of ranks."""
    probe = available()
    if probe.interface != "v1" or ep.group is None:
        raise DeepEPError(str(probe) if probe.missing else "deepep needs ep > 1")
    buffer_type = importlib.import_module("deep_ep").Buffer
    try:
        configs = [
            buffer_type.get_dispatch_config(ep.size),
            buffer_type.get_combine_config(ep.size),
        ]
    except AssertionError as error:
        raise DeepEPError(
            f"deepep has no default configuration for ep = {ep.size} ({error}). {INSTEAD}"
        ) from error
    # DeepEP refuses to run when torch's deterministic mode fills every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False
    row_bytes = 2 * hidden
    return buffer_type(
        ep.group,
        num_nvl_bytes=max(c.get_nvl_buffer_size_hint(row_bytes, ep.size) for c in configs),
        num_rdma_bytes=max(c.get_rdma_buffer_size_hint(row_bytes, ep.size) for c in configs),
        explicitly_destroy=True,
    )


class _Traffic(NamedTuple):
    """Entries of the ledger: rows that this rank sends, `num_own` of them to itself. Each row
    counts as sent straight to its rank: V1 does not report rows that it forwards inside a node."""

    axis: Axis
    num_sent: int
    num_own: int

    def enter(
        self, phase: str, caller: str, num_received: int, row_bytes: int, *, back: bool = False
    ) -> None:
        sent, received = (num_received, self.num_sent) if back else (self.num_sent, num_received)
        rows = (sent, sent - self.num_own, received - self.num_own)
        moved = WireBytes(*(number * row_bytes for number in rows))
        record(self.axis, "all_to_all", phase, caller, moved)


@dataclass(kw_only=True)
class DeepEPPlan:
    """Choices and their layout on this rank; `handle`, `experts_NK` and `by_expert` are set by a
    dispatch."""

    num_tokens: int
    experts_TK: Tensor
    layout: dict[str, Any]
    traffic: _Traffic
    handle: Any = None
    experts_NK: Tensor | None = None
    by_expert: RowMap | None = None


class DeepEPDispatcher(Dispatcher):
    """One copy of a token per rank, over NVLink inside a node and RDMA between nodes. `buffer`
    comes from :func:`connect`."""

    def __init__(self, ep: Axis, num_experts: int, buffer: Any) -> None:
        self.ep, self.num_experts, self.buffer = ep, num_experts, buffer
        self.num_local = num_experts // ep.size

    @classmethod
    def of(cls, site: DispatcherSite) -> DeepEPDispatcher:
        ep, config = site.mesh["ep"], site.config
        return cls(ep, config.num_experts, connect(ep, config.hidden_size))

    def plan(self, experts_TK: Tensor) -> DeepEPPlan:
        num_tokens = len(experts_TK)
        experts_TK = at_least_one_row(experts_TK, -1)
        per_rank, per_rdma_rank, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            experts_TK, self.num_experts
        )
        layout = {
            "num_tokens_per_rank": per_rank,
            "num_tokens_per_rdma_rank": per_rdma_rank,
            "num_tokens_per_expert": per_expert,
            "is_token_in_rank": in_rank,
        }
        sent_rows = per_rank.tolist()
        return DeepEPPlan(
            num_tokens=num_tokens,
            experts_TK=experts_TK,
            layout=layout,
            traffic=_Traffic(self.ep, sum(sent_rows), sent_rows[self.ep.index]),
        )

    def dispatch(
        self, x_TH: Tensor, weights_TK: Tensor, plan: DeepEPPlan
    ) -> Pending[DispatchedRows]:
        x_NH, weights_NK = _Dispatch.apply(
            at_least_one_row(x_TH), at_least_one_row(weights_TK), plan, self.buffer
        )
        assert plan.experts_NK is not None
        plan.by_expert, slot_R, counts_L = group_by_expert(plan.experts_NK, self.num_local)
        return Pending.ready(
            DispatchedRows(x_NH, plan.by_expert, pick_weights(weights_NK, slot_R), counts_L)
        )

    def combine(self, y_RH: Tensor, plan: DeepEPPlan) -> Pending[Tensor]:
        assert plan.handle is not None and plan.by_expert is not None, "combine before dispatch"
        handle, enter = plan.handle, plan.traffic.enter

        def run(y_NH: Tensor) -> Tensor:
            y_TH, _, _ = self.buffer.combine(y_NH.contiguous(), handle)
            enter("forward", "moe.combine", len(y_NH), _row_bytes(y_NH), back=True)
            return y_TH

        def back(grad_TH: Tensor) -> Tensor:
            grad_NH = self.buffer.dispatch(grad_TH.contiguous(), handle=handle)[0]
            enter("backward", "moe.combine", len(grad_NH), _row_bytes(grad_TH))
            return grad_NH

        y_TH = linear_map(unpermute(y_RH, plan.by_expert), run, back)
        return Pending.ready(y_TH[: plan.num_tokens])

    def close(self) -> None:
        """Free the buffer on all ranks. A destructor could wait for peers that have exited."""
        self.buffer.destroy()


class _Dispatch(torch.autograd.Function):
    """Rows and weights to their ranks; backward: combine, which adds up the weights' gradients."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, weights_TK: Tensor, plan: DeepEPPlan, buffer: Any
    ) -> tuple[Tensor, Tensor]:
        x_NH, experts_NK, weights_NK, _, handle, _ = buffer.dispatch(
            x_TH.contiguous(),
            topk_idx=plan.experts_TK,
            topk_weights=weights_TK.contiguous(),
            **plan.layout,
        )
        plan.handle, plan.experts_NK = handle, experts_NK.long()
        ctx.handle, ctx.buffer, ctx.traffic = handle, buffer, plan.traffic
        ids_and_weights = _row_bytes(plan.experts_TK) + _row_bytes(weights_TK)
        plan.traffic.enter("forward", "moe.dispatch", len(x_NH), _row_bytes(x_TH))
        plan.traffic.enter("forward", "moe.dispatch.weights", len(x_NH), ids_and_weights)
        return x_NH, weights_NK

    @staticmethod
    def backward(ctx: Any, grad_NH: Tensor, grad_NK: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NoSecondDerivative
        grad_TH, grad_TK, _ = ctx.buffer.combine(
            grad_NH.contiguous(), ctx.handle, topk_weights=grad_NK.contiguous()
        )
        num_rows, enter = len(grad_NH), ctx.traffic.enter
        enter("backward", "moe.dispatch", num_rows, _row_bytes(grad_NH), back=True)
        enter("backward", "moe.dispatch.weights", num_rows, _row_bytes(grad_NK), back=True)
        return grad_TH, grad_TK, None, None


def _row_bytes(rows: Tensor) -> int:
    return rows.shape[1] * rows.element_size()
