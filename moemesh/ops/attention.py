"""Softmax attention of a block of keys with its log-sum-exp, and the exact merge of blocks.

Legend: B sequences, N query heads, M key/value heads (N a multiple of M), S queries, C keys of the
block, D head size. Log-sum-exps (lse) are fp32, or fp64 for fp64 inputs; -inf where a query sees no
key.

Attention over many keys is the merge of attention over blocks of them (Milakov & Gimelshein,
"Online normalizer calculation for softmax", 2018). Of the *whole* attention, the gradient of a
block needs only the output, its gradient and the log-sum-exp (Dao et al., "FlashAttention", 2022),
so blocks may be computed in any order, on any rank:

    p = exp(scale q k^T - lse)      dv = p^T dy      ds = p (dy v^T - sum(dy y))
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from moemesh.trace.memory_profile import ROW_POSITIONS

_CPU_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_SOFTMAX_BACKWARD = torch.ops.aten._softmax_backward_data
_CUDA_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention
_CUDA_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward


#: Queries [B, N, S, D], keys and values [B, M, C, D]; the head size of values may differ.
Qkv: TypeAlias = tuple[Tensor, Tensor, Tensor]


class Partial(NamedTuple):
    """Attention over some of the keys: the output, and the log-sum-exp of its logits."""

    y_BNSD: Tensor
    lse_BNS: Tensor


class Gradients(NamedTuple):
    """Gradients of one block, with respect to query, key and value."""

    query_BNSD: Tensor
    key_BMCD: Tensor
    value_BMCD: Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def nothing_seen(query_BNSD: Tensor, value_size: int) -> Partial:
    """Attention over no keys: the neutral element of :func:`merge`."""
    (b, n, s), dtype = query_BNSD.shape[:3], wide(query_BNSD.dtype)
    return Partial(
        query_BNSD.new_zeros(b, s, n, value_size, dtype=dtype).transpose(1, 2),
        query_BNSD.new_full((b, n, s), -torch.inf, dtype=dtype),
    )


def merge(one: Partial, other: Partial) -> Partial:
    """Attention over the keys of both, which must not overlap."""
    lse_BNS = torch.logaddexp(one.lse_BNS, other.lse_BNS)
    # -inf minus -inf is NaN: a query that has seen no key so far has the weight 0.
    weight_BNS, other_BNS = (
        torch.exp(part.lse_BNS - lse_BNS).nan_to_num(0.0)[..., None] for part in (one, other)
    )
    return Partial(one.y_BNSD * weight_BNS + other.y_BNSD * other_BNS, lse_BNS)


#: Lowest compute capability of the CUDA kernel.
FLASH_CAPABILITY = (8, 0)


def is_fused(query_BNSD: Tensor, value_BMCD: Tensor) -> bool:
    """Whether an unmasked :func:`block_forward` has a kernel that never holds S x C numbers."""
    if query_BNSD.shape[-1] != value_BMCD.shape[-1]:
        return False
    if query_BNSD.device.type == "cpu":
        return query_BNSD.dtype in (torch.float64, torch.float32, torch.bfloat16)
    half = query_BNSD.dtype in (torch.float16, torch.bfloat16)
    size = query_BNSD.shape[-1]
    if not (query_BNSD.is_cuda and half and size % 8 == 0 and size <= 256):
        return False
    return torch.cuda.get_device_capability(query_BNSD.device) >= FLASH_CAPABILITY


def block_forward(
    qkv: Qkv,
    mask_BSC: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float,
) -> Partial:
    """Attention over one block of keys. `mask_BSC` (bool, True = seen; B may be 1); `causal`: query
    i sees the keys up to i, with one key for each query."""
    assert not (causal and mask_BSC is not None)
    query_BNSD, key_BMCD, value_BMCD = qkv
    if not query_BNSD.numel() or not key_BMCD.numel():
        return nothing_seen(query_BNSD, value_BMCD.shape[-1])
    if not is_fused(query_BNSD, value_BMCD) or (query_BNSD.is_cuda and mask_BSC is not None):
        mask_BSC = _triangle(query_BNSD) if causal else mask_BSC
        return block_forward_reference(*qkv, mask_BSC, scale=scale)
    if query_BNSD.is_cuda:
        return Partial(*_CUDA_FORWARD(*qkv, 0.0, causal, scale=scale)[:2])
    mask = _additive(mask_BSC, query_BNSD.dtype)
    y_BNSD, lse_BNS = _CPU_FORWARD(*qkv, 0.0, causal, attn_mask=mask, scale=scale)
    if mask_BSC is not None:
        # The kernel gives a query that sees no key the log-sum-exp 0.
        lse_BNS = lse_BNS.masked_fill(~mask_BSC.any(-1)[:, None], -torch.inf)
    return Partial(y_BNSD, lse_BNS)


def block_backward(
    gradient_BNSD: Tensor,
    whole: Partial,
    qkv: Qkv,
    mask_BSC: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float,
) -> Gradients:
    """Gradients of one block. `whole`: attention over all keys, of which the block is a part;
    `gradient_BNSD`: gradient of the output of `whole`."""
    query_BNSD, key_BMCD, value_BMCD = qkv
    if not query_BNSD.numel() or not key_BMCD.numel():
        return Gradients(*map(torch.zeros_like, qkv))
    y_BNSD = whole.y_BNSD.to(query_BNSD.dtype)
    if not is_fused(query_BNSD, value_BMCD) or (query_BNSD.is_cuda and mask_BSC is not None):
        mask_BSC = _triangle(query_BNSD) if causal else mask_BSC
        return block_backward_reference(gradient_BNSD, whole, *qkv, mask_BSC, scale=scale)
    inputs = (gradient_BNSD, *qkv, y_BNSD, whole.lse_BNS)
    if query_BNSD.is_cuda:
        # No dropout: the kernel reads neither seed nor offset.
        none = query_BNSD.new_zeros((), dtype=torch.uint64)
        sizes = query_BNSD.shape[2], key_BMCD.shape[2]
        # The kernel reads log-sum-exps in the order of memory and ignores their strides.
        inputs = (*inputs[:-1], whole.lse_BNS.contiguous())
        return Gradients(
            *_CUDA_BACKWARD(*inputs, None, None, *sizes, 0.0, causal, none, none, scale=scale)
        )
    return Gradients(
        *_CPU_BACKWARD(
            *inputs, 0.0, causal, attn_mask=_additive(mask_BSC, query_BNSD.dtype), scale=scale
        )
    )


#: Queries of a product in :func:`backward_in_rows`.
ROWS = 64


def rows_pay(query_BNSD: Tensor) -> bool:
    """Whether :func:`backward_in_rows` is faster than the kernel of the device
    (docs/results/step.md)."""
    on_cpu = query_BNSD.device.type == "cpu" and query_BNSD.dtype == torch.bfloat16
    return on_cpu and query_BNSD.shape[2] <= ROW_POSITIONS * query_BNSD.shape[3]


def backward_in_rows(
    gradient_BNSD: Tensor,
    lse_BNS: Tensor,
    query_BNSD: Tensor,
    key_BMCD: Tensor,
    value_BMCD: Tensor,
    *,
    scale: float,
) -> Gradients:
    """:func:`block_backward` with ``causal``, by matrix products of R rows with all keys that they
    see: the rows of ROWS queries, for all query heads of a key/value head. X = B M products."""
    (num_sequences, num_heads), size = key_BMCD.shape[:2], query_BNSD.shape[2]
    scaled_BNSD, lse_BNS1 = query_BNSD * scale, lse_BNS[..., None].to(query_BNSD.dtype)
    key_XCD, value_XCD = key_BMCD.flatten(0, 1), value_BMCD.flatten(0, 1)
    grad_query_BNSD = torch.empty_like(query_BNSD)
    grad_key_XCD, grad_value_XCD = (
        torch.zeros_like(x, dtype=wide(x.dtype)) for x in (key_XCD, value_XCD)
    )
    for start in range(0, size, ROWS):
        stop = min(start + ROWS, size)
        seen_XCD, values_XCD = key_XCD[:, :stop], value_XCD[:, :stop]
        query_XRD, grad_XRD, lse_XR1 = (
            x[:, :, start:stop].unflatten(1, (num_heads, -1)).flatten(2, 3).flatten(0, 1)
            for x in (scaled_BNSD, gradient_BNSD, lse_BNS1)
        )
        # Large weights have logits near the log-sum-exp. Their difference is near 0, where rounding
        # is finest. A rounded log-sum-exp is the same for a whole row, and softmax removes it.
        lse_XRC = lse_XR1.expand(-1, -1, stop)
        logits_XRC = torch.baddbmm(lse_XRC, query_XRD, seen_XCD.transpose(1, 2), beta=-1)
        later = torch.ones(stop - start, stop - start, dtype=torch.bool, device=query_XRD.device)
        by_head = logits_XRC.unflatten(1, (-1, stop - start))[..., start:]
        by_head.masked_fill_(later.triu_(1), -torch.inf)
        weights_XRC = logits_XRC.softmax(2)
        by_weight_XRC = grad_XRD @ values_XCD.transpose(1, 2)
        by_logit_XRC = _SOFTMAX_BACKWARD(by_weight_XRC, weights_XRC, 2, query_BNSD.dtype)
        grad_value_XCD[:, :stop] += weights_XRC.transpose(1, 2) @ grad_XRD
        grad_key_XCD[:, :stop] += by_logit_XRC.transpose(1, 2) @ query_XRD
        grad_query_XRD = (by_logit_XRC @ seen_XCD).mul_(scale)
        shape_BNRD = num_sequences, query_BNSD.shape[1], -1, query_BNSD.shape[3]
        grad_query_BNSD[:, :, start:stop] = grad_query_XRD.view(shape_BNRD)
    return Gradients(
        grad_query_BNSD,
        grad_key_XCD.to(key_BMCD.dtype).view(key_BMCD.shape),
        grad_value_XCD.to(value_BMCD.dtype).view(value_BMCD.shape),
    )


def block_forward_reference(
    query_BNSD: Tensor,
    key_BMCD: Tensor,
    value_BMCD: Tensor,
    mask_BSC: Tensor | None = None,
    *,
    scale: float,
) -> Partial:
    """The obvious form of :func:`block_forward`: all logits at once."""
    logits_BNSC = _logits(query_BNSD, key_BMCD, mask_BSC, scale)
    lse_BNS = logits_BNSC.logsumexp(-1)
    weights_BNSC = torch.exp(logits_BNSC - lse_BNS[..., None]).nan_to_num(0.0)
    groups = query_BNSD.shape[1] // value_BMCD.shape[1]
    value_BNCD = value_BMCD.repeat_interleave(groups, dim=1)
    y_BNSD = weights_BNSC @ value_BNCD.to(weights_BNSC.dtype)
    return Partial(y_BNSD, lse_BNS)


def block_backward_reference(
    gradient_BNSD: Tensor,
    whole: Partial,
    query_BNSD: Tensor,
    key_BMCD: Tensor,
    value_BMCD: Tensor,
    mask_BSC: Tensor | None = None,
    *,
    scale: float,
) -> Gradients:
    """The obvious form of :func:`block_backward`, the formula of this module's docstring."""
    num_kv_heads = key_BMCD.shape[1]
    groups = query_BNSD.shape[1] // num_kv_heads
    dtype = wide(query_BNSD.dtype)
    logits_BNSC = _logits(query_BNSD, key_BMCD, mask_BSC, scale)
    weights_BNSC = torch.exp(logits_BNSC - whole.lse_BNS[..., None].to(dtype)).nan_to_num(0.0)
    gradient_BNSD = gradient_BNSD.to(dtype)
    value_BNCD = value_BMCD.to(dtype).repeat_interleave(groups, dim=1)
    key_BNCD = key_BMCD.to(dtype).repeat_interleave(groups, dim=1)
    dot_BNS1 = (gradient_BNSD * whole.y_BNSD.to(dtype)).sum(-1, keepdim=True)
    by_logit_BNSC = weights_BNSC * (gradient_BNSD @ value_BNCD.transpose(2, 3) - dot_BNS1) * scale

    def of_groups(x_BNCD: Tensor) -> Tensor:
        """Sum over the query heads of each key/value head, [B, M, C, D]."""
        return x_BNCD.unflatten(1, (num_kv_heads, groups)).sum(2)

    return Gradients(
        (by_logit_BNSC @ key_BNCD).to(query_BNSD.dtype),
        of_groups(by_logit_BNSC.transpose(2, 3) @ query_BNSD.to(dtype)).to(key_BMCD.dtype),
        of_groups(weights_BNSC.transpose(2, 3) @ gradient_BNSD).to(value_BMCD.dtype),
    )


def _logits(query_BNSD: Tensor, key_BMCD: Tensor, mask_BSC: Tensor | None, scale: float) -> Tensor:
    dtype = wide(query_BNSD.dtype)
    groups = query_BNSD.shape[1] // key_BMCD.shape[1]
    key_BNCD = key_BMCD.to(dtype).repeat_interleave(groups, dim=1)
    logits_BNSC = query_BNSD.to(dtype) @ key_BNCD.transpose(2, 3) * scale
    if mask_BSC is not None:
        logits_BNSC = logits_BNSC.masked_fill(~mask_BSC[:, None], -torch.inf)
    return logits_BNSC


def _triangle(query_BNSD: Tensor) -> Tensor:
    size = query_BNSD.shape[2]
    return torch.ones(1, size, size, dtype=torch.bool, device=query_BNSD.device).tril()


def _additive(mask_BSC: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as the kernel adds it to logits, [B, 1, S, C]: 0 for True, -inf for False."""
    if mask_BSC is None:
        return None
    zeros = torch.zeros(mask_BSC.shape, dtype=dtype, device=mask_BSC.device)
    return zeros.masked_fill_(~mask_BSC, -torch.inf)[:, None]
