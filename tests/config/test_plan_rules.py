"""Rules of a plan: each names its numbers and the nearest legal ones."""

from __future__ import annotations

import re
from typing import Any

import pytest

from moemesh.config.layout import SHARDED_AXES, Layout
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan


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


# plan, model, exact sentence, text of the fix
BROKEN_PLANS = [
    ({"dp": 8, "ep": 6}, {}, "ep*etp (6) must divide dp*cp*tp (8)", "ep = 4 or 8"),
    (
        {"dp": 8, "ep": 6},
        {"num_experts": 6},
        "ep*etp (6) must divide dp*cp*tp (8)",
        "ep = 2, or dp = 12",
    ),
    ({"dp": 4, "etp": 3}, {}, "ep*etp (3) must divide dp*cp*tp (4)", "etp = 2 or 4"),
    ({"dp": 8, "ep": 3, "etp": 3}, {}, "ep*etp (9) must divide dp*cp*tp (8)", "ep*etp = 8"),
    ({"tp": 3}, {}, "tp (3) must divide num_heads (8)", "tp = 2 or 4"),
    ({"tp": 3}, {}, "tp (3) must divide num_kv_heads (4)", "tp = 2 or 4"),
    ({"tp": 8}, {}, "tp (8) must divide num_kv_heads (4)", "tp = 4"),
    (
        {"tp": 4},
        {"intermediate_size": 90},
        "tp (4) must divide intermediate_size (90)",
        "tp = 2",
    ),
    (
        {"tp": 4},
        {"shared_intermediate_size": 6},
        "tp (4) must divide shared width (6)",
        "tp = 2",
    ),
    ({"dp": 3, "ep": 3}, {}, "ep (3) must divide num_experts (8)", "ep = 1"),
    (
        {"dp": 4, "etp": 4},
        {"expert_intermediate_size": 6, "shared_intermediate_size": 8},
        "etp (4) must divide expert_intermediate_size (6)",
        "etp = 2",
    ),
    ({"dp": 2, "ep": 2}, {"num_experts": 0}, "num_experts is 0", "ep = 1"),
    ({"dp": 2, "etp": 2}, {"num_experts": 0}, "num_experts is 0", "etp = 1"),
    ({"dp": 2, "ep": 2}, {"first_dense_layers": 8}, "all layers are dense", "ep = 1"),
    ({"pp": 9}, {}, "num_layers is 8", "pp = 8"),
    ({"pp": 2, "stages_per_rank": 5}, {}, "(2*5 = 10)", "stages_per_rank = 4"),
    ({"pp": 8, "stages_per_rank": 2}, {}, "(8*2 = 16)", "stages_per_rank = 1"),
    (
        {"dp": 8, "ranks_per_node": 3},
        {},
        "ranks_per_node (3) must divide the number of ranks pp*dp*cp*tp (8)",
        "ranks_per_node = 2 or 4",
    ),
    (
        {"cp": 3, "context": "all_to_all"},
        {},
        "cp*tp (3) must divide num_heads (8)",
        "cp = 2 or 4",
    ),
    (
        {"data": "parameter_server", "dp": 2, "cp": 2, "servers": 5},
        {},
        "servers (5) must be fewer than the data-parallel ranks dp*cp (4)",
        "servers = 3, or data = zero1",
    ),
    ({"data": "parameter_server", "tp": 2}, {}, "dp*cp is 1", "dp = 2, or data = replicate"),
    ({"servers": 0}, {}, "servers must be at least 1", "servers = 1"),
    ({"tp": 0}, {}, "tp must be at least 1, not 0", "tp = 1"),
    ({"ep": -2}, {}, "ep must be at least 1, not -2", "ep = 1"),
    ({"dp": 2**30}, {}, "dp must be at most 1048576", "dp = 1048576"),
    ({"spare_slots": -1}, {}, "spare_slots must be at least 0", "spare_slots = 0"),
    ({"dispatch_chunks": 0}, {}, "dispatch_chunks must be at least 1", "dispatch_chunks = 1"),
    ({"ranks_per_node": 0}, {}, "ranks_per_node must be at least 1", "ranks_per_node = 1"),
]


@pytest.mark.parametrize(("plan", "model", "sentence", "fix"), BROKEN_PLANS)
def test_broken_plan_names_numbers_and_nearest(
    plan: dict, model: dict, sentence: str, fix: str
) -> None:
    found = Plan(**plan).check(ModelConfig(**model))
    assert [problem for problem in found if sentence in problem.message], messages(found)
    assert any(fix in problem.fix for problem in found if sentence in problem.message)


TWO = {"schedule": "pipedream_2bw", "pp": 4, "microbatches": 12}
AMPNET = {"schedule": "ampnet", "pp": 2, "microbatches": 4}
LIVE = AMPNET | {"ampnet_backward": "live"}


@pytest.mark.parametrize(
    ("keys", "key", "words", "fix"),
    [
        ({"reshard": "step", "data": "zero2"}, "reshard", "", "data = zero3"),
        ({"dp": 4, "shard_group": 2}, "shard_group", "", "data = zero1"),
        ({"dp": 6, "data": "zero1", "shard_group": 4}, "shard_group", "", "3"),
        ({"dp": 4, "data": "zero3", "shard_group": 0}, "shard_group", "", "1"),
        (
            TWO | {"update_window": 5},
            "update_window",
            "update_window (5) must divide microbatches (12)",
            "update_window = 4 or 6",
        ),
        (
            TWO | {"update_window": 2},
            "update_window",
            "pipedream_2bw needs update_window (2) >= pp (4)",
            "update_window = 4",
        ),
        (
            {"schedule": "pipedream", "update_window": 2, "microbatches": 2},
            "update_window",
            "a key of schedule pipedream_2bw or ampnet, the schedule is pipedream",
            "leave update_window out",
        ),
        ({"max_in_flight": 2}, "max_in_flight", "the schedule is 1f1b", "schedule = ampnet"),
        ({"replay": "there"}, "replay", "the schedule is 1f1b", "schedule = ampnet"),
        (AMPNET | {"max_in_flight": 0}, "max_in_flight", "at least 1", "max_in_flight = 1"),
        (
            LIVE | {"recompute": "full"},
            "ampnet_backward",
            "recompute = full does not",
            'ampnet_backward = "recompute"',
        ),
    ],
)
def test_one_mistake_is_one_problem(keys: dict[str, Any], key: str, words: str, fix: str) -> None:
    (problem,) = Plan(**keys).check(ModelConfig())
    assert problem.key == f"plan.{key}"
    assert words in problem.message and fix in problem.fix


def test_weights_that_two_stages_share() -> None:
    tied = ModelConfig(tied_embeddings=True)
    (problem,) = Plan(**AMPNET).check(tied)
    assert "tied embeddings put a weight on the first and the last of pp = 2" in problem.message
    assert Plan(**AMPNET | {"pp": 1}).check(tied) == []
    (problem,) = Plan(**LIVE).check(ModelConfig(router_dtype="model"))
    assert "rounded copy" in problem.message


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


def test_empty_microbatches_and_context_ranks_are_refused() -> None:
    found = Plan(microbatches=9, cp=8).check(ModelConfig(), seq_len=4, global_batch=8)
    assert {problem.key for problem in found} == {"plan.microbatches", "plan.cp"}


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
