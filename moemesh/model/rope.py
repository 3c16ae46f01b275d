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

import torch
from torch import Tensor

from moemesh.config.attention_keys import AttentionConfig


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
        case "llama3":  # 1 where a frequency is kept, 0 where it is divided by the factor
            turns_F = config.original_max_position_embeddings * plain_F / (2 * math.pi)
            low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
            kept_F = ((turns_F - low) / (high - low)).clamp(0.0, 1.0)
        case "yarn":
            # The same, a ramp over the pairs between those that turn `rope_beta_fast` times and
            # `rope_beta_slow` times over the original positions.
            length, log_theta = config.original_max_position_embeddings, math.log(config.rope_theta)
            first, last = (
                size * math.log(length / (times * 2 * math.pi)) / (2 * log_theta)
                for times in (config.rope_beta_fast, config.rope_beta_slow)
            )
            if config.rope_truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, size - 1)
            if first == last:
                last += 0.001  # a step in place of a ramp of no length
            pair_F = torch.arange(size // 2, dtype=torch.float64)
            kept_F = (1.0 - ((pair_F - first) / (last - first)).clamp(0.0, 1.0)).to(device)
    return plain_F * kept_F + plain_F / config.rope_factor * (1.0 - kept_F)


def rotary_tables(config: AttentionConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(cosines, sines) of integer positions [..., S], float64 [..., S, 1, R]: for all heads.

    In float64 whatever the run's dtype: positions are exact far beyond 2^24.
    """
    angles = positions.double()[..., None, None] * frequencies(config, positions.device)
    if config.rope_interleave:
        angles = angles.repeat_interleave(2, dim=-1)
    else:
        angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * config.rope_scale, angles.sin() * config.rope_scale


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first R channels of x [B, S, heads, D] by tables of [..., S, 1, R].

    Rotated pairs are channels (i, i + F), or (2i, 2i + 1) where `interleaved`.
    """
    size = cosine.shape[-1]
    rotated, rest = x[..., :size], x[..., size:]
    if interleaved:
        turned = torch.stack([-rotated[..., 1::2], rotated[..., 0::2]], dim=-1).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
    y = rotated * cosine.to(x.dtype) + turned * sine.to(x.dtype)
    return torch.cat([y, rest], dim=-1) if rest.shape[-1] else y
