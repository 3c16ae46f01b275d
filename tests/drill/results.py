"""Results of the drill: the outcome of a trial, a row a fault, and the file that keeps them.

The file has one JSON object a line, written as soon as a trial has ended: an interrupted drill
loses one trial and resumes from the file.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

#: For the times of the detection: what a rank does after the fault. "": no time is taken.
Kind = Literal["kill", "stop", "hang", "end", ""]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a trial. None: the field does not apply to the fault.

    ``verdict``, ``rank``: whether kind and rank of the failure were right; ``named``: whether
    report and console name the phase and, there, the collective, or the file; ``recovered``: the
    run ended with the bits of the run without a fault; ``detected``, ``resumed``: seconds from the
    fault to the verdict, and from there to the first step after it; ``step_seconds``: the median
    step; ``alarms``: verdicts that no fault caused; ``place``: where the fault came, and the plan.
    """

    verdict: bool | None = None
    rank: bool | None = None
    named: bool | None = None
    recovered: bool | None = None
    detected: float | None = None
    resumed: float | None = None
    step_seconds: float | None = None
    alarms: int = 0
    place: str = ""
    problem: str = ""

    @property
    def is_good(self) -> bool:
        """Whether nothing was wrong."""
        checks = (self.verdict, self.rank, self.named, self.recovered)
        return False not in checks and not self.alarms and not self.problem

    @property
    def is_attributed(self) -> bool | None:
        """Whether kind, rank and place or file were all reported; None where no report is due."""
        if self.named is None:
            return None
        return self.named and self.verdict is not False and self.rank is not False


Trial = Callable[[Any], Outcome]


@dataclass(frozen=True)
class Fault:
    """A row of the table: the figures of the reliability guide that it counts for, and a trial."""

    name: str
    figures: str
    trial: Trial
    is_short: bool = False
    kind: Kind = ""


HEADER = ["fault", "trials", "verdict right", "rank right", "place or file named", "oracle's bits"]
HEADER += ["s to verdict, median / most", "s to next step, median / most", "figures"]


@dataclass
class Row:
    """The trials of one fault."""

    fault: Fault
    outcomes: list[Outcome] = field(default_factory=list[Outcome])

    def cells(self) -> list[str]:
        """For a table, in the order of :data:`HEADER`."""
        outcomes = self.outcomes
        return [
            self.fault.name,
            str(len(outcomes)),
            share([one.verdict for one in outcomes]),
            share([one.rank for one in outcomes]),
            share([one.named for one in outcomes]),
            share([one.recovered for one in outcomes]),
            times([one.detected for one in outcomes]),
            times([one.resumed for one in outcomes]),
            self.fault.figures,
        ]


def share(values: Sequence[bool | None]) -> str:
    """``3/4``: how many of those that are known are true; empty where none is known."""
    known = [value for value in values if value is not None]
    return f"{sum(known)}/{len(known)}" if known else ""


def times(values: Sequence[float | None]) -> str:
    """``0.20 / 0.31``: median and most of those that are known, in seconds."""
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f} / {max(known):.2f}" if known else ""


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, for a document and for a person."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


class ResultsFile:
    """Trials and soaks that were carried out, one a line; without a path nothing is kept.

    Several drills may write to one file at once: each line is one write.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def records(self) -> list[dict[str, Any]]:
        """All lines; one that was cut off is left out."""
        if self.path is None or not self.path.exists():
            return []
        rows: list[dict[str, Any]] = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        return rows

    def outcomes(self, name: str) -> dict[int, Outcome]:
        """Number of the trial -> outcome, for the fault of that name."""
        known = set(Outcome.__dataclass_fields__)
        return {
            record["trial"]: Outcome(**{key: record[key] for key in known & record.keys()})
            for record in self.records()
            if record.get("fault") == name
        }

    def soaks(self) -> list[dict[str, Any]]:
        """The reports of :mod:`tests.drill.soak`."""
        return [record["soak"] for record in self.records() if "soak" in record]

    def add(self, name: str, number: int, outcome: Outcome, seconds: float) -> None:
        """Add a trial that took `seconds`, with the load of the machine after it."""
        load = round(os.getloadavg()[0], 1)
        kept = {key: value for key, value in asdict(outcome).items() if value not in (None, "")}
        self._write({"fault": name, "trial": number, "seconds": seconds, "load": load, **kept})

    def add_soak(self, report: dict[str, Any]) -> None:
        """A soak."""
        self._write({"soak": report})

    def _write(self, record: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
