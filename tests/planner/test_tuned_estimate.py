"""The estimate of a run of which some weights do not train."""

from __future__ import annotations

from pathlib import Path

import pytest

from moemesh.config.lora import LoraConfig
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.run import RunConfig
from moemesh.config.train import TrainConfig
from moemesh.planner.estimate import estimate_run
from moemesh.sharding.parameters import num_trained
from moemesh.train.preparation import TooLargeError, refuse_too_large

ADAPTED = RunConfig(lora=LoraConfig(rank=4), train=TrainConfig(dtype="float32"))


def test_states_and_traffic_are_those_of_what_trains(tmp_path: Path) -> None:
    every = estimate_run(RunConfig(train=TrainConfig(dtype="float32")), "laptop_cpu")
    found = estimate_run(ADAPTED, "laptop_cpu")
    trained = num_trained(ADAPTED.tuning, ADAPTED.model, ADAPTED.plan)
    memory, before = found.memory.worst, every.memory.worst
    assert memory.gradients == 4 * trained and memory.optimizer == 8 * trained
    weights = [one.dense_weights + one.expert_weights for one in (memory, before)]
    assert weights[0] == weights[1] + 4 * trained
    assert memory.activations == before.activations
    less = before.total - memory.total
    assert found.peak.needed == pytest.approx(every.peak.needed - less)
    assert any(f"{trained:,} parameters train" in note for note in found.notes)


def test_traffic_is_that_of_adapters() -> None:
    def sent(config: RunConfig) -> float:
        rows = estimate_run(config, "laptop_cpu").traffic.rows()
        return sum(row["wire_bytes"] for row in rows if row["caller"] == "gradients")

    plan = Plan(dp=2, ep=2)
    full = sent(RunConfig(plan=plan))
    alone = sent(RunConfig(plan=plan, lora=LoraConfig(rank=4)))
    assert 0 < alone < 0.2 * full


def test_a_run_that_fits_because_little_trains_is_not_refused() -> None:
    model = ModelConfig()
    full = RunConfig(model=model, train=TrainConfig(dtype="float32"))
    with pytest.raises(TooLargeError):
        refuse_too_large(full, memory_bytes=30_000_000)
    refuse_too_large(ADAPTED, memory_bytes=30_000_000)
