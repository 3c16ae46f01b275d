"""The pointwise middle of an MLP, ``silu(gate) * up * weight``, and its backward in one pass.

Legend: B rows (T: of tokens), F expert width, G = 2 F (gate, then up).

Written with torch it takes about ten passes over the numbers, each with its own conversions in
bfloat16. On a CPU the plain form, compiled by numba at the first use, takes one pass in fp32 and
rounds once, for enough numbers (:func:`moemesh.ops.fusion.is_worth_compiling`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.ops.fusion import fused, is_worth_compiling, run_in_one_pass


class SwigluForm(NamedTuple):
    """``gate * sigmoid(alpha * gate) * (up + offset)``; a `limit` above 0 clamps the gate from
    above, and up to +- the limit. gpt-oss has limit 7, alpha 1.702 and offset 1."""

    limit: float = 0.0
    alpha: float = 1.0
    offset: float = 0.0

    def clamped(self, h_BG: Tensor) -> tuple[Tensor, Tensor]:
        """Clamped gate, and clamped up plus its offset; [B, F] each."""
        gate_BF, up_BF = h_BG.chunk(2, dim=1)
        if self.limit:
            gate_BF, up_BF = gate_BF.clamp(max=self.limit), up_BF.clamp(-self.limit, self.limit)
        return gate_BF, up_BF + self.offset

    def product(self, h_BG: Tensor) -> Tensor:
        """The product [B, F] of h."""
        gate_BF, up_BF = self.clamped(h_BG)
        return gate_BF * torch.sigmoid(self.alpha * gate_BF) * up_BF

    def backward(self, grad_BF: Tensor, h_BG: Tensor) -> tuple[Tensor, Tensor]:
        """The recomputed product, and the gradient of h from that of the product."""
        gate_BF, up_BF = self.clamped(h_BG)
        sigmoid_BF = torch.sigmoid(self.alpha * gate_BF)
        act_BF = gate_BF * sigmoid_BF
        slope_BF = sigmoid_BF + self.alpha * act_BF * (1 - sigmoid_BF)
        grad_gate_BF, grad_up_BF = grad_BF * up_BF * slope_BF, grad_BF * act_BF
        if self.limit:
            raw_gate_BF, raw_up_BF = h_BG.chunk(2, dim=1)
            grad_gate_BF = grad_gate_BF.masked_fill(raw_gate_BF > self.limit, 0.0)
            grad_up_BF = grad_up_BF.masked_fill(raw_up_BF.abs() > self.limit, 0.0)
        return act_BF * up_BF, torch.cat([grad_gate_BF, grad_up_BF], dim=1)


#: ``silu(gate) * up``.
PLAIN = SwigluForm()


def swiglu_torch(h_BG: Tensor, weights_B: Tensor) -> Tensor:
    """:func:`swiglu` of the plain form, by torch's operations."""
    gate_BF, up_BF = h_BG.chunk(2, dim=1)
    return F.silu(gate_BF).mul_(up_BF).mul_(weights_B[:, None].to(h_BG.dtype))


def swiglu_backward_torch(
    grad_BF: Tensor, h_BG: Tensor, weights_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`swiglu_backward` of the plain form, by torch's operations."""
    gate_BF, up_BF = h_BG.chunk(2, dim=1)
    scale_B1 = weights_B[:, None].to(h_BG.dtype)
    silu_BF = F.silu(gate_BF)
    product_BF = silu_BF * up_BF
    grad_weights_B = torch.linalg.vecdot(grad_BF, product_BF).to(weights_B.dtype)
    product_BF.mul_(scale_B1)
    grad_BF.mul_(scale_B1)
    grad_h_BG = torch.empty_like(h_BG)
    grad_gate_BF, grad_up_BF = grad_h_BG.chunk(2, dim=1)
    torch.mul(grad_BF, silu_BF, out=grad_up_BF)
    torch.ops.aten.silu_backward.grad_input(grad_BF.mul_(up_BF), gate_BF, grad_input=grad_gate_BF)
    return product_BF, grad_h_BG, grad_weights_B


def swiglu(h_BG: Tensor, weights_B: Tensor, form: SwigluForm = PLAIN) -> Tensor:
    """``silu(gate) * up * weight`` [B, F], or its variant `form`; weights fp32 (or fp64)."""
    if h_BG.device.type != "cpu":
        if form == PLAIN:
            return _fused_plain(h_BG, weights_B)
        return _fused_of_form(h_BG, weights_B, form)
    if form != PLAIN:
        return form.product(h_BG) * weights_B[:, None].to(h_BG.dtype)
    if not _is_fused(h_BG, weights_B):
        return swiglu_torch(h_BG, weights_B)
    product_BF = h_BG.new_empty(h_BG.shape[0], h_BG.shape[1] // 2)
    run_in_one_pass("swiglu", h_BG, weights_B, product_BF)
    return product_BF


def swiglu_backward(
    grad_BF: Tensor, h_BG: Tensor, weights_B: Tensor, form: SwigluForm = PLAIN
) -> tuple[Tensor, Tensor, Tensor]:
    """The recomputed product, the gradients of h and of the weights; may overwrite `grad_BF`: the
    plain form does on a CPU."""
    if h_BG.device.type != "cpu":
        if form == PLAIN:
            return _fused_plain_backward(grad_BF, h_BG, weights_B)
        return _fused_backward_of_form(grad_BF, h_BG, weights_B, form)
    if form != PLAIN:
        scale_B1 = weights_B[:, None].to(h_BG.dtype)
        product_BF, grad_h_BG = form.backward(grad_BF * scale_B1, h_BG)
        grad_weights_B = torch.linalg.vecdot(grad_BF, product_BF).to(weights_B.dtype)
        return product_BF * scale_B1, grad_h_BG, grad_weights_B
    if not (_is_fused(h_BG, weights_B) and grad_BF.is_contiguous()):
        return swiglu_backward_torch(grad_BF, h_BG, weights_B)
    grad_h_BG, grad_weights_B = torch.empty_like(h_BG), torch.empty_like(weights_B)
    run_in_one_pass("swiglu_backward", grad_BF, h_BG, weights_B, grad_h_BG, grad_weights_B)
    return grad_BF, grad_h_BG, grad_weights_B


def unweighted_swiglu(h_TG: Tensor, form: SwigluForm = PLAIN) -> Tensor:
    """:func:`swiglu` of a dense MLP: every weight is 1."""
    return swiglu(h_TG, _ones(h_TG), form)


def unweighted_swiglu_backward(
    grad_TF: Tensor, h_TG: Tensor, form: SwigluForm = PLAIN
) -> tuple[Tensor, Tensor]:
    """The recomputed product, and the gradient of h; `grad_TF` is not changed."""
    if h_TG.device.type == "cpu" and form == PLAIN:
        grad_TF = grad_TF.clone(memory_format=torch.contiguous_format)
    return swiglu_backward(grad_TF, h_TG, _ones(h_TG), form)[:2]


def _ones(h_TG: Tensor) -> Tensor:
    return h_TG.new_ones(len(h_TG), dtype=torch.promote_types(h_TG.dtype, torch.float32))


def swiglu_on_device(h_BG: Tensor, weights_B: Tensor) -> Tensor:
    """:func:`swiglu` in few operations; a weight is rounded with the product, not before it."""
    gate_BF, up_BF = h_BG.chunk(2, dim=1)
    return F.silu(gate_BF).mul_(up_BF).mul_(weights_B[:, None])


def swiglu_of_form_on_device(h_BG: Tensor, weights_B: Tensor, form: SwigluForm) -> Tensor:
    """:func:`swiglu_on_device` for forms other than the plain one."""
    return form.product(h_BG).mul_(weights_B[:, None])


def swiglu_backward_on_device(
    grad_BF: Tensor, h_BG: Tensor, weights_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`swiglu_backward` in few operations; `grad_BF` is not changed."""
    gate_BF, up_BF = h_BG.chunk(2, dim=1)
    silu_BF = F.silu(gate_BF)
    product_BF = silu_BF * up_BF
    grad_weights_B = (grad_BF * product_BF).sum(1, dtype=weights_B.dtype)
    weighted_BF = grad_BF * weights_B[:, None].to(h_BG.dtype)
    grad_up_BF = silu_BF.mul_(weighted_BF)
    grad_gate_BF = torch.ops.aten.silu_backward(weighted_BF.mul_(up_BF), gate_BF)
    grad_h_BG = torch.cat([grad_gate_BF, grad_up_BF], dim=1)
    return product_BF.mul_(weights_B[:, None]), grad_h_BG, grad_weights_B


def swiglu_backward_of_form_on_device(
    grad_BF: Tensor, h_BG: Tensor, weights_B: Tensor, form: SwigluForm
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`swiglu_backward_on_device` for forms other than the plain one."""
    product_BF, grad_h_BG = form.backward(grad_BF * weights_B[:, None].to(h_BG.dtype), h_BG)
    grad_weights_B = torch.linalg.vecdot(grad_BF, product_BF).to(weights_B.dtype)
    return product_BF.mul_(weights_B[:, None]), grad_h_BG, grad_weights_B


# Separate functions for the plain form: inside of a compiled function, a comparison of forms keeps
# the result of its first call (torch 2.13).
_fused_plain, _fused_of_form = fused(swiglu_on_device), fused(swiglu_of_form_on_device)
_fused_plain_backward = fused(swiglu_backward_on_device)
_fused_backward_of_form = fused(swiglu_backward_of_form_on_device)


def load(dtype: torch.dtype) -> None:
    """Load the compiled form now, so that a measurement does not contain it."""
    if dtype in (torch.bfloat16, torch.float32):
        h_BG, product_BF = torch.zeros(1, 2, dtype=dtype), torch.zeros(1, 1, dtype=dtype)
        weights_B = torch.zeros(1)
        run_in_one_pass("swiglu", h_BG, weights_B, product_BF)
        gradients = h_BG.clone(), weights_B.clone()
        run_in_one_pass("swiglu_backward", product_BF, h_BG, weights_B, *gradients)


def _is_fused(h_BG: Tensor, weights_B: Tensor) -> bool:
    return (
        is_worth_compiling(h_BG, 2)
        and weights_B.dtype == torch.float32
        and h_BG.is_contiguous()
        and weights_B.is_contiguous()
    )
