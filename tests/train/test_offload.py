"""Runs with the optimizer's states in host memory: on a CPU, refusals, and memory of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moemesh.config.trainable import refusals
from moemesh.planner.machine_memory import TooLargeError, refuse_too_large
from moemesh.planner.traffic.own_memory import predicted_memory
from moemesh.sharding.load_run import load_run
from moemesh.sharding.parameters import num_trained
from moemesh.trace.run import Run
from tests.train import runs


def test_a_cpu_run_says_that_it_changes_nothing(tmp_path: Path) -> None:
    text = runs.said(*runs.arguments(tmp_path / "host", plan__offload="optimizer"))
    assert "plan.offload = optimizer has no effect: it needs a GPU" in text
    memory = Run.load(tmp_path / "host").memory
    assert memory is not None
    for measured, predicted in zip(memory.ranks, memory.predicted, strict=True):
        assert measured.host == 0 and measured.optimizer == predicted.optimizer > 0


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (["train.optimizer=muon"], "optimizer = muon"),
        (["plan.schedule=pipedream", "plan.pp=2", "plan.microbatches=2"], "schedule = pipedream"),
        (["plan.optimizer_validation=after", "plan.pp=2", "plan.microbatches=2"], "validation ="),
        (["train.rebalance_every=5", "plan.ep=2", "plan.dp=2"], "rebalance_every = 5"),
        (["train.on_mismatch=majority"], "on_mismatch = majority"),
    ],
)
def test_what_needs_the_states_on_the_device_is_refused(keys: list[str], named: str) -> None:
    config = load_run([], ["model.num_layers=4", "plan.offload=optimizer", *keys]).config
    (problem,) = refusals(config)
    assert named in problem.message and "offload = optimizer" in problem.message
    assert problem.fix.endswith("offload = none")
    without = load_run([], ["model.num_layers=4", *keys]).config
    assert not refusals(without)


def test_too_little_memory_of_the_host_is_refused_before_the_run(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"plan__offload": "optimizer", "plan__dp": 2}
    config = runs.config_of(tmp_path, **keys)
    needed = sum(predicted_memory(config, rank, on_cpu=False).host for rank in (0, 1))
    # Master, two moments and gradient of every weight, on both ranks.
    assert needed == 2 * 16 * num_trained(config.tuning, config.model, config.plan)
    refuse_too_large(config, needed, on_cpu=False)
    with pytest.raises(TooLargeError, match=r"on the host of 2 rank.*offload = none"):
        refuse_too_large(config, needed - 1, on_cpu=False)
    plain = runs.config_of(tmp_path, plan__dp=2)
    refuse_too_large(plain, 1, on_cpu=False)
