"""The drill: its short form, the table, and a fault that no run recovers from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moemesh.bench import drill, drill_faults
from moemesh.bench.drill import FAULTS, Drill, Fault, Outcome, Row, losses
from moemesh.bench.drill_rank import Spec
from tests import commands
from tests.train.test_train import process_of_rank


def test_the_short_form() -> None:
    """Every fault ends with the right verdict on the right rank, and with the oracle's bits."""
    assert drill_faults.__doc__ and len(FAULTS) > 20  # its rows are there, too
    names = [name for name, one in FAULTS.items() if one.is_short]
    problems: list[str] = []
    rows = drill.run(names, trials=1, seed=1, python=commands.python(), say=problems.append)
    assert all(one.is_good for row in rows for one in row.outcomes), "\n".join(problems)
    assert len(rows) == len(names) >= 4
    assert all(row.outcomes[0].recovered is not False for row in rows)


@pytest.mark.slow
def test_the_long_form() -> None:
    problems: list[str] = []
    rows = drill.run(list(FAULTS), trials=3, seed=2, python=commands.python(), say=problems.append)
    assert all(one.is_good for row in rows for one in row.outcomes), "\n".join(problems)


def test_rows_of_the_table() -> None:
    row = Row(Fault("a fault", "R4", lambda drill: Outcome(), False))
    row.outcomes += [
        Outcome(verdict=True, rank=True, recovered=True, detected=0.2, resumed=1.0),
        Outcome(verdict=True, rank=False, recovered=None, detected=0.4),
    ]
    cells = ["a fault", "2", "2/2", "1/2", "1/1", "0.30 / 0.40", "1.00 / 1.00", "R4"]
    assert row.cells() == cells
    assert [one.is_good for one in row.outcomes] == [True, False]
    assert drill.markdown([row]).splitlines()[-1] == f"| {' | '.join(cells)} |"


def report_of(out: Path) -> dict[str, object]:
    return json.loads((out / "failure.json").read_text())


def test_a_failure_that_comes_again_ends_the_run(tmp_path: Path) -> None:
    """Every start meets the fault: the budget ends it, and everything says what was wrong."""
    trials = Drill(tmp_path, 0, commands.python())
    folder = trials.new_folder()
    out = folder / "run"
    spec = Spec(action="raise", rank=1, step=3, place="collective", folder=str(folder), once=False)
    done = trials.moemesh(trials.arguments(out, "dp=2 ep=2"), spec)
    assert done.returncode == 1, done.stderr
    report = report_of(out)
    assert (report["kind"], report["rank"], report["step"]) == ("RuntimeError", 1, 3)
    assert report["message"] == "an exception of the drill" and report["epoch"] == 2
    assert report["action"] == "ended the run: it came twice at the same place"
    assert report["collective"]["operation"] and any("drill" in f for f in report["frames"])  # type: ignore[index,union-attr]
    first = json.loads((out / "failures" / "1" / "failure.json").read_text())
    assert first["rank"] == 1 and first["action"] == "restart 1 of 2, from step 2"
    kinds = [json.loads(line)["kind"] for line in (out / "events.jsonl").read_text().splitlines()]
    assert kinds.count("failed") == 2 and kinds.count("restart") == 1
    hint, last = done.stderr.splitlines()[-2:]
    assert hint == "the same command would fail there again: remove the cause first"
    assert last.startswith("checkpoints are untouched; the same command goes on from step 2: ")
    assert last.endswith(f"--out {out}")
    assert losses(out) and "rank 0 failed" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the rank in /proc")
def test_a_launcher_that_is_killed_leaves_one_writer(tmp_path: Path) -> None:
    trials = Drill(tmp_path, 0)
    whole = trials.oracle("dp=2 ep=2")
    out = trials.new_folder() / "run"
    arguments = trials.arguments(out, "dp=2 ep=2", train__steps=2000)
    first = subprocess.Popen([sys.executable, "-m", "moemesh", *arguments])
    end = time.monotonic() + 120
    while not (out / "checkpoints" / "step-4").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    pid = process_of_rank(1, out)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    arguments = trials.arguments(out, "dp=2 ep=2", train__steps=2000)
    again = subprocess.Popen([sys.executable, "-m", "moemesh", *arguments])
    end = time.monotonic() + 120
    while "resumed" not in (out / "events.jsonl").read_text():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()
    again.send_signal(signal.SIGTERM)
    assert again.wait(timeout=120) == 143
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1)) and len(whole) == 8
