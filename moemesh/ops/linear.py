"""The matrix product of dense layers, with a weight gradient that can be deferred.

Legend: T tokens, I inputs, O outputs, F width of a SwiGLU (Shazeer, 2020), G = 2 F (gate, then up);
R rank of an adapter, P outputs of the part of a weight that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.ops.nf4 import dense
from moemesh.ops.permute import linear_map
from moemesh.ops.swiglu import (
    PLAIN,
    SwigluForm,
    unweighted_swiglu,
    unweighted_swiglu_backward,
)
from moemesh.ops.weight_gradient import deferral, weight_gradient


class SwigluOf(NamedTuple):
    """:func:`swiglu` of `h_TG`, not computed yet: :func:`linear` computes it, and recomputes it in
    its backward instead of saving it."""

    h_TG: Tensor
    form: SwigluForm = PLAIN


#: The other factor of a product with a weight.
Operand = Tensor | SwigluOf


class Adapter(NamedTuple):
    """A low-rank adapter (Hu et al., 2021) of a part of a weight [..., I]: ``a`` [R, I], and ``b``
    [..., R] with the shape of the part. The part: `count` indices of `dim` from `start` on; `dim`
    None: the whole weight. For stacks of experts all shapes have a leading dim of experts, which
    `dim` does not count."""

    a: Tensor
    b: Tensor
    dim: int | None = None
    start: int = 0
    count: int = 0

    def of(self, a: Tensor, b: Tensor) -> Adapter:
        """An adapter of the same part with other factors."""
        return self._replace(a=a, b=b)

    def part(self, y: Tensor) -> Tensor:
        """The part of `y` [T, ...], whose dims after T are those of the weight but the last."""
        return y if self.dim is None else y.narrow(self.dim + 1, self.start, self.count)


class Adapted(NamedTuple):
    """A weight with adapters: each adds ``scale * (x a^T) b^T`` to its part of the output."""

    weight: Tensor
    adapters: tuple[Adapter, ...]
    scale: float


#: Right factor of :func:`linear`: a weight, or a weight with its adapters.
Weight = Tensor | Adapted


class _Linear(torch.autograd.Function):
    """The product with a weight, whose gradient may be deferred."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI if ctx.needs_input_grad[1] else None, weight)
        # Hooks may replace the saved tensor by another object; the gradient belongs to the leaf.
        ctx.leaf = weight
        return x_TI @ _matrix(weight, x_TI.dtype).t()

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TI, weight = ctx.saved_tensors
        needs_input = ctx.needs_input_grad[0]
        grad_x_TI = grad_TO @ _matrix(weight, grad_TO.dtype) if needs_input else None
        if not ctx.needs_input_grad[1]:
            return grad_x_TI, None
        return grad_x_TI, weight_gradient(
            ctx.leaf, lambda: (grad_TO.t() @ x_TI).reshape(weight.shape), (grad_TO, x_TI)
        )


class _SwigluLinear(torch.autograd.Function):
    """``swiglu(h) @ weight.T``, with the products of plain autograd in its order: the same bits."""

    @staticmethod
    def forward(ctx: Any, h_TG: Tensor, weight_OF: Tensor, form: SwigluForm) -> Tensor:
        ctx.save_for_backward(h_TG, weight_OF)
        ctx.leaf, ctx.form = weight_OF, form
        return unweighted_swiglu(h_TG, form) @ dense(weight_OF, h_TG.dtype).t()

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor, Tensor | None, None]:
        h_TG, weight_OF = ctx.saved_tensors
        grad_TF = grad_TO @ dense(weight_OF, grad_TO.dtype)
        product_TF, grad_h_TG = unweighted_swiglu_backward(grad_TF, h_TG, ctx.form)
        grad_OF, held = None, (grad_TO, product_TF)
        if ctx.needs_input_grad[1]:
            grad_OF = weight_gradient(ctx.leaf, lambda: grad_TO.t() @ product_TF, held)
        return grad_h_TG, grad_OF, None


class _AdaptedLinear(torch.autograd.Function):
    """The product with an adapted weight. It keeps the input and recomputes the narrow products
    x a^T, which costs R / O of the wide one."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        form: SwigluForm | None,
        kind: _AdaptedKind,
        weight: Tensor,
        *factors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x_TI, weight, *factors)
        ctx.form, ctx.kind, ctx.leaves = form, kind, (weight, *factors)
        input_TI = x_TI if form is None else unweighted_swiglu(x_TI, form)
        y_TO = input_TI @ _matrix(weight, input_TI.dtype).t()
        y = y_TO.view(len(y_TO), *weight.shape[:-1])
        for adapter in kind.adapters(factors):
            part = adapter.part(y)  # a view of the output
            u_TR = (input_TI @ adapter.a.t()) * kind.scale
            part += (u_TR @ _rows(adapter.b).t()).view(part.shape)
        return y_TO

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Any, ...]:
        x_TI, weight, *factors = ctx.saved_tensors
        form, kind, leaves = ctx.form, ctx.kind, ctx.leaves
        input_TI = x_TI if form is None else unweighted_swiglu(x_TI, form)
        grad_TO = grad_TO.contiguous()
        grad = grad_TO.view(len(grad_TO), *weight.shape[:-1])
        needs_input, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        grad_input_TI = grad_TO @ _matrix(weight, grad_TO.dtype) if needs_input else None
        gradients: list[Tensor | None] = [None] * len(leaves)
        if needs[0]:
            gradients[0] = weight_gradient(
                leaves[0],
                lambda: (grad_TO.t() @ input_TI).reshape(weight.shape),
                (grad_TO, input_TI),
            )
        for i, adapter in enumerate(kind.adapters(factors)):
            grad_TP = adapter.part(grad).flatten(1)
            g_TR = (grad_TP @ _rows(adapter.b)) * kind.scale
            if grad_input_TI is not None:
                grad_input_TI += g_TR @ adapter.a
            pair = _factor_gradients(adapter, adapter.part(grad), g_TR, input_TI, kind.scale)
            for place, gradient in enumerate(pair, start=1 + 2 * i):
                if needs[place]:
                    gradients[place] = weight_gradient(leaves[place], *gradient)
        if form is not None and grad_input_TI is not None:
            grad_input_TI = unweighted_swiglu_backward(grad_input_TI, x_TI, form)[1]
        return grad_input_TI, None, None, *gradients


def _factor_gradients(
    adapter: Adapter, grad_T: Tensor, g_TR: Tensor, input_TI: Tensor, scale: float
) -> tuple[tuple[Callable[[], Tensor], tuple[Tensor, ...]], ...]:
    """Gradients of a and of b: a function for each, and the tensors of activation size that it
    holds. `grad_T` [T, ...]: a view of the adapter's part of the output's gradient."""
    return (
        (lambda: g_TR.t() @ input_TI, (g_TR, input_TI)),
        (
            lambda: (grad_T.flatten(1).t() @ ((input_TI @ adapter.a.t()) * scale)).view(
                adapter.b.shape
            ),
            (grad_T, input_TI),
        ),
    )


class _AdaptedKind(NamedTuple):
    """:class:`Adapted` without its tensors: (dim, start, count) of each adapter, and the scale."""

    parts: tuple[tuple[int | None, int, int], ...]
    scale: float

    def adapters(self, factors: Sequence[Tensor]) -> list[Adapter]:
        """The adapters, from a and b of each."""
        return [
            Adapter(a, b, *part)
            for part, a, b in zip(self.parts, factors[::2], factors[1::2], strict=True)
        ]


def _matrix(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight as a matrix [O, I]; a packed one is unpacked to `dtype`, for one product."""
    return dense(weight.reshape(-1, weight.shape[-1]), dtype)


def _rows(b: Tensor) -> Tensor:
    """``b`` as a matrix [P, R]."""
    return b.reshape(-1, b.shape[-1])


class _Swiglu(torch.autograd.Function):
    """SwiGLU that saves only its input."""

    @staticmethod
    def forward(ctx: Any, h_TG: Tensor, form: SwigluForm) -> Tensor:
        ctx.save_for_backward(h_TG)
        ctx.form = form
        return unweighted_swiglu(h_TG, form)

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor, None]:
        return unweighted_swiglu_backward(grad_TF, *ctx.saved_tensors, ctx.form)[1], None


def linear(x_TI: Operand, weight: Weight) -> Tensor:
    """``x @ weight.T`` [T, O] for x [T, I] and `weight` [..., I], whose leading dims are flattened;
    with the outputs of the weight's adapters added.

    Parameters whose rows have structure (fused QKV, gate and up) keep it in their leading dims, so
    that a tensor-parallel shard is a plain slice of one dim. `weight` must be the parameter itself,
    not a view of it: its gradient may be deferred (:mod:`moemesh.ops.weight_gradient`). It may be
    packed (:mod:`moemesh.ops.nf4`), and has no gradient then. Deferred or not, the bits are the
    same: for rows that are contiguous, autograd computes the same products.
    """
    if isinstance(weight, Adapted):
        x, form = (x_TI.h_TG, x_TI.form) if isinstance(x_TI, SwigluOf) else (x_TI, None)
        kind = _AdaptedKind(tuple(adapter[2:] for adapter in weight.adapters), weight.scale)
        factors = [factor for adapter in weight.adapters for factor in adapter[:2]]
        return _AdaptedLinear.apply(x, form, kind, weight.weight, *factors)
    if isinstance(x_TI, SwigluOf):
        return _SwigluLinear.apply(x_TI.h_TG, weight, x_TI.form)
    if weight.dtype == torch.uint8 or (torch.is_grad_enabled() and deferral.is_possible):
        return _Linear.apply(x_TI, weight)
    return F.linear(x_TI, weight.flatten(0, -2))


def plain_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, is_transposed: bool = False
) -> Tensor:
    """``F.linear`` of a weight [O, I] of any form; `is_transposed`: stored as [I, O]."""
    if weight.dtype != torch.uint8:
        return F.linear(x, weight.t() if is_transposed else weight, bias)

    def unpacked_IO(dtype: torch.dtype) -> Tensor:
        """The weight for one product: autograd keeps the packed one."""
        matrix = dense(weight, dtype)
        return matrix if is_transposed else matrix.t()

    y = linear_map(x, lambda x: x @ unpacked_IO(x.dtype), lambda g: g @ unpacked_IO(g.dtype).t())
    return y if bias is None else y + bias


def swiglu(h_TG: Tensor, form: SwigluForm = PLAIN) -> Tensor:
    """``silu(gate) * up`` [T, F], or another form of it."""
    return _Swiglu.apply(h_TG, form)
