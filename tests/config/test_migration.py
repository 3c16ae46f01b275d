"""Renamed keys: what a file becomes, what is told, and that comments stay."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from moemesh.config import migration as renames
from moemesh.config.errors import ConfigError
from moemesh.config.migration import migrate
from moemesh.config.schema import all_keys
from moemesh.config.suggest import explain_unknown_key
from moemesh.sharding.load_run import load_run
from tests.test_cli import run

OLD = """# My run.

[train]  # the loop
rate = 1e-3  # peak
batch = [   # moves
    4,
]
steps = 5

[data]
seq_len = 64
# the end
"""
NEW = """# My run.
schema_version = 3

[train]  # the loop
lr = 1e-3  # peak
steps = 5

[data]
seq_len = 64
# the end
global_batch = [   # moves
    4,
]
"""
RENAMES = {
    2: {"train.rate": "train.speed", "train.batch": "data.global_batch"},
    3: {"train.speed": "train.lr"},
}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renames, "RENAMES", RENAMES)
    monkeypatch.setattr("moemesh.config.migration.SCHEMA_VERSION", 3)


@pytest.mark.usefixtures("table")
def test_a_file_is_brought_to_the_keys_of_now() -> None:
    found = migrate(OLD, "old.toml")
    assert found.text == NEW
    assert sorted(found.changes) == [
        "line 4: train.rate is train.lr now",
        "line 5: train.batch is data.global_batch now",
        "schema_version = 3",
    ]
    assert migrate(NEW).changes == ()
    assert "train.lr = 2  # dotted\n" in migrate("train.rate = 2  # dotted\n").text
    made = migrate("[train]\nbatch = 4\n").text
    assert tomllib.loads(made) == {"schema_version": 3, "train": {}, "data": {"global_batch": 4}}


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train = { rate = 1.0 }\n", ["train.rate is train.lr now", "inline table", "x.toml:1"]),
        ("[train]\nrate = 1\nlr = 2\n", ["both are given", "write train.lr by hand"]),
        ("[train\n", ["not valid TOML"]),
        ("schema_version = 4\n", ["keys of version 4"]),
    ],
)
def test_what_cannot_be_rewritten_is_told(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        migrate(text, "x.toml")
    assert all(word in str(caught.value) for word in words)


@pytest.mark.usefixtures("table")
def test_an_old_key_is_answered_with_its_name_now() -> None:
    message, fix = explain_unknown_key("train.rate")
    assert message == "train.rate is train.lr now"
    assert fix == "train.lr; `moemesh config migrate FILE` renames it in a file"


def test_the_table_names_keys_that_exist_and_none_that_does() -> None:
    keys = set(all_keys())
    assert set(renames.renamed().values()) <= keys
    assert not set(renames.renamed()) & keys
    assert max(renames.RENAMES, default=1) <= renames.SCHEMA_VERSION


def test_the_version_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("schema_version = 1\n[train]\nsteps = 5\n")
    assert load_run([path], [], {}).config.train.steps == 5
    for wrong, word in (("2", "version 2"), ('"1"', "whole number"), ("true", "whole number")):
        path.write_text(f"schema_version = {wrong}\n")
        with pytest.raises(ConfigError, match=word):
            load_run([path], [], {})


def test_migrate_and_diff_as_verbs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def config(*words: str) -> tuple[int, str]:
        return run(capsys, monkeypatch, "config", *words)[:2]

    Path("a.toml").write_text("# mine\n[train]\nlr = 0.1  # fast\n")
    wanted = "# mine\nschema_version = 1\n\n[train]\nlr = 0.1  # fast\n"
    assert config("migrate", "a.toml", "--dry-run") == (0, wanted)
    assert "schema_version" not in Path("a.toml").read_text()
    assert config("migrate", "a.toml") == (0, "a.toml: schema_version = 1\n")
    assert Path("a.toml").read_text() == wanted
    assert config("migrate", "a.toml") == (0, "a.toml: nothing to change\n")
    Path("b.toml").write_text("[plan]\ndp = 2\n[train]\nlr = 0.1\n")
    difference = "plan.dp   (layout)\n    a.toml: 1   # default\n    b.toml: 2   # b.toml:2\n"
    assert config("diff", "a.toml", "b.toml") == (0, difference)
    (one,) = json.loads(config("diff", "a.toml", "b.toml", "--json")[1])
    assert (one["key"], one["a"], one["b"], one["kind"]) == ("plan.dp", 1, 2, "layout")
    assert config("diff", "a.toml", "a.toml")[1].endswith("are the same configuration\n")
    assert config("diff", "a.toml", "none.toml")[0] == config("migrate", "none.toml")[0] == 2
