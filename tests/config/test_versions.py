"""The version of a file's keys: read, and refused where it is later; and `config diff`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moemesh.config.errors import ConfigError
from moemesh.sharding.load_run import load_run
from tests.test_cli import Invoke


def test_the_version_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("schema_version = 1\n[train]\nsteps = 5\n")
    assert load_run([path], [], {}).config.train.steps == 5
    for wrong, word in (("2", "version 2"), ('"1"', "whole number"), ("true", "whole number")):
        path.write_text(f"schema_version = {wrong}\n")
        with pytest.raises(ConfigError, match=word):
            load_run([path], [], {})


def test_diff_as_a_verb(tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def config(*words: str) -> tuple[int, str]:
        return invoke("config", *words)[:2]

    Path("a.toml").write_text("schema_version = 1\n\n[train]\nlr = 0.1  # fast\n")
    Path("b.toml").write_text("[plan]\ndp = 2\n[train]\nlr = 0.1\n")
    difference = "plan.dp   (layout)\n    a.toml: 1   # default\n    b.toml: 2   # b.toml:2\n"
    assert config("diff", "a.toml", "b.toml") == (0, difference)
    (one,) = json.loads(config("diff", "a.toml", "b.toml", "--json")[1])
    assert (one["key"], one["a"], one["b"], one["kind"]) == ("plan.dp", 1, 2, "layout")
    assert config("diff", "a.toml", "a.toml")[1].endswith("are the same configuration\n")
    assert config("diff", "a.toml", "none.toml")[0] == 2
