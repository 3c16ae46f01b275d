"""Rows of all positions of a sequence: in their order, or in that of the ranks that hold them."""

from __future__ import annotations

import torch
from torch import Tensor

from moemesh.config.context import context_runs


def _order(length: int, ranks: int, device: torch.device) -> Tensor:
    """The positions in the order of the ranks."""
    runs = (run for index in range(ranks) for run in context_runs(length, ranks, index))
    parts = [torch.arange(run.start, run.stop, device=device) for run in runs]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def in_rank_order(x_L: Tensor, ranks: int) -> Tensor:
    """[L, ...] by position -> the rows of rank 0, then those of rank 1, ..."""
    return x_L[_order(len(x_L), ranks, x_L.device)]


def in_position_order(x_L: Tensor, ranks: int) -> Tensor:
    """The inverse of :func:`in_rank_order`."""
    return x_L[torch.argsort(_order(len(x_L), ranks, x_L.device))]
