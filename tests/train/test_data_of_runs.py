"""Runs and their data: sources, epochs, the token cache, and data that change under a run."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests import commands
from tests.waiting import PATIENCE

CONFIG = """
[model]
num_layers = 2
hidden_size = 32
[data]
seq_len = 32
global_batch = 4
validation = "v.jsonl"
tokenizer = "tok"
[[data.sources]]
path = "a.jsonl"
weight = 3
[[data.sources]]
path = "b"
[train]
epochs = 0.02
warmup_steps = 2
checkpoint_every = 3
validation_batches = 1
dtype = "float64"
optimizer = "sgd"
"""


def moemesh(folder: Path, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [commands.python(), "-m", "moemesh", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=folder,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def write_lines(path: Path, seed: int, count: int) -> None:
    words = np.random.default_rng(seed).integers(0, 40, (count, 12))
    text = [" ".join(f"w{word}" for word in row) for row in words]
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in text))


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    letters = {chr(code): code - 32 for code in range(32, 127)} | {"\n": 95}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    (tmp_path / "tok").mkdir()
    made.save(str(tmp_path / "tok" / "tokenizer.json"))
    (tmp_path / "b").mkdir()
    # Above the size that every rank would tokenize for itself.
    write_lines(tmp_path / "a.jsonl", 1, 20_000)
    write_lines(tmp_path / "b" / "one.jsonl", 2, 50)
    write_lines(tmp_path / "b" / "two.jsonl", 3, 50)
    write_lines(tmp_path / "v.jsonl", 4, 50)
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def test_ranks_share_the_cache_and_no_layout_changes_the_losses(folder: Path) -> None:
    few = ["--set", "train.epochs=0.001"]
    printed = moemesh(folder, "train", "run.toml", *few, "--out", "one")
    steps = len(losses(folder / "one"))
    assert f"steps    {steps}: 0.001 epoch(s)" in printed and "2 sources" in printed
    assert "75.00%  a.jsonl" in printed and "validation v.jsonl" in printed
    assert "file(s)," in printed and len(list((folder / "token_cache").glob("*.bin"))) == 1
    plan = ["--set", "plan.dp=2", "--set", "plan.ep=2"]
    again = moemesh(folder, "train", "run.toml", *few, *plan, "--out", "two")
    assert "file(s)," not in again  # nothing is tokenized a second time
    np.testing.assert_allclose(losses(folder / "one"), losses(folder / "two"), rtol=1e-9)
    assert f"steps = {steps}\n" in (folder / "one" / "config.toml").read_text()
    one, two = ((folder / run / "data.json").read_text() for run in ("one", "two"))
    assert one == two


def test_data_that_changed_in_place_are_refused(folder: Path) -> None:
    few = ["--set", "train.epochs=0.001", "--out", "run"]
    moemesh(folder, "train", "run.toml", *few)
    steps = len(losses(folder / "run"))
    more = ["--set", "train.epochs=0.0013", "--out", "run"]
    original = (folder / "b" / "two.jsonl").read_text()
    (folder / "b" / "two.jsonl").write_text(original.replace("w1 ", "w2 "))
    told = moemesh(folder, "train", "run.toml", *more, code=2)
    assert "  b: " in told and "as many, but not the same" in told and "--allow-change data" in told
    assert "  a.jsonl: " not in told
    # Put back, or accepted, the run goes on.
    (folder / "b" / "two.jsonl").write_text(original)
    assert f"resumed from step {steps}" in moemesh(folder, "train", "run.toml", *more)
    write_lines(folder / "b" / "three.jsonl", 5, 9)
    last = ["--set", "train.epochs=0.0016", "--out", "run"]
    assert "tokens then" in moemesh(folder, "train", "run.toml", *last, code=2)
    moemesh(folder, "train", "run.toml", *last, "--allow-change", "data")
    # The new data are those of the run from now on.
    assert "already trained" in moemesh(folder, "train", "run.toml", *last)
    # Another tokenizer in the same folder is other data, too.
    file = folder / "tok" / "tokenizer.json"
    made = json.loads(file.read_text())
    vocabulary = made["model"]["vocab"]
    vocabulary["w"], vocabulary["x"] = vocabulary["x"], vocabulary["w"]
    file.write_text(json.dumps(made))
    told = moemesh(folder, "train", "run.toml", *last, code=2)
    assert told.count("as many, but not the same") == 2


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("path", "nots", "data.path nots: No such file"),
        ("path", "packed.txt", "packed.txt holds gzip data"),
        ("tokenizer", "gpt2", 'data.tokenizer is "gpt2"'),
        ("validation", "none.jsonl", "none.jsonl: No such file"),
    ],
)
def test_config_check_looks_at_the_data(tmp_path: Path, key: str, value: str, told: str) -> None:
    (tmp_path / "packed.txt").write_bytes(gzip.compress(b"text"))
    assert told in moemesh(tmp_path, "config", "check", "--set", f"data.{key}={value}", code=2)
