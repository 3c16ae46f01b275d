"""Restarts and their end: the budget, a folder that is taken over, Ctrl-C before training."""

from __future__ import annotations

import errno
import json
import re
import signal
import threading
import time
from pathlib import Path
from typing import Literal

import pytest
import torch

from moemesh.config.run import RunConfig
from moemesh.config.train import TrainConfig
from moemesh.train.command import CAME_TWICE, Budget, limits_of, train_supervised
from moemesh.train.records import failure
from moemesh.train.records.run_folder import RunFolder
from moemesh.watch.supervisor import Ended
from moemesh.watch.verdict import Kind, Seen, Told, Verdict
from tests.train.runs import arguments, metrics, start
from tests.waiting import PATIENCE, until
from tests.watch.looks import word


def failed(
    kind: Kind = "killed",
    rank: int = 1,
    *,
    step: int = 5,
    told: Told | None = None,
    code: int | None = -9,
) -> Verdict:
    seen = Seen(rank=rank, exit_code=code, word=word(rank, step=step), told=told)
    return Verdict(kind=kind, rank=rank, message="", seen=seen)


def test_restarts_without_progress_come_to_an_end() -> None:
    budget = Budget(2)
    assert [budget.refuses(failed(), 4) for _ in range(2)] == [None, None]
    assert budget.refuses(failed(), 4) == "no progress between restarts"
    assert Budget(0).refuses(failed(), 4) == "train.restarts is 0"


def test_a_newer_checkpoint_renews_the_budget() -> None:
    budget = Budget(1)
    assert budget.refuses(failed(), None) is None
    assert budget.refuses(failed(), 0) is None  # the first checkpoint
    assert budget.refuses(failed(), 2) is None
    assert budget.refuses(failed(), 2) == "no progress between restarts"
    # An older one, since the newest was damaged, is no progress.
    assert budget.refuses(failed(), 1) == "no progress between restarts"


def test_what_would_come_again_is_not_tried_again() -> None:
    final = Told(kind="ConfigError", message="", at=0.0, is_final=True)
    assert Budget(2).refuses(failed("exception", told=final), 4) == "the same would happen again"
    raised = Told(kind="KeyError", message="'x'", at=0.0)
    budget = Budget(5)
    assert budget.refuses(failed("exception", told=raised), 4) is None
    assert budget.refuses(failed("exception", told=raised, code=None), 4) == CAME_TWICE
    # Elsewhere it is another one, and so it is behind a newer checkpoint.
    budget = Budget(5)
    assert budget.refuses(failed("exception", told=raised), 4) is None
    assert budget.refuses(failed("exception", told=raised, step=6), 4) is None
    assert budget.refuses(failed("exception", told=raised, step=6), 5) is None
    # A signal is no mistake of the program.
    budget = Budget(5)
    assert [budget.refuses(failed(), 4) for _ in range(3)] == [None] * 3


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_folder_is_taken_over_writes_nothing_more(tmp_path: Path, ranks: int) -> None:
    out = tmp_path / "run"
    keys = {"plan__dp": ranks, "train__steps": 100_000, "train__checkpoint_every": 5}
    first = start(*arguments(out, **keys))
    until(lambda: (out / "checkpoints/step-10").exists())
    second = start(*arguments(out, **keys), "--takeover")
    _, err = first.communicate(timeout=PATIENCE)
    assert first.returncode not in (0, None) and "another run has taken over" in err, err
    events = out / "events.jsonl"
    until(lambda: "resumed from" in events.read_text())
    rows = len(metrics(out))
    until(lambda: len(metrics(out)) > rows + 5)
    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == 143, second.communicate()
    steps = [row["step"] for row in metrics(out)]
    assert steps == list(range(1, len(steps) + 1))
    said = [json.loads(line) for line in events.read_text().splitlines()]
    assert sum(one["kind"] == "resumed" for one in said) == 1


@pytest.mark.slow
def test_ctrl_c_before_training_leaves_at_once(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(*arguments(out, plan__dp=2, train__steps=100_000))
    until(lambda: (out / "logs/rank-1.out").exists())
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and time.monotonic() - begun < 5
    assert err.endswith("moemesh: stopped by SIGINT before training began\n"), err
    assert not (out / "metrics.jsonl").exists() and not (out / "failure.json").exists()


@pytest.mark.parametrize(
    ("device", "has_devices", "floor"),
    [("cpu", True, 2.9), ("cpu", False, 2.9), ("auto", False, 2.9), ("auto", True, 180.0)],
)
def test_a_hang_is_told_soon_where_no_kernels_are_compiled(
    monkeypatch: pytest.MonkeyPatch, device: Literal["cpu", "auto"], has_devices: bool, floor: float
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_devices)
    found = limits_of(RunConfig(train=TrainConfig(device=device, timeout_seconds=77.0)))
    assert (found.floor, found.patience) == (floor, 77.0)
    assert found.aborts_follow == (floor == 180.0)


def test_what_a_failed_rank_wrote_is_found_where_the_console_says(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    folder = RunFolder.open(path)
    folder.lock()
    config = RunConfig(train=TrainConfig(restarts=1))

    def run(*_: object, logs: Path, **__: object) -> Ended:
        # As the launcher of ranks does, which opens these files anew.
        logs.mkdir(exist_ok=True)
        (logs / "rank-1.err").write_text(f"Traceback of epoch {folder.epoch}\n")
        (logs / "rank-1.stacks").write_text("")
        (logs / "rank-2.err").write_text("")
        verdict = failed("exception", told=Told(kind="KeyError", message="'x'", at=0.0))
        return Ended(code=1, verdict=verdict, stacks={}, traces={})

    for first in (1, 3):  # the same command again
        assert train_supervised(config, folder, ["train"], run=run) == 1
        said = capfd.readouterr().err
        named = [Path(line) for line in re.findall(r"\(all of it in (.*)\)", said)]
        assert named == [path / f"failures/{first}/rank-1.err", path / "logs/rank-1.err"]
        found = [file.read_text() for file in named]
        assert found == [f"Traceback of epoch {epoch}\n" for epoch in (first, first + 1)]
        folder.raise_epoch()
    folder.release()
    kept = sorted(str(file.relative_to(path)) for file in path.glob("failures/*/*"))
    names = ("failure.json", "rank-1.err", "rank-1.stacks")
    assert kept == [f"failures/{epoch}/{name}" for epoch in (1, 2, 3) for name in names]


def test_a_folder_in_which_nothing_can_be_written_ends_a_failed_run_with_its_cause(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two starts of the ranks: no traceback, and the exit code of the rank."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    folder = RunFolder.open(tmp_path / "run")
    folder.lock()

    def run(*_: object, **__: object) -> Ended:
        for name in ("os.pwrite", "os.replace", "pathlib.Path.write_text"):
            monkeypatch.setattr(name, refuse)
        return Ended(code=137, verdict=failed(), stacks={}, traces={})

    config = RunConfig(train=TrainConfig(restarts=1))
    assert train_supervised(config, folder, ["train"], run=run) == 137
    said = capfd.readouterr().err
    assert "not started again" in said and "Read-only file system" in said
    assert "no report could be written" in said and "None" not in said
    folder.release()


def test_a_place_of_checkpoints_that_does_not_answer_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def candidates(folder: Path) -> list[int]:
        answers.wait(30)
        return [7]

    monkeypatch.setattr(failure, "candidates", candidates)
    monkeypatch.setattr(failure, "_ASK_SECONDS", 0.05)
    assert failure.newest_step(tmp_path, seconds=0.05) is None
    text = failure.go_on(tmp_path, ["moemesh", "train"])
    assert text.endswith("from the newest checkpoint, if there is one: moemesh train")
    answers.set()
    assert failure.newest_step(tmp_path) == 7
