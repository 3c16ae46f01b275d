"""`moemesh drill`: faults in tiny runs, one after the other, and a table of how they ended.

A row of the table is a function, registered by :func:`fault`, that carries one trial out and says
how it ended. A run that recovers must have the losses of the run without a fault, bit for bit.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moemesh.bench.drill_rank import FIRED, JUDGED, WENT_ON, Spec, read_time

#: Of every run: small enough that a trial takes the seconds of its starts.
SETTINGS: dict[str, Any] = {
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.head_dim": 4,
    "model.intermediate_size": 32,
    "model.expert_intermediate_size": 16,
    "data.seq_len": 16,
    "data.global_batch": 12,
    "train.steps": 8,
    "train.warmup_steps": 2,
    "train.checkpoint_every": 2,
    "train.validation_batches": 1,
    "train.timeout_seconds": 60,
    "train.device": "cpu",
}
PLANS: dict[str, dict[str, Any]] = {
    "dp=2 ep=2": {"plan.dp": 2, "plan.ep": 2},
    "pp=2": {"plan.pp": 2, "plan.microbatches": 2},
    "tp=2 dp=2 ep=4": {"plan.tp": 2, "plan.dp": 2, "plan.ep": 4},
}
_TIMEOUT_SECONDS = 400


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a trial ended. None: that does not apply to the fault.

    ``verdict``, ``rank``: whether kind and rank of the failure were right; ``recovered``: the run
    ended with the bits of the run without a fault; ``detected``, ``resumed``: seconds from the
    fault to the verdict, and from there to the first step behind it.
    """

    verdict: bool | None = None
    rank: bool | None = None
    recovered: bool | None = None
    detected: float | None = None
    resumed: float | None = None
    problem: str = ""

    @property
    def is_good(self) -> bool:
        """Whether nothing was wrong."""
        return False not in (self.verdict, self.rank, self.recovered) and not self.problem


class Drill:
    """Carries trials out in `folder`; runs without a fault are kept for comparison."""

    def __init__(self, folder: Path, seed: int, python: str = sys.executable) -> None:
        self.folder, self.python = folder, python
        self.random = random.Random(seed)
        self._oracles: dict[str, list[float]] = {}
        self._num_runs = 0
        (folder / "text.txt").write_text(
            "".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(400))
        )

    def new_folder(self) -> Path:
        """A folder for one run."""
        self._num_runs += 1
        folder = self.folder / f"{self._num_runs}"
        folder.mkdir()
        return folder

    def arguments(self, out: Path, plan: str, **more: Any) -> list[str]:
        """``train`` with the settings of the drill; ``train__steps=4`` sets train.steps."""
        keys = SETTINGS | PLANS[plan] | {"data.path": str(self.folder / "text.txt")}
        keys |= {name.replace("__", "."): value for name, value in more.items()}
        words = ["train", "--out", str(out)]
        for name, value in keys.items():
            words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
        return words

    def moemesh(
        self, arguments: Sequence[str], spec: Spec | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``moemesh``, with the fault of `spec` if there is one."""
        entry = ["moemesh"] if spec is None else ["moemesh.bench.drill_rank", spec.text()]
        return subprocess.run(
            [self.python, "-m", *entry, *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
        )

    def oracle(self, plan: str) -> list[float]:
        """The losses of the run without a fault."""
        if plan not in self._oracles:
            out = self.new_folder() / "run"
            done = self.moemesh(self.arguments(out, plan))
            if done.returncode:
                raise RuntimeError(f"the run without a fault failed:\n{done.stderr}")
            self._oracles[plan] = losses(out)
        return self._oracles[plan]

    def rank_fault(self, action: str, place: str, kind: str, plan: str | None = None) -> Outcome:
        """One trial of an `action` on a random rank and step at `place`; `kind`: of the failure."""
        plan = plan or self.random.choice(list(PLANS))
        whole, folder = self.oracle(plan), self.new_folder()
        out = folder / "run"
        world = 4 if plan.startswith("tp") else 2
        # Behind the first steps, which have more time; in a save: of an even step; in a
        # validation: of the last one.
        step = self.random.choice((4, 6)) if place == "save" else self.random.randint(4, 7)
        step = SETTINGS["train.steps"] if place == "validate" else step
        spec = Spec(
            action=action,
            rank=self.random.randrange(world),
            step=step,
            place=place,
            folder=str(folder),
        )
        done = self.moemesh(self.arguments(out, plan), spec)
        fired, judged, went_on = (read_time(folder / name) for name in (FIRED, JUDGED, WENT_ON))
        reports = sorted((out / "failures").glob("*/failure.json"))
        if fired is None or judged is None or not reports:
            return Outcome(verdict=False, problem=f"{spec}: no verdict:\n{done.stderr[-2000:]}")
        report = json.loads(reports[0].read_text())
        outcome = Outcome(
            verdict=report["kind"] == kind,
            rank=report["rank"] == spec.rank,
            recovered=done.returncode == 0 and losses(out) == whole,
            detected=judged - fired,
            resumed=None if went_on is None else went_on - judged,
        )
        if outcome.is_good:
            return outcome
        said = f"{spec} -> {report['kind']} of rank {report['rank']}\n{done.stderr[-2000:]}"
        return Outcome(**{**vars(outcome), "problem": said})


Trial = Callable[[Drill], Outcome]


@dataclass(frozen=True)
class Fault:
    """A row of the table: the figures of the reliability guide that it counts for, and a trial."""

    name: str
    figures: str
    trial: Trial
    is_short: bool


#: All rows, in the order of their definition.
FAULTS: dict[str, Fault] = {}


def fault(name: str, figures: str, *, is_short: bool = False) -> Callable[[Trial], Trial]:
    """Register a trial as a row; `is_short`: it belongs to the short form, too."""

    def register(trial: Trial) -> Trial:
        FAULTS[name] = Fault(name, figures, trial, is_short)
        return trial

    return register


@fault("kill -9 in the forward", "R3 R4 R5 R6", is_short=True)
def _kill_in_forward(drill: Drill) -> Outcome:
    return drill.rank_fault("kill", "forward", "Killed")


@fault("kill -9 inside a collective", "R3 R4 R5 R6")
def _kill_in_collective(drill: Drill) -> Outcome:
    return drill.rank_fault("kill", "collective", "Killed")


@fault("kill -9 during a save", "R2 R3 R4 R5 R6")
def _kill_in_save(drill: Drill) -> Outcome:
    return drill.rank_fault("kill", "save", "Killed")


@fault("kill -9 in the validation", "R3 R4 R5 R6")
def _kill_in_validation(drill: Drill) -> Outcome:
    return drill.rank_fault("kill", "validate", "Killed")


@fault("kill -STOP", "R3 R4 R5 R6")
def _stop(drill: Drill) -> Outcome:
    return drill.rank_fault("stop", drill.random.choice(("forward", "collective")), "Stopped")


@fault("endless loop", "R3 R4 R5 R6")
def _endless_loop(drill: Drill) -> Outcome:
    return drill.rank_fault("loop", "forward", "Busy")


@fault("sleep without end", "R3 R4 R5 R6")
def _endless_sleep(drill: Drill) -> Outcome:
    return drill.rank_fault("sleep", "forward", "Hung")


@fault("exception", "R3 R4 R5 R6", is_short=True)
def _exception(drill: Drill) -> Outcome:
    # One stage: a pipeline names its operation in an exception of its own.
    plan = drill.random.choice([name for name in PLANS if "pp" not in name])
    return drill.rank_fault("raise", "forward", "RuntimeError", plan)


@fault("exit(0) inside of a step", "R3 R4 R5 R6")
def _silent_exit(drill: Drill) -> Outcome:
    return drill.rank_fault("exit 0", "forward", "Exited")


@fault("exit(3) inside of a step", "R3 R4 R5 R6")
def _exit_with_a_code(drill: Drill) -> Outcome:
    return drill.rank_fault("exit 3", "forward", "Exited")


@fault("an operation that one rank alone calls", "R4 R5")
def _call_alone(drill: Drill) -> Outcome:
    # Of two ranks that differ nobody knows which one is right.
    return drill.rank_fault("call", "forward", "Mismatch", "tp=2 dp=2 ep=4")


@dataclass
class Row:
    """The trials of one fault."""

    fault: Fault
    outcomes: list[Outcome] = field(default_factory=list[Outcome])

    def cells(self) -> list[str]:
        """For a table: name, trials, right verdicts and ranks, recoveries, times, figures."""

        def share(values: list[bool | None]) -> str:
            known = [value for value in values if value is not None]
            return f"{sum(known)}/{len(known)}" if known else ""

        def times(values: list[float | None]) -> str:
            known = [value for value in values if value is not None]
            if not known:
                return ""
            return f"{statistics.median(known):.2f} / {max(known):.2f}"

        found = self.outcomes
        return [
            self.fault.name,
            str(len(found)),
            share([one.verdict for one in found]),
            share([one.rank for one in found]),
            share([one.recovered for one in found]),
            times([one.detected for one in found]),
            times([one.resumed for one in found]),
            self.fault.figures,
        ]


HEADER = [
    "fault",
    "trials",
    "verdict right",
    "rank right",
    "oracle's bits",
    "s to verdict, median / most",
    "s to next step, median / most",
    "figures",
]


def run(
    names: Sequence[str],
    *,
    trials: int,
    seed: int,
    python: str = sys.executable,
    say: Callable[[str], None] = print,
) -> list[Row]:
    """`trials` of every fault in `names`; `say` gets the problems as they come."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="moemesh-drill-") as folder:
        drill = Drill(Path(folder), seed, python)
        for name in names:
            rows.append(Row(FAULTS[name]))
            for _ in range(trials):
                start = time.monotonic()
                outcome = _one(FAULTS[name], drill)
                rows[-1].outcomes.append(outcome)
                seconds = time.monotonic() - start
                say(f"{name}: {'good' if outcome.is_good else 'WRONG'} ({seconds:.0f} s)")
                if outcome.problem:
                    say(outcome.problem)
    return rows


def _one(fault: Fault, drill: Drill) -> Outcome:
    try:
        return fault.trial(drill)
    except subprocess.TimeoutExpired as error:
        return Outcome(verdict=False, problem=f"no end after {error.timeout:.0f} s")


def losses(out: Path) -> list[float]:
    """The losses of a run, one a step; a step that stands there twice shows."""
    return [row["loss"] for row in _rows(out / "metrics.jsonl")]


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def markdown(rows: Sequence[Row]) -> str:
    """The table, for a document and for a person."""
    lines = [HEADER, ["---"] * len(HEADER), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
