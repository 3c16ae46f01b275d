"""The computation of a `MoELayer` on prepared parameters: its output, losses and counts.

Legend: T tokens of this rank, H hidden, E experts of all ranks, K choices of a token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moemesh.config.model import ModelConfig
from moemesh.config.shown import short_repr
from moemesh.model.balance_loss import auxiliary_loss
from moemesh.model.batch import Context
from moemesh.model.faults import NO_FAULT
from moemesh.model.moe import MoE
from moemesh.ops.permute import count_ids


class Auxiliary(NamedTuple):
    """The second result of a forward.

    ``loss``: the sum of the next two, to be added to this rank's loss; both carry their
    coefficients and gradients. ``counts`` int64 [E]: choices of this rank's tokens by global expert
    id, after capacity; ``num_dropped`` int64: choices for which an expert had no room; ``finite``
    bool: whether all logits of the router were. No value waits for the device.
    """

    loss: Tensor
    balance_loss: Tensor
    z_loss: Tensor
    counts: Tensor
    num_dropped: Tensor
    finite: Tensor

    def __repr__(self) -> str:
        return short_repr(self, self._asdict())


class LayerBlock(MoE):
    """The computation, on parameters that are prepared for it."""

    def __init__(self, config: ModelConfig, gradients: str, num_ranks: int) -> None:
        super().__init__(config)
        self.gradients, self.num_ranks = gradients, num_ranks
        self.recorder: nn.Module | None = None

    def forward(  # type: ignore[override]
        self, x_TH: Tensor, context: Context
    ) -> tuple[Tensor, Auxiliary]:
        routing = self.router(x_TH, context, self.tokens)
        if self.recorder is not None:
            self.recorder(routing.logits_TE)
        scale = self._loss_scale(context)
        balance_loss, z_loss = (
            auxiliary_loss(
                routing, self.config.model_copy(update={other: 0.0}), context, self.tokens
            )
            * scale
            for other in ("z_loss_coefficient", "aux_loss_coefficient")
        )
        counts_E = count_ids(routing.experts_TK.flatten(), self.config.num_experts)
        num_dropped = routing.num_dropped
        y_TH = self.apply_experts(x_TH, routing, context)
        return y_TH, Auxiliary(
            loss=balance_loss + z_loss,
            balance_loss=balance_loss,
            z_loss=z_loss,
            counts=counts_E,
            num_dropped=counts_E.new_zeros(()) if num_dropped is None else num_dropped,
            finite=routing.fault == NO_FAULT,
        )

    def _loss_scale(self, context: Context) -> float | Tensor:
        """From this rank's part of the losses, a sum over its scopes, to its loss."""
        if self.gradients == "sum" or self.config.aux_loss_scope == "microbatch":
            return 1.0
        if self.config.aux_loss_scope == "global":
            return float(self.num_ranks)
        if context.valid_T is None:
            return 1 / max(context.num_sequences, 1)
        routed_B = context.valid_T.view(context.num_sequences, -1).any(1)
        return 1 / routed_B.sum().clamp(min=1)


class ScaledGradient(torch.autograd.Function):
    """The same tensor; its gradient is multiplied by `factor`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None
