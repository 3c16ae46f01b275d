"""Attention over positions: what a query sees, and softmax attention in bounded memory.

Legend: B sequences, L positions of a whole sequence, S queries and C keys held here, N query heads,
M key/value heads, D head size (that of values may differ), E positions of the keys of a tile.

A query at position p sees the keys at the positions ``lowest .. p``: all before it, none behind it;
``lowest`` is the start of its document, or of its window, whichever is later. Queries and keys are
contiguous runs of positions, any number of them, in any order: a whole sequence, a slice of it, or
the chunks that a context-parallel rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moemesh.ops.attention import (
    Gradients,
    Partial,
    block_backward,
    block_forward,
    is_fused,
    merge,
    nothing_seen,
    wide,
)

#: Queries and keys of a tile for which a mask is made: bounds the numbers of the mask.
TILE_QUERIES, TILE_KEYS = 512, 4096

Runs = tuple[range, ...]


@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees. ``queries`` and ``keys``: the positions held here, as runs;
    ``window``: a query sees the last `window` positions, itself among them (None: all);
    ``starts_BL``: of each position of the whole sequence, the first position of its document
    (int64; None: a sequence is one document); ``length``: of whole sequences, where other ranks
    hold the other positions."""

    queries: Runs
    keys: Runs
    window: int | None = None
    starts_BL: Tensor | None = None
    length: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether all queries of a sequence see all keys up to themselves."""
        return self.is_triangle and len(self.queries) == 1 and self.queries == self.keys

    @property
    def is_triangle(self) -> bool:
        """Whether nothing but the order of positions bounds what is seen."""
        longest = max((run.stop for run in self.queries), default=0)
        return self.starts_BL is None and (self.window is None or self.window >= longest)

    @cached_property
    def starts_on_host(self) -> Tensor | None:
        """``starts_BL`` on the CPU: tiles are chosen there."""
        return None if self.starts_BL is None else self.starts_BL.cpu()

    def between(self, queries: Runs, keys: Runs) -> Visibility:
        """The same rules for other queries and keys."""
        return self._with_starts(replace(self, queries=queries, keys=keys))

    def within(self, window: int) -> Visibility:
        """The same, and no query sees more than the last `window` positions."""
        return self._with_starts(replace(self, window=window))

    def known(self, starts_on_host: Tensor | None) -> Visibility:
        """The same, with ``starts_BL`` of the host where it has them: else it waits for them."""
        if starts_on_host is not None:
            self.__dict__["starts_on_host"] = starts_on_host
        return self

    def _with_starts(self, found: Visibility) -> Visibility:
        if "starts_on_host" in self.__dict__:
            found.__dict__["starts_on_host"] = self.starts_on_host
        return found

    def lowest(self, queries: range) -> tuple[int, int]:
        """The first positions that the first of `queries` sees and that the last one sees, the
        least and the largest over the sequences."""
        first, last = queries[0], queries[-1]
        window = last + 1 if self.window is None else self.window
        least, largest = max(first + 1 - window, 0), max(last + 1 - window, 0)
        if self.starts_on_host is not None and len(self.starts_on_host):
            least = max(least, int(self.starts_on_host[:, first].min()))
            largest = max(largest, int(self.starts_on_host[:, last].max()))
        return least, largest

    def mask(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """Which keys are seen: bool [B or 1, S, E]."""
        query_S1 = torch.arange(queries.start, queries.stop, device=device)[:, None]
        key_E = torch.arange(keys.start, keys.stop, device=device)
        mask_BSE = (key_E <= query_S1)[None]
        if self.window is not None:
            mask_BSE = mask_BSE & (key_E > query_S1 - self.window)
        if self.starts_BL is not None:
            lowest_BS = self.starts_BL[:, queries.start : queries.stop]
            mask_BSE = mask_BSE & (key_E >= lowest_BS[:, :, None])
        return mask_BSE

    def num_pairs(self) -> int:
        """Pairs of a query and a key that it sees, of all sequences (of one, without documents):
        what the work of attention is proportional to."""
        total = 0
        for queries in self.queries:
            positions = torch.arange(queries.start, queries.stop)
            lowest_BS = torch.zeros(1, len(positions), dtype=torch.int64)
            if self.window is not None:
                lowest_BS = (positions + 1 - self.window).clamp(min=0)[None]
            if self.starts_on_host is not None:
                own = self.starts_on_host[:, queries.start : queries.stop]
                lowest_BS = torch.maximum(lowest_BS, own)
            for keys in self.keys:
                last = torch.minimum(positions, torch.tensor(keys.stop - 1))
                first = lowest_BS.clamp(min=keys.start)
                total += int((last - first + 1).clamp(min=0).sum())
        return total


def document_starts(documents_BL: Tensor) -> Tensor:
    """Document numbers, equal within a document and different between neighbours -> the first
    position of each position's document, int64 [B, L]."""
    positions_L = torch.arange(documents_BL.shape[1], device=documents_BL.device)
    begins_BL = torch.ones_like(documents_BL, dtype=torch.bool)
    begins_BL[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
    return torch.where(begins_BL, positions_L, 0).cummax(dim=1).values


def attention(
    query_BNSD: Tensor,
    key_BMCD: Tensor,
    value_BMCD: Tensor,
    visible: Visibility,
    *,
    sinks_N: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention [B, N, S, value head size]; every query sees at least one key.

    `sinks_N`: one more logit in the denominator of each head, without a value. `scale` of the
    logits, None for 1/sqrt(D).
    """
    if scale is None:
        scale = query_BNSD.shape[-1] ** -0.5
    value_size = value_BMCD.shape[-1]
    value_BMCD = _padded(value_BMCD, query_BNSD)
    # The fused kernels of CUDA refuse a batch of 0, which a rank without sequences has.
    if visible.is_whole and sinks_N is None and query_BNSD.numel():
        y_BNSD = F.scaled_dot_product_attention(
            query_BNSD, key_BMCD, value_BMCD, is_causal=True, scale=scale, enable_gqa=True
        )
    else:
        y_BNSD, _ = attention_with_lse(
            query_BNSD, key_BMCD, value_BMCD, visible, sinks_N=sinks_N, scale=scale
        )
    return y_BNSD[..., :value_size]


def attention_with_lse(
    query_BNSD: Tensor,
    key_BMCD: Tensor,
    value_BMCD: Tensor,
    visible: Visibility,
    *,
    sinks_N: Tensor | None = None,
    scale: float,
) -> Partial:
    """:func:`attention` with the log-sum-exp [B, N, S] of the logits, sinks included, in fp32 or
    fp64, without gradient. A query that sees no key (and no sink) has the output 0 and -inf."""
    return Partial(*_Attention.apply(query_BNSD, key_BMCD, value_BMCD, sinks_N, visible, scale))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_BNSD: Tensor,
        key_BMCD: Tensor,
        value_BMCD: Tensor,
        sinks_N: Tensor | None,
        visible: Visibility,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        partial = attend_to(query_BNSD, key_BMCD, value_BMCD, visible, scale=scale)
        whole = with_sinks(partial, sinks_N)
        y_BNSD = output_of(whole, query_BNSD.dtype)
        ctx.save_for_backward(query_BNSD, key_BMCD, value_BMCD, sinks_N, y_BNSD, whole.lse_BNS)
        ctx.visible, ctx.scale = visible, scale
        ctx.mark_non_differentiable(whole.lse_BNS)
        return y_BNSD, whole.lse_BNS

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BNSD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query_BNSD, key_BMCD, value_BMCD, sinks_N, *whole = ctx.saved_tensors
        inputs = (query_BNSD, key_BMCD, value_BMCD)
        found = gradients_of(gradient_BNSD, Partial(*whole), *inputs, ctx.visible, scale=ctx.scale)
        own = (x.to(like.dtype) for x, like in zip(found, inputs, strict=True))
        return *own, sink_gradient(gradient_BNSD, Partial(*whole), sinks_N), None, None


def attend_to(
    query_BNSD: Tensor,
    key_BMCD: Tensor,
    value_BMCD: Tensor,
    visible: Visibility,
    *,
    scale: float,
) -> Partial:
    """Attention over the keys given, without gradient; to be merged with that over others."""
    value_size = value_BMCD.shape[-1]
    found = nothing_seen(query_BNSD, value_size)
    value_BMCD = _padded(value_BMCD, query_BNSD)
    fused = is_fused(query_BNSD, value_BMCD)
    for rows, tiles in _plan(visible, fused=fused):
        parts = [
            block_forward(
                query_BNSD[:, :, rows],
                key_BMCD[:, :, tile.keys],
                value_BMCD[:, :, tile.keys],
                tile.mask(visible, query_BNSD.device),
                causal=tile.causal,
                scale=scale,
            )
            for tile in tiles
        ]
        if parts:
            whole = parts[0]
            for part in parts[1:]:
                whole = merge(whole, part)
            found.y_BNSD[:, :, rows] = whole.y_BNSD[..., :value_size]
            found.lse_BNS[:, :, rows] = whole.lse_BNS
    return found


def gradients_of(
    gradient_BNSD: Tensor,
    whole: Partial,
    query_BNSD: Tensor,
    key_BMCD: Tensor,
    value_BMCD: Tensor,
    visible: Visibility,
    *,
    scale: float,
) -> Gradients:
    """What the keys given contribute to the gradients, in fp32 or fp64. `whole` is the attention
    over all keys (and sinks), `gradient` that of its output."""
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
            found = block_backward(
                gradient_BNSD[:, :, rows],
                Partial(whole.y_BNSD[:, :, rows], whole.lse_BNS[:, :, rows]),
                query_BNSD[:, :, rows],
                key_BMCD[:, :, tile.keys],
                value_BMCD[:, :, tile.keys],
                tile.mask(visible, query_BNSD.device),
                causal=tile.causal,
                scale=scale,
            )
            total.query_BNSD[:, :, rows] += found.query_BNSD
            total.key_BMCD[:, :, tile.keys] += found.key_BMCD
            total.value_BMCD[:, :, tile.keys] += found.value_BMCD
    return total._replace(value_BMCD=total.value_BMCD[..., :value_size])


def with_sinks(partial: Partial, sinks_N: Tensor | None) -> Partial:
    """A sink takes its share of the weights and adds nothing to the output."""
    if sinks_N is None:
        return partial
    lse_BNS = torch.logaddexp(partial.lse_BNS, sinks_N.to(partial.lse_BNS.dtype)[:, None])
    share_BNS = torch.exp(partial.lse_BNS - lse_BNS)
    return Partial(partial.y_BNSD * share_BNS[..., None], lse_BNS)


def sink_gradient(gradient_BNSD: Tensor, whole: Partial, sinks_N: Tensor | None) -> Tensor | None:
    """The gradient of the sinks, from the queries held here."""
    if sinks_N is None:
        return None
    lse_BNS = whole.lse_BNS
    weight_BNS = torch.exp(sinks_N.to(lse_BNS.dtype)[:, None] - lse_BNS)
    mean_BNS = (gradient_BNSD.to(lse_BNS.dtype) * whole.y_BNSD).sum(-1)
    return -(weight_BNS * mean_BNS).sum((0, 2)).to(sinks_N.dtype)


def output_of(whole: Partial, dtype: torch.dtype) -> Tensor:
    """The output in `dtype`, laid out by token: what comes next reads it so, without a copy."""
    return whole.y_BNSD.transpose(1, 2).to(dtype).contiguous().transpose(1, 2)


def _padded(x: Tensor, query_BNSD: Tensor) -> Tensor:
    """Values, outputs or their gradients with zeros up to the size of queries: PyTorch's fused
    kernels for the CPU want one head size."""
    missing = query_BNSD.shape[-1] - x.shape[-1]
    return x if missing <= 0 or query_BNSD.is_cuda else F.pad(x, (0, missing))


class _Tile(NamedTuple):
    """Neighbouring queries that see some of these keys: all of them, unless `causal` (a square on
    the diagonal) or `masked`. ``keys`` are places among the keys held here."""

    keys: slice
    positions: range
    queries: range
    causal: bool = False
    masked: bool = False

    def mask(self, visible: Visibility, device: torch.device) -> Tensor | None:
        return visible.mask(self.queries, self.positions, device) if self.masked else None


def _plan(visible: Visibility, *, fused: bool) -> Iterator[tuple[slice, list[_Tile]]]:
    """Places of queries held here, each with the tiles of keys that they see.

    With a kernel for it (`fused`) rectangles and triangles may have any size.
    """
    for place, queries in _places(visible.queries):
        if visible.is_triangle and fused:
            for part in _cut(queries, visible.keys):
                yield _rows(place, queries, part), list(_large_tiles(part, visible.keys))
            continue
        for start in range(queries.start, queries.stop, TILE_QUERIES):
            part = range(start, min(start + TILE_QUERIES, queries.stop))
            yield _rows(place, queries, part), list(_small_tiles(part, visible))


def _places(runs: Runs) -> Iterator[tuple[int, range]]:
    """Each run with the place of its first position among those held here."""
    place = 0
    for run in runs:
        yield place, run
        place += len(run)


def _rows(place: int, whole: range, part: range) -> slice:
    start = place + part.start - whole.start
    return slice(start, start + len(part))


def _cut(queries: range, keys: Sequence[range]) -> Iterator[range]:
    """`queries` cut where a run of keys begins or ends."""
    borders = {border for run in keys for border in (run.start, run.stop) if border in queries}
    points = sorted({queries.start, queries.stop, *borders})
    for start, stop in pairwise(points):
        yield range(start, stop)


def _large_tiles(queries: range, keys: Runs) -> Iterator[_Tile]:
    """For queries that lie in a run of keys or outside of it, never across its border."""
    for place, run in _places(keys):
        before = range(run.start, min(run.stop, queries.start))
        if before:
            yield _Tile(_rows(place, run, before), before, queries)
        if queries.start in run:
            yield _Tile(_rows(place, run, queries), queries, queries, causal=True)


def _small_tiles(queries: range, visible: Visibility) -> Iterator[_Tile]:
    """Bounded tiles of the keys that any of `queries` sees."""
    least, largest = visible.lowest(queries)
    for place, run in _places(visible.keys):
        seen = range(max(run.start, least), min(run.stop, queries.stop))
        for start in range(seen.start, seen.stop, TILE_KEYS):
            part = range(start, min(start + TILE_KEYS, seen.stop))
            masked = part.start < largest or part.stop - 1 > queries.start
            yield _Tile(_rows(place, run, part), part, queries, masked=masked)
