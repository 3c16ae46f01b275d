"""The matrix product of every dense layer, with a weight gradient that can be deferred."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moemesh.ops.weight_gradient import weight_gradient


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, weight)
        # Hooks on saved tensors give back another object: only the leaf itself has a gradient.
        ctx.leaf = weight
        return x_TI @ weight.reshape(-1, weight.shape[-1]).t()

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TI, weight = ctx.saved_tensors
        weight_OI = weight.reshape(-1, weight.shape[-1])
        grad_x_TI = grad_TO @ weight_OI if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x_TI, None
        return grad_x_TI, weight_gradient(
            ctx.leaf, lambda: (grad_TO.t() @ x_TI).reshape(weight.shape)
        )


def linear(x_TI: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` for x [tokens, in]; `weight` [..., in], leading dims flattened to out.

    Parameters whose rows have structure (fused QKV, gate and up) keep it in their leading dims, so
    that a tensor-parallel shard is a plain slice of one dim. `weight` must be the parameter itself,
    not a view of it: its gradient may be deferred (:mod:`moemesh.ops.weight_gradient`).
    """
    return _Linear.apply(x_TI, weight)
