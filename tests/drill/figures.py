"""The twelve figures of reliability, R1 to R12, as far as the trials of a drill measure them.

Some figures need more than a trial has (every bit, every system call, every layout): their text
names the tests that measure them; ``docs/results/reliability.md`` has the counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.drill.results import Kind, Outcome, Row

HEADER = ["figure", "goal", "by the trials of the drill", "met", "beyond the drill"]
#: Most seconds from the fault to the verdict; a hang has ten median steps where that is more.
BOUNDS: dict[Kind, float] = {"kill": 1.0, "stop": 2.0, "hang": 3.0}
_MEDIAN_STEPS = 10
_RESTART_SECONDS = 15.0
_NUM_KILLS, _NUM_FAULTS, _NUM_KINDS = 100, 300, 12
_ATTRIBUTED = 0.99
_GOODPUT = 0.95
_CLEAN_SECONDS = 7200.0


@dataclass(frozen=True)
class Figure:
    """A figure: its goal, the result of the trials, and whether the result meets the goal.

    None: the trials alone cannot decide; `tests`: the tests that measure the rest.
    """

    name: str
    goal: str
    measured: str
    is_met: bool | None
    tests: str = ""

    def cells(self) -> list[str]:
        """For a table, in the order of :data:`HEADER`."""
        met = {True: "yes", False: "no", None: ""}[self.is_met]
        return [self.name, self.goal, self.measured, met, self.tests]


def figures(rows: Sequence[Row], soaks: Sequence[dict[str, Any]] = ()) -> list[Figure]:
    """All twelve, of the trials in `rows` and the reports of :mod:`tests.drill.soak`."""
    counts = _Counts(rows)
    special = {
        "R3": _recovery(counts),
        "R4": _detection(counts, soaks),
        "R5": _attribution(counts),
        "R6": _goodput(counts, soaks),
    }
    counted = {
        name: Figure(name, goal, counts.good(name, noun), counts.none_wrong(name), tests)
        for name, goal, noun, tests in _COUNTED
    }
    goal = "28 faults in 3 phases each, in 10 minutes; simulations, coverage"
    measured = f"{len(rows)} faults of the drill, {counts.num_trials} trials"
    last = {"R12": Figure("R12", goal, measured, None)}
    every = special | counted | last
    return sorted(every.values(), key=lambda figure: int(figure.name[1:]))


#: Figures that count trials: name, goal, what a good trial is, and the tests that measure the rest.
_COUNTED = (
    ("R1", "every flipped bit (10,000) and damaged file (1,000) found, tensor named",
     "damaged checkpoints found and passed over", "tests/checkpoint/test_drill.py"),
    ("R2", "kill at every call of a save (500), full disk: no torn load, no lost checkpoint",
     "kills in a save and full disks",
     "tests/checkpoint/test_drill.py tests/checkpoint/test_power_loss.py"),
    ("R7", "60 changes of layout: state equal to the bit, losses to 1e-6",
     "resumes under another plan to losses within 1e-6", "tests/train/test_resharding.py"),
    ("R8", "40 layouts: gradients equal to one process to 1e-6", "", "tests/parity/test_parity.py"),
    ("R9", "500 NaN, Inf and flips: none reaches the weights, all named",
     "NaN and differing copies named", "tests/train/test_numerical_faults.py"),
    ("R10", "adversarial routing: no crash, peak within 1.05 of the bound", "",
     "tests/parity/test_bounded_rows.py"),
    ("R11", "hostile files: typed errors only; no socket beyond loopback",
     "runs without a socket beyond loopback", "tests/checkpoint/test_fuzz.py"),
)  # fmt: skip


class _Counts:
    """Sums over the rows of a drill."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self.num_trials = sum(len(row.outcomes) for row in rows)

    def outcomes(self, belongs: Callable[[Row], bool]) -> list[Outcome]:
        """Outcomes of the rows for which `belongs` is true."""
        return [one for row in self._rows if belongs(row) for one in row.outcomes]

    def of(self, figure: str) -> list[Outcome]:
        """Outcomes of the rows that count for the figure."""
        return self.outcomes(lambda row: figure in row.fault.figures.split())

    def of_kind(self, kind: Kind) -> list[Outcome]:
        """Outcomes of the rows with times of this kind."""
        return self.outcomes(lambda row: row.fault.kind == kind)

    def good(self, figure: str, noun: str) -> str:
        """``24 of 25 <noun>``; empty without trials."""
        good = [one.is_good for one in self.of(figure)]
        return f"{sum(good)} of {len(good)} {noun}" if good else ""

    def none_wrong(self, figure: str) -> bool | None:
        """False where a trial went wrong; None otherwise: the count is that of the tests."""
        return None if all(one.is_good for one in self.of(figure)) else False

    def alarms(self) -> int:
        """Verdicts that no fault caused."""
        return sum(one.alarms for row in self._rows for one in row.outcomes)

    def attributed(self) -> list[list[bool]]:
        """For each kind of fault that is to be named, whether its trials were."""
        texts = [
            [known for one in row.outcomes if (known := one.is_attributed) is not None]
            for row in self._rows
        ]
        return [one for one in texts if one]


def _recovery(counts: _Counts) -> Figure:
    kills = [one.recovered is True for one in counts.of_kind("kill")]
    others = [
        one.recovered
        for one in counts.outcomes(lambda row: row.fault.kind != "kill")
        if one.recovered is not None
    ]
    return Figure(
        "R3",
        f"{_NUM_KILLS} kills recovered to the state and the losses of the run without one",
        f"{sum(kills)} of {len(kills)} kills; {sum(others)} of {len(others)} other faults",
        False if not all(kills) else True if len(kills) >= _NUM_KILLS else None,
    )


def is_in_time(kind: Kind, outcome: Outcome) -> bool:
    """Whether the verdict came within the bound of the kind."""
    if outcome.detected is None:
        return False
    steps = _MEDIAN_STEPS * (outcome.step_seconds or 0.0) if kind == "hang" else 0.0
    return outcome.detected <= max(BOUNDS[kind], steps)


def _detection(counts: _Counts, soaks: Sequence[dict[str, Any]]) -> Figure:
    parts: list[str] = []
    in_time: list[bool] = []
    for kind in BOUNDS:
        outcomes = counts.of_kind(kind)
        seconds = [one.detected for one in outcomes if one.detected is not None]
        if not seconds:
            continue
        good = [is_in_time(kind, one) for one in outcomes]
        in_time += good
        middle, most = statistics.median(seconds), max(seconds)
        parts.append(
            f"{kind}: median {middle:.2f} s, most {most:.2f} s, in time {sum(good)} of {len(good)}"
        )
    clean = [soak for soak in soaks if not soak["faults"]]
    clean_seconds = sum(soak["wall_seconds"] for soak in clean)
    alarms = counts.alarms() + sum(soak["false_alarms"] for soak in soaks)
    parts.append(f"{alarms} false alarms in {counts.num_trials} trials")
    if soaks:
        minutes = sum(soak["wall_seconds"] for soak in soaks) / 60
        parts[-1] += f" and {minutes:.0f} minutes ({clean_seconds / 60:.0f} of them clean)"
    is_wrong = alarms > 0 or not all(in_time)
    return Figure(
        "R4",
        "kill 1 s, stop 2 s, hang 3 s or 10 median steps; no false alarm in 2 h clean",
        "; ".join(parts),
        False if is_wrong else True if in_time and clean_seconds >= _CLEAN_SECONDS else None,
        "tests/train/test_network_cut.py",
    )


def _attribution(counts: _Counts) -> Figure:
    kinds = counts.attributed()
    total = sum(map(len, kinds))
    right = sum(map(sum, kinds))
    is_enough = total >= _NUM_FAULTS and len(kinds) >= _NUM_KINDS
    is_right = right >= _ATTRIBUTED * total
    return Figure(
        "R5",
        f"{_NUM_FAULTS} faults of {_NUM_KINDS} kinds: {_ATTRIBUTED:.0%} with rank and place named",
        f"{right} of {total} faults of {len(kinds)} kinds",
        False if not is_right else True if is_enough else None,
    )


def _goodput(counts: _Counts, soaks: Sequence[dict[str, Any]]) -> Figure:
    resumed = [one.resumed for one in counts.of("R6") if one.resumed is not None]
    parts: list[str] = []
    met: list[bool] = []
    if resumed:
        middle, most = statistics.median(resumed), max(resumed)
        parts.append(
            f"verdict to next step: median {middle:.2f} s, most {most:.2f} s of {len(resumed)}"
        )
    for soak in (soak for soak in soaks if soak["faults"]):
        restarts = [one["resumed"] for one in soak["faults"] if one["resumed"] is not None]
        parts.append(
            f"{soak['effective_share']:.1%} effective in {soak['wall_seconds'] / 60:.0f} minutes "
            f"with {len(soak['faults'])} faults, restart to first step "
            f"{max(restarts, default=0.0):.1f} s at most"
        )
        met.append(
            soak["effective_share"] >= _GOODPUT
            and len(restarts) == len(soak["faults"])
            and max(restarts, default=0.0) <= _RESTART_SECONDS
        )
    return Figure(
        "R6",
        f"{_GOODPUT:.0%} effective time with a fault every 5 minutes; restart in 15 s",
        "; ".join(parts),
        all(met) if met else None,
        "" if met else "python -m tests.drill --soak 7200",
    )
