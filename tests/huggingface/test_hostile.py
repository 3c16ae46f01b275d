"""A ``config.json`` and a cache of the hub that are not as they should be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moemesh.checkpoint.files import CheckpointError
from moemesh.config.errors import ConfigError
from moemesh.sharding.load_run import load_run
from moemesh.train.weights.conversion import open_weights
from tests.huggingface.ours import as_cache, load, logits, there_and_back
from tests.huggingface.tiny import save

pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = save("qwen3_moe", tmp_path / "hub" / "model")
    (path / "tokenizer_config.json").write_text("{}")
    return path


def opened(folder: Path) -> Any:
    return open_weights(load_run([], [f"model.path={folder}"]).config)


def with_config(change: Callable[[dict[str, Any]], None]) -> Callable[[str], str]:
    def changed(text: str) -> str:
        values = json.loads(text)
        change(values)
        return json.dumps(values)

    return changed


@pytest.mark.usefixtures("architectures")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "[1]", "is not a JSON object"),
        (lambda text: "[" * 100_000, "is not valid JSON"),
        (lambda text: text[:-20], "is not valid JSON"),
        (lambda text: '{"hidden_size": 1,' + text.lstrip()[1:], "hidden_size is repeated"),
        (with_config(lambda v: v.update(model_type="qwen3_mo")), "did you mean qwen3_moe"),
        (with_config(lambda v: v.update(model_type="cohere2")), "mend sliding_window in"),
        (with_config(lambda v: v.update(vocab_size="288")), "vocab_size must be a whole number"),
        (with_config(lambda v: v.update(rope_parameters=[])), "must be an object"),
        (with_config(lambda v: v["rope_parameters"].update(rope_theta="x")), "must be a number"),
        (with_config(lambda v: v.update(rms_norm_eps=[])), "norm_eps must be a number"),
        (with_config(lambda v: v.update(partial_rotary_factor="x")), "must be a number"),
        (
            with_config(lambda v: v["rope_parameters"].update(partial_rotary_factor=[])),
            "partial_rotary_factor must be a number",
        ),
        (with_config(lambda v: v.update(num_hidden_layers=10**9)), "exceeds 65536"),
        (with_config(lambda v: v.update(num_experts_per_tok=99)), "exceeds num_experts"),
        (with_config(lambda v: v.update(rms_norm_eps="tiny")), "norm_eps"),
    ],
)
def test_a_config_that_is_wrong(folder: Path, change: Callable[[str], str], message: str) -> None:
    config = folder / "config.json"
    config.write_text(change(config.read_text()))
    with pytest.raises(ConfigError) as caught:
        opened(folder)
    assert message in str(caught.value)


def test_a_config_of_another_model(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 64}))
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight has shape \[288, 48\]"):
        opened(folder)


def test_the_cache_of_the_hub(folder: Path, tmp_path: Path) -> None:
    ids = torch.arange(40)[None]
    expected, _ = logits(load(folder), ids)
    (link := tmp_path / "link").symlink_to(as_cache(folder))
    found, _ = logits(load(link), ids)
    assert torch.equal(found, expected)
    carried = there_and_back(link, tmp_path) / "tokenizer_config.json"
    assert carried.read_text() == "{}" and not carried.is_symlink()


@pytest.mark.parametrize("target", ["elsewhere/file", "models--a--b/refs/file"])
def test_links_that_lead_out_of_the_cache(folder: Path, target: str) -> None:
    snapshot = as_cache(folder)
    there = folder.parent / target
    there.parent.mkdir(parents=True)
    file = snapshot / "model.safetensors"
    file.resolve().rename(there)
    file.unlink()
    file.symlink_to(there)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        opened(snapshot)
