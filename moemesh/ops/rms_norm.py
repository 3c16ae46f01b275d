"""RMSNorm over the last dim (Zhang & Sennrich, 2019), each direction in one pass on a CPU.

torch takes six passes over the numbers on a CPU and ten for the backward, and keeps the normalised
ones. One pass, compiled by numba at the first use, needs the input alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.ops.fusion import compiled_for_cpu, is_worth_compiling, memory_of


def rms_norm(x: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dim of x [..., H]."""
    if is_worth_compiling(x) and x.dtype == weight_H.dtype:
        return _RMSNorm.apply(x.contiguous(), weight_H, epsilon)
    return F.rms_norm(x, weight_H.shape, weight_H, epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x, weight_H)
        ctx.epsilon = epsilon
        y, size = torch.empty_like(x), len(weight_H)
        numbers, found = (memory_of(one.view(-1, size)) for one in (x, y))
        scales = _copied(weight_H)
        compiled_for_cpu().rms_norm(numbers, scales, np.float32(epsilon), found)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_H = ctx.saved_tensors
        size, grad_x = len(weight_H), torch.empty_like(x)
        total_H = torch.zeros(size, dtype=torch.float64)
        rows = (memory_of(one.view(-1, size)) for one in (grad.contiguous(), x, grad_x))
        given, numbers, found = rows
        compiled_for_cpu().rms_norm_backward(
            given, numbers, _copied(weight_H), np.float32(ctx.epsilon), found, total_H.numpy()
        )
        return grad_x, total_H.to(weight_H.dtype), None


def _copied(weight_H: Tensor) -> Any:
    """The weight for numpy. A copy: torch never resizes memory that numpy has seen, and zero3 frees
    gathered weights by resizing theirs."""
    return memory_of(weight_H.clone())
