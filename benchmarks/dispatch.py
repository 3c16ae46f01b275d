"""`benchmarks.dispatch`: every dispatcher under a given load, against the bare all-to-all.

All contenders take turns in every round, one step of each, so that what else the machine does hits
all alike. A step counts as long as its slowest rank takes, planning included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Bench, against_transformers, measure
from benchmarks.ranks import on_ranks
from benchmarks.settings import DispatchSettings
from moemesh.comm import collectives
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan


def run(settings: DispatchSettings, found: Path | None = None) -> dict[str, Any] | None:
    """Measure on the ranks that `settings` ask for; None where another rank has the result."""
    return on_ranks(
        "dispatch",
        settings,
        lambda ranks: measured(settings, make_mesh(settings)),
        num_ranks=settings.ranks,
        found=found,
    )


def make_mesh(settings: DispatchSettings) -> Mesh:
    """All ranks are one expert-parallel group."""
    if settings.ranks == 1:
        return Mesh.single("cpu")
    num_ranks = settings.ranks
    return Mesh.create(Layout(dp=num_ranks, ep=num_ranks, ranks_per_node=settings.node), "cpu")


def measured(settings: DispatchSettings, mesh: Mesh) -> dict[str, Any]:
    """Measure on every rank; the same object on all, as `--json` prints it."""
    config = ModelConfig(
        hidden_size=settings.hidden,
        expert_intermediate_size=settings.width,
        num_experts=settings.experts,
        experts_per_token=settings.top_k,
        num_shared_experts=0,
    )
    plan = Plan(
        dp=settings.ranks,
        ep=settings.ranks,
        payload=settings.payload,
        ranks_per_node=settings.node,
    )
    bench = Bench(
        config=config,
        plan=plan,
        mesh=mesh,
        dispatchers=settings.dispatchers,
        ranks_per_node=settings.node,
        dtype=getattr(torch, settings.dtype),
        num_chunks=settings.chunks,
        num_groups=settings.groups,
        num_tokens=settings.tokens,
        with_layer=settings.mode == "moe_fwd_bwd",
        num_rounds=settings.rounds,
        seed=settings.seed,
    )
    found = [measure(bench, name) for name in settings.workloads]
    peer = against_transformers(bench) if mesh.rank == 0 and bench.with_layer else None
    (peer, *_) = collectives.gather_json(peer, mesh["world"])
    return {"settings": settings.to_json(), "workloads": found, "single_process": peer}


if __name__ == "__main__":
    from benchmarks.application import main

    main("dispatch")
