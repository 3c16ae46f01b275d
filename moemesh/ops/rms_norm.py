"""RMSNorm over the last dim (Zhang & Sennrich, 2019), each direction in one pass on a CPU.

torch takes six passes over the numbers on a CPU and ten for the backward, and keeps the normalised
ones. One pass, compiled by numba at the first use, needs the input alone.
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
        scales, least = _copied(weight_H), np.float32(epsilon)
        run_in_one_pass("rms_norm", x.view(-1, size), scales, least, y.view(-1, size))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_H = ctx.saved_tensors
        size, grad_x = len(weight_H), torch.empty_like(x)
        totals_PH = torch.zeros(num_parts(), size, dtype=torch.float64)
        given, numbers, result = (one.view(-1, size) for one in (grad.contiguous(), x, grad_x))
        scales, least = _copied(weight_H), np.float32(ctx.epsilon)
        run_in_one_pass("rms_norm_backward", given, numbers, scales, least, result, totals_PH)
        return grad_x, totals_PH.sum(0).to(weight_H.dtype), None


def _copied(weight_H: Tensor) -> Tensor:
    """The weight for numpy. A copy: torch never resizes memory that numpy has seen, and zero3 frees
    gathered weights by resizing theirs."""
    return weight_H.detach().clone()
