"""Tables of experts: the choice, other files, and tables of other models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moemesh.config.errors import ConfigError
from moemesh.config.esft_table import TableError, most_relevant, read_table, relevance
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.tuning import Tuning
from moemesh.sharding.load_run import load_run
from moemesh.sharding.parameters import logical_names, num_trained

SHARES = [0.1, 0.4, 0.1, 0.4]


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (0.3, (1,)),
        (0.4, (1,)),
        (0.41, (1, 3)),
        (0.8, (1, 3)),
        (0.85, (0, 1, 3)),
        (1.0, (0, 1, 2, 3)),
    ],
)
def test_the_smallest_set_that_reaches_the_threshold(
    threshold: float, expected: tuple[int, ...]
) -> None:
    assert most_relevant(SHARES, threshold=threshold) == expected


def test_a_number_of_experts_and_shares() -> None:
    assert most_relevant(SHARES, count=3) == (0, 1, 3)
    assert relevance([1.0, 3.0]) == [0.25, 0.75]
    assert relevance([0.0, 0.0]) == [0.5, 0.5], "a layer that no token has reached"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ('{"experts": {"1": [0], "1": [1]}}', "the key 1 is repeated"),
        ("[]", "no object"),
        ('{"experts": {}}', "no object"),
        ('{"experts": {"one": [1]}}', "not the number of a layer"),
        ('{"experts": {"1": [1, 1]}}', "different numbers"),
        ('{"experts": {"1": [true]}}', "different numbers"),
        ('{"experts": {"1": [1]}, "shared_experts": true}', "train_only"),
    ],
)
def test_files_that_are_no_tables(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(TableError, match=message):
        read_table(path)


def table(path: Path, experts: dict[int, list[int]]) -> str:
    path.write_text(json.dumps({"experts": experts}))
    return f"train.esft={path}"


GOOD: dict[int, list[int]] = {layer: [layer % 8] for layer in range(1, 8)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({9: [1]}, "names layer 9; the model's layers with experts are 1 to 7"),
        ({3: []}, "names no expert of layer 3"),
        ({3: [8]}, "names expert 8 of layer 3; the model has 8"),
        ({3: [-1]}, "names expert -1"),
        ({3: None}, "has no layer 3"),
    ],
)
def test_tables_of_other_models(tmp_path: Path, change: dict[int, Any], message: str) -> None:
    experts = {layer: chosen for layer, chosen in (GOOD | change).items() if chosen is not None}
    with pytest.raises(ConfigError, match=message):
        load_run([], [table(tmp_path / "table.json", experts)], {})


def test_only_the_experts_of_the_table_train_and_what_patterns_add(tmp_path: Path) -> None:
    given = table(tmp_path / "table.json", GOOD)
    model, plan = ModelConfig(), Plan()
    tuning = load_run([], [given], {}).config.tuning
    trained = {name for name in logical_names(model, plan) if tuning.trains(name)}
    assert trained == {
        f"layers.{layer}.feed_forward.experts.{layer % 8}.{leaf}"
        for layer in range(1, 8)
        for leaf in ("gate_up", "down")
    }
    more = [given, 'train.train_only="*.shared.*"', 'train.freeze="layers.1.*"']
    both = load_run([], more, {}).config.tuning
    assert both.trains("layers.2.feed_forward.shared.down")
    assert both.trains("layers.2.feed_forward.experts.2.down")
    assert not both.trains("layers.1.feed_forward.experts.1.down")
    assert not both.trains("layers.2.feed_forward.router.weight")
    assert num_trained(tuning, model, plan) == sum(
        num_trained(Tuning(train_only=(f"layers.{layer}.*.experts.{layer % 8}.*",)), model, plan)
        for layer in range(1, 8)
    )
