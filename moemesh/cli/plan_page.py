"""The answer of `moemesh plan` as a page: one offline HTML file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from moemesh.cli.plan_text import (
    COLUMNS,
    INTERVAL,
    PARTS,
    batch_words,
    cells,
    certified,
    cheapest,
    command_lines,
    figures,
    heading,
    memory_unit,
    mfu_words,
    published,
    risk_of_memory,
    rival_sentences,
    step_parts,
)
from moemesh.planner.estimate import estimate
from moemesh.planner.layout_sources import plan_of, untrained
from moemesh.planner.search.command import PlannedAnswer
from moemesh.planner.search.rival import MEMORY_PARTS
from moemesh.planner.search.search import Candidate
from moemesh.planner.traffic.by_axis import by_axis
from moemesh.report.page import from_template
from moemesh.report.section import Table
from moemesh.report.svg import COLOURS, DARK
from moemesh.trace.memory_profile import PREDICTED_PEAK, format_bytes

#: A bar: its name, its text, and pieces of (name, size, text).
_Bar = tuple[str, str, list[tuple[str, float, str]]]


def plan_html(planned: PlannedAnswer, asked: str) -> str:
    """The page of a plan, the same bytes for the same plan; `asked` are options that `moemesh
    estimate` takes, too."""
    best = planned.candidates[0]
    capacity = planned.cluster.memory_bytes * planned.usable_share
    rows, unit = figures(planned), memory_unit(planned)[0]
    heads = ["Seconds a step", "80 % interval, s", f"Memory, {unit}", f"80 % interval, {unit}"]
    heads += ["Tokens/s", "Tokens/s a device", "MFU"]
    heads += ["Days", "GPU-hours"] if planned.tokens else []
    notes = (
        *filter(None, (risk_of_memory(planned), *published(planned), cheapest(planned))),
        certified(planned),
        f"binding: {planned.advice.binding}",
        *(f"assumed: {assumption}" for assumption in planned.certificate.assumptions),
    )
    numbered = list(enumerate(planned.candidates, start=1))
    layouts = Table(
        caption="Layouts that fit",
        header=("#", "Role", "Like it", *COLUMNS),
        rows=[
            (str(number), ", ".join(one.roles), str(one.alike), *cells(one.layout).values())
            for number, one in numbered
        ],
        num_names=2,
    )
    of_each = Table(
        caption="Time, memory and speed of each",
        header=("#", *heads),
        rows=[(str(number), *row) for number, row in enumerate(rows, start=1)],
    )
    named = [(one.asked, rival_sentences(one, best, capacity)) for one in planned.rivals]
    near = (line.rpartition(": ") for line in planned.advice.why_not)
    return from_template(
        "plan.html",
        parts=[(colour, DARK.get(colour, colour)) for colour in COLOURS],
        title=heading(planned),
        subtitle=batch_words(best),
        choice=list(cells(best.layout).items()),
        facts=list(zip(heads, rows[0], strict=True)),
        tables=[layouts, of_each],
        legend=[
            f"memory: {PREDICTED_PEAK}, of the fullest device: what is held, and what allocator "
            "and libraries add",
            INTERVAL,
            mfu_words(planned),
        ],
        charts=[_time_bars(planned), _memory_bars(planned, capacity)],
        why_not=[*named, *((change, [rest.strip()]) for change, _, rest in near)],
        traffic=_traffic(planned, best),
        notes=[f"{sentence[0].upper()}{sentence[1:]}." for sentence in notes],
        command="\n".join(command_lines(planned, best, asked)),
    )


def _chart(title: str, note: str, bars: Sequence[_Bar], limit: float = 0, text: str = "") -> Any:
    """Bars of one scale; `limit` is a line across them (0: none)."""
    names = dict.fromkeys(name for _, _, parts in bars for name, _, _ in parts)
    sums = (sum(size for _, size, _ in parts) for _, _, parts in bars)
    return {
        "title": title,
        "note": note,
        "bars": bars,
        "limit": limit,
        "limit_text": text,
        "highest": max([limit, *sums]) or 1.0,
        "colours": {name: index % len(COLOURS) for index, name in enumerate(names)},
    }


def _time_bars(planned: PlannedAnswer) -> Any:
    """Seconds of each layout by part; parts beyond the colours there are count as other."""
    shares = [step_parts(one.breakdown) for one in planned.candidates]
    largest: defaultdict[str, float] = defaultdict(float)
    for share in shares:
        for name, seconds, _ in share:
            largest[name] = max(largest[name], seconds)
    shown = sorted(largest, key=lambda name: (name == "other", -largest[name]))
    if len(shown) > len(COLOURS):
        shown = shown[: len(COLOURS) - 1]
    bars: list[_Bar] = []
    for number, (one, share) in enumerate(zip(planned.candidates, shares, strict=True), start=1):
        sums = {name: (seconds, percent) for name, seconds, percent in share if name in shown}
        if rest := [(seconds, percent) for name, seconds, percent in share if name not in shown]:
            sums["other"] = (max(sum(x for x, _ in rest), 0.0), sum(x for _, x in rest))
        parts = [
            (name, sums[name][0], f"{sums[name][0]:.4g} s ({sums[name][1]:.1f} %)")
            for name in dict.fromkeys([*shown, "other"])
            if name in sums and (sums[name][0] > 0 or name == "other")
        ]
        bars.append((f"layout {number}", f"{one.seconds:.4g} s", parts))
    note = "; ".join(f"{name}: {PARTS[name]}" for name in shown if name in PARTS)
    return _chart("Seconds of a step, by part", note, bars)


def _memory_bars(planned: PlannedAnswer, capacity: float) -> Any:
    bars: list[_Bar] = []
    for number, one in enumerate(planned.candidates, start=1):
        parts = [(name, getattr(one.memory, name)) for name in MEMORY_PARTS]
        parts.append(("libraries", one.memory.needed - sum(size for _, size in parts)))
        sized = [(name, size, format_bytes(round(size))) for name, size in parts if size > 0]
        name = f"layout {number}, pipeline rank {one.memory.rank}"
        bars.append((name, format_bytes(round(one.memory.needed)), sized))
    return _chart(
        f"Memory of the fullest device ({PREDICTED_PEAK}), by part",
        "states: weights, gradients and optimizer; activations: kept for the backward; "
        "working: what exists while one layer runs; libraries: of device, collectives, kernels",
        bars,
        capacity,
        f"usable: {format_bytes(round(capacity))} ({planned.usable_share:.1%})",
    )


def _traffic(planned: PlannedAnswer, best: Candidate) -> Table | None:
    # Of weights that do not train the closed forms know, a plan says nothing.
    is_exact = planned.model.run is None and not untrained(best.layout, planned.model)
    plan = plan_of(best.layout) if is_exact else None
    priced = estimate(planned.model, best.layout, planned.cluster, plan)
    if not (rows := by_axis(priced.traffic)):
        return None
    return Table(
        caption=f"One device of pipeline rank {priced.traffic_rank}, in a step",
        header=("Axis", "Operation", "Transfers", "Bytes of one", "Bytes of all", "Share of bytes"),
        rows=[
            (
                *(row.axis, row.op, f"{row.transfers:,}", format_bytes(round(row.bytes_each))),
                *(format_bytes(row.total_bytes), f"{row.share:.2%}"),
            )
            for row in rows
        ],
        num_names=2,
    )
