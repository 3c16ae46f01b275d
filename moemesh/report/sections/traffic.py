"""Bytes between ranks, predicted beside measured, by axis and phase."""

from __future__ import annotations

from moemesh.report import beside
from moemesh.report.section import (
    MAX_TABLE_ROWS,
    Chapter,
    Table,
    figures,
    left_out,
    missing,
    plural,
)
from moemesh.report.svg import clip
from moemesh.report.traffic import traffic_bars, traffic_rows
from moemesh.trace.memory_profile import format_bytes
from moemesh.trace.run import Run

_IDENTITY, _TITLE = "traffic-section", "Traffic"
_BY_OPERATION = (
    "Axis",
    "Operation",
    "Phase",
    "Operations, busiest rank",
    "Payload in a step, busiest rank",
    "Sent in a step, busiest rank",
    "Received in a step, busiest rank",
    "Sent in a step, all ranks",
    "Sent in a step, all ranks (bytes)",
)


def traffic(run: Run) -> Chapter:
    """From the ledgers of the run and of the planner."""
    if not run.ledgers:
        text = missing(run, "ledger.json")
        return Chapter(identity=_IDENTITY, title=_TITLE, missing=text)
    rows = traffic_rows(run.ledgers, steps=run.ledger_steps)
    if not rows:
        text = "No rank sent anything to another."
        return Chapter(identity=_IDENTITY, title=_TITLE, missing=text)
    steps = plural(run.ledger_steps, "step")
    covered = f", averaged over {steps}" if run.ledger_steps > 1 else ""
    by_operation = Table(
        caption=f"By operation; the number of operations is that of {steps}",
        header=_BY_OPERATION,
        rows=[
            (
                *(clip(name, 40) for name in (row.axis, row.op, row.phase)),
                f"{row.max_count * run.ledger_steps:,.0f}",
                format_bytes(row.max_payload_bytes),
                format_bytes(row.max_wire_bytes),
                format_bytes(row.max_received_bytes),
                format_bytes(row.sum_wire_bytes),
                f"{row.sum_wire_bytes:,.0f}",
            )
            for row in rows[:MAX_TABLE_ROWS]
        ],
        num_names=3,
        folded=True,
    )
    bars = traffic_bars(run.ledgers, run.predicted_ledgers, steps=run.ledger_steps)
    caption = "Bytes sent in one step by all ranks, by axis and phase"
    by_axis = beside.traffic_by_axis(run.predicted_ledgers, run.ledgers, steps=run.ledger_steps)
    return Chapter(
        identity=_IDENTITY,
        title=_TITLE,
        figures=figures((caption, bars)),
        tables=[
            Table(
                caption="Bytes sent in one step by all ranks, predicted before it and measured",
                header=("Axis", "Phase", "Predicted", "Measured", "Difference", "Share, measured"),
                rows=by_axis[:MAX_TABLE_ROWS],
                num_names=2,
            ),
            by_operation,
        ],
        note=f"From the ledgers of {plural(len(run.ledgers), 'rank')}{covered}. Predictions are "
        "for uniform routing; validation and control are not predicted."
        + left_out(len(rows), "rows"),
    )
