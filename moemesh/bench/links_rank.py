"""One rank of `bench links`: the same collectives as in training, timed in groups of one shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from moemesh.bench.device import synchronize
from moemesh.comm import collectives, point_to_point, transfers
from moemesh.comm.mesh import Axis, Mesh

#: One sample repeats an operation until it has taken so long, at most so often.
_SAMPLE_SECONDS, _MOST_REPEATS = 2e-3, 20
_SAID = {"phase": "bench", "caller": "bench.links"}
_NUMBER_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class GroupShape:
    """Groups of `ranks`, `stride` apart, of which `members` share a node."""

    ranks: int
    members: int
    stride: int


def measure_shape(
    mesh: Mesh, shape: GroupShape, operations: Sequence[str], sizes: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """A row for each operation: bytes of the full tensor, and medians in seconds. The groups are
    those of the mesh's axis ``dp``; all ranks of the mesh call this and get the same rows."""
    axis, rows = mesh["dp"], list[dict[str, Any]]()
    for operation in operations:
        if operation == "send" and shape.ranks > 2:
            continue
        measured: dict[int, float] = {}
        for size in sizes:
            numbers = -(-size // (_NUMBER_BYTES * shape.ranks)) * shape.ranks
            if numbers * _NUMBER_BYTES in measured:
                continue
            run = _operation(operation, axis, numbers)
            measured[numbers * _NUMBER_BYTES] = _seconds(run, mesh, rounds)
        rows.append(
            {
                "operation": operation,
                "ranks": shape.ranks,
                "members_per_node": shape.members,
                "bytes": list(measured),
                "seconds": list(measured.values()),
            }
        )
    return rows


def _operation(name: str, axis: Axis, numbers: int) -> Callable[[], object]:
    """One call of the operation over tensors of `numbers` float32 in all."""
    whole = torch.zeros(numbers, device=axis.device)
    own = torch.zeros(numbers // axis.size, device=axis.device)
    match name:
        case "all_reduce":
            return lambda: transfers.all_reduce_(whole, axis, **_SAID)
        case "all_gather":
            return lambda: transfers.all_gather(own, axis, **_SAID)
        case "reduce_scatter":
            return lambda: transfers.reduce_scatter(whole, axis, **_SAID)
        case "all_to_all":
            return lambda: transfers.all_to_all(whole, axis, **_SAID)
        case _:
            return lambda: _message(whole, axis)


def _message(x: torch.Tensor, axis: Axis) -> None:
    """From the first of two to the second."""
    if axis.index == 0:
        point_to_point.send(x, axis, 1, **_SAID)
    else:
        point_to_point.receive(x, axis, 0, **_SAID)


def _seconds(run: Callable[[], object], mesh: Mesh, rounds: int) -> float:
    """Median over rounds of what the slowest rank took, an operation."""
    world, device = mesh["world"], mesh.device

    def timed(repeats: int) -> float:
        collectives.barrier(world)
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronize(device)
        return (time.perf_counter() - start) / repeats

    timed(1)
    longest = max(collectives.gather_json(timed(1), mesh.control))
    repeats = min(max(int(_SAMPLE_SECONDS / longest), 1), _MOST_REPEATS)
    own = [timed(repeats) for _ in range(rounds)]
    ranks = collectives.gather_json(own, mesh.control)
    return median(max(samples) for samples in zip(*ranks, strict=True))
