"""`moemesh bench partition`: baselines against the exact division into stages, as a table.

The comparison is `moemesh.planner.stages.partition_cases.compare`, passed in.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

#: (case, evaluations, seeds) -> rows, each a data class.
Compare = Callable[[str, int, int], Sequence[Any]]


def command(
    compare: Compare, *, case: str = "all", evaluations: int = 25_600, seeds: int = 3, json: bool
) -> int:
    """Run the comparison, print a table or one JSON object; returns the exit code."""
    rows = compare(case, evaluations, seeds)
    if json:
        print(json_format.dumps({"rows": [asdict(row) for row in rows]}))
    else:
        print(table(rows))
    return 0


def table(rows: Sequence[Any]) -> str:
    """The rows as Markdown."""
    lines = [
        "| case | method | seconds | gap | worst seed | evaluations | until its best | wall |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        gap = "none fits" if row.gap is None else f"{row.gap:+.2%}"
        worst = "none fits" if row.worst_gap is None else f"{row.worst_gap:+.2%}"
        seconds = "" if row.seconds is None else f"{row.seconds:.5g}"
        until = "" if row.evaluations_to_best is None else str(row.evaluations_to_best)
        lines.append(
            f"| {row.case} | {row.method} | {seconds} | {gap} | {worst} | {row.evaluations} | "
            f"{until} | {row.wall_seconds:.3g} s |"
        )
    return "\n".join(lines)
