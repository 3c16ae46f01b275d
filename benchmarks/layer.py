"""`benchmarks.layer`: one MoE layer, forward and backward, as a multiple of what bounds it.

Every number of ranks is measured in processes of its own that the launcher starts, with the
allocator set as in training. The bounds are measured in the same processes, taking turns with the
layer (:mod:`benchmarks.bounds`): bare expert products on one rank; bare expert products plus
bare all-to-all on several. The tokens of a shape are those of all ranks together, so that the work
in total is the same for any number of ranks. A workload of :mod:`benchmarks.workloads` may
choose the experts in the router's place; the bounds then have its loads too.
"""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.layer_rank import measure
from benchmarks.ranks import on_ranks
from benchmarks.settings import LayerSettings
from benchmarks.shapes import SHAPES
from moemesh.bench.settings import counts_in
from moemesh.comm import launch
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout
from moemesh.trace.machine import keep_freed_memory, processor


def run(settings: LayerSettings, found: Path | None = None) -> dict[str, Any] | None:
    """Measure every shape, number type and number of ranks; None where another rank has the result.

    Each in processes of its own; a process that is itself a rank measures its own number of ranks.
    """
    if launch.joined():
        return on_ranks("layer", settings, partial(_measured, settings), num_ranks=0, found=found)
    results: list[dict[str, Any]] = []
    machine: dict[str, Any] = {}
    for shape in settings.shapes:
        for dtype in settings.dtypes:
            for count in counts_in(settings.ranks):
                one = replace(settings, shape=shape, dtype=dtype, ranks=str(count))
                measured = partial(_measured, one)
                told = on_ranks("layer", one, measured, num_ranks=count, found=None)
                assert told is not None
                machine = told["machine"]
                results += told["results"]
    return {"machine": machine, "results": results}


def _measured(settings: LayerSettings, ranks: launch.Ranks) -> dict[str, Any]:
    # Ranks that torchrun started are left alone by the launcher, but a figure must say one thing.
    keeps = keep_freed_memory()
    mesh = Mesh.create(Layout(dp=ranks.world_size, ep=ranks.world_size), ranks.device)
    results = [
        {"shape": shape, **_sizes(shape), "dtype": dtype, "ranks": ranks.world_size}
        | {"rounds": settings.rounds, "workload": load}
        | measure(SHAPES[shape], getattr(torch, dtype), mesh, settings.rounds, load)
        for shape in settings.shapes
        for dtype in settings.dtypes
        for load in settings.workloads
    ]
    return {"machine": _machine(keeps), "results": results}


def _sizes(shape: str) -> dict[str, int]:
    sizes = SHAPES[shape]
    return {
        "tokens": sizes.tokens,
        "hidden": sizes.hidden,
        "width": sizes.width,
        "num_experts": sizes.num_experts,
        "top_k": sizes.top_k,
    }


def _machine(keeps_freed_memory: bool) -> dict[str, Any]:
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads_per_rank": torch.get_num_threads(),
        "keeps_freed_memory": keeps_freed_memory,
    }


if __name__ == "__main__":
    from benchmarks.application import main

    main("layer")
