"""Causal attention within documents and windows, by one fused kernel of CUDA.

Legend: B sequences, S positions of each, T = B * S, N query heads, M key/value heads, D head size.

The kernel of flash attention takes documents of different lengths laid end to end, and a window.
It reads only keys that a query sees. Its backward takes the output and the log-sum-exp of the
*whole* attention, like :mod:`moemesh.ops.attention`, so sinks may be part of both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.ops.attention import Gradients, Partial, Qkv, is_fused
from moemesh.ops.host_copy import upload

_FORWARD = torch.ops.aten._flash_attention_forward
_BACKWARD = torch.ops.aten._flash_attention_backward


class Documents(NamedTuple):
    """All documents of B sequences, end to end. `starts`: first position of each document, then T
    (int32, on the device). `longest`: number of positions of the longest document."""

    starts: Tensor
    longest: int


def documents(starts_BS: Tensor | None, batch: int, length: int, device: torch.device) -> Documents:
    """The documents of `batch` sequences of `length` positions. `starts_BS`: first position of each
    position's document (int64, on the CPU: the kernel needs the length of the longest document as a
    number); None: each sequence is one document."""
    if starts_BS is None:
        starts = torch.arange(0, batch * length + 1, length)
    else:
        begins_T = (starts_BS == torch.arange(length)).flatten()
        starts = torch.cat([begins_T.nonzero().flatten(), torch.tensor([batch * length])])
    return Documents(upload(starts.int(), device), int(starts.diff().max()))


def takes_documents(query_BNSD: Tensor, value_BMSD: Tensor) -> bool:
    """Whether the fused kernel takes these tensors; values may be narrower than queries."""
    has_kernel = query_BNSD.is_cuda and is_fused(query_BNSD, query_BNSD)
    return has_kernel and query_BNSD.numel() > 0 and value_BMSD.shape[-1] <= query_BNSD.shape[-1]


def packed_forward(
    qkv: Qkv,
    within: Documents,
    window: int | None,
    *,
    scale: float,
) -> Partial:
    """Attention of each position to itself and to earlier positions of its document, to `window` of
    them at most, its own included (None: to all)."""
    batch, value_size = len(qkv[0]), qkv[2].shape[-1]
    inputs = (_end_to_end(x, qkv[0]) for x in qkv)
    rules, options = _rules(within, window, scale)
    y_TND, lse_NT = _FORWARD(*inputs, *rules, False, **options)[:2]
    lse_BNS = lse_NT.unflatten(1, (batch, -1)).transpose(0, 1)
    return Partial(_by_head(y_TND, batch)[..., :value_size], lse_BNS)


def packed_backward(
    gradient_BNSD: Tensor,
    whole: Partial,
    qkv: Qkv,
    within: Documents,
    window: int | None,
    *,
    scale: float,
) -> Gradients:
    """The gradients. `whole`: the attention, sinks included; `gradient_BNSD`: gradient of its
    output."""
    query_BNSD, value_size = qkv[0], qkv[2].shape[-1]
    batch, tensors = len(query_BNSD), (gradient_BNSD.to(query_BNSD.dtype), *qkv, whole.y_BNSD)
    inputs = (_end_to_end(x, query_BNSD) for x in tensors)
    lse_NT = whole.lse_BNS.transpose(0, 1).flatten(1).contiguous()
    # No dropout: the kernel reads no seed.
    none = query_BNSD.new_zeros(2, dtype=torch.uint64)
    rules, options = _rules(within, window, scale)
    gradients = _BACKWARD(*inputs, lse_NT, *rules, none, none[:0], **options)
    query, key, value = (_by_head(x, batch) for x in gradients)
    return Gradients(query, key, value[..., :value_size])


def _rules(
    within: Documents, window: int | None, scale: float
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the kernel in its order: starts of documents of queries and of keys, the longest
    of each, dropout, whether it is causal; then options: scale and window. With a window the
    argument for causal is False: the right side of the window, 0, makes it causal."""
    starts, longest = within
    left = -1 if window is None else window - 1
    options = {"scale": scale, "window_size_left": left, "window_size_right": 0}
    return (starts, starts, longest, longest, 0.0, window is None), options


def _end_to_end(x_BNSD: Tensor, query_BNSD: Tensor) -> Tensor:
    """[T, N, D], with zeros up to the head size of queries."""
    missing = query_BNSD.shape[-1] - x_BNSD.shape[-1]
    x_BNSD = F.pad(x_BNSD, (0, missing)) if missing else x_BNSD
    x_TND = x_BNSD.transpose(1, 2).flatten(0, 1)
    return x_TND if x_TND.stride(-1) == 1 else x_TND.contiguous()


def _by_head(x_TND: Tensor, batch: int) -> Tensor:
    return x_TND.unflatten(0, (batch, -1)).transpose(1, 2)
