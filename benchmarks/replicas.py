"""Training steps with spare slots and without, in turns, where routing is skewed.

Two copies of one model are trained side by side on the same ranks: the same weights, tokens and
routing (replayed from :mod:`benchmarks.workloads`, another one each step), one with
``plan.spare_slots``. A step is forward, backward and gradient sums, between two barriers. Beside
its time stands the time that the busiest rank's processor worked: what the step would take if every
rank had a core of its own and nothing else were slow.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.ranks import on_ranks
from benchmarks.settings import ReplicasSettings
from benchmarks.workloads import workload
from moemesh.bench.settings import counts_in
from moemesh.comm import launch
from moemesh.comm.collectives import barrier, gather_json
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout, shard_range
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.model.batch import Batch
from moemesh.model.transformer import ModelPart, Output
from moemesh.parallel.expert.replicas import replicated, take_rank_tokens
from moemesh.parallel.parallelize import RankModel, parallelize
from moemesh.trace.loads import max_over_mean
from moemesh.trace.timeline import TimelineRecorder


def run(settings: ReplicasSettings, found: Path | None = None) -> list[dict[str, Any]] | None:
    """Measure on each number of ranks; None where another rank has the result.

    A process that is itself a rank measures its own number of ranks.
    """
    if launch.joined():
        measured = partial(_measured, settings)
        return on_ranks("replicas", settings, measured, num_ranks=0, found=found)
    results: list[dict[str, Any]] = []
    for count in counts_in(settings.ranks):
        one = replace(settings, ranks=str(count))
        told = on_ranks("replicas", one, partial(_measured, one), num_ranks=count, found=None)
        results += told or []
    return results


def _measured(settings: ReplicasSettings, ranks: launch.Ranks) -> list[dict[str, Any]]:
    mesh = Mesh.create(Layout(dp=ranks.world_size, ep=ranks.world_size), ranks.device)
    return [measure(mesh, settings)]


def _model(settings: ReplicasSettings) -> ModelConfig:
    """Layers of few attention heads and many wide experts."""
    return ModelConfig(
        vocab_size=64,
        hidden_size=settings.hidden,
        num_layers=settings.layers,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=settings.hidden,
        first_dense_layers=0,
        num_experts=settings.num_experts,
        experts_per_token=settings.experts_per_token,
        expert_intermediate_size=settings.width,
        num_shared_experts=0,
    )


def measure(mesh: Mesh, settings: ReplicasSettings) -> dict[str, Any]:
    """On every rank of a mesh with dp = ep = its ranks; the same result on all."""
    num_ranks = mesh["ep"].size
    left_out = ("ranks", "workload")
    told = {"workloads": settings.workloads, **settings.to_json()}
    plan = Plan(dp=num_ranks, ep=num_ranks)
    spared = plan.model_copy(
        update={"spare_slots": settings.spare_slots, "spare_policy": settings.policy}
    )
    contenders = {"without": _build(mesh, settings, plan), "with": _build(mesh, settings, spared)}
    return {
        "settings": {name: value for name, value in told.items() if name not in left_out},
        "ranks": num_ranks,
        "workloads": [_compare(contenders, settings, name) for name in settings.workloads],
    }


def _build(mesh: Mesh, settings: ReplicasSettings, plan: Plan) -> RankModel:
    return parallelize(
        _model(settings),
        plan,
        mesh,
        seed=settings.seed,
        dtype=torch.float32,
        tokens_per_rank=plan.tokens_per_rank(settings.seq_len, settings.sequences),
    )


def _compare(
    contenders: dict[str, RankModel], settings: ReplicasSettings, name: str
) -> dict[str, Any]:
    """Medians over rounds; the first round is not counted."""
    walls: dict[str, list[float]] = {key: [] for key in contenders}
    busiest: dict[str, list[float]] = {key: [] for key in contenders}
    balances: dict[str, list[float]] = {key: [] for key in contenders}
    planning: list[float] = []
    for step in range(settings.rounds + 1):
        for key, parallel in contenders.items():
            wall, cpu, planned, tokens_LP = _step(parallel, settings, name, step)
            if step:
                walls[key].append(wall)
                busiest[key].append(cpu)
                balances[key].append(statistics.mean(map(max_over_mean, tokens_LP)))
                if key == "with":
                    planning.append(planned / wall)
    seconds = {key: statistics.median(values) for key, values in walls.items()}
    cpu_seconds = {key: statistics.median(values) for key, values in busiest.items()}
    ratios = [a / b for a, b in zip(walls["with"], walls["without"], strict=True)]
    return {
        "workload": name,
        "seconds": seconds,
        "busiest_rank_cpu_seconds": cpu_seconds,
        "ratio": statistics.median(ratios),
        "cpu_ratio": cpu_seconds["with"] / cpu_seconds["without"],
        "balance": {key: statistics.mean(values) for key, values in balances.items()},
        "planning_share": statistics.median(planning),
    }


def _step(
    parallel: RankModel, settings: ReplicasSettings, name: str, step: int
) -> tuple[float, float, float, list[list[int]]]:
    """Seconds of the slowest rank, processor seconds of the busiest, most seconds of planning, and
    the tokens that each rank computed in each layer."""
    mesh = parallel.mesh
    batch = _batch(parallel, settings, name, step)
    layers = [moe.dispatcher for moe in replicated(parallel.model)]
    for dispatcher in layers:
        dispatcher.planning_seconds = 0.0
    barrier(mesh["world"])
    start, cpu_start = time.perf_counter(), time.process_time()
    parallel.pipeline.run([batch], _objective, TimelineRecorder(mesh.rank))
    parallel.reducer.finish()
    own = [
        time.perf_counter() - start,
        time.process_time() - cpu_start,
        sum(dispatcher.planning_seconds for dispatcher in layers),
    ]
    wall, cpu, planning = map(max, zip(*gather_json(own, mesh.control), strict=True))
    return wall, cpu, planning, _rank_tokens(parallel, batch)


def _batch(parallel: RankModel, settings: ReplicasSettings, name: str, step: int) -> Batch:
    """This rank's sequences of one step, their experts chosen by the workload."""
    axis = parallel.mesh["dp"]
    own = shard_range(settings.sequences, axis.size, axis.index)
    generator = torch.Generator().manual_seed(settings.seed + step)
    tokens = torch.randint(64, (settings.sequences, settings.seq_len + 1), generator=generator)
    tokens = tokens[own.start : own.stop]
    batch = Batch(
        tokens_BS=tokens[:, :-1],
        targets_BS=tokens[:, 1:],
        sequences_B=torch.arange(own.start, own.stop),
    )
    gids = range(own.start * settings.seq_len, own.stop * settings.seq_len)
    experts = {
        layer: workload(
            name,
            seed=settings.seed + layer,
            step=step,
            gids=gids,
            num_experts=settings.num_experts,
            experts_per_token=settings.experts_per_token,
        )
        for layer in range(settings.layers)
    }
    return replace(batch, experts=experts)


def _objective(part: ModelPart, output: Output, batch: Batch) -> Tensor:
    """The losses of this rank's tokens; a factor changes no time."""
    assert output.losses_T is not None
    return output.losses_T.mean()


def _rank_tokens(parallel: RankModel, batch: Batch) -> list[list[int]]:
    """Tokens that each rank computed in each layer."""
    mesh = parallel.mesh
    if parallel.has_replicas:
        own_LP = take_rank_tokens(parallel.model, mesh)
    else:
        assert batch.experts is not None
        num_local = parallel.model.config.num_experts // mesh["ep"].size
        own_LP = torch.stack(
            [
                torch.bincount((experts_TK // num_local).flatten(), minlength=mesh["ep"].size)
                for experts_TK in batch.experts.values()
            ]
        )
    return torch.tensor(gather_json(own_LP.tolist(), mesh.control)).sum(0).tolist()


if __name__ == "__main__":
    from benchmarks.application import main

    main("replicas")
