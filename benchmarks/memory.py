"""`benchmarks.memory`: every `plan.data` side by side, in memory, traffic and seconds of a step.

The same model, weights and tokens on the same ranks, all of them data-parallel. Memory is measured
first, for one strategy after the other: the bytes of all tensors that exist at the fullest moment
of a step, as the profiler of torch sees them come and go. Then all strategies take turns, one whole
step each (gradients, norm, clipping, update) between two barriers; a step counts as long as its
slowest rank takes. Bytes on the wire are those of gradients and weights in one step.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from benchmarks.contenders import quiet_profiler
from benchmarks.ranks import on_ranks
from benchmarks.settings import MemorySettings
from moemesh.comm.collectives import barrier, gather_json
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout, shard_range
from moemesh.config.model import ModelConfig
from moemesh.config.plan import DataStrategy, Plan
from moemesh.config.train import TrainConfig
from moemesh.model.batch import Batch
from moemesh.parallel.parallelize import RankModel, parallelize
from moemesh.planner.traffic.ledger import predict_ledger
from moemesh.planner.traffic.own_memory import predict_memory
from moemesh.trace.ledger import Ledger
from moemesh.trace.machine import keep_freed_memory
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.optimizer import Optimizer
from moemesh.train.records.artifacts import state_bytes
from moemesh.train.step import gradients_of_step, update

#: Callers of what data parallelism sends.
_CALLERS = ("gradients", "weights")
_MEASURED_STEP = "moemesh.measured_step"
_CLIP = 1.0
#: Steps before the one whose memory counts: the first makes the optimizer's state.
_STEPS_BEFORE = 2


def run(settings: MemorySettings, found: Path | None = None) -> dict[str, Any] | None:
    """Measure on `settings.ranks` ranks; None where another rank has the result."""
    return on_ranks(
        "memory",
        settings,
        lambda ranks: measure(Mesh.create(Layout(dp=ranks.world_size), ranks.device), settings),
        num_ranks=settings.ranks,
        found=found,
    )


def model_of(settings: MemorySettings) -> ModelConfig:
    """Many narrow layers: their states are large beside the activations of a few tokens, and one
    layer is small beside all."""
    return ModelConfig(
        vocab_size=256,
        hidden_size=settings.hidden,
        num_layers=settings.layers,
        num_heads=4,
        num_kv_heads=4,
        head_dim=settings.hidden // 4,
        intermediate_size=settings.width,
        first_dense_layers=0,
        num_experts=settings.experts,
        experts_per_token=2,
        expert_intermediate_size=settings.width,
        num_shared_experts=0,
    )


def plan_of(settings: MemorySettings, strategy: str) -> Plan:
    """All ranks data-parallel."""
    servers = settings.servers if strategy == "parameter_server" else 1
    return Plan(
        dp=settings.ranks,
        data=cast("DataStrategy", strategy),
        servers=servers,
        microbatches=settings.microbatches,
    )


@dataclass
class _Contender:
    """A model under one strategy, and its optimizer."""

    parallel: RankModel
    optimizer: Optimizer
    settings: MemorySettings
    plan: Plan

    @classmethod
    def build(cls, mesh: Mesh, settings: MemorySettings, strategy: str) -> _Contender:
        plan = plan_of(settings, strategy)
        parallel = parallelize(
            model_of(settings),
            plan,
            mesh,
            seed=settings.seed,
            dtype=getattr(torch, settings.dtype),
            tokens_per_rank=plan.tokens_per_rank(settings.seq_len, settings.sequences),
        )
        train = TrainConfig(dtype=settings.dtype, optimizer="adamw")
        return cls(parallel, Optimizer.of(parallel, train), settings, plan)

    def step(self, number: int) -> None:
        """One training step."""
        batches = _batches(self.parallel.mesh, self.settings, number)
        recorder = TimelineRecorder(self.parallel.mesh.rank)
        result = gradients_of_step(self.parallel, batches, recorder)
        update(self.parallel, self.optimizer, result, lr=1e-4, clip=_CLIP)


def _batches(mesh: Mesh, settings: MemorySettings, step: int) -> list[Batch]:
    """This rank's microbatches of one step."""
    own = shard_range(settings.sequences, mesh["dp"].size, mesh["dp"].index)
    generator = torch.Generator().manual_seed(settings.seed + step)
    tokens = torch.randint(256, (settings.sequences, settings.seq_len + 1), generator=generator)
    found: list[Batch] = []
    for number in range(settings.microbatches):
        part = shard_range(len(own), settings.microbatches, number)
        places = slice(own.start + part.start, own.start + part.stop)
        found.append(
            Batch(
                tokens_BS=tokens[places, :-1],
                targets_BS=tokens[places, 1:],
                sequences_B=torch.arange(places.start, places.stop),
            )
        )
    return found


def measure(mesh: Mesh, settings: MemorySettings) -> dict[str, Any]:
    """On every rank of a mesh with dp = its ranks; the same result on all."""
    rows: dict[str, dict[str, Any]] = {}
    for strategy in settings.wanted:
        rows[strategy] = _memory(mesh, settings, strategy) | _traffic(mesh, settings, strategy)
        gc.collect()
    for strategy, seconds in _seconds(mesh, settings).items():
        rows[strategy]["seconds"] = statistics.median(seconds)
        rows[strategy]["rounds"] = seconds
    base = rows["replicate"]
    for row in rows.values():
        pairs = zip(row["rounds"], base["rounds"], strict=True)
        row["seconds_ratio"] = statistics.median(mine / theirs for mine, theirs in pairs)
        row["peak_ratio"] = max(row["peak_bytes"]) / max(base["peak_bytes"])
    parameters = sum(where.num_elements for where in _placements(mesh, settings))
    return {
        "settings": {**settings.to_json(), "strategies": list(settings.wanted)},
        "parameters": parameters,
        "strategies": rows,
    }


def _placements(mesh: Mesh, settings: MemorySettings) -> list[Any]:
    return list(_Contender.build(mesh, settings, "replicate").parallel.placements.values())


def _memory(mesh: Mesh, settings: MemorySettings, strategy: str) -> dict[str, list[int]]:
    """Measured and predicted bytes of every rank: at the peak of a step, and of model states."""
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with quiet_profiler():
        profiler.start()
    contender = _Contender.build(mesh, settings, strategy)
    for number in range(_STEPS_BEFORE):
        contender.step(number)
    with record_function(_MEASURED_STEP):
        contender.step(_STEPS_BEFORE)
    with quiet_profiler():
        profiler.stop()
    states = state_bytes(contender.parallel, contender.optimizer)
    del states["buffers"]  # they exist for a part of a step only
    predicted = predict_memory(
        model_of(settings),
        contender.plan,
        seq_len=settings.seq_len,
        global_batch=settings.sequences,
        dtype=settings.dtype,
        rank=mesh.rank,
    )
    own = {
        "peak_bytes": _peak_bytes(profiler),
        "state_bytes": sum(states.values()),
        "predicted_peak_bytes": predicted.peak,
        "predicted_state_bytes": sum(getattr(predicted, name) for name in states),
    }
    return _by_rank(mesh, own)


def _peak_bytes(profiler: profile) -> int:
    """Bytes of the tensors that were made since the profiler started and existed at the fullest
    moment of the measured step."""
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    begin, end = next(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.name() == _MEASURED_STEP
    )
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    now = peak = 0
    for moment, change in changes:
        if moment > end:
            break
        if moment >= begin:
            peak = max(peak, now)
        now += change
        if moment >= begin:
            peak = max(peak, now)
    return peak


def _traffic(mesh: Mesh, settings: MemorySettings, strategy: str) -> dict[str, list[int]]:
    """Bytes that every rank sends and receives in a step for gradients and weights."""
    contender = _Contender.build(mesh, settings, strategy)
    before = _totals(mesh.ledger)
    contender.step(0)
    after = _totals(mesh.ledger)
    predicted = _totals(
        predict_ledger(
            model_of(settings),
            contender.plan,
            seq_len=settings.seq_len,
            global_batch=settings.sequences,
            dtype=settings.dtype,
            rank=mesh.rank,
        )
    )
    names = ("wire_bytes", "received_bytes")
    own = {name: after[name] - before[name] for name in names}
    own |= {f"predicted_{name}": predicted[name] for name in names}
    return _by_rank(mesh, own)


def _totals(ledger: Ledger) -> dict[str, int]:
    found = [ledger.total(caller=caller) for caller in _CALLERS]
    return {
        "wire_bytes": sum(total.wire_bytes for total in found),
        "received_bytes": sum(total.received_bytes for total in found),
    }


def _by_rank(mesh: Mesh, own: dict[str, int]) -> dict[str, list[int]]:
    every = gather_json(own, mesh.control)
    return {name: [int(one[name]) for one in every] for name in own}


def _seconds(mesh: Mesh, settings: MemorySettings) -> dict[str, list[float]]:
    """Strategy -> seconds of its step in each round; the steps before the first are not counted."""
    keep_freed_memory()
    contenders = {name: _Contender.build(mesh, settings, name) for name in settings.wanted}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(_STEPS_BEFORE + settings.rounds):
        for name, contender in contenders.items():
            barrier(mesh["world"])
            start = time.perf_counter()
            contender.step(number)
            slowest = max(gather_json(time.perf_counter() - start, mesh.control))
            if number >= _STEPS_BEFORE:
                seconds[name].append(slowest)
    return seconds


if __name__ == "__main__":
    from benchmarks.application import main

    main("memory")
