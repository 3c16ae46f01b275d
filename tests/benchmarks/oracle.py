"""Experts and tokens whose layer output and gradients are known exactly, even in bfloat16.

Legend: T tokens, K experts per token, R dispatched rows, H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Base-4 digits of a token id in the oracle: ids below 4**16.
NUM_DIGITS = 16


class Oracle(NamedTuple):
    """Inputs whose layer output and gradients are known exactly, for any order of addition.

    In units of 1/8 every partial sum of rows is an integer below 256 (for K <= 10), which bfloat16
    holds. ``grad_weights_TK`` is a sum over H, exact in the fp32 in which weights live.
    """

    x_TH: Tensor
    weights_TK: Tensor
    gradient_TH: Tensor
    y_TH: Tensor
    grad_x_TH: Tensor
    grad_weights_TK: Tensor


def multiplier(experts: Tensor) -> Tensor:
    """Factor of expert i for a row: ``2 ** (i mod 3)``, negative for every other three; fp32,
    0 for -1."""
    sign = 1 - 2 * (experts // 3 % 2)
    return torch.where(experts < 0, 0, sign * 2 ** (experts % 3)).float()


def oracle(gids: Tensor | range, experts_TK: Tensor, hidden: int, *, dtype: torch.dtype) -> Oracle:
    """x and the incoming gradient hold base-4 digits of ``gid + 1`` (no row is all zero), weights
    are 1/8 and 1/4 by slot, and each expert multiplies by :func:`multiplier`."""
    if experts_TK.shape[1] > 10:
        raise ValueError(f"the oracle is exact for top-k <= 10, not {experts_TK.shape[1]}")
    ids_T = gids if isinstance(gids, Tensor) else torch.arange(gids.start, gids.stop, gids.step)
    ids_T1 = ids_T[:, None] + 1
    places_H = torch.arange(hidden)
    x_TH = (ids_T1 >> 2 * (places_H % NUM_DIGITS) & 3).double()
    gradient_TH = (ids_T1 >> 2 * ((places_H + 1) % NUM_DIGITS) & 3).double()
    slots_K = torch.arange(experts_TK.shape[1])
    weights_TK = torch.where(slots_K % 2 == 0, 1 / 8, 1 / 4).double().expand(experts_TK.shape)
    weights_TK = weights_TK.masked_fill(experts_TK < 0, 0.0)
    scale_TK = multiplier(experts_TK).double()
    total_T1 = (weights_TK * scale_TK).sum(1, keepdim=True)
    grad_weights_TK = scale_TK * (x_TH * gradient_TH).sum(1, keepdim=True)
    return Oracle(
        x_TH=x_TH.to(dtype),
        weights_TK=weights_TK.float(),
        gradient_TH=gradient_TH.to(dtype),
        y_TH=(total_T1 * x_TH).to(dtype),
        grad_x_TH=(total_T1 * gradient_TH).to(dtype),
        grad_weights_TK=grad_weights_TK.float(),
    )


def oracle_experts(x_RH: Tensor, weights_R: Tensor, experts_R: Tensor) -> Tensor:
    """The oracle's experts on dispatched rows: weighted outputs [R, H] in the dtype of x.

    Computed in fp32, so that the gradient of the weights is exact too.
    """
    scale_R1 = (multiplier(experts_R) * weights_R)[:, None]
    return (x_RH.float() * scale_R1).to(x_RH.dtype)
