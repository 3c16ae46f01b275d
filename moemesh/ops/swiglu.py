"""The pointwise middle of an expert, ``silu(gate) * up * weight``, and its backward in one pass.

Legend: B rows, F expert width, G = 2 F (gate, then up).

Written with torch it takes about ten passes over the numbers, each with its own conversions in
bfloat16. On a CPU one pass, compiled by numba at the first use, does it all in fp32 and rounds
once. It is taken where it pays: bfloat16 or float32, enough numbers to be worth loading the
compiled code, and no more than :data:`MOST_THREADS` threads, since it runs in one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

#: A block with fewer numbers than this is left to torch.
FEWEST_NUMBERS = 1 << 16
#: One thread of the compiled form is as fast as about three of torch's (docs/results/layer.md).
MOST_THREADS = 2


def swiglu_torch(h_BG: Tensor, weights_B: Tensor) -> Tensor:
    """The obvious form of :func:`swiglu`."""
    gate_BF, up_BF = h_BG.chunk(2, dim=1)
    return F.silu(gate_BF).mul_(up_BF).mul_(weights_B[:, None].to(h_BG.dtype))


def swiglu_backward_torch(
    grad_BF: Tensor, h_BG: Tensor, weights_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The obvious form of :func:`swiglu_backward`."""
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


def swiglu(h_BG: Tensor, weights_B: Tensor) -> Tensor:
    """``silu(gate) * up * weight`` [B, F]; weights are fp32 (fp64 in float64)."""
    if not _is_fused(h_BG, weights_B):
        return swiglu_torch(h_BG, weights_B)
    product_BF = h_BG.new_empty(h_BG.shape[0], h_BG.shape[1] // 2)
    _kernels(h_BG.dtype).forward(_array(h_BG), _array(weights_B), _array(product_BF))
    return product_BF


def swiglu_backward(
    grad_BF: Tensor, h_BG: Tensor, weights_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The product once more, the gradient of h and that of the weights; overwrites `grad_BF`."""
    if not (_is_fused(h_BG, weights_B) and grad_BF.is_contiguous()):
        return swiglu_backward_torch(grad_BF, h_BG, weights_B)
    grad_h_BG, grad_weights_B = torch.empty_like(h_BG), torch.empty_like(weights_B)
    _kernels(h_BG.dtype).backward(
        _array(grad_BF), _array(h_BG), _array(weights_B), _array(grad_h_BG), _array(grad_weights_B)
    )
    return grad_BF, grad_h_BG, grad_weights_B


def load(dtype: torch.dtype) -> None:
    """Load the compiled form now, so that a measurement does not contain it."""
    if dtype in (torch.bfloat16, torch.float32):
        empty = torch.zeros(1, 2, dtype=dtype)
        weights = torch.zeros(1)
        kernels = _kernels(dtype)
        kernels.forward(_array(empty), _array(weights), _array(empty[:, :1].contiguous()))
        kernels.backward(
            _array(empty[:, :1].contiguous()), _array(empty), _array(weights),
            _array(empty.clone()), _array(weights.clone()),
        )  # fmt: skip


def _is_fused(h_BG: Tensor, weights_B: Tensor) -> bool:
    return (
        h_BG.device.type == "cpu"
        and h_BG.dtype in (torch.bfloat16, torch.float32)
        and weights_B.dtype == torch.float32
        and h_BG.numel() >= 2 * FEWEST_NUMBERS
        and h_BG.is_contiguous()
        and weights_B.is_contiguous()
        and torch.get_num_threads() <= MOST_THREADS
    )


def _array(x: Tensor) -> Any:
    """The same memory for numpy, which knows no bfloat16: its bits."""
    x = x.detach()
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


class _Kernels(NamedTuple):
    """``forward(h, weights, product)``; ``backward(grad -> product, h, weights, grad_h,
    grad_weights)``."""

    forward: Callable[..., None]
    backward: Callable[..., None]


@functools.cache
def _kernels(dtype: torch.dtype) -> _Kernels:
    from moemesh.ops import swiglu_kernels

    return _Kernels(*swiglu_kernels.of_bits(is_bfloat16=dtype == torch.bfloat16))
