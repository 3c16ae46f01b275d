"""The matrix product of every dense layer, with a weight gradient that can be deferred.

Legend: T tokens, I inputs, O outputs, F width of a SwiGLU (Shazeer, 2020), G = 2 F (gate, then up).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.ops.swiglu import PLAIN, SwigluForm
from moemesh.ops.weight_gradient import weight_gradient


class SwigluOf(NamedTuple):
    """The product :func:`swiglu` of `h_TG`, not made yet: :func:`linear` makes it, and makes it
    again in its backward instead of keeping it."""

    h_TG: Tensor
    form: SwigluForm = PLAIN


#: The other factor of a product with a weight.
Operand = Tensor | SwigluOf


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
            ctx.leaf, lambda: (grad_TO.t() @ x_TI).reshape(weight.shape), (grad_TO, x_TI)
        )


class _SwigluLinear(torch.autograd.Function):
    """The products and their order are those of plain autograd: the same bits."""

    @staticmethod
    def forward(ctx: Any, h_TG: Tensor, weight_OF: Tensor, form: SwigluForm) -> Tensor:
        ctx.save_for_backward(h_TG, weight_OF)
        ctx.leaf, ctx.form = weight_OF, form
        return swiglu(h_TG, form) @ weight_OF.t()

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor, Tensor | None, None]:
        h_TG, weight_OF = ctx.saved_tensors
        if ctx.form != PLAIN:
            other_TF, grad_h_TG = ctx.form.backward(grad_TO @ weight_OF, h_TG)
            return grad_h_TG, _weight_half(ctx, grad_TO, other_TF), None
        gate_TF, up_TF = h_TG.chunk(2, dim=1)
        silu_TF = F.silu(gate_TF)
        grad_TF = grad_TO @ weight_OF
        grad_h_TG = torch.empty_like(h_TG)
        grad_gate_TF, grad_up_TF = grad_h_TG.chunk(2, dim=1)
        torch.mul(grad_TF, silu_TF, out=grad_up_TF)
        torch.ops.aten.silu_backward.grad_input(grad_TF * up_TF, gate_TF, grad_input=grad_gate_TF)
        return grad_h_TG, _weight_half(ctx, grad_TO, silu_TF * up_TF), None


def _weight_half(ctx: Any, grad_TO: Tensor, product_TF: Tensor) -> Tensor | None:
    if not ctx.needs_input_grad[1]:
        return None
    return weight_gradient(ctx.leaf, lambda: grad_TO.t() @ product_TF, (grad_TO, product_TF))


class _Swiglu(torch.autograd.Function):
    """A form of SwiGLU that keeps its input and nothing else."""

    @staticmethod
    def forward(ctx: Any, h_TG: Tensor, form: SwigluForm) -> Tensor:
        ctx.save_for_backward(h_TG)
        ctx.form = form
        return form.product(h_TG)

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor, None]:
        return ctx.form.backward(grad_TF, *ctx.saved_tensors)[1], None


def linear(x_TI: Operand, weight: Tensor) -> Tensor:
    """``x @ weight.T`` for x [tokens, in]; `weight` [..., in], leading dims flattened to out.

    Parameters whose rows have structure (fused QKV, gate and up) keep it in their leading dims, so
    that a tensor-parallel shard is a plain slice of one dim. `weight` must be the parameter itself,
    not a view of it: its gradient may be deferred (:mod:`moemesh.ops.weight_gradient`).
    """
    if isinstance(x_TI, SwigluOf):
        return _SwigluLinear.apply(x_TI.h_TG, weight, x_TI.form)
    return _Linear.apply(x_TI, weight)


def swiglu(h_TG: Tensor, form: SwigluForm = PLAIN) -> Tensor:
    """``silu(gate) * up`` [T, F], or another form of it."""
    if form != PLAIN:
        return _Swiglu.apply(h_TG, form)
    gate_TF, up_TF = h_TG.chunk(2, dim=1)
    return F.silu(gate_TF) * up_TF
