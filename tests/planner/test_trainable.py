"""`train` accepts what `plan --trainable` prints; a model that it cannot train is refused."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moemesh.config.errors import ConfigError
from moemesh.planner.layout_sources import from_plan
from moemesh.planner.requests import PlanRequest
from moemesh.planner.search.command import NothingFits, plan_named, to_json
from moemesh.sharding.load_run import load_run
from moemesh.train.preparation import untrainable
from tests.waiting import PATIENCE

MODELS = [
    "tiny", "llama3-8b", "mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "qwen3-235b-a22b",
    "deepseek-v2-lite",
]  # fmt: skip
CLUSTERS = ["dgx_h100", "dgx_a100", "laptop_cpu", "gb200_nvl72"]
BATCHES = [(128, 32), (4096, 256), (32768, 1), (8192, 96), (1000, 7)]

CASES = [
    ("qwen3-30b-a3b", "gb200_nvl72", 32768, 1),  # more ranks in a node than key/value heads
    ("qwen3-30b-a3b", "dgx_h100", 4096, 256),
    ("llama3-8b", "dgx_a100", 8192, 96),
    ("tiny", "laptop_cpu", 128, 32),
    ("mixtral-8x7b", "gb200_nvl72", 4096, 256),
]
EVERY = [(m, c, *b) for m in MODELS for c in CLUSTERS for b in BATCHES]


def answers(model: str, cluster: str, seq_len: int, batch: int, **more: Any) -> list[Any]:
    try:
        found = plan_named(PlanRequest(model, cluster, seq_len, batch, trainable=True, **more))
    except (NothingFits, ConfigError):
        return []
    return to_json(found)["plans"]


def check(model: str, cluster: str, seq_len: int, batch: int) -> int:
    found = answers(model, cluster, seq_len, batch, top=40)
    for row in found:
        assert row["not_trained"] == []
        words = shlex.split(row["command"])
        assert words[:2] == ["moemesh", "train"] and words[2::2] == ["--set"] * len(words[2::2])
        resolved = load_run([], words[3::2], {})
        assert untrainable(resolved) == [], row["command"]
        config = resolved.config
        assert (config.data.seq_len, config.data.global_batch) == (seq_len, batch)
        plan = from_plan(config.plan, seq_len=seq_len, global_batch=batch)
        for key, value in row["plan"].items():
            assert getattr(config.plan, key) == (tuple(value) if type(value) is list else value)
        assert plan.microbatches == row["plan"]["microbatches"]
    return len(found)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_train_accepts_every_command_that_is_printed(case: tuple[str, str, int, int]) -> None:
    assert check(*case) > 0


@pytest.mark.slow
def test_train_accepts_every_command_of_every_preset() -> None:
    assert sum(check(*case) for case in EVERY) >= 500


@pytest.mark.parametrize(
    ("model", "more", "words"),
    [
        ("llama3-70b", {}, ("presets", "--trainable")),
        ("qwen3-30b-a3b", {"precision": "float8"}, ("plan.precision", "no key of [plan]")),
    ],
)
def test_what_is_never_trained_is_refused(
    model: str, more: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_named(PlanRequest(model, "dgx_h100", 4096, 64, trainable=True, **more))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_refusal_is_exit_code_2_and_prints_no_command(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100,
        "num_attention_heads": 4, "intermediate_size": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["--model", str(tmp_path), "--cluster", "laptop_cpu", "--seq-len", "64"]
    run = [sys.executable, "-m", "moemesh", "plan", *arguments, "--global-batch", "8"]
    done = subprocess.run([*run, "--trainable"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2 and not done.stdout and "Traceback" not in done.stderr
    assert "folders with config.json and weights" in done.stderr
    planned = subprocess.run([*run, "--json"], capture_output=True, text=True, timeout=PATIENCE)
    assert [row["command"] for row in json.loads(planned.stdout)["plans"]] == [None] * 5


def test_a_model_of_a_toml_file_is_said_key_by_key(tmp_path: Path) -> None:
    """A name like that of a preset must not stand for the preset."""
    (tmp_path / "tiny.toml").write_text('[model]\npreset = "tiny"\nnum_layers = 6\n')
    (row, *_) = answers(str(tmp_path / "tiny.toml"), "laptop_cpu", 128, 32)
    assert "--set model.num_layers=6" in row["command"] and "preset" not in row["command"]
    words = shlex.split(row["command"])[3::2]
    assert load_run([], words, {}).config.model.num_layers == 6
