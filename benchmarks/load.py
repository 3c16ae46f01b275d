"""`benchmarks.load`: weights from a folder of transformers onto ranks, against a plain read.

A folder of the asked size is written first: an MoE model with random numbers. Then every rank reads
the slices of its shards, as `moemesh train` does, into memory that is there already; and, in turns,
as many bytes from the same files one after the other into the same memory, which is as fast as
reading can be. `cold` rounds drop the files from the page cache first. A round counts as long as
its slowest rank takes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from benchmarks.ranks import on_ranks
from benchmarks.settings import LoadSettings
from moemesh.checkpoint.huggingface.convert import write_folder
from moemesh.checkpoint.huggingface.logical import logical_tensors
from moemesh.checkpoint.huggingface.weight_folder import HuggingFaceWeights
from moemesh.checkpoint.load import DeferredTensor
from moemesh.checkpoint.store import Shard
from moemesh.comm.collectives import barrier, gather_json
from moemesh.comm.mesh import Mesh
from moemesh.config.huggingface.export import config_json
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.parallel.placement import Placement, placements
from moemesh.trace.machine import drop_from_cache, peak_growth

_KIND = "qwen3_moe"
_DTYPE = torch.bfloat16
#: Random numbers that all tensors are cut from.
_POOL = 1 << 22
#: Bytes of a plain read at once.
_CHUNK_BYTES = 8 << 20


def run(settings: LoadSettings, found: Path | None = None) -> dict[str, Any] | None:
    """Measure on `settings.ranks` ranks; None where another rank has the result."""
    return on_ranks(
        "load",
        settings,
        lambda ranks: measure(Mesh.create(settings.plan.layout, ranks.device), settings),
        num_ranks=settings.ranks,
        found=found,
    )


def model_of(settings: LoadSettings) -> ModelConfig:
    """Layers of the sizes of Qwen3-30B-A3B where the folder has 2 GB or more, else small ones."""
    is_large = settings.megabytes >= 2048
    hidden, width, experts = (2048, 768, 128) if is_large else (512, 192, 32)
    model = ModelConfig(
        vocab_size=4096,
        num_heads=16,
        num_kv_heads=4,
        head_dim=128 if is_large else 32,
        qk_norm=True,
        first_dense_layers=0,
        num_layers=1,
        num_shared_experts=0,
        experts_per_token=8,
        max_position_embeddings=4096,
        hidden_size=hidden,
        expert_intermediate_size=width,
        num_experts=experts,
    )
    layer = sum(
        prod(one.shape) for name, one in logical_tensors(model, _KIND).items() if "layers" in name
    )
    num_layers = max(round(settings.megabytes * 2**20 / (layer * _DTYPE.itemsize)), 1)
    return model.model_copy(update={"num_layers": num_layers})


def measure(mesh: Mesh, settings: LoadSettings) -> dict[str, Any]:
    """Write the folder, read it in turns, and describe the result; all ranks call."""
    model = model_of(settings)
    with tempfile.TemporaryDirectory(prefix="moemesh-load-", dir=settings.folder or None) as own:
        path = Path(gather_json(own, mesh.control)[0]) / "model"
        if mesh.rank == 0:
            _write(path, model)
        barrier(mesh.control)
        found = _measured(path, model, mesh, settings)
        # Rank 0 keeps the folder until all have read it.
        barrier(mesh.control)
    return {"settings": settings.to_json(), **found}


def _measured(path: Path, model: ModelConfig, mesh: Mesh, settings: LoadSettings) -> dict[str, Any]:
    shards = shards_of(model, settings.plan, mesh)
    for shard in shards:
        shard.tensor.zero_()  # The memory is there before anything is timed.
    needed = sum(shard.tensor.numel() * _DTYPE.itemsize for shard in shards)
    largest = max(shard.tensor.numel() * shard.tensor.element_size() for shard in shards)
    rounds: dict[str, Any] = {}
    read = peak = 0
    for is_cold in (False, True):
        times: dict[str, list[float]] = {"load": [], "plain": []}
        for _ in range(settings.rounds + 1):
            grown = peak_growth()
            weights = HuggingFaceWeights(path, model)
            times["load"].append(_timed(mesh, path, is_cold, partial(weights.load_into, shards)))
            read, peak = weights.folder.bytes_read, max(peak, grown() or 0)
            plain = partial(_plain_read, path, shards, mesh)
            times["plain"].append(_timed(mesh, path, is_cold, plain))
        # The first round warms the cache, and code up.
        medians = {name: statistics.median(each[1:]) for name, each in times.items()}
        rounds["cold" if is_cold else "warm"] = {
            "seconds": medians,
            "speed_ratio": medians["plain"] / medians["load"],
        }
    own = {
        "needed_bytes": needed,
        "read_bytes": read,
        "largest_tensor_bytes": largest,
        "peak_bytes_beyond_model": peak,
    }
    total = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return {"folder_bytes": total, "rounds": rounds, "ranks": gather_json(own, mesh.control)}


def shards_of(model: ModelConfig, plan: Plan, mesh: Mesh) -> list[Shard]:
    """The weights that this rank holds under `plan`, bf16, as parts of logical tensors."""
    shards: list[Shard] = []
    for name, where in placements(model, plan).items():
        slices = where.slices(mesh)
        if not where.is_expert:
            shards.append(_shard(name, where, slices))
            continue
        module, _, leaf = name.rpartition(".")
        for expert in where.experts(mesh):
            shards.append(_shard(f"{module}.{expert}.{leaf}", where, slices[1:]))
    return shards


def _shard(name: str, where: Placement, slices: tuple[range, ...]) -> Shard:
    return Shard(
        name=f"model.{name}",
        shape=where.shape[-len(slices) :],
        offset=tuple(part.start for part in slices),
        tensor=torch.empty([len(part) for part in slices], dtype=_DTYPE),
    )


def _write(path: Path, model: ModelConfig) -> None:
    pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(0)).to(_DTYPE)

    def numbers(shape: tuple[int, ...]) -> torch.Tensor:
        size = prod(shape)
        return pool.repeat(-(-size // _POOL))[:size].view(shape)

    tensors = {
        piece.source: DeferredTensor(_DTYPE, piece.stored, partial(numbers, piece.stored))
        for one in logical_tensors(model, _KIND).values()
        for piece in one.pieces
    }
    write_folder(path, tensors, config_json(model, _KIND, "bfloat16"), file_bytes=1 << 30)


def _timed(mesh: Mesh, path: Path, is_cold: bool, work: Callable[[], object]) -> float:
    """Seconds of `work` on the slowest rank."""
    if is_cold and mesh.rank == 0:
        for file in path.glob("*.safetensors"):
            _drop_from_cache(file)
    barrier(mesh.control)
    start = time.perf_counter()
    work()
    return max(gather_json(time.perf_counter() - start, mesh.control))


def _plain_read(path: Path, shards: list[Shard], mesh: Mesh) -> None:
    """As many bytes as the shards have, file after file from this rank's place on, into them."""
    files = sorted(path.glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    handles = [os.open(file, os.O_RDONLY) for file in files]
    place = sum(sizes) * mesh.rank // mesh["world"].size
    try:
        for shard in shards:
            left = memoryview(shard.tensor.view(torch.uint8).numpy().reshape(-1))
            while left:
                index, start = 0, place % sum(sizes)
                while start >= sizes[index]:
                    start -= sizes[index]
                    index += 1
                count = os.preadv(handles[index], [left[:_CHUNK_BYTES]], start)
                left, place = left[count:], place + count
    finally:
        for handle in handles:
            os.close(handle)


def _drop_from_cache(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
        drop_from_cache(handle)
    finally:
        os.close(handle)


if __name__ == "__main__":
    from benchmarks.application import main

    main("load")
