"""The answer of the planner to a model that does not fit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from moemesh.planner.requests import PlanRequest
from moemesh.planner.search.command import NothingFits, plan_named


@pytest.mark.slow
def test_each_remedy_fits_in_the_seconds_that_it_names() -> None:
    request = PlanRequest("mixtral-8x7b", "dgx_a100", 4096, 16, nodes=1, top=1)
    with pytest.raises(NothingFits) as caught:
        plan_named(request)
    lines = re.findall(r"^  (--.*): (\S+) s a step$", str(caught.value), re.MULTILINE)
    changes: list[dict[str, Any]] = []
    for options, _ in lines:
        pairs = re.findall(r"--(\S+) (\S+)", options)
        values = {"settings": tuple(value for name, value in pairs if name == "set")}
        changes.append(values if values["settings"] else {pairs[0][0]: pairs[0][1]})
    assert [*map(str, changes[1:4])] == [
        "{'settings': ('lora.rank=16',)}",
        "{'settings': ('lora.rank=16', 'lora.base=nf4')}",
        "{'settings': ('plan.offload=optimizer',)}",
    ]
    # Half as many nodes do not fit: the number is the smallest of its kind.
    assert changes[0] == {"nodes": "2"} and changes[4].keys() == {"cluster"} and len(changes) == 5
    changes[0]["nodes"] = 2
    for (_, seconds), change in zip(lines, changes, strict=True):
        answer = plan_named(replace(request, **change))
        fastest = min(candidate.seconds for candidate in answer.candidates)
        assert fastest == pytest.approx(float(seconds), rel=5e-3)


@pytest.mark.parametrize(
    ("seq_len", "options"),
    [
        pytest.param(
            4096,
            "--set lora.base=nf4 --set lora.targets=q_proj,k_proj,v_proj,o_proj",
            marks=pytest.mark.slow,
        ),
        (
            16384,
            "--seq-len 8192 --set lora.base=nf4 --set lora.targets=q_proj,k_proj,v_proj,o_proj",
        ),
    ],
)
def test_one_small_gpu_gets_fewer_adapters_and_a_shorter_sequence(
    seq_len: int, options: str
) -> None:
    """The wider adapters, and the given length, do not fit 24 GB: they are not among the fixes."""
    request = PlanRequest(
        "qwen3-30b-a3b", "1xRTX4090", seq_len, 16, settings=("lora.rank=16",), top=1
    )
    with pytest.raises(NothingFits) as caught:
        plan_named(request)
    lines = re.findall(
        r"^  (--se.*) \(adapters of attention alone\): (\S+) s", str(caught.value), 8
    )
    ((found, seconds),) = lines
    assert found == options
    pairs = re.findall(r"--(\S+) (\S+)", found)
    given = tuple(value for name, value in pairs if name == "set")
    length = int(dict(pairs).get("seq-len", seq_len))
    answer = plan_named(replace(request, seq_len=length, settings=(*request.settings, *given)))
    fastest = min(candidate.seconds for candidate in answer.candidates)
    assert fastest == pytest.approx(float(seconds), rel=5e-3)
