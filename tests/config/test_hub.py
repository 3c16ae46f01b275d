"""Names of the hub, with a fake of its cache: the snapshot, its revision, and refusals."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moemesh.config.errors import ConfigError
from moemesh.config.hub import is_hub_name, local_folder, short_name
from moemesh.config.load import resolved_toml, with_recorded
from moemesh.config.sources import preset_names
from moemesh.planner.shapes import load_shape
from moemesh.planner.shapes.load_shape import load_model
from moemesh.sharding.load_run import load_run
from moemesh.train.weights.weight_sources import local_source
from tests.test_cli import Invoke

constants = pytest.importorskip("huggingface_hub.constants")

LLAMA = {
    "model_type": "llama", "vocab_size": 288, "hidden_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 56, "max_position_embeddings": 64,
}  # fmt: skip
OLD, NEW = "a" * 40, "b" * 40


def add_revision(cache: Path, repository: str, commit: str, files: dict[str, str]) -> Path:
    """One more revision of a repository, the newest of ``main``, as huggingface_hub keeps it."""
    home = cache / repository
    for folder in ("refs", "blobs", f"snapshots/{commit}"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    (home / "refs" / "main").write_text(commit)
    for name, text in files.items():
        blob = home / "blobs" / f"{commit[:1]}{abs(hash(text))}"
        blob.write_text(text)
        (home / "snapshots" / commit / name).symlink_to(f"../../blobs/{blob.name}")
    return home / "snapshots" / commit


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, without a network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def test_a_name_is_its_newest_snapshot_and_a_run_keeps_its_own(cache: Path, tmp_path: Path) -> None:
    home = "models--tiny--llama"
    old = add_revision(cache, home, OLD, {"config.json": json.dumps(LLAMA)})
    first = load_run([], ["model.path=tiny/llama"])
    assert first.config.model_path == str(old)
    assert any(f"tiny/llama is the snapshot {old}" in note for note in first.notes)
    (tmp_path / "config.toml").write_text(resolved_toml(first.config))
    assert OLD in (tmp_path / "config.toml").read_text()
    new = add_revision(cache, home, NEW, {"config.json": json.dumps(LLAMA) + "\n"})
    second = load_run([], ["model.path=tiny/llama"]).config
    assert second.model_path == str(new)
    assert with_recorded(second, tmp_path).model_path == str(old)
    assert load_run([], [f"model.path=tiny/llama@{OLD}"]).config.model_path == str(old)
    # The recorded snapshot does not replace a path of another repository or of a folder.
    other = replace(second, model_path=str(tmp_path))
    assert with_recorded(other, tmp_path).model_path == str(tmp_path)
    assert short_name(str(new)) == "llama"
    assert [short_name(f"models/{name}") for name in ("own", "my--model")] == ["own", "my--model"]


def test_a_data_set(cache: Path) -> None:
    snapshot = add_revision(cache, "datasets--tatsu-lab--alpaca", OLD, {"a.jsonl": "{}"})
    assert local_folder("tatsu-lab/alpaca", "dataset", "data.path") == snapshot


def test_a_local_folder_counts_before_a_name(cache: Path, tmp_path: Path) -> None:
    Path("tiny/llama").mkdir(parents=True)
    assert not is_hub_name("tiny/llama")
    assert local_folder("tiny/llama", "model", "model.path") == Path("tiny/llama")
    for path in (str(tmp_path / "none"), "none", "a/b/c", "../a/b", "~/models", "a/*.txt"):
        assert not is_hub_name(path)


def test_what_is_not_in_the_cache_is_refused_with_the_command(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"
    with pytest.raises(ConfigError, match="the hub cannot be reached") as caught:
        load_run([], ["model.path=Qwen/Qwen3-0.6B"])
    assert command in str(caught.value)
    with pytest.raises(ConfigError, match=r"--repo-type dataset --revision v2"):
        local_folder("tatsu-lab/alpaca@v2", "dataset", "data.path")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="huggingface_hub, which is not installed") as caught:
        load_run([], ["model.path=Qwen/Qwen3-0.6B"])
    assert command in str(caught.value)


def test_a_plan_takes_a_preset_or_fetches_a_config_alone(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_model("Qwen/Qwen3-235B-A22B") == load_model("qwen3-235b-a22b")
    shapes = {*preset_names(load_shape.SHAPES)}
    assert {*load_shape._RELEASES} - shapes == {*preset_names()} - {"tiny"}
    fetched: list[list[str]] = []
    snapshot = add_revision(cache, "models--tiny--llama", OLD, {"config.json": json.dumps(LLAMA)})

    def download(repository: str, *, allow_patterns: list[str], **options: Any) -> str:
        fetched.append(allow_patterns)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model = load_model("tiny/llama")
    assert (model.shape.hidden_size, model.shape.name) == (48, "llama")
    assert fetched == [["config.json"]]


def test_a_name_is_a_source_of_weights(cache: Path, invoke: Invoke) -> None:
    """Weights for every verb that reads them; a wrong name of a run starts no search on the hub."""
    snapshot = add_revision(cache, "models--tiny--llama", OLD, {"config.json": json.dumps(LLAMA)})
    assert local_source(Path("tiny/llama")) == snapshot
    Path("runs").mkdir()
    assert local_source(Path("runs/frist")) == Path("runs/frist")
    words = {
        "evaluate": ["--data", "a.txt"], "generate": ["--prompt", "a"], "convert": ["out"],
        "esft": ["a.txt", "--out", "b.json"],
    }  # fmt: skip
    for verb, more in words.items():
        verb = ["esft", "scores"] if verb == "esft" else [verb]
        code, _, err = invoke(*verb, "tiny/llama", *more)
        assert code == 2 and (OLD in err or "--seq-len" in err)
        code, _, err = invoke(*verb, "tiny/none", *more)
        assert code == 2 and "`hf download tiny/none --local-dir none` where" in err


def test_adapters_are_found_by_their_name(cache: Path) -> None:
    base = add_revision(cache, "models--tiny--llama", OLD, {"config.json": json.dumps(LLAMA)})
    adapters = {"r": 4, "lora_alpha": 8, "base_model_name_or_path": "tiny/llama"}
    files = {"adapter_config.json": json.dumps(adapters)}
    folder = add_revision(cache, "models--tiny--adapters", NEW, files)
    config = load_run([], ["lora.path=tiny/adapters"]).config
    assert (config.lora.path, config.lora.rank, config.model_path) == (str(folder), 4, str(base))
    with pytest.raises(ConfigError, match="hf download tiny/none"):
        load_run([], ["lora.path=tiny/none"])
