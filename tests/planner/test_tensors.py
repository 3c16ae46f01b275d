"""Where the parameters of our own model live: the schedule that a plan names, slices and all."""

from __future__ import annotations

from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.planner.traffic.tensors import StagePlacement


def test_the_schedule_has_the_slices_of_the_plan() -> None:
    """Not TeraPipe's own default, one slice a rank."""
    for slices in (3, 5):
        plan = Plan(pp=2, schedule="terapipe", slices=slices, microbatches=2)
        assert StagePlacement(ModelConfig(), plan).schedule.num_slices == slices
    assert StagePlacement(ModelConfig(), Plan(pp=2, schedule="terapipe")).schedule.num_slices == 2
