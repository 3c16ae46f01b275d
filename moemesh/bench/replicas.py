"""Training steps with spare slots and without, in turns, where routing is skewed.

Two copies of one model are trained side by side on the same ranks: the same weights, tokens and
routing (replayed from :mod:`moemesh.bench.workloads`, another one each step), one with
``plan.spare_slots``. A step is forward, backward and gradient sums, between two barriers. Beside
its time stands the time that the busiest rank's processor worked: what the step would take if every
rank had a core of its own and nothing else were slow.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moemesh.bench.workloads import WORKLOADS, workload
from moemesh.comm import launch
from moemesh.comm.collectives import barrier, gather_json
from moemesh.comm.mesh import Mesh
from moemesh.config.errors import UserError
from moemesh.config.layout import Layout, shard_range
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan, SparePolicy
from moemesh.model.batch import Batch
from moemesh.model.transformer import Output, Part
from moemesh.parallel.expert.replicas import replicated, take_rank_tokens
from moemesh.parallel.parallelize import ParallelModel, parallelize
from moemesh.trace.loads import max_over_mean
from moemesh.trace.timeline import TimelineRecorder

TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The model (experts dominate its step), its data, and what is compared."""

    workloads: tuple[str, ...] = ("W2", "W3", "W4", "W5", "W6")
    spare_slots: int = 2
    policy: SparePolicy = "quota"
    layers: int = 2
    hidden: int = 128
    width: int = 512
    num_experts: int = 32
    experts_per_token: int = 4
    sequences: int = 16
    seq_len: int = 128
    rounds: int = 7
    seed: int = 0

    def model(self) -> ModelConfig:
        """Two layers of few attention heads and many wide experts."""
        return ModelConfig(
            vocab_size=64,
            hidden_size=self.hidden,
            num_layers=self.layers,
            num_heads=4,
            num_kv_heads=4,
            head_dim=16,
            intermediate_size=self.hidden,
            first_dense_layers=0,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            expert_intermediate_size=self.width,
            num_shared_experts=0,
        )


def command(
    *,
    ranks: str,
    workload: str,
    spare_slots: int,
    policy: SparePolicy,
    rounds: int,
    as_json: bool,
    out: Path | None = None,
) -> int:
    """Measure on each of the numbers of `ranks` ("2,4") and print; returns the exit code.

    `workload` names loads with commas, or "all". `out` is a file for the JSON list. A process that
    is itself a rank measures its own number of ranks.
    """
    settings = Settings(
        workloads=WORKLOADS if workload == "all" else tuple(workload.split(",")),
        spare_slots=spare_slots,
        policy=policy,
        rounds=rounds,
    )
    _check(settings, ranks)
    found: list[dict[str, Any]] = []
    if launch.joined():
        own = launch.start("cpu", TIMEOUT_SECONDS)
        launch.keep_freed_memory()
        mesh = Mesh.create(Layout(dp=own.world_size, ep=own.world_size), own.device)
        found.append(measure(mesh, settings))
        if own.rank == 0:
            _deliver(found, as_json, out)
        launch.stop()
        return 0
    for count in map(int, ranks.split(",")):
        with tempfile.TemporaryDirectory(prefix="moemesh-bench-") as folder:
            file = Path(folder) / "result.json"
            options = {"--ranks": count, "--workload": workload, "--spare-slots": spare_slots}
            options |= {"--policy": policy, "--rounds": rounds, "--out": file}
            words = [str(word) for pair in options.items() for word in pair]
            code = launch.launch(count, ["bench", "replicas", *words])
            if code:
                return code
            found += json.loads(file.read_text())
    _deliver(found, as_json, out)
    return 0


def _check(settings: Settings, ranks: str) -> None:
    for name in settings.workloads:
        if name not in WORKLOADS:
            raise UserError(f'--workload "{name}": choose from {", ".join(WORKLOADS)}, or "all"')
    if settings.spare_slots < 1 or settings.rounds < 1:
        raise UserError(
            f"--spare-slots ({settings.spare_slots}) and --rounds ({settings.rounds}) must be at "
            "least 1"
        )
    for word in ranks.split(","):
        if not word.isdecimal() or int(word) < 2 or settings.num_experts % int(word):
            raise UserError(
                f'--ranks "{ranks}": numbers such as 2,4 that divide {settings.num_experts} '
                "experts; one rank has nowhere to put a replica"
            )


def _deliver(found: list[dict[str, Any]], as_json: bool, out: Path | None) -> None:
    if out is not None:
        out.write_text(json.dumps(found, indent=2))
    if as_json:
        print(json.dumps(found, indent=2))
    elif out is None:
        print("\n".join(map(table, found)), end="")


def measure(mesh: Mesh, settings: Settings) -> dict[str, Any]:
    """On every rank of a mesh with dp = ep = its ranks; the same result on all."""
    num_ranks = mesh["ep"].size
    plan = Plan(dp=num_ranks, ep=num_ranks)
    spared = plan.model_copy(
        update={"spare_slots": settings.spare_slots, "spare_policy": settings.policy}
    )
    contenders = {"without": _build(mesh, settings, plan), "with": _build(mesh, settings, spared)}
    return {
        "settings": asdict(settings),
        "ranks": num_ranks,
        "workloads": [_compare(contenders, settings, name) for name in settings.workloads],
    }


def _build(mesh: Mesh, settings: Settings, plan: Plan) -> ParallelModel:
    return parallelize(
        settings.model(),
        plan,
        mesh,
        seed=settings.seed,
        dtype=torch.float32,
        tokens_per_rank=plan.tokens_per_rank(settings.seq_len, settings.sequences),
    )


def _compare(contenders: dict[str, ParallelModel], settings: Settings, name: str) -> dict[str, Any]:
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
    parallel: ParallelModel, settings: Settings, name: str, step: int
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


def _batch(parallel: ParallelModel, settings: Settings, name: str, step: int) -> Batch:
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


def _objective(part: Part, output: Output, batch: Batch) -> Tensor:
    """The losses of this rank's tokens; a factor changes no time."""
    assert output.losses_T is not None
    return output.losses_T.mean()


def _rank_tokens(parallel: ParallelModel, batch: Batch) -> list[list[int]]:
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


def table(found: dict[str, Any]) -> str:
    """The result for a person, as a Markdown table."""
    lines = [
        "| ranks | load | balance without | with | step without | with | ratio "
        "| busiest CPU without | with | ratio | planning |",
        "|" + "---|" * 11,
    ]
    for row in found["workloads"]:
        seconds, cpu, balance = row["seconds"], row["busiest_rank_cpu_seconds"], row["balance"]
        lines.append(
            f"| {found['ranks']} | {row['workload']} "
            f"| {balance['without']:.2f} | {balance['with']:.3f} "
            f"| {1e3 * seconds['without']:.0f} ms | {1e3 * seconds['with']:.0f} ms "
            f"| {row['ratio']:.2f} "
            f"| {1e3 * cpu['without']:.0f} ms | {1e3 * cpu['with']:.0f} ms "
            f"| {row['cpu_ratio']:.2f} | {row['planning_share']:.2%} |"
        )
    return "\n".join(lines) + "\n"
