"""`benchmarks.checkpoint`: how long a step waits for a save, written behind it and not.

Every rank holds its share of a state of the asked size. In turns, all ranks save it while they wait
and behind the steps; hash the same bytes; and write and sync them, as the disk's own speed. A time
is that of the slowest rank.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.ranks import on_ranks
from benchmarks.settings import CheckpointSettings
from moemesh.checkpoint.digests import hash_bytes
from moemesh.checkpoint.files import CHUNK_BYTES, write_file
from moemesh.checkpoint.load import Shard
from moemesh.checkpoint.saver import Saver
from moemesh.comm.collectives import barrier, gather_json
from moemesh.comm.mesh import Axis, Mesh
from moemesh.config.errors import UserError
from moemesh.config.layout import Layout

#: Tensors of a rank.
_TENSORS = 16


def run(settings: CheckpointSettings, found: Path | None = None) -> dict[str, Any] | None:
    """Measure on `settings.ranks` ranks; None where another rank has the result."""

    def measure_on(ranks: Any) -> dict[str, Any]:
        alone = ranks.world_size == 1
        mesh = (
            Mesh.single(ranks.device)
            if alone
            else Mesh.create(Layout(dp=ranks.world_size), ranks.device)
        )
        return measure(mesh.control, settings)

    return on_ranks("checkpoint", settings, measure_on, num_ranks=settings.ranks, found=found)


def measure(axis: Axis, settings: CheckpointSettings) -> dict[str, Any]:
    """Times of the slowest rank in seconds, and their ratios; the same on every rank."""
    made = tempfile.mkdtemp(prefix="moemesh-bench-", dir=settings.folder or None)
    folder = Path(gather_json(made, axis)[0])
    try:
        return _measure(axis, settings, folder)
    finally:
        barrier(axis)
        for place in {folder, Path(made)}:
            shutil.rmtree(place, ignore_errors=True)


def _measure(axis: Axis, settings: CheckpointSettings, folder: Path) -> dict[str, Any]:
    numel = max(settings.megabytes * 2**20 // (4 * _TENSORS * axis.size), 1)
    tensors = [torch.rand(numel) for _ in range(_TENSORS)]
    shards = [
        Shard(name=f"rank{axis.index}.{n}", shape=(numel,), offset=(0,), tensor=tensor)
        for n, tensor in enumerate(tensors)
    ]
    savers = {
        name: Saver(
            folder / name,
            rank=axis.index,
            world_size=axis.size,
            gather=lambda value: gather_json(value, axis),
            keep=1,
            in_background=name == "behind",
        )
        for name in ("waiting", "behind")
    }
    views = [memoryview(tensor.numpy()).cast("B") for tensor in tensors]
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        barrier(axis)
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        times.setdefault(name, []).append(max(gather_json(seconds, axis)))

    def save(step: int) -> None:
        savers["waiting"].start(step, shards, {})
        _finish(savers["waiting"])

    def hash_all() -> None:
        for view in views:
            for first in range(0, len(view), CHUNK_BYTES):
                hash_bytes(view[first : first + CHUNK_BYTES])

    plain = folder / f"plain-{axis.index}"
    for step in range(settings.rounds + 1):
        timed("waiting", lambda step=step: save(step))
        timed("behind", lambda step=step: savers["behind"].start(step, shards, {}))
        timed("behind_rest", lambda: _finish(savers["behind"]))
        timed("hash", hash_all)
        timed("write", lambda: write_file(plain, views))
        plain.unlink()
    later = {name: statistics.median(found[1:]) for name, found in times.items()}
    return {
        "bytes": 4 * numel * _TENSORS * axis.size,
        "ranks": axis.size,
        "rounds": settings.rounds,
        "seconds": later,
        "first_seconds": {name: found[0] for name, found in times.items()},
        "blocked_ratio": later["behind"] / later["waiting"],
        "first_blocked_ratio": times["behind"][0] / times["waiting"][0],
        "hash_ratio": later["hash"] / later["waiting"],
    }


def _finish(saver: Saver) -> None:
    outcome = saver.finish()
    if outcome is None or outcome.problem is not None:
        raise UserError(f"the save failed: {outcome and outcome.problem}")


if __name__ == "__main__":
    from benchmarks.application import main

    main("checkpoint")
