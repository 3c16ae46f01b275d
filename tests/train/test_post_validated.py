"""Optimizer steps that can be undone, and `moemesh train` with validation after the step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moemesh.config.train import TrainConfig
from moemesh.train.optimizer import Optimizer
from tests.train import runs

KEYS: dict[str, Any] = {
    "model__num_layers": 4,
    "plan__pp": 2,
    "plan__schedule": "zb_h2",
    "plan__microbatches": 4,
    "data__global_batch": 8,
    "train__steps": 8,
    # Some steps are clipped, others are not: see the test.
    "train__clip": 1.6,
    "train__checkpoint_every": 5,
    "train__checkpoints_kept": 9,
    "train__validate_every": 5,
}


def _optimizer(keys: dict[str, Any], dtype: torch.dtype) -> Optimizer:
    generator = torch.Generator().manual_seed(3)
    weights = {"a": (5, 7), "b": (7,)}
    return Optimizer(
        {
            name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
            for name, shape in weights.items()
        },
        TrainConfig(**keys),
    )


def _gradients(optimizer: Optimizer, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randn(master.shape, generator=generator).to(master.dtype)
        for name, master in optimizer.masters.items()
    }


def _everything(optimizer: Optimizer) -> dict[str, Tensor]:
    states = {f"parameter.{n}": p.detach() for n, p in optimizer._parameters.items()}
    states |= {f"master.{name}": master.detach() for name, master in optimizer.masters.items()}
    for kind, tensors in optimizer.state().items():
        states |= {f"{kind}.{name}": tensor for name, tensor in tensors.items()}
    return states


@pytest.mark.parametrize("done", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "keys", [{}, {"optimizer": "sgd"}, {"optimizer": "sgd", "momentum": 0.9}], ids=str
)
def test_a_step_taken_back_leaves_no_trace(
    keys: dict[str, Any], dtype: torch.dtype, done: int
) -> None:
    """Now, and in the steps that follow: one with a gradient far above all before."""
    tried, never = _optimizer(keys, dtype), _optimizer(keys, dtype)
    for step in range(done):
        for optimizer in (tried, never):
            optimizer.step(_gradients(optimizer, step), 0.01)
    snapshot = tried.snapshot()
    spike = {name: 1e8 * gradient for name, gradient in _gradients(tried, 50).items()}
    tried.step(spike, 0.1)
    assert not torch.equal(_everything(tried)["master.a"], _everything(never)["master.a"])
    tried.restore(snapshot)
    for step in range(done, done + 3):
        assert tried.num_updates == never.num_updates == step
        got, wanted = _everything(tried), _everything(never)
        assert got.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(got[name], tensor), name
        for optimizer in (tried, never):
            optimizer.step(_gradients(optimizer, step), 0.01)


@pytest.mark.slow
def test_a_run_has_the_metrics_of_one_that_validates_before(tmp_path: Path) -> None:
    """Losses, norms, loads, validations, in order; also when the run resumes from a checkpoint."""
    before = runs.train(tmp_path / "before", **KEYS)
    clipped = [row["step"] for row in before if row["grad_norm"] > 1.6]
    # Step 5 is taken early, step 6 and what was built on it are taken back.
    assert clipped[:2] == [1, 6], [row["grad_norm"] for row in before]
    loads = (tmp_path / "before/loads.jsonl").read_text()
    out = tmp_path / "after"
    keys = KEYS | {"plan__optimizer_validation": "after"}
    assert _numbers(runs.train(out, **keys)) == _numbers(before)
    assert (out / "loads.jsonl").read_text() == loads
    timeline = json.loads((out / "timeline.json").read_text())
    assert "validate" in {record["name"] for record in timeline["records"]}

    shutil.rmtree(out / "checkpoints" / "step-8")
    assert "resumed from step 5" in runs.said(*runs.arguments(out, **keys))
    assert _numbers(runs.metrics(out)) == _numbers(before)
    assert (out / "loads.jsonl").read_text() == loads


def _numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = {"seconds", "tokens_per_second", "data_seconds", "memory_bytes", "tflops_per_rank"}
    timed.add("communication_seconds")
    return [{k: v for k, v in row.items() if k not in timed} for row in rows]
