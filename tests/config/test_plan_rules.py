"""Rules of a plan: each names its numbers and the nearest legal ones."""

from __future__ import annotations

import re
from typing import Any

import pytest

from moemesh.config.errors import ConfigError
from moemesh.config.layout import SHARDED_AXES, Layout
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.sharding.load_run import load_run


def messages(problems: list) -> str:
    return "\n".join(str(problem) for problem in problems)


def test_plan_world_and_layout() -> None:
    plan = Plan(pp=2, dp=2, cp=1, tp=2, ep=2)
    assert plan.check(ModelConfig()) == []
    assert plan.world_size == 8
    assert plan.edp == 2
    assert plan.layout == Layout(pp=2, dp=2, tp=2, ep=2)
    with pytest.raises(ValueError, match=r"must divide"):
        _ = Plan(ep=3).layout


def test_legal_plan_needs_no_division_of_batch_vocabulary_or_sequence() -> None:
    model = ModelConfig(vocab_size=257)
    plan = Plan(dp=3, cp=2, tp=4, microbatches=5)
    assert plan.check(model, seq_len=7, global_batch=11) == []


TWO = {"schedule": "pipedream_2bw", "pp": 4, "microbatches": 12}
AMPNET = {"schedule": "ampnet", "pp": 2, "microbatches": 4}
LIVE = AMPNET | {"ampnet_backward": "live"}


@pytest.mark.parametrize(
    "keys",
    [
        TWO,
        TWO | {"update_window": 6},
        LIVE | {"update_window": 1, "max_in_flight": 9},
        AMPNET | {"replay": "runs/tiny"},
        {"schedule": "pipedream", "pp": 2},
        *({"dp": 2, "cp": 2, "data": "zero3", "shard_group": size} for size in (None, 1, 2, 4)),
        {"data": "zero3", "reshard": "step"},
    ],
)
def test_legal_schedules_and_groups(keys: dict[str, Any]) -> None:
    assert Plan(**keys).check(ModelConfig()) == []


def test_a_tied_weight_of_one_stage_is_legal() -> None:
    assert Plan(schedule="ampnet", microbatches=4).check(ModelConfig(tied_embeddings=True)) == []


@pytest.mark.parametrize("group", [0, 1, 2, 3, 4])
def test_the_two_halves_of_an_axis_meet_in_one_rank(group: int) -> None:
    layout = Layout(dp=4, tp=3, ep=6, shard_group=group)
    for axis in SHARDED_AXES:
        for rank in range(layout.world_size):
            whole = set(layout.group_of(axis, rank))
            shard = set(layout.group_of(f"{axis}_shard", rank))
            copies = set(layout.group_of(f"{axis}_copies", rank))
            assert shard & copies == {rank} and shard | copies <= whole
            assert len(shard) * len(copies) == len(whole)
        if not group:
            assert layout.groups(f"{axis}_shard") == layout.groups(axis)


def test_suggested_degrees_are_legal() -> None:
    """Every `name = a or b` of a divisibility problem gives a plan without that problem."""
    for degrees in [
        {"dp": 8, "ep": 6},
        {"tp": 3, "dp": 4},
        {"dp": 12, "ep": 5},
        {"dp": 8, "etp": 3},
    ]:
        for problem in Plan(**degrees).check(ModelConfig()):
            for name, values in re.findall(r"(\w+) = ([\d or]+)", problem.fix):
                for value in re.findall(r"\d+", values):
                    again = Plan(**{**degrees, name: int(value)}).check(ModelConfig())
                    assert problem.message.split("(")[0] not in messages(again), (name, value)


def test_interleaving_takes_two_stages_a_rank() -> None:
    given = ["plan.schedule=interleaved_1f1b", "plan.pp=2", "plan.microbatches=2"]
    loaded = load_run([], given, {})
    assert loaded.config.plan.stages_per_rank == 2
    assert loaded.origins["plan.stages_per_rank"] == "default by plan.schedule"
    assert load_run([], [*given, "plan.stages_per_rank=1"], {}).config.plan.stages_per_rank == 1
    assert load_run([], ["plan.pp=2"], {}).config.plan.stages_per_rank == 1
    with pytest.raises(ConfigError, match=r"pp\*stages_per_rank \(2\*2 = 4\) stages"):
        load_run([], [*given, "model.num_layers=3"], {})
