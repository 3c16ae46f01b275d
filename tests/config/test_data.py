"""Sources in a configuration: tables, on the command line, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from moemesh.config.data import DataSource
from moemesh.config.errors import ConfigError
from moemesh.config.load import resolved_toml
from moemesh.config.run import RunConfig
from moemesh.config.train import TrainConfig
from moemesh.sharding.load_run import load_run
from moemesh.train.from_python import overrides_of

TEXT = """
[[data.sources]]
path = "a"
weight = 2
[[data.sources]]
path = "b"
format = "jsonl"
text_key = "content"
"""


def test_sources_are_tables(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(TEXT)
    resolved = load_run([file], [], {})
    sources = resolved.config.data.sources
    assert sources == (
        DataSource(path="a", weight=2.0),
        DataSource(path="b", format="jsonl", text_key="content"),
    )
    assert resolved.origins["data.sources"] == f"{file}:2"
    file.write_text(resolved_toml(resolved.config))
    assert load_run([file], [], {}).config == resolved.config
    assert load_run([], overrides_of(resolved.config), {}).config.data.sources == sources


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("abc", 'sources must be a list of tables, not "abc"'),
        ('["a"]', r"sources\[0\] must be a table"),
        ('[{path="a", weigth=2}]', r"sources\[0\] has no key `weigth`"),
        ('[{path="a"}, {path="b", weight="x"}]', r'sources\[1\]: weight must be a number, not "x"'),
        ('[{path="a", format="josnl"}]', 'format cannot be "josnl"'),
        ('[{path="a", weight=0}]', r"sources\[0\]: weight must be above 0"),
        ('[{path="a", weight=inf}]', r"sources\[0\]: weight must be a finite number"),
        ('[{path=""}]', r"sources\[0\]: path is empty"),
    ],
)
def test_wrong_sources_are_named(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run([], [f"data.sources={value}"], {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (['data.sources=[{path="a"}]', "data.path=b"], "data.path is for a run of one source"),
        (["data.format=bytes", "data.tokenizer=somewhere"], '"bytes" reads files of any content'),
        (["train.epochs=2", "train.steps=200"], "both say when the run ends"),
        (["train.epochs=0"], "epochs must be above 0"),
    ],
)
def test_contradictions(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run([], given, {})


@pytest.mark.parametrize(("weak", "strong"), [("steps", "epochs"), ("epochs", "steps")])
def test_the_stronger_source_says_when_a_run_ends(tmp_path: Path, weak: str, strong: str) -> None:
    file = tmp_path / "a.toml"
    file.write_text(f"[train]\n{weak} = 5\n")
    resolved = load_run([file], [f"train.{strong}=7"], {})
    assert resolved.config.train.epochs == (7 if strong == "epochs" else None)
    assert resolved.config.train.steps == (7 if strong == "steps" else 200)
    assert resolved.origins[f"train.{weak}"] == "default"


def test_epochs_stand_in_place_of_steps() -> None:
    config = RunConfig(train=TrainConfig(epochs=1.5))
    assert "steps =" not in resolved_toml(config).partition("[train]")[2].partition("seed")[0]
    assert load_run([], overrides_of(config), {}).config.train.epochs == 1.5
