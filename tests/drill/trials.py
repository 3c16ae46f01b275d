"""The trials of the drill: faults in tiny runs, one after the other, and a table of how they ended.

A row of the table is a function, registered by :func:`fault`, that runs one trial and returns its
outcome. A run that recovers must have the losses of the run without a fault, bit for bit.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from moemesh.config.python import python_command
from tests.drill.rank import Spec, environment, read_notes
from tests.drill.results import Fault, Kind, Outcome, ResultsFile, Row, Trial
from tests.train import runs
from tests.train.runs import SMALL, metrics, sets, settings, text_file

#: Settings of every run: small enough that a trial takes the seconds of its starts.
SETTINGS: dict[str, Any] = SMALL | {
    "data.global_batch": 12,
    "train.steps": 8,
    "train.checkpoint_every": 2,
    "train.timeout_seconds": 60,
    "train.device": "cpu",
}
PLANS: dict[str, dict[str, Any]] = {
    "dp=2 ep=2": {"plan.dp": 2, "plan.ep": 2},
    "pp=2": {"plan.pp": 2, "plan.microbatches": 2},
    "tp=2 dp=2 ep=4": {"plan.tp": 2, "plan.dp": 2, "plan.ep": 4},
}
_TIMEOUT_SECONDS = 400


class Ending(NamedTuple):
    """Final state of a run: the loss of every step, and shape, dtype and digests of the bytes of
    every tensor of the last checkpoint, by its logical name."""

    losses: list[float]
    tensors: dict[str, Any]


class Drill:
    """Carries trials out in `folder`; runs without a fault are kept for comparison."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder, self.python = folder, python
        self.random = random.Random(0)
        self._oracles: dict[str, Ending] = {}
        self._num_runs = 0
        self.text = text_file(folder)

    def new_folder(self) -> Path:
        """A folder for one run."""
        self._num_runs += 1
        folder = self.folder / f"{self._num_runs}"
        folder.mkdir()
        return folder

    def tidy(self) -> None:
        """Delete the folders of all runs: what a drill of hours keeps is in its results."""
        for number in range(1, self._num_runs + 1):
            shutil.rmtree(self.folder / f"{number}", ignore_errors=True)

    def arguments(self, out: Path, plan: str, **more: Any) -> list[str]:
        """``train`` with the settings of the drill; ``train__steps=4`` sets train.steps."""
        keys = SETTINGS | PLANS[plan] | {"data.path": str(self.text)}
        keys |= {name.replace("__", "."): value for name, value in more.items()}
        return ["train", "--out", str(out), *sets(*settings(keys))]

    def moemesh(
        self, arguments: Sequence[str], spec: Spec | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``moemesh``, with the fault of `spec` if there is one."""
        module = ["moemesh"] if spec is None else ["tests.drill.rank", spec.text()]
        command = python_command(*module, *arguments, python=self.python)
        options = {"env": environment(), "timeout": _TIMEOUT_SECONDS}
        return subprocess.run(command, capture_output=True, text=True, **options)

    def oracle(self, plan: str) -> Ending:
        """Ending of the run without a fault."""
        if plan not in self._oracles:
            out = self.new_folder() / "run"
            done = self.moemesh(self.arguments(out, plan))
            if done.returncode or alarms(out):
                raise RuntimeError(f"the run without a fault failed:\n{done.stderr}")
            self._oracles[plan] = ending(out)
        return self._oracles[plan]

    def begin(self, plan: str = "") -> tuple[str, Ending, Path, Path]:
        """A plan (given or drawn), how its run without a fault ends, and the folders of a trial
        and of the run in it."""
        plan = plan or self.random.choice(list(PLANS))
        whole, folder = self.oracle(plan), self.new_folder()
        return plan, whole, folder, folder / "run"

    def rank_fault(self, row: RankFault) -> Outcome:
        """One trial of the action of `row` on a random rank and step."""
        plan, place = self.random.choice(row.plans), self.random.choice(row.places)
        _, whole, folder, out = self.begin(plan)
        world = 4 if plan.startswith("tp") else 2
        # Behind the first steps, which have more time; in a save: of an even step; in a
        # validation: of the last one.
        step = self.random.choice((4, 6)) if place == "save" else self.random.randint(4, 7)
        step = SETTINGS["train.steps"] if place == "validate" else step
        rank = self.random.randrange(world)
        spec = Spec(action=row.action, rank=rank, step=step, place=place, folder=str(folder))
        done = self.moemesh(self.arguments(out, plan), spec)
        times = {note["event"]: note["time"] for note in reversed(read_notes(folder))}
        fired, judged, went_on = map(times.get, ("fault", "verdict", "went on"))
        reports = sorted((out / "failures").glob("*/failure.json"))
        if fired is None or judged is None or not reports:
            return Outcome(verdict=False, problem=f"{spec}: no verdict:\n{done.stderr[-2000:]}")
        report = json.loads(reports[0].read_text())
        outcome = Outcome(
            verdict=report["kind"] == row.failure,
            rank=report["rank"] == spec.rank,
            named=_names_the_place(report, done.stderr, spec),
            recovered=done.returncode == 0 and ending(out) == whole,
            detected=judged - fired,
            resumed=None if went_on is None else went_on - judged,
            step_seconds=median_step(out),
            alarms=alarms(out) - 1,
            place=f"{place}, step {step}, rank {spec.rank}, {plan}",
        )
        if outcome.is_good:
            return outcome
        said = f"{spec} -> {report['kind']} of rank {report['rank']}\n{done.stderr[-2000:]}"
        return replace(outcome, problem=said)


def _names_the_place(report: dict[str, Any], console: str, spec: Spec) -> bool:
    """Whether the report and the console name the step and the phase of the fault, and its
    collective if it was in one."""
    phase = "step" if spec.place in ("forward", "collective") else spec.place
    lines = [line for line in console.splitlines() if line.startswith("it was in step ")]
    if (report.get("phase"), report.get("step")) != (phase, spec.step) or not lines:
        return False
    if not lines[0].startswith(f"it was in step {spec.step}"):
        return False
    if spec.place == "collective":
        # Of ranks that are alive the report has the collective in which others wait.
        return "operation" in report.get("collective", {}) and ", inside " in lines[0]
    return spec.place == "forward" or f"({phase})" in lines[0]


#: All rows, in the order of their definition.
FAULTS: dict[str, Fault] = {}


def fault(
    name: str, figures: str, *, is_short: bool = False, kind: Kind = ""
) -> Callable[[Trial], Trial]:
    """Register a trial as a row; `is_short`: it belongs to the short form, too."""

    def register(trial: Trial) -> Trial:
        FAULTS[name] = Fault(name, figures, trial, is_short, kind)
        return trial

    return register


_FORWARD, _COLLECTIVE, _ALL = ("forward",), ("collective",), tuple(PLANS)
_KILLS, _ALONE = "R3 R4 R5 R6", "an operation that one rank alone calls"
#: Places of faults of ranks that do not hang; ranks that hang have more time outside of steps.
_PLACES = ("forward", "collective", "save", "validate")
#: Plans for exceptions: one stage, because a pipeline names its operation in an exception of its
#: own. Plan for mismatches: four ranks, because of two that differ neither is known to be right.
_ONE_STAGE, _FOUR_RANKS = ("dp=2 ep=2", "tp=2 dp=2 ep=4"), ("tp=2 dp=2 ep=4",)


class RankFault(NamedTuple):
    """A row of a fault of one rank: its action and places, and the kind of failure.json."""

    name: str
    figures: str
    kind: Kind
    action: str
    places: Sequence[str]
    failure: str
    plans: Sequence[str] = _ALL
    is_short: bool = False

    def __call__(self, drill: Drill) -> Outcome:
        return drill.rank_fault(self)


for _row in (
    RankFault("kill -9 in the forward", _KILLS, "kill", "kill", _FORWARD, "Killed", _ALL, True),
    RankFault("kill -9 inside a collective", _KILLS, "kill", "kill", _COLLECTIVE, "Killed"),
    RankFault("kill -9 during a save", "R2 R3 R4 R5 R6", "kill", "kill", ("save",), "Killed"),
    RankFault("kill -9 in the validation", _KILLS, "kill", "kill", ("validate",), "Killed"),
    RankFault("kill -STOP", "R4 R5 R6", "stop", "stop", _PLACES, "Stopped"),
    RankFault("endless loop", "R4 R5 R6", "hang", "loop", _FORWARD, "Busy"),
    RankFault("sleep without end", "R4 R5 R6", "hang", "sleep", _FORWARD, "Hung"),
    RankFault("exception", "R5 R6", "end", "raise", _PLACES, "RuntimeError", _ONE_STAGE, True),
    RankFault("exit(0) inside of a step", "R5 R6", "end", "exit 0", _PLACES[:2], "Exited"),
    RankFault("exit(3)", "R5 R6", "end", "exit 3", _PLACES, "Exited"),
    RankFault(_ALONE, "R4 R5 R6", "hang", "call", _FORWARD, "Mismatch", _FOUR_RANKS),
):
    fault(_row.name, _row.figures, is_short=_row.is_short, kind=_row.kind)(_row)


def run(
    names: Sequence[str],
    *,
    trials: int,
    seed: int,
    python: str = sys.executable,
    results: ResultsFile | None = None,
    log: Callable[[str], None] = print,
) -> list[Row]:
    """Rows with `trials` trials of every fault in `names`, those in `results` included.

    `log` gets the problems as they come. The n-th trials of all faults come before the next ones,
    and each fault has its own random numbers.
    """
    results = results or ResultsFile(None)
    outcomes = {name: results.outcomes(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="moemesh-drill-") as folder:
        drill = Drill(Path(folder), python)
        for number in range(trials):
            for name in names:
                if number in outcomes[name]:
                    continue
                drill.random = random.Random(f"{seed} {name} {number}")
                start = time.monotonic()
                outcome = outcomes[name][number] = _one(FAULTS[name], drill)
                seconds = round(time.monotonic() - start, 1)
                results.add(name, number, outcome, seconds)
                log(f"{name}: {'good' if outcome.is_good else 'WRONG'} ({seconds:.0f} s)")
                if outcome.problem:
                    log(outcome.problem)
    return [Row(FAULTS[name], [one for _, one in sorted(outcomes[name].items())]) for name in names]


def _one(fault: Fault, drill: Drill) -> Outcome:
    try:
        return fault.trial(drill)
    except subprocess.TimeoutExpired as error:
        return Outcome(verdict=False, problem=f"no end after {error.timeout:.0f} s")
    finally:
        drill.tidy()


def ending(out: Path) -> Ending:
    """Ending of the run in `out`."""
    newest = max((out / "checkpoints").glob("step-*/manifest.json"), key=_step_of, default=None)
    tensors = {} if newest is None else json.loads(newest.read_text())["tensors"]
    return Ending(losses(out), tensors)


def _step_of(manifest: Path) -> int:
    number = manifest.parent.name.removeprefix("step-")
    return int(number) if number.isdigit() else -1


def losses(out: Path) -> list[float]:
    """Losses of a run, one a step; a step that is written twice shows."""
    return runs.losses(metrics(out))


def median_step(out: Path) -> float | None:
    """Median seconds of a step of the run, the first two left out; None where there are none."""
    seconds = [row["seconds"] for row in metrics(out)][2:]
    return statistics.median(seconds) if seconds else None


def alarms(out: Path) -> int:
    """Number of failures that the run reported."""
    earlier = sum(1 for _ in (out / "failures").glob("*/failure.json"))
    return earlier + (out / "failure.json").exists()
