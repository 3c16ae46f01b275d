"""Host work beside transformers': `python -m benchmarks.device --calls`."""

import functools
import json
from typing import Any

import pytest

from benchmarks import calls
from benchmarks.settings import DeviceSettings
from benchmarks.shapes import SHAPES
from benchmarks.text import calls_text

OURS, THEIRS = "moemesh", "transformers, grouped_mm"
#: Most calls of Python functions, as a multiple of transformers': a Function of Python has its
#: backward in Python, too, and costs thirteen calls (docs/results/device.md).
MOST_CALLS = {"layer": 1.95, "step": 1.0}

report = functools.cache(lambda: calls.run(DeviceSettings(shape="tiny")))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["layer", "step"])
@pytest.mark.parametrize("name", [OURS, f"{OURS}, nothing compiled"])
def test_a_host_launches_no_more_operations_than_transformers(part: str, name: str) -> None:
    rows: dict[str, Any] = {row["name"]: row for row in report()[part]}
    ours, theirs = rows[name], rows[THEIRS]
    assert 0 < sum(ours["operations"]) <= sum(theirs["operations"]), rows
    assert sum(ours["waits"]) <= (0 if part == "layer" else sum(theirs["waits"])), rows
    assert sum(ours["calls"]) <= MOST_CALLS[part] * sum(theirs["calls"]), rows


@pytest.mark.slow
def test_the_report_is_json_and_a_table() -> None:
    assert json.loads(json.dumps(report())) == report()
    lines = calls_text(report()).splitlines()
    assert sum(line.startswith(OURS) for line in lines) == 4


def test_a_large_shape_is_counted_scaled_down() -> None:
    shape = SHAPES["Q"]
    assert shape.flops == pytest.approx(7.42e12, rel=1e-3)
    counted = shape.counted
    assert (counted.num_experts, counted.top_k) == (shape.num_experts, shape.top_k)
    assert counted.flops < 1e12 and SHAPES["B"].counted == SHAPES["B"]
