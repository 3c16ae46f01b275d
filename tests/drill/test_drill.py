"""The drill: its short form, the table, and a fault that no run recovers from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moemesh.checkpoint.files import COMMITTED
from tests import commands
from tests.drill import faults, soak, trials
from tests.drill.figures import figures
from tests.drill.rank import Spec
from tests.drill.results import HEADER, Fault, Outcome, ResultsFile, Row, markdown
from tests.drill.trials import FAULTS, Drill, losses
from tests.sandbox import ROOT
from tests.train.runs import metrics, processes_of, rows_of
from tests.waiting import PATIENCE, until


@pytest.mark.slow
def test_the_short_form() -> None:
    """Every fault ends with the right verdict on the right rank, and with the oracle's bits."""
    assert faults.__doc__ and len(FAULTS) > 20  # with the rows of that module
    names = [name for name, one in FAULTS.items() if one.is_short]
    problems: list[str] = []
    rows = trials.run(names, trials=1, seed=1, python=commands.python(), log=problems.append)
    assert all(one.is_good for row in rows for one in row.outcomes), "\n".join(problems)
    assert len(rows) == len(names) >= 4
    assert all(row.outcomes[0].recovered is not False for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 72 trials, of whole runs
def test_the_long_form() -> None:
    problems: list[str] = []
    rows = trials.run(list(FAULTS), trials=3, seed=2, python=commands.python(), log=problems.append)
    assert all(one.is_good for row in rows for one in row.outcomes), "\n".join(problems)


def test_tables(tmp_path: Path) -> None:
    """Rows and figures of trials that were kept in a file; a line that was cut off is left out."""
    kept = ResultsFile(tmp_path / "results.jsonl")
    good = Outcome(verdict=True, rank=True, named=True, recovered=True, detected=0.2, resumed=1.0)
    kept.add("kill", 0, good, 3.0)
    kept.add("kill", 1, Outcome(verdict=True, rank=False, named=True, detected=0.4), 3.0)
    kept.add("loop", 0, replace(good, detected=4.0, step_seconds=0.5), 3.0)
    kept.add("loop", 1, replace(good, detected=4.0, step_seconds=0.3, alarms=1), 3.0)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"fault": "loop", "trial": 2, "verd')
    assert kept.outcomes("kill")[0] == good and sorted(kept.outcomes("loop")) == [0, 1]
    rows = [
        Row(Fault(name, figures, lambda drill: good, kind=kind), [*kept.outcomes(name).values()])
        for name, figures, kind in [("kill", "R4", "kill"), ("loop", "R4 R6", "hang")]
    ]
    cells = ["kill", "2", "2/2", "1/2", "2/2", "1/1", "0.30 / 0.40", "1.00 / 1.00", "R4"]
    assert rows[0].cells() == cells
    assert [one.is_good for row in rows for one in row.outcomes] == [True, False, True, False]
    assert markdown(HEADER, [cells]).splitlines()[-1] == f"| {' | '.join(cells)} |"
    by_name = {one.name: one for one in figures(rows)}
    assert list(by_name) == [f"R{number}" for number in range(1, 13)]
    paths = [path for one in by_name.values() for path in one.tests.split() if "/" in path]
    assert len(paths) > 8 and all((ROOT / path).exists() for path in paths)
    # A hang of 4 s is in time where ten median steps are 5 s, and late where they are 3 s.
    assert (
        "hang: median 4.00 s, most 4.00 s, in time 1 of 2; 1 false alarms" in by_name["R4"].measured
    )
    assert by_name["R4"].is_met is False
    assert (by_name["R5"].measured, by_name["R5"].is_met) == ("3 of 4 faults of 2 kinds", False)
    assert by_name["R3"].measured == "1 of 2 kills; 2 of 2 other faults"


def test_a_figure_is_met_by_enough_trials() -> None:
    good = Outcome(verdict=True, rank=True, named=True, recovered=True, detected=0.2)

    def rows(trials: int) -> list[Row]:
        return [
            Row(Fault(f"{n}", "R3 R5", lambda drill: good, kind="kill"), [good] * trials)
            for n in range(12)
        ]

    def met(trials: int) -> dict[str, bool | None]:
        return {one.name: one.is_met for one in figures(rows(trials))}

    assert met(25)["R3"] is met(25)["R5"] is True and met(8)["R3"] is met(8)["R5"] is None


def test_a_drill_goes_on_from_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of the file are not repeated; each other trial draws the same random numbers."""
    drawn: list[tuple[str, float]] = []

    def trial(name: str) -> Fault:
        def one(drill: Drill) -> Outcome:
            drawn.append((name, drill.random.random()))
            return Outcome(verdict=True)

        return Fault(name, "R5", one)

    monkeypatch.setattr(trials, "FAULTS", {name: trial(name) for name in ("a", "b")})
    whole = trials.run(["a", "b"], trials=3, seed=1, log=lambda _: None)
    assert [name for name, _ in drawn] == ["a", "b"] * 3
    once, kept = sorted(drawn), ResultsFile(tmp_path / "results.jsonl")
    drawn.clear()
    trials.run(["a"], trials=2, seed=1, results=kept, log=lambda _: None)
    rows = trials.run(["a", "b"], trials=3, seed=1, results=kept, log=lambda _: None)
    assert sorted(drawn) == once and rows == whole


def test_a_failure_that_comes_again_ends_the_run(tmp_path: Path) -> None:
    """The fault comes in every start: the budget ends the run, and every report names the fault."""
    drill = Drill(tmp_path, commands.python())
    folder = drill.new_folder()
    out = folder / "run"
    spec = Spec(action="raise", rank=1, step=3, place="collective", folder=str(folder), once=False)
    done = drill.moemesh(drill.arguments(out, "dp=2 ep=2"), spec)
    assert done.returncode == 1, done.stderr
    report = json.loads((out / "failure.json").read_text())
    assert (report["kind"], report["rank"], report["step"]) == ("RuntimeError", 1, 3)
    # A save after step 2 may end before the first failure or after it; after it the second start
    # went further than the first, and may fail a second time.
    times = report["epoch"]
    assert report["message"] == "an exception of the drill" and times in (2, 3)
    assert report["action"] == "ended the run: it came twice at the same place"
    assert report["collective"]["operation"] and any("drill" in f for f in report["frames"])
    first = json.loads((out / "failures" / "1" / "failure.json").read_text())
    assert first["rank"] == 1 and first["action"].startswith("restart 1 of 2, from ")
    kinds = [event["kind"] for event in rows_of(out / "events.jsonl")]
    assert kinds.count("failed") == times and kinds.count("restart") == times - 1
    hint, last = done.stderr.splitlines()[-2:]
    assert hint == "the same command would fail at the same place: remove the cause first"
    # The failure may leave a save half-written: a folder of another name, which nothing loads.
    saved = any(COMMITTED.fullmatch(path.name) for path in (out / "checkpoints").glob("step-*"))
    goes_on = "checkpoints are untouched; the same command resumes from step 2: "
    assert last.startswith(goes_on if saved else "no checkpoint was written yet; ")
    assert last.endswith(f"--out {out}")
    assert losses(out) and "rank 0 failed" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the rank in /proc")
def test_a_launcher_that_is_killed_leaves_one_writer(tmp_path: Path) -> None:
    drill = Drill(tmp_path)
    whole = drill.oracle("dp=2 ep=2")
    out = drill.new_folder() / "run"
    arguments = drill.arguments(out, "dp=2 ep=2", train__steps=2000)
    first = subprocess.Popen([sys.executable, "-m", "moemesh", *arguments])
    until((out / "checkpoints" / "step-4").exists)
    (pid,) = [pid for pid, told in processes_of(out).items() if "RANK=1" in told]
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    again = subprocess.Popen([sys.executable, "-m", "moemesh", *arguments])
    until(lambda: "resumed" in (out / "events.jsonl").read_text())
    assert not Path(f"/proc/{pid}").exists()
    again.send_signal(signal.SIGTERM)
    assert again.wait(timeout=PATIENCE) == 143
    steps = [row["step"] for row in metrics(out)]
    assert steps == list(range(1, len(steps) + 1)) and len(whole.losses) == 8


def run_folder(folder: Path, seconds: list[float]) -> Path:
    folder.mkdir()
    rows = [json.dumps({"step": n, "seconds": s}) for n, s in enumerate(seconds, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "events.jsonl").write_text('{"kind": "slow_rank"}\n{"kind": "note"}\n')
    return folder


def test_a_report_matches_verdicts_with_faults(tmp_path: Path) -> None:
    """A reported loop, a verdict without a fault, and a kill that is reported of the wrong rank."""
    out = run_folder(tmp_path / "run", [2.0, 2.0, 4.0])
    notes = [
        {"event": "went on", "time": 105.0, "step": 1},
        {"event": "fault", "time": 110.0, "action": "loop", "rank": 1, "step": 3},
        {"event": "verdict", "time": 113.0, "kind": "busy", "rank": 1},
        {"event": "went on", "time": 118.0, "step": 3},
        {"event": "verdict", "time": 119.0, "kind": "hung", "rank": 0},
        {"event": "went on", "time": 121.0, "step": 3},
        {"event": "fault", "time": 130.0, "action": "kill", "rank": 0, "step": 4},
        {"event": "verdict", "time": 130.5, "kind": "killed", "rank": 1},
    ]
    report = soak.report(out, notes, start=100.0, wall=40.0)
    assert (report["effective_share"], report["start_seconds"]) == (0.2, 5.0)
    assert (report["false_alarms"], report["slow_ranks"], report["steps"]) == (1, 1, 3)
    loop, kill = report["faults"]
    assert (loop["detected"], loop["resumed"], loop["good"], loop["at"]) == (3.0, 5.0, True, 10.0)
    assert (kill["detected"], kill["resumed"], kill["good"]) == (0.5, None, False)
    assert not soak.is_good({"exit_code": 143, **report})
    calm = soak.report(out, notes[:1], start=100.0, wall=40.0)
    assert soak.is_good({"exit_code": 143, **calm})
    assert not soak.is_good({"exit_code": 1, **calm})


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path) -> None:
    """A fault after 25 of 50 seconds is reported, and the run continues until the stop request."""
    said: list[str] = []
    report = soak.soak(
        50.0,
        every=25.0,
        out=tmp_path / "run",
        overrides=["data.seq_len=16", "train.checkpoint_every=2", "data.global_batch=4"],
        python=commands.python(),
        log=said.append,
    )
    assert len(report["faults"]) == len(said) == 1
    assert soak.is_good(report), report
    assert 0 < report["effective_seconds"] < report["wall_seconds"] and report["steps"] > 2
