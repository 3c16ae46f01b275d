"""RMSNorm over the last dim (Zhang & Sennrich, 2019); its backward in one pass on a CPU.

torch's backward on a CPU takes ten passes over the numbers and keeps the normalised ones. One pass,
compiled by numba at the first use, needs the input alone.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.ops.fusion import is_worth_compiling, memory_of


def rms_norm(x: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dim of x [..., H]."""
    if is_worth_compiling(x) and x.dtype == weight_H.dtype:
        return _RMSNorm.apply(x, weight_H, epsilon)
    return F.rms_norm(x, weight_H.shape, weight_H, epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x, weight_H)
        ctx.epsilon = epsilon
        return F.rms_norm(x, weight_H.shape, weight_H, epsilon)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_H = ctx.saved_tensors
        size, grad_x = len(weight_H), torch.empty_like(x)
        total_H = torch.zeros(size, dtype=torch.float64)
        rows = (memory_of(one.view(-1, size)) for one in (grad.contiguous(), x, grad_x))
        given, numbers, found = rows
        kernel, epsilon = _backward_kernel(x.dtype), np.float32(ctx.epsilon)
        kernel(given, numbers, memory_of(weight_H), epsilon, found, total_H.numpy())
        return grad_x, total_H.to(weight_H.dtype), None


@functools.cache
def _backward_kernel(dtype: torch.dtype) -> Any:
    from moemesh.ops import cpu_kernels

    return cpu_kernels.norm_backward_of(is_bfloat16=dtype == torch.bfloat16)
