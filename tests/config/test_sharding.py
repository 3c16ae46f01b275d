"""The rules of sharded states name the numbers and the nearest legal choice."""

from __future__ import annotations

from typing import Any

import pytest

from moemesh.config.layout import SHARDED_AXES, Layout
from moemesh.config.plan import Plan


@pytest.mark.parametrize(
    ("keys", "key", "fix"),
    [
        ({"reshard": "step", "data": "zero2"}, "plan.reshard", "data = zero3"),
        ({"dp": 4, "shard_group": 2}, "plan.shard_group", "data = zero1"),
        ({"dp": 6, "data": "zero1", "shard_group": 4}, "plan.shard_group", "3"),
        ({"dp": 4, "data": "zero3", "shard_group": 0}, "plan.shard_group", "1"),
    ],
)
def test_a_mistake_is_told(keys: dict[str, Any], key: str, fix: str) -> None:
    (problem,) = Plan(**keys).check()
    assert problem.key == key and problem.fix is not None and fix in problem.fix


def test_legal_groups() -> None:
    for group in (None, 1, 2, 4):
        assert Plan(dp=2, cp=2, data="zero3", shard_group=group).check() == []
    assert Plan(data="zero3", reshard="step").check() == []


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
