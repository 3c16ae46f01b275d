"""Layouts give the numbers of a plain loop over transformers, to 1e-9 in float64."""

from __future__ import annotations

from typing import Any

import pytest

from tests.hub.families import family_names
from tests.hub.training import architecture_of, difference, plain, split

#: dp, ep, ep beside replicas of experts, and weights that are gathered, each layer computed twice.
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"dp": 2, "ep": 2},
    "ep4": {"dp": 4, "ep": 4},
    "zero3": {"dp": 2, "ep": 2, "data": "zero3", "recompute": "full", "microbatches": 2},
}
#: Plain experts; a gate of its own, biases and windows; linear attention, and idle parameters.
FEW = ("qwen3_moe", "gpt_oss", "qwen3_next", "afmoe")


@pytest.mark.parametrize("layout", ["ep2", "zero3"])
@pytest.mark.parametrize("name", FEW)
def test_a_layout_trains_as_transformers(name: str, layout: str) -> None:
    assert difference(split(name, **LAYOUTS[layout]), plain(name)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", family_names())
def test_every_family_trains_as_transformers(name: str, layout: str) -> None:
    architecture = architecture_of(name)
    if architecture.num_experts % LAYOUTS[layout]["ep"]:
        pytest.skip(f"{architecture.num_experts} experts")
    assert difference(split(name, **LAYOUTS[layout]), plain(name)) < 1e-9
