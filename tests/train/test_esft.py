"""`moemesh esft scores`, and runs that train the experts of its table."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from moemesh.sharding.load_run import load_run
from moemesh.trace.run import Run
from moemesh.train.inference.esft_request import EsftRequest
from tests.commands import python

SMALL = ["--set", "model.num_layers=3", "--set", "data.seq_len=16", "--set", "data.global_batch=4"]
SMALL += ["--set", "train.validation_batches=1", "--set", "train.lr=0.01"]


def moemesh(*arguments: str, fails: str = "") -> None:
    """Run the command; `fails`: it must, with this in its message."""
    done = subprocess.run([python(), "-m", "moemesh", *arguments], capture_output=True, text=True)
    assert done.returncode == (2 if fails else 0), done.stderr
    assert fails in done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of three steps, and a text."""
    folder = tmp_path_factory.mktemp("esft")
    text = folder / "text.txt"
    text.write_text("one expert knows this, another one does not. " * 40)
    moemesh("train", *SMALL, "--set", "train.steps=3", "--out", str(folder / "run"))
    return folder / "run", text


def scores(run: Path, text: Path, out: Path, *more: str) -> dict[str, Any]:
    given = ["--seq-len", "16", "--samples", "40", "--out", str(out), *more]
    moemesh("esft", "scores", str(run), str(text), *given)
    return json.loads(out.read_text())


def test_scores_are_shares_and_plans_agree(trained: tuple[Path, Path], tmp_path: Path) -> None:
    run, text = trained
    drawn = tmp_path / "p.svg"
    one = scores(run, text, tmp_path / "1.json", "--threshold", "0.5", "--svg", str(drawn))
    for layer, chosen in one["experts"].items():
        row = one["scores"][layer]
        assert sum(row["gate"]) == pytest.approx(1) and sum(row["token"]) == pytest.approx(1)
        reached = sum(row["gate"][expert] for expert in chosen)
        least = min(row["gate"][expert] for expert in chosen)
        assert reached >= 0.5 > reached - least, "the smallest set"
    assert one["experts"].keys() == {"1", "2"}
    frames = drawn.read_text().split('stroke="#b3245e" stroke-width="2">')[1].split("</g>")[0]
    assert frames.count("<rect") == sum(map(len, one["experts"].values()))
    many = scores(
        run, text, tmp_path / "4.json", "--threshold", "0.5", "--score", "gate",
        "--set", "plan.tp=2", "--set", "plan.ep=2",
    )  # fmt: skip
    assert many["experts"] == one["experts"] and many["data"] == one["data"]
    for layer, row in one["scores"].items():
        assert many["scores"][layer]["gate"] == pytest.approx(row["gate"], abs=1e-5)


def test_a_run_trains_the_table_and_resumes(trained: tuple[Path, Path], tmp_path: Path) -> None:
    run, text = trained
    table = tmp_path / "table.json"
    found = scores(run, text, table, "--experts-per-layer", "2", "--score", "token")
    out = str(tmp_path / "tuned")
    arguments = ["train", *SMALL, "--set", f"train.esft={table}", "--out", out]
    moemesh(*arguments, "--set", "train.steps=2")
    memory = Run.load(Path(out)).memory
    assert memory is not None
    assert memory.ranks[0].gradients == memory.predicted[0].gradients
    assert memory.ranks[0].optimizer == memory.predicted[0].optimizer
    # Two of eight experts in two layers, in fp32: a gradient and two moments.
    assert memory.ranks[0].optimizer == 2 * memory.ranks[0].gradients
    assert memory.ranks[0].gradients * 4 == memory.ranks[0].expert_weights
    moemesh(*arguments, "--set", "train.steps=3")
    table.unlink()
    # The run has a copy of its table.
    moemesh("evaluate", out, "--data", str(text), "--seq-len", "16")
    found["experts"]["1"] = [7] if found["experts"]["1"] != [7] else [6]
    table.write_text(json.dumps(found))
    moemesh(*arguments, "--set", "train.steps=4", fails="the run in this folder trains")


def test_windows_are_no_longer_than_the_positions_of_the_model() -> None:
    request = EsftRequest(data="text.txt", out=Path("out.json"))
    for positions, length in ((0, 4096), (64, 64), (8192, 4096)):
        given = [f"model.max_position_embeddings={positions}", "data.seq_len=8"]
        assert request.checked(load_run([], given, environ={}).config).seq_len == length


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--threshold", "1.5"], "at most 1"),
        (["--experts-per-layer", "9"], "a layer has 8 experts"),
        (["--threshold", "0.5", "--experts-per-layer", "2"], "both given"),
        (["--seq-len", "4000"], "one window"),
    ],
)
def test_requests_that_cannot_be_met(
    trained: tuple[Path, Path], tmp_path: Path, given: list[str], message: str
) -> None:
    run, text = trained
    out = tmp_path / "table.json"
    window = [] if "--seq-len" in given else ["--seq-len", "16"]
    arguments = ["esft", "scores", str(run), str(text), "--out", str(out), *window, *given]
    moemesh(*arguments, fails=message)
    assert not out.exists()
