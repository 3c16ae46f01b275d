"""`benchmarks.step` measures the same work twice: both trainers have the same losses."""

from __future__ import annotations

import pytest

from benchmarks import step
from benchmarks.settings import StepSettings
from benchmarks.text import step_text
from moemesh.config.errors import UserError
from tests.ranks import mesh_on_ranks

SIZES = {"layers": 2, "hidden": 64, "width": 32, "experts": 4, "top_k": 2, "vocabulary": 256}


def test_both_do_the_same_work() -> None:
    pytest.importorskip("transformers")
    settings = StepSettings(plan="dp=2,ep=2", rounds=1, sequences=4, seq_len=16, **SIZES)
    found, other = mesh_on_ranks(settings.layout.layout, step.measure, settings)
    assert found == other
    full, half = found["results"]
    assert (full["dtype"], half["dtype"]) == ("float32", "bfloat16")
    assert full["loss_difference"] < 1e-4 and half["loss_difference"] < 0.05
    alone = StepSettings(contender="moemesh", dtype="float32", rounds=1, seq_len=16, **SIZES)
    ((memory,),) = (
        one["results"] for one in mesh_on_ranks(alone.layout.layout, step.measure, alone)
    )
    assert memory["peak_bytes"]["moemesh"] > 0
    for result in found["results"]:
        result["peak_bytes"] = dict.fromkeys(("moemesh", "transformers"), 2**30)
    lines = step_text(found).splitlines()
    assert len(lines) == 4 and "plan dp=2,ep=2" in lines[0] and "1.0 GiB" in lines[2]


@pytest.mark.parametrize("work", ["evaluate", "generate"])
def test_inference_gives_both_the_same(work: str) -> None:
    pytest.importorskip("transformers")
    settings = StepSettings(work=work, dtype="float32", rounds=1, seq_len=192, **SIZES)  # type: ignore[arg-type]
    ((result,),) = (
        one["results"] for one in mesh_on_ranks(settings.layout.layout, step.measure, settings)
    )
    assert result["loss_difference"] < 1e-5


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"plan": "dp=2", "work": "generate"}, "one rank"),
        ({"hidden": 96}, "hidden"),
        ({"plan": "dp=4", "sequences": 6}, "sequences"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        StepSettings(**wrong)  # type: ignore[arg-type]
