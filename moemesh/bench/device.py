"""Rates of one device: matrix products, bytes a second of a copy, memory.

A product of [M, K] and [K, N] is taken to run at peak / ((1 + r 64/M) (1 + n 64/N) (1 + n 64/K)),
as the planner's time model has it: three measured shapes give the peak, r and n.

All ranks measure at the same time, as they compute in training: on a machine that they share, each
gets its part.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

#: The side length in units of which products lose efficiency; the least loss (0 is no constant).
TILE = 64
_LEAST_LOSS = 1e-3
#: Numbers of a side of the products and of the copied tensor, on a CPU and on an accelerator.
_SIDE = {"cpu": 1024, "cuda": 8192}
_NUMBERS = {"cpu": 1 << 24, "cuda": 1 << 28}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Of one rank's device: operations/s of the largest products by dtype, what few rows and narrow
    sides lose of it (in 16 bit), bytes/s read and written, bytes."""

    peak_flops: dict[str, float]
    row_loss: float
    width_loss: float
    memory_bandwidth: float
    memory_bytes: int
    name: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_device(device: torch.device, ranks_per_node: int, rounds: int) -> DeviceRates:
    """Medians of `rounds` on the device of this rank."""
    side = _SIDE[device.type]

    def rate(dtype: torch.dtype, rows: int, columns: int) -> float:
        left = torch.randn(rows, side, device=device).to(dtype)
        right = torch.randn(side, columns, device=device).to(dtype)
        seconds = median_seconds(lambda: torch.mm(left, right), device, rounds)
        return 2 * rows * columns * side / seconds

    rates = {name: rate(dtype, side, side) for name, dtype in DTYPES.items()}
    full = rates["bfloat16"]
    row_loss = side_loss(full, rate(torch.bfloat16, TILE, side), side)
    width_loss = side_loss(full, rate(torch.bfloat16, side, TILE), side)
    # What the large product itself still loses.
    lost = (1 + row_loss * TILE / side) * (1 + width_loss * TILE / side) ** 2
    source = torch.zeros(_NUMBERS[device.type] // 4, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), device, rounds)
    bandwidth = 2 * source.numel() * source.element_size() / seconds
    return DeviceRates(
        peak_flops={name: found * lost for name, found in rates.items()},
        row_loss=row_loss,
        width_loss=width_loss,
        memory_bandwidth=bandwidth,
        memory_bytes=_memory(device, ranks_per_node),
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
    )


def side_loss(full: float, narrow: float, side: int) -> float:
    """l of rate = peak / (1 + l 64 / side), from the rates with a full side and one of 64."""
    ratio = full / narrow
    # Beyond this ratio not even an infinite loss explains the times.
    ratio = min(max(ratio, 1.0), 0.99 * side / TILE)
    return max((ratio - 1) / (1 - ratio * TILE / side), _LEAST_LOSS)


def median_seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Of one call, once warm."""
    taken: list[float] = []
    for number in range(rounds + 2):
        start = time.perf_counter()
        work()
        synchronize(device)
        if number >= 2:
            taken.append(time.perf_counter() - start)
    return median(taken)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(device: torch.device, ranks_per_node: int) -> int:
    """Of the device, or this rank's part of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return pages * size // ranks_per_node
