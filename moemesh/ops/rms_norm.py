"""RMSNorm over the last dim (Zhang & Sennrich, 2019), each direction in one pass on a CPU.

Legend: H channels, P parts of the rows (one for each thread).

On a CPU torch makes six passes over the numbers, ten in the backward, and saves the normalised
numbers. The code here, compiled by numba at the first use, makes one, and saves only the input and
the weight; it is used for enough numbers (:func:`moemesh.ops.fusion.is_worth_compiling`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from moemesh.ops.fusion import is_worth_compiling, num_parts, run_in_one_pass


def rms_norm(x: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dim of x [..., H]."""
    if x.dtype == weight_H.dtype and is_worth_compiling(x):
        return _RMSNorm.apply(x.contiguous(), weight_H, epsilon)
    return torch.rms_norm(x, weight_H.shape, weight_H, epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x, weight_H)
        ctx.epsilon = epsilon
        y, size = torch.empty_like(x), len(weight_H)
        scales, eps = _copied(weight_H), np.float32(epsilon)
        run_in_one_pass("rms_norm", x.view(-1, size), scales, eps, y.view(-1, size))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_H = ctx.saved_tensors
        size, grad_x = len(weight_H), torch.empty_like(x)
        totals_PH = torch.zeros(num_parts(), size, dtype=torch.float64)
        rows = [tensor.view(-1, size) for tensor in (grad.contiguous(), x, grad_x)]
        scales, eps = _copied(weight_H), np.float32(ctx.epsilon)
        run_in_one_pass("rms_norm_backward", *rows[:2], scales, eps, rows[2], totals_PH)
        return grad_x, totals_PH.sum(0).to(weight_H.dtype), None


def _copied(weight_H: Tensor) -> Tensor:
    """A copy of the weight for numpy: torch cannot resize memory that numpy has used, and zero3
    frees gathered weights by resizing their memory."""
    return weight_H.detach().clone()
