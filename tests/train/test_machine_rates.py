"""The small model whose speed predicts the seconds of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from moemesh.config.run import RunConfig
from moemesh.model.transformer import Transformer
from moemesh.monitor import progress
from moemesh.planner.step_parts import pass_flops
from moemesh.sharding.load_run import load_run
from moemesh.trace import step_seconds as parts
from moemesh.train.records import machine_rates
from moemesh.train.records.machine_rates import small_run
from moemesh.train.records.step_clock import StepClock
from tests.hub.families import tiny_folder

MODELS = {
    "default": (),
    "dense": ("model.num_experts=0",),
    "experts everywhere": ("model.first_dense_layers=0",),
    "latent": ("model.preset=deepseek-v2-lite", "model.hidden_size=64"),
    "windows": (
        "model.sliding_window=16",
        'model.layer_types=["sliding_attention", "full_attention"]',
        "model.moe_layers=[1, 3, 5]",
    ),
    "groups": ("model.num_experts=16", "model.router_groups=4", "model.router_groups_kept=2"),
}
PLANS = ("plan.dp=1", "plan.dp=4 plan.ep=4", "plan.tp=2 plan.ep=2", "plan.cp=2", "plan.pp=2")


def configured(*keys: str) -> RunConfig:
    return load_run([], [*keys, "data.global_batch=8", "data.seq_len=64"], {}).config


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_the_small_model_is_legal_and_has_the_layers_of_a_rank(model: str, plan: str) -> None:
    if "ep" in plan and model == "dense":
        plan = plan.partition(" ")[0]
    config = configured(*MODELS[model], *plan.split())
    small = small_run(config)
    assert small.model.check() == [] and small.plan.world_size == 1
    assert small.model.hidden_size == config.model.hidden_size
    assert small.model.num_layers == len(
        {config.model.is_moe_layer(layer) for layer in range(config.model.num_layers)}
    )
    assert small.model.num_heads == config.model.num_heads // config.plan.tp
    assert pass_flops(small).keys() == pass_flops(config).keys()


@pytest.mark.parametrize("sequences", [16, 64, 1024])
def test_an_expert_has_as_many_rows_as_in_the_run(sequences: int) -> None:
    config = load_run([], ["plan.dp=2", "plan.ep=2", f"data.global_batch={sequences}"], {}).config
    small, model = small_run(config), config.model
    tokens = sequences * config.data.seq_len
    rows = tokens * model.experts_per_token / model.num_experts
    small_tokens = small.data.global_batch * small.data.seq_len
    assert small_tokens <= 2048
    assert (
        small_tokens * small.model.experts_per_token / small.model.num_experts
        == pytest.approx(rows, rel=0.01)
        or small.model.num_experts == small.model.experts_per_token
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["zaya", "smollm3"])
def test_a_model_of_transformers_is_measured_by_one_of_its_sizes(
    family: str, tmp_path: Path
) -> None:
    folder = tiny_folder(family, tmp_path / family)
    config = configured(f"model.path={folder}", "model.implementation=transformers")
    small = small_run(config).model
    assert small.check() == [] and small.architecture is None
    assert small.hidden_size == config.model.hidden_size
    assert small.num_experts == config.model.num_experts
    assert machine_rates._pass_rates(small_run(config))[parts.TOGETHER] > 0


@pytest.mark.parametrize("keys", [(), ("lora.rank=2",)])
def test_rates_are_those_of_the_parts_of_training_steps(keys: tuple[str, ...]) -> None:
    rates = machine_rates._pass_rates(small_run(configured(*keys)))
    assert rates.keys() == {*parts.PASSES, parts.TOGETHER}
    # The fastest part is faster than all passes together. The slowest one need not be slower: parts
    # without operations take time of all passes, and more of it on a busy machine.
    apart = [rates[part] for part in parts.PASSES]
    assert 0 < min(apart) / 4 <= rates[parts.TOGETHER] <= max(apart)


def test_what_is_frozen_in_the_run_is_frozen_in_the_small_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained: list[str] = []

    class Clock(StepClock):
        def __init__(self, model: Transformer) -> None:
            trained.extend(name for name, p in model.named_parameters() if p.requires_grad)
            super().__init__(model)

    monkeypatch.setattr(machine_rates, "StepClock", Clock)
    machine_rates._pass_rates(small_run(configured("lora.rank=2")))
    assert trained and all("_lora_" in name for name in trained)


def test_the_clock_of_the_small_model_does_not_keep_the_waits_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs whose steps have no clock would grow by each of their waits."""
    listeners: list[object] = []
    monkeypatch.setattr(progress, "on_wait", listeners.append)
    machine_rates._pass_rates(small_run(configured()))
    assert len(listeners) == 2 and listeners[-1] is None


def test_a_model_too_large_to_try_has_no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates, "_MOST_NUMBERS", 1000)
    assert machine_rates._pass_rates(small_run(configured())) == {}
