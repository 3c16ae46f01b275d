"""memory.json of real runs: the model states of every rank are the predicted ones, to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moemesh.planner.traffic.own_memory import predict_memory
from moemesh.sharding.load_run import load_run
from moemesh.trace.memory_profile import MemoryProfiles
from tests.train.runs import train

STATES = (
    "dense_weights",
    "expert_weights",
    "gathered_weights",
    "weight_versions",
    "gradients",
    "optimizer",
    "snapshots",
)

#: Keys of runs. A run without clipping steps early after three steps.
EARLY: dict[str, Any] = {
    "plan.pp": 2,
    "plan.microbatches": 4,
    "plan.optimizer_validation": "after",
    "train.clip": 0,
    "train.steps": 6,
}
STREAM: dict[str, Any] = {"plan.pp": 2, "plan.schedule": "pipedream", "plan.microbatches": 4}
BIASED: dict[str, Any] = {"model.router_score": "sigmoid", "model.router_selection_bias": True}
RUNS: dict[str, dict[str, Any]] = {
    "early": EARLY | BIASED | {"train.dtype": "bfloat16"},
    "stream": STREAM | BIASED,
    "sgd": {"plan.dp": 2, "plan.ep": 2, "train.optimizer": "sgd"},
}
MORE: dict[str, dict[str, Any]] = {
    "early in fp32": EARLY | {"plan.schedule": "zb_h1"},
    "early with momentum": EARLY | {"train.optimizer": "sgd", "train.momentum": 0.9},
    "stream in bf16": STREAM | {"plan.dp": 2, "plan.ep": 2, "train.dtype": "bfloat16"},
    "2bw": STREAM | BIASED | {"plan.schedule": "pipedream_2bw", "plan.update_window": 2},
    "ampnet": STREAM | {"plan.schedule": "ampnet"},
    "momentum": {"plan.tp": 2, "train.optimizer": "sgd", "train.momentum": 0.5},
}


def check(out: Path, keys: dict[str, Any]) -> None:
    """Train with `keys`, and compare memory.json with the prediction."""
    train(out, **keys)
    config = load_run([out / "config.toml"], [], {}).config
    found = MemoryProfiles.from_json(json.loads((out / "memory.json").read_text()))
    assert len(found.ranks) == config.plan.world_size
    assert (found.ranks[0].snapshots > 0) == (config.plan.optimizer_validation == "after")
    keeps_versions = config.plan.schedule in ("pipedream", "pipedream_2bw")
    assert (found.ranks[0].weight_versions > 0) == keeps_versions
    for measured in found.ranks:
        predicted = predict_memory(
            config.model,
            config.plan,
            seq_len=config.data.seq_len,
            global_batch=config.data.global_batch,
            dtype=config.train.dtype,
            optimizer=config.train.optimizer,
            momentum=config.train.momentum,
            rank=measured.rank,
        )
        for part in STATES:
            assert getattr(predicted, part) == getattr(measured, part), f"{measured.rank}: {part}"


@pytest.mark.parametrize("name", RUNS)
def test_states_are_the_predicted_ones(tmp_path: Path, name: str) -> None:
    check(tmp_path / "run", RUNS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_states_of_more_runs_are_the_predicted_ones(tmp_path: Path, name: str) -> None:
    check(tmp_path / "run", MORE[name])
