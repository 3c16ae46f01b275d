"""Uniform random numbers as a pure function of integer keys: no state, any device, any order.

A value depends on its logical coordinates (seed, step, layer, token, expert) and on nothing else,
so it is the same in every layout and in a recomputed layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: The finaliser of SplitMix64 (G. Steele et al., "Fast splittable pseudorandom number generators",
#: 2014), with its constants as signed 64-bit integers. Its products are modulo 2^64.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


def uniform(*keys: int | Tensor) -> Tensor:
    """Numbers in [0, 1), fp32, multiples of 2^-24; int64 keys are broadcast against one another.
    The order of keys matters. Equal keys give equal numbers on every device."""
    state = torch.zeros((), dtype=torch.int64)
    for key in keys:
        state = (state ^ key) + _STEP
        state = (state ^ _shift(state, 30)) * _FIRST
        state = (state ^ _shift(state, 27)) * _SECOND
        state = state ^ _shift(state, 31)
    return _shift(state, 40).to(torch.float32) * 2.0**-24


def uniform_loop(*keys: int) -> float:
    """Reference for :func:`uniform`, for one number, in Python's integers."""
    mask = 2**64 - 1
    state = 0
    for key in keys:
        state = ((state ^ (key & mask)) + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return (state >> 40) * 2.0**-24


def _shift(state: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: torch's keeps the sign."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
