"""Rotary positions (Su et al., 2021): frequencies, stretched for longer sequences, and tables.

Legend: S positions, R rotated channels of a head, F = R/2 frequencies, D head size.

| rope_type | frequency of pair i, f = theta^(-2i/R) | source |
|---|---|---|
| default | f | arXiv:2104.09864 |
| linear | f / factor | arXiv:2306.15595 |
| llama3 | f, f / factor, or between them, by wavelength 2 pi / f | Llama 3.1 |
| yarn | f, f / factor, or between them, by turns over the original positions | arXiv:2309.00071 |
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moemesh.config.attention_keys import AttentionConfig
from moemesh.ops import fusion


def frequencies(config: AttentionConfig, device: torch.device | str = "cpu") -> Tensor:
    """Radians per position of each rotated pair, float64 [F]."""
    size = config.rotary_dim
    index_F = torch.arange(0, size, 2, dtype=torch.float64, device=device)
    plain_F = config.rope_theta ** (-index_F / size)
    match config.rope_type:
        case "default":
            return plain_F
        case "linear":
            return plain_F / config.rope_factor
        # share_F: 1 for the plain frequency, 0 for that divided by the factor.
        case "llama3":
            turns_F = config.original_max_position_embeddings * plain_F / (2 * math.pi)
            low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
            share_F = ((turns_F - low) / (high - low)).clamp(0.0, 1.0)
        case "yarn":
            # Linear over the pairs, from the one that turns `rope_beta_fast` times over the
            # original positions to the one that turns `rope_beta_slow` times.
            length, log_theta = config.original_max_position_embeddings, math.log(config.rope_theta)
            first, last = (
                size * math.log(length / (times * 2 * math.pi)) / (2 * log_theta)
                for times in (config.rope_beta_fast, config.rope_beta_slow)
            )
            if config.rope_truncate:
                first, last = math.floor(first), math.ceil(last)
            # As in transformers, `last` is limited by the channels, not by the pairs.
            first, last = max(first, 0), min(last, size - 1)
            if first == last:
                last += 0.001  # a ramp of length 0 would divide by zero
            pair_F = torch.arange(size // 2, dtype=torch.float64)
            share_F = (1.0 - ((pair_F - first) / (last - first)).clamp(0.0, 1.0)).to(device)
    return plain_F * share_F + plain_F / config.rope_factor * (1.0 - share_F)


class Tables(NamedTuple):
    """Tables [..., S, 1, R] for all heads: a rotated channel is ``x * cosine + partner * sine``,
    where `partner` is the other channel of the pair. So `sine` has -sin for the first channel of a
    pair, sin for the second. Pairs are channels (i, i + F), or (2i, 2i + 1) if `interleaved`."""

    cosine: Tensor
    sine: Tensor
    interleaved: bool = False

    def to(self, dtype: torch.dtype) -> Tables:
        return Tables(self.cosine.to(dtype), self.sine.to(dtype), self.interleaved)


def rotary_tables(config: AttentionConfig, positions: Tensor) -> Tables:
    """Tables of integer positions [..., S], float64 for every dtype of a run: float32 is not exact
    beyond position 2^24."""
    angles = positions.double()[..., None, None] * frequencies(config, positions.device)
    scale = config.rope_scale
    cosine, sine = angles.cos() * scale, angles.sin() * scale
    if config.rope_interleave:
        paired = torch.stack([-sine, sine], -1).flatten(-2)
        return Tables(cosine.repeat_interleave(2, dim=-1), paired, interleaved=True)
    return Tables(torch.cat([cosine, cosine], dim=-1), torch.cat([-sine, sine], dim=-1))


def rotate(query: Tensor, key: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """Rotate the first R channels of queries and keys [B, S, heads, D]; tables have their dtype."""
    if not torch.is_grad_enabled():
        return _rotate(query, key, *tables, False)
    return _Rotation.apply(query, key, tables)


class _Rotation(torch.autograd.Function):
    """A rotation. The backward rotates by the opposite angles, and needs no queries or keys."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(tables.cosine, tables.sine)
        ctx.interleaved = tables.interleaved
        return _rotate(query, key, *tables, False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rotated = _rotate(*gradients, *ctx.saved_tensors, ctx.interleaved, True)
        return *rotated, None


def _rotate(
    query: Tensor,
    key: Tensor,
    cosine: Tensor,
    sine: Tensor,
    interleaved: bool,
    backwards: bool,
) -> tuple[Tensor, Tensor]:
    options = cosine, sine, interleaved, backwards
    if query.device.type == "cpu":
        return _rotate_on_cpu(query, *options), _rotate_on_cpu(key, *options)
    # A single position (a generated token) would be compiled separately.
    is_compiled = query.shape[0] and query.shape[1] > 1
    function = fusion.compiled(_rotate_query_and_key) if is_compiled else _rotate_query_and_key
    return function(query, key, *options)


def _rotate_query_and_key(query: Tensor, key: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _rotate_one(query, *options), _rotate_one(key, *options)


def _rotate_on_cpu(
    x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool, backwards: bool
) -> Tensor:
    if not fusion.is_worth_compiling(x):
        return _rotate_one(x, cosine, sine, interleaved, backwards)
    x = x.contiguous()
    y = torch.empty_like(x)
    tables = (table.reshape(-1, table.shape[-1]) for table in (cosine, sine))
    sign = np.float32(-1 if backwards else 1)
    fusion.run_in_one_pass("rotate", x.flatten(0, 1), *tables, interleaved, sign, y.flatten(0, 1))
    return y


def _rotate_one(
    x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool, backwards: bool
) -> Tensor:
    size = cosine.shape[-1]
    rotated = x[..., :size] if size < x.shape[-1] else x
    if interleaved:
        partners = rotated.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partners = rotated.roll(size // 2, -1)
    y = (rotated * cosine).add_(partners * sine, alpha=-1 if backwards else 1)
    return torch.cat([y, x[..., size:]], dim=-1) if size < x.shape[-1] else y
