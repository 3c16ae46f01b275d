"""Bytes of the key-value cache of a model that generates.

Per token: GQA 2 L h_kv w, MLA L (r_kv + d_r) w: the latent and the rotary key stand for all heads.
``4 b L h (s + n)`` is the multi-head 16-bit case.
"""

from __future__ import annotations

from typing import NamedTuple

from moemesh.config.data import read_tokens
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.section import LARGEST_SIZE
from moemesh.planner.shapes.shape import ModelShape


def kv_bytes_per_token(shape: ModelShape, element_bytes: float = 2) -> float:
    """Bytes that one more token of context costs while no window is full."""
    return shape.num_layers * _layer_bytes(shape) * element_bytes


class CacheSize(NamedTuple):
    """Sequences of a batch, and tokens of each: the prompt's s and the n that are generated."""

    batch: int
    tokens: int


def read_cache_size(text: str) -> CacheSize:
    """A size as a user writes it: "32x4096", "32x4k". Raises ConfigError."""
    parts = text.lower().replace("×", "x").split("x")
    try:
        numbers = [read_tokens(part, 1024) for part in parts]
    except ConfigError:
        numbers = []
    if len(numbers) != 2 or not all(n <= LARGEST_SIZE and n == int(n) for n in numbers):
        message = "a cache is of so many sequences of so many tokens (prompt and answer), from 1"
        fix = "such as --kv-cache 32x4096"
        raise ConfigError([Problem.of("out-of-range", "kv_cache", text, message, fix)])
    return CacheSize(*map(int, numbers))


def kv_cache_bytes(shape: ModelShape, batch: int, tokens: int, element_bytes: float = 2) -> float:
    """Bytes of the cache of `batch` sequences of `tokens` (s + n: the prompt and what is generated)
    over all ranks; a layer with a window keeps that many of the last ones."""
    windows = (kind.window for kind in shape.kinds)
    kept = sum(min(tokens, window) if window else tokens for window in windows)
    return batch * kept * _layer_bytes(shape) * element_bytes


def _layer_bytes(shape: ModelShape) -> int:
    """Numbers a layer keeps for a token."""
    if shape.attention == "mla":
        return shape.kv_lora_rank + shape.qk_rotary_head_dim
    return 2 * shape.num_kv_heads * shape.head_dim
