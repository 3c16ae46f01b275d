"""Strict JSON as output of --json: no NaN, no Infinity, for any computed value."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moemesh.cli import application
from moemesh.trace.strict_json import strict_json
from tests.train.runs import arguments, moemesh, text_file


def test_numbers_that_are_not_finite_are_null() -> None:
    value: dict[str, Any] = {"a": [math.nan, (1.5, -math.inf)], "b": {"c": math.inf, "d": "NaN"}}
    assert json.loads(strict_json(value)) == {
        "a": [None, [1.5, None]],
        "b": {"c": None, "d": "NaN"},
    }
    assert strict_json([1, True, None]) == "[1, true, null]"


@pytest.mark.parametrize("file", sorted(Path(application.__file__).parent.glob("*.py")), ids=str)
def test_verbs_print_by_it_alone(file: Path) -> None:
    assert not re.search(r"json\.dumps?\(", file.read_text())


@pytest.mark.representative("two ranks")
@pytest.mark.parametrize("plan", [(), ("--set", "plan.dp=2")], ids=["one rank", "two ranks"])
def test_a_loss_that_is_not_finite_is_an_error(tmp_path: Path, plan: tuple[str, ...]) -> None:
    done = moemesh(*arguments(tmp_path / "run", train__steps=1))
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "hf"
    assert moemesh("convert", str(tmp_path / "run"), str(folder)).returncode == 0
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], math.nan)
    save_file(weights, file, metadata={"format": "pt"})
    given = ["--data", str(text_file(tmp_path)), "--seq-len", "16", "--json", *plan]
    done = moemesh("evaluate", str(folder), *given)
    assert done.returncode != 0 and "NaN" not in done.stdout
    assert "its weights are not all finite numbers" in done.stderr
