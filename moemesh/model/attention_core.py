"""Softmax attention over positions, in bounded memory.

Legend: B sequences, S queries and C keys of this rank, N query heads, M key/value heads, D head
size (that of values may differ).

A :class:`~moemesh.model.visibility.Visibility` defines the keys that each query sees. One call of a
kernel computes whole causal sequences and a last query alone (both without sinks), and on CUDA
documents and windows; the rest is computed in tiles, without tiles that no query sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moemesh.model.visibility import Runs, Visibility
from moemesh.ops.attention import (
    Gradients,
    Partial,
    Qkv,
    backward_in_rows,
    block_backward,
    block_forward,
    is_fused,
    merge,
    nothing_seen,
    rows_pay,
    wide,
)
from moemesh.ops.packed_attention import packed_backward, packed_forward

#: Most queries and keys of a tile with a mask: bounds the memory of the mask.
TILE_QUERIES, TILE_KEYS = 512, 4096


def attention(
    qkv: Qkv,
    visible: Visibility,
    *,
    sinks_N: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention [B, N, S, value head size]; every query sees at least one key. `sinks_N`: a
    further logit in the softmax of each head, without a value. `scale` of the logits; None:
    1/sqrt(D)."""
    query_BNSD, key_BMCD, value_BMCD = qkv
    if scale is None:
        scale = query_BNSD.shape[-1] ** -0.5
    value_size = value_BMCD.shape[-1]
    if value_size < query_BNSD.shape[-1]:
        value_BMCD = _padded(value_BMCD, query_BNSD)
    # The fused kernels of CUDA refuse a batch of 0, which a rank without sequences has.
    has_kernel = sinks_N is None and query_BNSD.numel() > 0
    seen = None if torch.is_grad_enabled() else visible.by_the_last
    if has_kernel and seen is not None:
        # A token of generated text: one query after all keys, which needs no mask.
        y_BNSD = F.scaled_dot_product_attention(
            query_BNSD, key_BMCD[:, :, seen], value_BMCD[:, :, seen], scale=scale, enable_gqa=True
        )
    elif has_kernel and visible.is_whole and torch.is_grad_enabled() and rows_pay(query_BNSD):
        y_BNSD = _Triangle.apply(query_BNSD, key_BMCD, value_BMCD, scale)
    elif has_kernel and visible.is_whole:
        y_BNSD = F.scaled_dot_product_attention(
            query_BNSD, key_BMCD, value_BMCD, is_causal=True, scale=scale, enable_gqa=True
        )
    else:
        qkv = query_BNSD, key_BMCD, value_BMCD
        y_BNSD, _ = attention_with_lse(qkv, LocalPass(visible, scale), sinks_N)
    return y_BNSD[..., :value_size]


class _Triangle(torch.autograd.Function):
    """Causal attention of whole sequences, with :func:`backward_in_rows`."""

    @staticmethod
    def forward(
        ctx: Any, query_BNSD: Tensor, key_BMCD: Tensor, value_BMCD: Tensor, scale: float
    ) -> Tensor:
        qkv = query_BNSD, key_BMCD, value_BMCD
        y_BNSD, lse_BNS = block_forward(qkv, causal=True, scale=scale)
        ctx.save_for_backward(lse_BNS, *qkv)
        ctx.scale = scale
        return y_BNSD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BNSD: Tensor) -> tuple[Tensor | None, ...]:
        return *backward_in_rows(gradient_BNSD, *ctx.saved_tensors, scale=ctx.scale), None


class AttentionPass(Protocol):
    """Attention of a rank's queries over all keys that they see, without sinks or autograd."""

    def forward(self, qkv: Qkv) -> Partial: ...

    def backward(self, gradient_BNSD: Tensor, whole: Partial, qkv: Qkv) -> Gradients:
        """Gradients of `qkv`. `whole`: the output, whose gradient is `gradient_BNSD`, and the
        log-sum-exp, both with sinks."""
        ...


class LocalPass(NamedTuple):
    """An :class:`AttentionPass` over keys that this rank has."""

    visible: Visibility
    scale: float

    def forward(self, qkv: Qkv) -> Partial:
        visible = self.visible
        if (documents := visible.documents(qkv[0], qkv[2])) is not None:
            return packed_forward(qkv, documents, visible.window, scale=self.scale)
        return attend_to(qkv, visible, scale=self.scale)

    def backward(self, gradient_BNSD: Tensor, whole: Partial, qkv: Qkv) -> Gradients:
        visible, inputs = self.visible, (gradient_BNSD, whole, qkv)
        if (documents := visible.documents(qkv[0], qkv[2])) is not None:
            return packed_backward(*inputs, documents, visible.window, scale=self.scale)
        return gradients_of(*inputs, visible, scale=self.scale)


def attention_with_lse(
    qkv: Qkv, attention_pass: AttentionPass, sinks_N: Tensor | None = None
) -> Partial:
    """:func:`attention` by `attention_pass`, and the log-sum-exp [B, N, S] of the logits, sinks
    included, in fp32 or fp64, without gradient. A query without a key has the output 0, and without
    a sink the log-sum-exp -inf."""
    return Partial(*_Attention.apply(*qkv, sinks_N, attention_pass))


class _Attention(torch.autograd.Function):
    """Attention by an :class:`AttentionPass`, with sinks: each has a share of the weights, but no
    value."""

    @staticmethod
    def forward(
        ctx: Any,
        query_BNSD: Tensor,
        key_BMCD: Tensor,
        value_BMCD: Tensor,
        sinks_N: Tensor | None,
        attention_pass: AttentionPass,
    ) -> tuple[Tensor, Tensor]:
        qkv = query_BNSD, key_BMCD, value_BMCD
        y_BNSD, lse_BNS = attention_pass.forward(qkv)
        if sinks_N is not None:
            keys_lse_BNS = lse_BNS
            lse_BNS = torch.logaddexp(keys_lse_BNS, sinks_N.to(keys_lse_BNS.dtype)[:, None])
            y_BNSD = y_BNSD * torch.exp(keys_lse_BNS - lse_BNS)[..., None]
        # The heads of a token are contiguous: unless values were padded, the output projection
        # reads them without a copy.
        y_BNSD = y_BNSD.transpose(1, 2).to(query_BNSD.dtype).contiguous().transpose(1, 2)
        ctx.save_for_backward(*qkv, sinks_N, y_BNSD, lse_BNS)
        ctx.attention_pass = attention_pass
        ctx.mark_non_differentiable(lse_BNS)
        ctx.set_materialize_grads(False)  # no zeros for the log-sum-exp
        return y_BNSD, lse_BNS

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BNSD: Tensor, _: None) -> tuple[Tensor | None, ...]:
        query_BNSD, key_BMCD, value_BMCD, sinks_N, y_BNSD, lse_BNS = ctx.saved_tensors
        qkv = query_BNSD, key_BMCD, value_BMCD
        by_qkv = ctx.attention_pass.backward(gradient_BNSD, Partial(y_BNSD, lse_BNS), qkv)
        by_sinks = None
        if sinks_N is not None:
            weight_BNS = torch.exp(sinks_N.to(lse_BNS.dtype)[:, None] - lse_BNS)
            dot_BNS = (gradient_BNSD.to(lse_BNS.dtype) * y_BNSD).sum(-1)
            by_sinks = -(weight_BNS * dot_BNS).sum((0, 2)).to(sinks_N.dtype)
        gradients = (x.to(like.dtype) for x, like in zip(by_qkv, qkv, strict=True))
        return *gradients, by_sinks, None


def attend_to(qkv: Qkv, visible: Visibility, *, scale: float) -> Partial:
    """Attention over the keys of `qkv`, without autograd; :func:`merge` joins several of these."""
    query_BNSD, key_BMCD, value_BMCD = qkv
    value_size = value_BMCD.shape[-1]
    total = nothing_seen(query_BNSD, value_size)
    value_BMCD = _padded(value_BMCD, query_BNSD)
    fused = is_fused(query_BNSD, value_BMCD)
    for rows, tiles in _plan(visible, fused=fused):
        parts = [
            block_forward(
                (query_BNSD[:, :, rows], key_BMCD[:, :, tile.keys], value_BMCD[:, :, tile.keys]),
                tile.mask(visible, query_BNSD.device),
                causal=tile.causal,
                scale=scale,
            )
            for tile in tiles
        ]
        if parts:
            merged = parts[0]
            for part in parts[1:]:
                merged = merge(merged, part)
            total.y_BNSD[:, :, rows] = merged.y_BNSD[..., :value_size]
            total.lse_BNS[:, :, rows] = merged.lse_BNS
    return total


def gradients_of(
    gradient_BNSD: Tensor,
    whole: Partial,
    qkv: Qkv,
    visible: Visibility,
    *,
    scale: float,
) -> Gradients:
    """Gradients of `qkv` from attention over these keys, fp32 or fp64; the caller adds up those of
    the queries over all sets of keys. `whole`: the output over all keys (and sinks), whose gradient
    is `gradient_BNSD`, and the log-sum-exp."""
    query_BNSD, key_BMCD, value_BMCD = qkv
    value_size = value_BMCD.shape[-1]
    value_BMCD = _padded(value_BMCD, query_BNSD)
    gradient_BNSD = _padded(gradient_BNSD, query_BNSD)
    whole = Partial(_padded(whole.y_BNSD, query_BNSD), whole.lse_BNS)
    inputs = (query_BNSD, key_BMCD, value_BMCD)
    total = Gradients(*(torch.zeros_like(x, dtype=wide(x.dtype)) for x in inputs))
    fused = is_fused(query_BNSD, value_BMCD)
    if gradient_BNSD.stride(-1) != 1:
        gradient_BNSD = gradient_BNSD.contiguous()
    for rows, tiles in _plan(visible, fused=fused):
        for tile in tiles:
            tile_gradients = block_backward(
                gradient_BNSD[:, :, rows],
                Partial(whole.y_BNSD[:, :, rows], whole.lse_BNS[:, :, rows]),
                (query_BNSD[:, :, rows], key_BMCD[:, :, tile.keys], value_BMCD[:, :, tile.keys]),
                tile.mask(visible, query_BNSD.device),
                causal=tile.causal,
                scale=scale,
            )
            total.query_BNSD[:, :, rows] += tile_gradients.query_BNSD
            total.key_BMCD[:, :, tile.keys] += tile_gradients.key_BMCD
            total.value_BMCD[:, :, tile.keys] += tile_gradients.value_BMCD
    return total._replace(value_BMCD=total.value_BMCD[..., :value_size])


def _padded(x: Tensor, query_BNSD: Tensor) -> Tensor:
    """Values, outputs or their gradients, padded with zeros to the head size of queries: PyTorch's
    fused kernels for the CPU need one head size."""
    missing = query_BNSD.shape[-1] - x.shape[-1]
    return x if missing <= 0 or query_BNSD.is_cuda else F.pad(x, (0, missing))


class _Tile(NamedTuple):
    """A block of neighbouring queries and keys. Each query sees all of the keys, unless `causal`
    (a square on the diagonal) or `masked`."""

    #: Indices of the keys among this rank's, and their positions in the sequence.
    keys: slice
    positions: range
    queries: range
    causal: bool = False
    masked: bool = False

    def mask(self, visible: Visibility, device: torch.device) -> Tensor | None:
        return visible.mask(self.queries, self.positions, device) if self.masked else None


def _plan(visible: Visibility, *, fused: bool) -> Iterator[tuple[slice, list[_Tile]]]:
    """Slices of this rank's queries, each with the tiles of keys that they see. With a `fused`
    kernel, tiles without a mask may have any size."""
    for place, queries in _places(visible.queries):
        if visible.is_triangle and fused:
            # Queries are cut where a run of keys begins or ends. Then a run before a part is a
            # rectangle, and the run that contains the part adds a triangle on the diagonal.
            ends = {end for run in visible.keys for end in (run.start, run.stop) if end in queries}
            for start, stop in pairwise(sorted({queries.start, queries.stop, *ends})):
                part, tiles = range(start, stop), list[_Tile]()
                for first, run in _places(visible.keys):
                    before = range(run.start, min(run.stop, start))
                    if before:
                        tiles.append(_Tile(_rows(first, run, before), before, part))
                    if start in run:
                        tiles.append(_Tile(_rows(first, run, part), part, part, causal=True))
                yield _rows(place, queries, part), tiles
            continue
        for start in range(queries.start, queries.stop, TILE_QUERIES):
            part, tiles = range(start, min(start + TILE_QUERIES, queries.stop)), list[_Tile]()
            # Tiles of at most TILE_KEYS keys, of those that any query of the part sees.
            least, largest = visible.lowest(part)
            for first, run in _places(visible.keys):
                seen = range(max(run.start, least), min(run.stop, part.stop))
                for key in range(seen.start, seen.stop, TILE_KEYS):
                    keys = range(key, min(key + TILE_KEYS, seen.stop))
                    masked = key < largest or keys.stop - 1 > start
                    tiles.append(_Tile(_rows(first, run, keys), keys, part, masked=masked))
            yield _rows(place, queries, part), tiles


def _places(runs: Runs) -> Iterator[tuple[int, range]]:
    """Each run with the index of its first position among this rank's positions."""
    place = 0
    for run in runs:
        yield place, run
        place += len(run)


def _rows(place: int, whole: range, part: range) -> slice:
    """Indices of the positions `part` of the run `whole`, whose first one has the index `place`."""
    start = place + part.start - whole.start
    return slice(start, start + len(part))
