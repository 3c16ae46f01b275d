"""The console of a run: lines that are due, time that is left, a console that is gone, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moemesh.config.cluster import load_cluster
from moemesh.config.errors import ConfigError
from moemesh.config.train import TrainConfig
from moemesh.monitor.supervisor import SAME_KEY_SECONDS, STOPPING_NOW, STOPPING_SOON
from moemesh.sharding.load_run import load_run
from moemesh.train.console import Progress
from moemesh.train.early_stop import EarlyStop
from moemesh.train.records.artifacts import Artifacts, _peak_flops
from moemesh.train.records.run_folder import DATA
from tests.commands import python
from tests.train.runs import arguments, metrics, rows_of, said
from tests.waiting import PATIENCE, until


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "total", "keys", "expected"),
    [
        pytest.param(0.01, 200, {}, [1, 51, 101, 151, 200], id="fast: one in fifty"),
        pytest.param(0.01, 1000, {}, [1, *range(51, 1000, 50), 1000], id="fast and many"),
        pytest.param(0.01, 20, {}, [1, 6, 11, 16, 20], id="a short run: a quarter"),
        pytest.param(0.01, 3, {}, [1, 2, 3], id="three steps"),
        pytest.param(25.0, 12, {}, [1, 4, 7, 10, 12], id="slow: one a minute"),
        pytest.param(600.0, 4, {}, [1, 2, 3, 4], id="very slow"),
        pytest.param(1.0, 10, {"log_every": 4}, [1, 4, 8, 10], id="by their number"),
        pytest.param(0.01, 110, {"done": 100}, [101, 110], id="after a resume"),
    ],
)
def test_steps_with_a_line(
    seconds: float, total: int, keys: dict[str, int], expected: list[int]
) -> None:
    clock, done = Clock(), keys.get("done", 0)
    progress, due = Progress(done, total, keys.get("log_every", 0), clock), list[int]()
    for step in range(done + 1, total + 1):
        clock.now += seconds
        due += [step] if progress.finished(step) else []
    assert due == expected


def summary(validation: float, path: str = "run", stop: EarlyStop | None = None, *keys: str) -> str:
    """The last lines of a run whose unigram model has a loss of 3.2."""
    ended: Any = SimpleNamespace(
        config=load_run([], keys, environ={}).config,
        folder=SimpleNamespace(path=Path(path)),
        _validation=validation,
        _unigram=3.2,
        _recent=(),
    )
    return Artifacts.summary(ended, stop or EarlyStop(0))


@pytest.mark.parametrize(("validation", "is_told"), [(3.1, False), (3.2, True), (5.0, True)])
def test_a_run_that_ends_above_the_unigram_model_says_so(validation: float, is_told: bool) -> None:
    text = summary(validation)
    assert f"validation loss     {validation:.4f} nats a byte" in text
    assert ("has not learned" in text) == is_told
    assert 'generate run --prompt "def " --temperature 0.8' in text


def test_a_run_of_few_steps_is_a_start() -> None:
    text = summary(3.4, "run", None, "train.steps=20")
    assert "20 steps are a start" in text and "has not learned" not in text
    # More steps do not help a run that its patience has ended.
    stopped = EarlyStop(1)
    for step, loss in ((1, 3.3), (2, 3.4)):
        stopped.add(step, loss)
    text = summary(3.4, "run", stopped, "train.steps=20")
    assert "are a start" not in text and "has not learned" in text


@pytest.mark.parametrize("tokenizer", ["bytes", "tokenizer"])
def test_the_next_command_of_a_tuned_run(tmp_path: Path, tokenizer: str) -> None:
    """Completions need no chat template: without one, `--chat` would be refused."""
    sources = [{"loss_tokens": 3}]
    (tmp_path / DATA).write_text(json.dumps({"sources": sources}))
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}")
    name = tokenizer if tokenizer == "bytes" else str(tmp_path / tokenizer)
    text = summary(3.4, str(tmp_path), None, f"data.tokenizer={name}", "data.path=a.jsonl")
    words = "TEXT" if tokenizer == "bytes" else "TEXT --chat"
    assert f"generate {tmp_path} --prompt {words} --temperature" in text


def test_time_that_is_left() -> None:
    clock = Clock()
    progress = Progress(0, 10, clock=clock)
    clock.now = 50.0  # a slow start is not a step's time
    progress.finished(1)
    assert progress.seconds_left is None
    for step in (2, 3, 4):
        clock.now += 2.0
        progress.finished(step)
    assert progress.seconds_left == pytest.approx(12.0)
    clock.now += 4.0  # two steps in one report
    progress.finished(6)
    assert progress.seconds_left == pytest.approx(8.0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_closed_pipe_stops_no_run(ranks: int, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    given = arguments(tmp_path / "run", plan__dp=ranks, train__log_every=1)
    command = [python(), "-m", "moemesh", *given]
    done = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=PATIENCE
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert (tmp_path / "run" / "report.html").exists()
    events = rows_of(tmp_path / "run/events.jsonl")
    assert "BrokenPipe" in str([one["text"] for one in events if one["kind"] == "console"])


def test_rows_and_events_say_what_a_watcher_asks(tmp_path: Path) -> None:
    out = tmp_path / "run"
    printed = said(*arguments(out, train__log_every=2, train__cluster="laptop_cpu"))
    rows = metrics(out)
    assert all(0 <= row["data_seconds"] <= row["seconds"] for row in rows)
    assert all(row["tflops_per_rank"] > 0 and row["memory_bytes"] > 1 << 20 for row in rows)
    lines = [line for line in printed.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/4", "2/4", "4/4"]
    assert "FLOP/s a rank (MFU " in lines[0] and " left" in lines[1]
    assert "  waits: data " in lines[0] and "  epoch 0.01" in lines[0]
    peak = load_cluster("laptop_cpu").peak_flops["float32"] / 1e12
    assert [row["mfu"] * peak for row in rows] == pytest.approx(
        [r["tflops_per_rank"] for r in rows]
    )
    epochs = [row["epoch"] for row in rows]
    assert epochs == pytest.approx([step * epochs[0] for step in (1, 2, 3, 4)])
    loads = rows_of(out / "loads.jsonl")
    for row in rows:
        worst = max(one["max_over_mean"] for one in loads if one["step"] == row["step"])
        assert row["load_max_over_mean"] == pytest.approx(worst) and row["dropped_share"] == 0
    # A second start, whose events come after those of the first.
    output = said(*arguments(out, train__steps=6))
    assert "note: the learning rate of step 4 was " in output
    assert "its decay ends at step 6 now, not at 4" in output
    events = rows_of(out / "events.jsonl")
    kinds = [one["kind"] for one in events]
    assert kinds.count("start") == kinds.count("finished") == 2 and "resumed" in kinds
    assert [one["step"] for one in events if one["kind"] == "finished"] == [4, 6]


def test_a_cpu_without_a_cluster_has_no_mfu(tmp_path: Path) -> None:
    assert _peak_flops(TrainConfig(), torch.device("cpu")) is None
    given = TrainConfig(cluster="dgx_h100", dtype="bfloat16")
    assert _peak_flops(given, torch.device("cpu")) == 989.4e12
    with pytest.raises(ConfigError, match=r"train\.cluster = \"dgx_h10\"(.|\n)*dgx_h100"):
        load_run([], ["train.cluster=dgx_h10"])


RANK = """
import os, signal, sys, time
from pathlib import Path
from moemesh.monitor import progress
progress.attach(Path(os.environ["MOEMESH_LAUNCHER"]) / "words", int(os.environ["RANK"]))
signal.signal(signal.SIGINT, lambda *_: print("asked", flush=True))
Path(sys.argv[1], os.environ["RANK"]).touch()
time.sleep(1000)
time.sleep(1000)
"""
LAUNCHER = """
import sys
from moemesh.comm.launch import launch
sys.exit(launch(2, sys.argv[1:], entry=("-c", {rank!r})))
"""


def interrupted(tmp_path: Path, rank: str) -> subprocess.Popen[str]:
    """A launcher of two ranks with the script `rank`, after one Ctrl-C."""
    process = subprocess.Popen(
        [python(), "-c", LAUNCHER.format(rank=rank), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: len(list(tmp_path.iterdir())) == 2, process)
    process.send_signal(signal.SIGINT)
    return process


def test_ctrl_c_before_training_promises_no_save(tmp_path: Path) -> None:
    process = interrupted(tmp_path, RANK.replace("signal.signal", "progress.phase('setup'); print"))
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert err == "moemesh: stopped by SIGINT before training began\n"


def test_the_second_interrupt_ends_ranks_that_do_not_listen(tmp_path: Path) -> None:
    process = interrupted(tmp_path, RANK)
    assert process.stdout is not None
    assert process.stdout.readline() == "asked\n"
    time.sleep(2 * SAME_KEY_SECONDS)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert out == ""
    assert STOPPING_SOON in err and STOPPING_NOW in err


def test_a_longer_run_names_the_rate_of_its_past_settings(tmp_path: Path) -> None:
    out = tmp_path / "run"
    said(*arguments(out, train__steps=2))
    last = f"{rows_of(out / 'metrics.jsonl')[-1]['lr']:.2e}"
    changed = arguments(out, train__steps=4, train__lr=0.5)
    output = said(*changed, "--allow-change", "train.lr")
    assert f"note: the learning rate of step 2 was {last}, that of step 3 is " in output
    constant = arguments(out, train__steps=5, train__lr=0.5, train__lr_schedule="constant")
    assert "decay ends" not in said(*constant, "--allow-change", "train.lr_schedule")
