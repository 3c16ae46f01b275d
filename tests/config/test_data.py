"""Sources in a configuration: tables, on the command line, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moemesh.config.data import DataSource
from moemesh.config.errors import ConfigError
from moemesh.config.load import resolved_toml
from moemesh.config.run import RunConfig
from moemesh.config.train import TrainConfig
from moemesh.sharding.load_run import load_run
from moemesh.train.from_python import needed, overrides_of

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


@pytest.mark.parametrize(("weight", "message"), [('"x"', 'a number, not "x"'), ("inf", "a finite")])
def test_a_wrong_number_of_a_source_is_named(weight: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"sources\[1\]: weight must be {message}"):
        load_run([], [f'data.sources=[{{path="a"}}, {{path="b", weight={weight}}}]'], {})


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


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["plan.tp=2", "train.steps=3"],
        ["plan.dp=2", "train.epochs=1.5", "train.lr=0.003", "train.warmup_steps=20"],
    ],
)
def test_what_differs_from_the_defaults_is_enough(given: list[str]) -> None:
    config = load_run([], given, {}).config
    changes = needed(overrides_of(config))
    assert set(changes) == {'model.preset="tiny"', *given}
    assert load_run([], changes).config == config


def test_all_settings_are_given_if_the_model_is_refused_with_the_defaults(tmp_path: Path) -> None:
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 9}
    shape |= {"num_key_value_heads": 1, "max_position_embeddings": 128}
    config = {"model_type": "mixtral", "intermediate_size": 8, "num_local_experts": 2, **shape}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = [f"model.path={tmp_path}", "data.tokenizer=words"]
    overrides = overrides_of(load_run([], given, {}).config)
    with pytest.raises(ConfigError, match="below the 256 ids"):
        load_run([], given[:1], {})
    assert needed(overrides) == overrides
