"""The answer of the planner to a model that does not fit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from moemesh.planner.requests import PlanRequest
from moemesh.planner.search.command import NothingFits, plan_named


def test_each_remedy_fits_in_the_seconds_that_it_names() -> None:
    request = PlanRequest("mixtral-8x7b", "dgx_a100", 4096, 16, nodes=1, top=1)
    with pytest.raises(NothingFits) as caught:
        plan_named(request)
    lines = re.findall(r"^  --(\S+) (\S+).*: (\S+) s a step$", str(caught.value), re.MULTILINE)
    assert [option for option, _, _ in lines] == ["nodes", "set", "set", "cluster"]
    changes: list[dict[str, Any]] = [
        {"nodes": int(lines[0][1])}, {"settings": (lines[1][1],)}, {"settings": (lines[2][1],)},
        {"cluster": lines[3][1]},
    ]  # fmt: skip
    for (_, _, seconds), change in zip(lines, changes, strict=True):
        answer = plan_named(replace(request, **change))
        fastest = min(candidate.seconds for candidate in answer.candidates)
        assert fastest == pytest.approx(float(seconds), rel=5e-3)
    # Half as many nodes do not fit: the number is the smallest of its kind.
    assert int(lines[0][1]) == 2
