"""`benchmarks.step`: a whole training step beside a plain loop over transformers.

One folder of weights (Qwen3-MoE) and the same tokens for both, in processes of their own that take
turns, one whole step each: forward, loss, backward, sums over ranks, norm, clipping, AdamW. A step
counts as long as its slowest rank takes. Each contender has the environment of its users: ours what
the command `moemesh` sets, the peer (:mod:`benchmarks.step_peer`) what plain `python` or `torchrun`
has. Losses of both are compared, so that both do the same work.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_profile import profile_step
from benchmarks.layer_rank import spread
from benchmarks.ranks import on_ranks
from benchmarks.settings import GENERATED, StepSettings
from benchmarks.step_peer import LORA_TARGETS, write_model
from benchmarks.turns import (
    CLIP,
    CONTENDERS,
    DECAY,
    LEARNING_RATE,
    PROMPT,
    Step,
    take_turns,
    tokens_of_round,
)
from moemesh.comm import launch
from moemesh.comm.collectives import gather_json
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import shard_range
from moemesh.config.lora import LoraConfig
from moemesh.model.batch import Batch
from moemesh.sharding.load_run import load_run
from moemesh.trace.machine import OPENMP_WAITING
from moemesh.trace.strict_json import strict_json
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.inference.evaluation import load
from moemesh.train.inference.generation import chooser, continuation
from moemesh.train.optimizer import Optimizer
from moemesh.train.step import gradients_of_step, sum_losses, update

_ROOT = str(Path(__file__).parent.parent)


def run(settings: StepSettings, found: Path | None = None) -> dict[str, Any] | None:
    """Measure every number type; None where another rank has the result."""
    if settings.turns:  # a rank, or the process that starts the ranks of our contender
        plan = settings.layout

        def measured(ranks: launch.Ranks) -> dict[str, Any]:
            return _take_our_turns(Mesh.create(plan.layout, ranks.device), settings)

        on_ranks(
            "step",
            settings,
            measured,
            num_ranks=plan.world_size,
            found=found,
            device=settings.device,
        )
        return None
    results = [_measured(settings, dtype) for dtype in settings.dtypes]
    return {
        "settings": settings.to_json(),
        "transformers": __import__("transformers").__version__,
        "results": results,
    }


def _take_our_turns(mesh: Mesh, settings: StepSettings) -> dict[str, Any]:
    step = our_step(mesh, settings, Path(settings.turns) / "model", settings.dtype)

    def gather(value: float) -> list[float]:
        return gather_json(value, mesh.control)

    take_turns(settings, "moemesh", step, gather, mesh.device, rank=mesh.rank)
    if settings.kernels:
        tokens_BS = tokens_of_round(settings, 0)
        measured = profile_step(lambda: step(tokens_BS), mesh.device, settings.kernels)
        if mesh.rank == 0:
            (Path(settings.turns) / "profile.json").write_text(strict_json(measured))
    return {}


def _measured(settings: StepSettings, dtype: str) -> dict[str, Any]:
    """Both contenders with numbers of type `dtype`, in turns."""
    with tempfile.TemporaryDirectory(prefix="moemesh-step-") as turns:
        folder = Path(turns)
        write_model(folder / "model", settings)
        (folder / "0").touch()
        chosen = replace(settings, dtype=dtype, turns=turns)
        with _busy_neighbours(settings.neighbours):
            _run_together([our_command(chosen), peer_command(chosen)])
        ours, theirs = (
            json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in CONTENDERS
        )
        profile = folder / "profile.json"
        measured = json.loads(profile.read_text(encoding="utf-8")) if settings.kernels else None
    ratios = [a / b for a, b in zip(ours["seconds"], theirs["seconds"], strict=True)]
    both = dict(zip(CONTENDERS, (ours, theirs), strict=True))
    return {
        "dtype": dtype,
        "seconds": {name: statistics.median(one["seconds"]) for name, one in both.items()},
        "peak_bytes": {name: one["peak_bytes"] for name, one in both.items()},
        "threads": {name: one["threads"] for name, one in both.items()},
        "ratio": spread(ratios),
        "loss_difference": max(
            abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)
        ),
        "goal": settings.goal(dtype),
        "flops": settings.flops if settings.work == "train" else None,
        "profile": measured,
    }


def our_command(settings: StepSettings) -> tuple[list[str], dict[str, str]]:
    """Our contender: what the command `moemesh` sets is set by the command of the benchmark."""
    return [sys.executable, "-m", "benchmarks", "step", *settings.words()], dict(os.environ)


def peer_command(settings: StepSettings) -> tuple[list[str], dict[str, str]]:
    """The peer: `python` on one rank, `torchrun` on several, without settings of ours."""
    file = Path(settings.turns) / "peer.json"
    values = settings.to_json() | {
        "folder": str(Path(settings.turns) / "model"),
        "lora_alpha": LoraConfig().alpha,
        "generated": GENERATED,
    }
    file.write_text(json.dumps(values), encoding="utf-8")
    ranks = settings.layout.world_size
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    environment = {k: v for k, v in os.environ.items() if OPENMP_WAITING.get(k) != v}
    return [
        sys.executable,
        *(launcher if ranks > 1 else []),
        "-m",
        "benchmarks.step_peer",
        str(file),
    ], environment


def _run_together(commands: Sequence[tuple[list[str], dict[str, str]]]) -> None:
    """Run all commands at once; if one fails the others are ended, and this process with it."""
    processes = []
    for command, environment in commands:
        path = os.pathsep.join(filter(None, (_ROOT, environment.get("PYTHONPATH"))))
        processes.append(
            subprocess.Popen(command, env=environment | {"PYTHONPATH": path}, stdout=sys.stderr)
        )
    try:
        while any(process.poll() is None for process in processes):
            for process in processes:
                if process.returncode:
                    raise SystemExit(process.returncode)
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if code := next((process.returncode for process in processes if process.returncode), 0):
        raise SystemExit(code)


@contextmanager
def _busy_neighbours(number: int) -> Iterator[None]:
    """Processes that compute without a pause, as another user of the machine would."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def our_step(mesh: Mesh, settings: StepSettings, folder: Path, dtype: str) -> Step:
    keys = [f"plan.{key}" for key in filter(None, settings.plan.split(","))]
    keys += [f"model.implementation={settings.implementation}"]
    keys += [f"model.path={folder}", f"train.dtype={dtype}", f"train.weight_decay={DECAY}"]
    keys += [f"data.seq_len={settings.seq_len}", f"data.global_batch={settings.sequences}"]
    if settings.lora:
        targets = ", ".join(f'"{name}"' for name in LORA_TARGETS)
        keys += [f"lora.rank={settings.lora}", f"lora.targets=[{targets}]"]
    config = load_run([], keys, {}).config
    parallel = load(config, mesh, folder)
    optimizer = Optimizer.of(parallel, config.train)
    recorder = TimelineRecorder(mesh.rank)

    def own_batch(tokens_BS: Tensor) -> Batch:
        own = shard_range(settings.sequences, mesh["dp"].size, mesh["dp"].index)
        part = tokens_BS[own.start : own.stop].to(mesh.device)
        sequences_B = torch.arange(own.start, own.stop, device=mesh.device)
        return Batch(tokens_BS=part[:, :-1], targets_BS=part[:, 1:], sequences_B=sequences_B)

    def train(tokens_BS: Tensor) -> float:
        result = gradients_of_step(parallel, [own_batch(tokens_BS)], recorder)
        update(parallel, optimizer, result, lr=LEARNING_RATE, clip=CLIP)
        return result.loss

    def evaluate(tokens_BS: Tensor) -> float:
        total, count = sum_losses(parallel, [own_batch(tokens_BS)])
        return total / count

    def generate(tokens_BS: Tensor) -> float:
        prompt = tokens_BS[0, :PROMPT].tolist()
        ids = continuation(parallel.model, prompt, chooser(), mesh.device)
        return statistics.mean(islice(ids, GENERATED))

    return {"train": train, "evaluate": evaluate, "generate": generate}[settings.work]


if __name__ == "__main__":
    from benchmarks.application import main

    main("step")
