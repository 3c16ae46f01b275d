"""`train` accepts what `plan --trainable` prints; a model that it cannot train is refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from moemesh.config.errors import ConfigError
from moemesh.planner.requests import PlanRequest
from moemesh.planner.search.command import NothingFits, plan_named, to_json
from moemesh.sharding.load_run import load_run
from tests.test_cli import Invoke


def answers(model: str, cluster: str, seq_len: int, batch: int, **more: Any) -> list[Any]:
    try:
        planned = plan_named(PlanRequest(model, cluster, seq_len, batch, trainable=True, **more))
    except (NothingFits, ConfigError):
        return []
    return to_json(planned)["plans"]


@pytest.mark.parametrize(
    ("model", "more", "words"),
    [
        ("llama3-70b", {}, ("presets", "--trainable")),
        ("qwen3-30b-a3b", {"precision": "float8"}, ("plan.precision", "[plan] has no key")),
    ],
)
def test_what_is_never_trained_is_refused(
    model: str, more: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_named(PlanRequest(model, "dgx_h100", 4096, 64, trainable=True, **more))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_refusal_is_exit_code_2_and_prints_no_command(tmp_path: Path, invoke: Invoke) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100,
        "num_attention_heads": 4, "intermediate_size": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = f"plan --model {tmp_path} --cluster laptop_cpu --seq-len 64 --global-batch 8"
    code, out, err = invoke(*words.split(), "--trainable")
    assert (code, out) == (2, "") and "folders with config.json and weights" in err
    _, out, _ = invoke(*words.split(), "--json")
    assert {row["command"] for row in json.loads(out)["plans"]} == {None}


def test_a_model_of_a_toml_file_is_said_key_by_key(tmp_path: Path) -> None:
    """A file named like a preset is not replaced by the preset."""
    (tmp_path / "tiny.toml").write_text('[model]\npreset = "tiny"\nnum_layers = 6\n')
    (row, *_) = answers(str(tmp_path / "tiny.toml"), "laptop_cpu", 128, 32)
    assert "--set model.num_layers=6" in row["command"] and "preset" not in row["command"]
    words = shlex.split(row["command"])[3::2]
    assert load_run([], words, {}).config.model.num_layers == 6


def test_positions_of_sizes_without_weights(tmp_path: Path, invoke: Invoke) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = {"model_type": "llama", "intermediate_size": 64, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    for seq_len, is_too_long in (("128", False), ("256", True)):
        words = f"plan --model {tmp_path}/config.json --cluster one_h100 --seq-len {seq_len}"
        _, out, _ = invoke(*words.split(), "--global-batch", "8")
        text = " ".join(out.split())
        assert "has no weights beside it" in text
        assert ("max_position_embeddings (128)" in text) == is_too_long
