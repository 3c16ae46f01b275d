"""Cross-entropy from hidden states, in chunks of the vocabulary: logits [T, V] never exist at once.

Legend: T tokens, H hidden, V vocabulary rows of this rank, C rows of one chunk. The forward keeps
one number per token, the log-sum-exp (lse); the backward recomputes each chunk's logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.ops.fusion import fused
from moemesh.ops.saved import Held
from moemesh.ops.weight_gradient import deferral, weight_gradient
from moemesh.trace.memory_profile import LOGITS, LOSS_ROWS

#: (log-sum-exp, target logit), each [T], over the rows of this rank -> over the whole vocabulary.
Combine = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def cross_entropy_reference(x_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> Tensor:
    """The obvious form: all logits at once. Negative log-likelihood per token [T]."""
    logits_TV = x_TH @ weight_VH.t()
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    return F.cross_entropy(logits_TV.to(wide), targets_T, reduction="none")


@fused
def _with_chunk(
    logits_TC: Tensor, lse_T: Tensor, logit_T: Tensor, column_T: Tensor, in_chunk_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and target logit over the chunks up to this one. The target of a token is in
    column `column_T` of the chunk if `in_chunk_T`."""
    logits_TC = logits_TC.to(lse_T.dtype)
    picked_T = logits_TC.gather(1, column_T[:, None]).squeeze(1)
    lse_T = torch.logaddexp(lse_T, torch.logsumexp(logits_TC, dim=1))
    return lse_T, logit_T + torch.where(in_chunk_T, picked_T, 0.0)


@fused
def _chunk_gradient(
    logits_TC: Tensor, lse_T: Tensor, grad_T: Tensor, column_T: Tensor, in_chunk_T: Tensor
) -> Tensor:
    """Gradient of a chunk's logits, in their dtype: (softmax - one-hot target) x `grad_T`."""
    grad_TC = torch.exp_(logits_TC.to(lse_T.dtype) - lse_T[:, None])
    if grad_TC.device.type == "cpu":
        grad_TC.scatter_add_(1, column_T[:, None], -in_chunk_T[:, None].to(grad_TC.dtype))
    else:  # a scatter would split the fused kernel in two
        columns_C = torch.arange(grad_TC.shape[1], device=grad_TC.device)
        is_target_TC = (columns_C == column_T[:, None]) & in_chunk_T[:, None]
        grad_TC.sub_(is_target_TC.to(grad_TC.dtype))
    return grad_TC.mul_(grad_T[:, None]).to(logits_TC.dtype)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weight_VH: Tensor,
        targets_T: Tensor,
        first_row: int,
        combine: Combine,
        chunk: int,
    ) -> Tensor:
        accumulate = torch.float64 if x_TH.dtype == torch.float64 else torch.float32
        num_tokens = x_TH.shape[0]
        lse_T = x_TH.new_full((num_tokens,), -torch.inf, dtype=accumulate)
        logit_T = x_TH.new_zeros((num_tokens,), dtype=accumulate)
        for start in range(0, weight_VH.shape[0], chunk):
            weight_CH = weight_VH[start : start + chunk]
            columns = _columns(targets_T - first_row - start, weight_CH.shape[0])
            # `Held` makes a measurement of memory count the chunk.
            logits_TC = Held(x_TH @ weight_CH.t(), LOGITS)
            lse_T, logit_T = _with_chunk(logits_TC.tensor, lse_T, logit_T, *columns)
            del logits_TC  # before the next chunk's exist
        lse_T, logit_T = combine(lse_T, logit_T)
        ctx.save_for_backward(x_TH, weight_VH, targets_T, lse_T)
        ctx.first_row, ctx.chunk = first_row, chunk
        ctx.leaf = weight_VH  # a deferred gradient is added to the leaf itself
        return lse_T - logit_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, weight_VH, targets_T, lse_T = ctx.saved_tensors
        grad_x_TH = torch.zeros_like(x_TH)
        is_deferred = ctx.needs_input_grad[1] and deferral.queue is not None
        is_computed = ctx.needs_input_grad[1] and not is_deferred
        grad_VH = torch.zeros_like(weight_VH) if is_computed else None

        def for_each_chunk(use: Callable[[slice, Tensor], None]) -> None:
            """Call `use` with the rows of each chunk and the gradient of its recomputed logits
            [T, C]. The logits and their gradient end before those of the next chunk exist."""
            for start in range(0, weight_VH.shape[0], ctx.chunk):
                weight_CH = weight_VH[start : start + ctx.chunk]
                columns = _columns(targets_T - ctx.first_row - start, weight_CH.shape[0])
                logits_TC = Held(x_TH @ weight_CH.t(), LOGITS)
                grad_TC = Held(_chunk_gradient(logits_TC.tensor, lse_T, grad_T, *columns), LOGITS)
                del logits_TC
                use(slice(start, start + weight_CH.shape[0]), grad_TC.tensor)
                del grad_TC

        def weight_half() -> Tensor:
            # Recomputes the logits a second time: kept, they would be T x V numbers.
            total_VH = torch.zeros_like(weight_VH)
            for_each_chunk(lambda rows, g_TC: torch.mm(g_TC.t(), x_TH, out=total_VH[rows]))
            return total_VH

        def add(rows: slice, grad_TC: Tensor) -> None:
            grad_x_TH.addmm_(grad_TC, weight_VH[rows])
            if grad_VH is not None:
                torch.mm(grad_TC.t(), x_TH, out=grad_VH[rows])

        for_each_chunk(add)
        if is_deferred:
            weight_gradient(ctx.leaf, weight_half, (x_TH, targets_T, lse_T, grad_T))
        return grad_x_TH, grad_VH, None, None, None, None


def _columns(column_T: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Clamped column of each target, and whether the target lies in this chunk."""
    in_chunk_T = (column_T >= 0) & (column_T < width)
    return column_T.clamp(0, width - 1), in_chunk_T


def cross_entropy(
    x_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    first_row: int = 0,
    combine: Combine = lambda lse_T, logit_T: (lse_T, logit_T),
    chunk: int = LOSS_ROWS,
) -> Tensor:
    """Negative log-likelihood per token [T] in nats, fp32 (fp64 for fp64 input).

    ``weight_VH`` holds the vocabulary rows ``first_row ...`` (all, or one tensor-parallel shard);
    `combine` merges log-sum-exp and target logit over the shards. Targets are global ids. With
    shards, the gradient of `x_TH` is this shard's part of it: the true one is the SUM over shards.
    """
    return _CrossEntropy.apply(x_TH, weight_VH, targets_T, first_row, combine, chunk)
