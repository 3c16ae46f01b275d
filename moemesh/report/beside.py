"""Memory, traffic and the parts of a step: rows of tables, predicted beside measured."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from moemesh.report.svg import clip
from moemesh.report.timeline_picture import KINDS
from moemesh.trace.ledger import Ledger
from moemesh.trace.memory_profile import ACTIVATION_KINDS, PARTS, MemoryProfile, format_bytes
from moemesh.trace.run import PlannedStep, Run
from moemesh.trace.timeline import Timeline

#: Spans of a step that stand beside the operations of the pipeline, as their records are named.
_SPANS = ("data", "reduce", "optimizer")


class Traffic(NamedTuple):
    """One (axis, op, phase), per step: on the rank with most of it, and over all ranks.

    Bytes as in `moemesh.trace.ledger`; an average over several steps need not be whole.
    """

    axis: str
    op: str
    phase: str
    max_count: float
    max_payload_bytes: float
    max_wire_bytes: float
    max_received_bytes: float
    sum_wire_bytes: float


def traffic_rows(ledgers: Mapping[int, Ledger], *, steps: int = 1) -> list[Traffic]:
    """Traffic of all ranks by (axis, op, phase) a step, the most bytes sent first."""
    totals: defaultdict[tuple[str, str, str], defaultdict[int, Counter[str]]]
    totals = defaultdict(lambda: defaultdict(Counter))
    for rank, ledger in ledgers.items():
        for entry in ledger.entries():
            totals[entry.axis, entry.op, entry.phase][rank].update(
                count=entry.count,
                payload=entry.payload_bytes,
                wire=entry.wire_bytes,
                received=entry.received_bytes,
            )
    rows: list[Traffic] = []
    for key, ranks in totals.items():
        count, payload, wire, received = (
            max(amounts[name] for amounts in ranks.values()) / steps
            for name in ("count", "payload", "wire", "received")
        )
        total = sum(own["wire"] for own in ranks.values()) / steps
        rows.append(Traffic(*key, count, payload, wire, received, total))
    return sorted(rows, key=lambda row: (-row.sum_wire_bytes, row.axis, row.op, row.phase))


def by_axis_and_phase(
    ledgers: Mapping[int, Ledger], *, steps: int = 1
) -> dict[tuple[str, str], float]:
    """(axis, phase) -> bytes sent by all ranks in a step."""
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for row in traffic_rows(ledgers, steps=steps):
        found[row.axis, row.phase] += row.sum_wire_bytes
    return dict(found)


def sent_in_training(run: Run) -> dict[tuple[str, str], float]:
    """(axis, phase) -> bytes sent by all ranks in a step, by its training alone."""
    found = by_axis_and_phase(run.ledgers, steps=run.ledger_steps)
    return {key: size for key, size in found.items() if key[1] not in ("evaluate", "control")}


def memory_rows(
    predicted: Sequence[MemoryProfile], measured: Sequence[MemoryProfile]
) -> list[tuple[str, ...]]:
    """(rank, class, predicted, measured, difference): every class that a rank has bytes of, and the
    kinds of its activations."""
    expected_by = {profile.rank: profile for profile in predicted}
    rows: list[tuple[str, ...]] = []
    for found in measured:
        if (expected := expected_by.get(found.rank)) is None:
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


def traffic_by_axis(
    predicted: Mapping[int, Ledger], measured: Mapping[int, Ledger], *, steps: int
) -> list[tuple[str, ...]]:
    """(axis, phase, predicted, measured, difference, share of what was measured) in bytes sent a
    step by all ranks, the most first; what no prediction covers says so."""
    expected_by, found = by_axis_and_phase(predicted), by_axis_and_phase(measured, steps=steps)
    total = sum(found.values()) or 1.0
    rows: list[tuple[str, ...]] = []
    for key in sorted(expected_by.keys() | found.keys(), key=lambda key: (-found.get(key, 0), key)):
        sent = found.get(key, 0.0)
        expected = expected_by.get(key)
        rows.append(
            (
                clip(key[0], 40),
                clip(key[1], 40),
                "not predicted" if expected is None else format_bytes(expected),
                format_bytes(sent),
                "" if expected is None else difference(expected, sent),
                f"{sent / total:.1%}",
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


#: Parts of a planned step that are transfers which no computation hides.
EXPOSED = ("tensor", "context", "experts", "pipeline", "data")


def exposed_rows(planned: PlannedStep, waited: float | None, step: float) -> list[tuple[str, ...]]:
    """(part, planned, share of the planned step, measured, share of the measured one): exposed
    communication by what sends, in milliseconds. `waited`: seconds of a step of so many that a rank
    waited for others, bubbles of the pipeline included (None: not measured)."""
    parts = {name: planned.parts.get(name, 0.0) for name in EXPOSED}
    together, bubble = sum(parts.values()), planned.parts.get("bubble", 0.0)
    rows = [*parts.items(), ("exposed communication", together), ("bubble", bubble)]
    found = [
        (name, *_of_step(seconds, planned.seconds), "", "") for name, seconds in rows if seconds
    ]
    total = _of_step(together + bubble, planned.seconds)
    measured = ("not measured", "") if waited is None else _of_step(waited, step)
    return [*found, ("waiting for other ranks", *total, *measured)]


def _of_step(seconds: float, step: float) -> tuple[str, str]:
    return f"{seconds * 1e3:,.3f}", f"{seconds / step:.1%}" if step else ""


def pipeline_bubble(timeline: Timeline, ranks: Sequence[int]) -> float:
    """Share of `ranks` x the span of their pipeline operations in which none of them ran."""
    records = tuple(r for r in timeline.records if r.kind in KINDS and r.rank in ranks)
    own = [record.rank for record in records]
    pipeline = replace(timeline, ranks=tuple(rank for rank in ranks if rank in own),
                       records=records)  # fmt: skip
    capacity = len(pipeline.ranks) * (pipeline.end - pipeline.start)
    if not capacity:
        return 0.0
    return 1.0 - sum(rank.busy for rank in pipeline.statistics()) / capacity


def time_rows(simulated: Timeline | None, measured: Timeline) -> list[tuple[str, ...]]:
    """(part, simulated, measured, difference, share of what was measured) in milliseconds; what no
    simulation says is empty."""
    found = step_parts(measured)
    expected = step_parts(simulated) if simulated is not None else {}
    total = sum(found.values()) or 1.0
    rows: list[tuple[str, ...]] = []
    for name, seconds in found.items():
        before = expected.get(name, 0.0)
        rows.append(
            (
                name,
                f"{before * 1e3:,.3f}" if before else "",
                f"{seconds * 1e3:,.3f}",
                difference(before, seconds) if before else "",
                f"{seconds / total:.1%}",
            )
        )
    return rows


def difference(predicted: float, measured: float) -> str:
    """Of the prediction from the measurement: "0 %" means equal."""
    if predicted == measured:
        return "0 %"
    return f"{predicted / measured - 1:+.2%}".replace("%", " %") if measured else "not measured"
