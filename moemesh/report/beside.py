"""Predicted beside measured: rows of tables for memory, traffic and the parts of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moemesh.report.boxes import KINDS
from moemesh.report.traffic import traffic_rows
from moemesh.trace.ledger import Ledger
from moemesh.trace.memory import ACTIVATION_KINDS, PARTS, MemoryProfile, format_bytes
from moemesh.trace.timeline import Timeline

#: Spans of a step that stand beside the operations of the pipeline, as their records are named.
_SPANS = ("data", "reduce", "optimizer")


def memory_rows(
    predicted: Sequence[MemoryProfile], measured: Sequence[MemoryProfile]
) -> list[tuple[str, ...]]:
    """(rank, class, predicted, measured, difference): every class that a rank has bytes of, and the
    kinds of its activations."""
    foreseen = {profile.rank: profile for profile in predicted}
    rows: list[tuple[str, ...]] = []
    for found in measured:
        if (expected := foreseen.get(found.rank)) is None:
            continue
        pairs = [(name.replace("_", " "), expected.parts()[name], found.parts()[name])
                 for name in PARTS]  # fmt: skip
        place = PARTS.index("activations") + 1
        kinds = (expected.activation_kinds, found.activation_kinds)
        pairs[place:place] = [
            (f"· {kind}", kinds[0].get(kind, 0), kinds[1].get(kind, 0)) for kind in ACTIVATION_KINDS
        ]
        rows += [
            (str(found.rank), name, format_bytes(before), format_bytes(after),
             difference(before, after))
            for name, before, after in pairs
            if before or after
        ]  # fmt: skip
    return rows


def traffic_beside(
    predicted: Mapping[int, Ledger], measured: Mapping[int, Ledger], *, steps: int
) -> list[tuple[str, ...]]:
    """(axis, operation, phase, predicted, measured, difference) in bytes sent a step by all ranks,
    of the lines that are predicted."""
    found = {row.name: row for row in traffic_rows(measured, steps=steps)}
    rows: list[tuple[str, ...]] = []
    for row in traffic_rows(predicted):
        sent = found[row.name].sum_wire_bytes if row.name in found else 0.0
        rows.append(
            (
                row.axis,
                row.op,
                row.phase,
                format_bytes(row.sum_wire_bytes),
                format_bytes(sent),
                difference(row.sum_wire_bytes, sent),
            )
        )
    return rows


def step_parts(timeline: Timeline) -> dict[str, float]:
    """Mean seconds (or ticks) of a rank by part of its last step, which add up to its span.

    Waiting is for messages of other stages: exposed communication of the pipeline, and its bubble.
    """
    last, ranks = timeline.last_step(), max(len(timeline.ranks), 1)
    parts = dict.fromkeys(("data", "forward and backward", "waiting", "reduce", "optimizer"), 0.0)
    seen: set[tuple[int, float, float]] = set()
    for record in last.records:
        if record.kind in KINDS:
            # The operations of a block share its time.
            moment = record.rank, record.start, record.end
            if moment not in seen:
                seen.add(moment)
                parts["forward and backward"] += record.duration / ranks
                parts["waiting"] += record.wait / ranks
        elif record.name in _SPANS:
            parts[record.name] += record.duration / ranks
    spans = sum(rank.span for rank in last.statistics()) / ranks
    rest = spans - sum(parts.values())
    if last.source == "simulated":
        parts["waiting"], rest = parts["waiting"] + rest, 0.0
    return {**parts, "rest": max(rest, 0.0)}


def time_rows(simulated: Timeline | None, measured: Timeline) -> list[tuple[str, ...]]:
    """(part, simulated, measured, difference) in milliseconds; what no simulation says is empty."""
    found = step_parts(measured)
    expected = step_parts(simulated) if simulated is not None else {}
    rows: list[tuple[str, ...]] = []
    for name, seconds in found.items():
        before = expected.get(name, 0.0)
        rows.append(
            (
                name,
                f"{before * 1e3:,.3f}" if before else "",
                f"{seconds * 1e3:,.3f}",
                difference(before, seconds) if before else "",
            )
        )
    return rows


def difference(predicted: float, measured: float) -> str:
    """Of the prediction from the measurement: "0 %" means equal."""
    if predicted == measured:
        return "0 %"
    return f"{predicted / measured - 1:+.2%}".replace("%", " %") if measured else "not measured"
