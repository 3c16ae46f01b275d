"""Table rows and bars of predicted and measured bytes and seconds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from moemesh.report import svg
from moemesh.report.timeline_picture import KINDS
from moemesh.trace.ledger import Ledger
from moemesh.trace.memory_profile import (
    ACTIVATION_KINDS,
    PARTS,
    MemoryProfile,
    MemoryProfiles,
    format_bytes,
)
from moemesh.trace.run import PlannedStep, Run
from moemesh.trace.step_seconds import (
    PASSES,
    TOGETHER,
    StepSeconds,
    flop_rate,
    is_communication,
)
from moemesh.trace.timeline import Timeline, of_blocks

#: Names of the records of a step that are not operations of the pipeline.
_SPANS = ("data", "reduce", "optimizer")


class Traffic(NamedTuple):
    """Traffic of one (axis, op, phase) per step: the largest of a rank for each number, and the
    bytes that all ranks send.

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
    """Traffic of all ranks by (axis, op, phase) per step, sorted by bytes sent, largest first."""
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
        total = sum(amounts["wire"] for amounts in ranks.values()) / steps
        rows.append(Traffic(*key, count, payload, wire, received, total))
    return sorted(rows, key=lambda row: (-row.sum_wire_bytes, row.axis, row.op, row.phase))


def by_axis_and_phase(
    ledgers: Mapping[int, Ledger], *, steps: int = 1
) -> dict[tuple[str, str], float]:
    """(axis, phase) -> bytes sent by all ranks in a step."""
    sent: defaultdict[tuple[str, str], float] = defaultdict(float)
    for row in traffic_rows(ledgers, steps=steps):
        sent[row.axis, row.phase] += row.sum_wire_bytes
    return dict(sent)


def sent_in_training(run: Run) -> dict[tuple[str, str], float]:
    """(axis, phase) -> bytes sent by all ranks in a step, without evaluation and control."""
    sent = by_axis_and_phase(run.ledgers, steps=run.ledger_steps)
    return {key: size for key, size in sent.items() if key[1] not in ("evaluate", "control")}


def _compared(
    names: Sequence[str],
    predicted: float | None,
    measured: float,
    form: Callable[[float], str],
    *,
    absent: str = "",
    total: float = 0.0,
) -> tuple[str, ...]:
    """Row (names, predicted or `absent`, measured, difference), and with a `total` the share of
    `measured` in it; `form` formats a number."""
    share = (f"{measured / total:.1%}",) if total else ()
    if predicted is None:
        return *names, absent, form(measured), "", *share
    return *names, form(predicted), form(measured), difference(predicted, measured), *share


def memory_rows(
    predicted: Sequence[MemoryProfile], measured: Sequence[MemoryProfile]
) -> list[tuple[str, ...]]:
    """Rows (rank, class, predicted, measured, difference) of all classes with bytes, and of the
    kinds of activations, for ranks with a prediction."""
    expected_by = {profile.rank: profile for profile in predicted}
    rows: list[tuple[str, ...]] = []
    for profile in measured:
        if (expected := expected_by.get(profile.rank)) is None:
            continue
        expected_kinds, actual_kinds = expected.activation_kinds, profile.activation_kinds
        kinds = [
            (f"· {kind}", expected_kinds.get(kind, 0), actual_kinds.get(kind, 0))
            for kind in ACTIVATION_KINDS
        ]
        for part in PARTS:
            sizes = (part.replace("_", " "), expected.parts()[part], profile.parts()[part])
            rows += [
                _compared((str(profile.rank), name), size, measured_size, format_bytes)
                for name, size, measured_size in (sizes, *(kinds if part == "activations" else ()))
                if size or measured_size
            ]
    return rows


def traffic_by_axis(
    predicted: Mapping[int, Ledger], measured: Mapping[int, Ledger], *, steps: int
) -> list[tuple[str, ...]]:
    """Rows (axis, phase, predicted, measured, difference, share of the measured total) in bytes
    sent by all ranks in a step, largest first; rows without a prediction contain "not
    predicted"."""
    expected, actual = by_axis_and_phase(predicted), by_axis_and_phase(measured, steps=steps)
    compared = partial(_compared, absent="not predicted", total=sum(actual.values()) or 1.0)
    return [
        compared([svg.clip(x, 40) for x in key], expected.get(key), size, format_bytes)
        for size, key in sorted(
            ((actual.get(key, 0.0), key) for key in expected.keys() | actual.keys()),
            key=lambda pair: (-pair[0], pair[1]),
        )
    ]


def step_parts(timeline: Timeline) -> dict[str, float]:
    """Mean seconds (or ticks) of a rank in each part of its last step; they add up to its span
    unless parts overlap.

    "waiting" is the time for messages of other stages: exposed communication of the pipeline, and
    its bubble.
    """
    last, ranks = timeline.last_step(), max(len(timeline.ranks), 1)
    parts = dict.fromkeys(("data", "forward and backward", "waiting", "reduce", "optimizer"), 0.0)
    for record in of_blocks(record for record in last.records if record.kind in KINDS):
        parts["forward and backward"] += record.duration / ranks
        parts["waiting"] += record.wait / ranks
    for record in last.records:
        if record.kind not in KINDS and record.name in _SPANS:
            parts[record.name] += record.duration / ranks
    spans = sum(rank.span for rank in last.statistics()) / ranks
    remainder = spans - sum(parts.values())
    if last.source == "simulated":  # it has no other work: ranks wait
        parts["waiting"], remainder = parts["waiting"] + remainder, 0.0
    return {**parts, "rest": max(remainder, 0.0)}


#: Parts of a planned step with transfers that computation does not hide.
EXPOSED = ("tensor", "context", "experts", "pipeline", "data")


def exposed_rows(planned: PlannedStep, waited: float | None, step: float) -> list[tuple[str, ...]]:
    """Rows (part, planned, share of the planned step, measured, share of the measured step) of
    exposed communication by source, in milliseconds. `waited`: seconds of a step of `step` seconds
    that a rank waited for others, including bubbles of the pipeline; None if not measured."""
    parts = {name: planned.parts.get(name, 0.0) for name in EXPOSED}
    together, bubble = sum(parts.values()), planned.parts.get("bubble", 0.0)
    sources = [*parts.items(), ("exposed communication", together), ("bubble", bubble)]
    rows = [
        (name, *of_step(seconds, planned.seconds), "", "") for name, seconds in sources if seconds
    ]
    total = of_step(together + bubble, planned.seconds)
    measured = ("not measured", "") if waited is None else of_step(waited, step)
    return [*rows, ("waiting for other ranks", *total, *measured)]


def of_step(seconds: float, step: float) -> tuple[str, str]:
    """`seconds` in milliseconds, and as a share of a step, as texts."""
    return milliseconds(seconds), f"{seconds / step:.1%}" if step else ""


def pipeline_bubble(timeline: Timeline, ranks: Sequence[int]) -> float:
    """Idle share of `ranks` during the span of their pipeline operations."""
    records = tuple(r for r in timeline.records if r.kind in KINDS and r.rank in ranks)
    active = [record.rank for record in records]
    pipeline = replace(timeline, ranks=tuple(rank for rank in ranks if rank in active),
                       records=records)  # fmt: skip
    capacity = len(pipeline.ranks) * (pipeline.end - pipeline.start)
    if not capacity:
        return 0.0
    return 1.0 - sum(rank.busy for rank in pipeline.statistics()) / capacity


def time_rows(simulated: Timeline | None, measured: Timeline) -> list[tuple[str, ...]]:
    """Rows (part, simulated, measured, difference, share of the measured total) in milliseconds;
    cells without a simulated value are empty."""
    parts = step_parts(measured)
    expected = step_parts(simulated) if simulated is not None else {}
    total = sum(parts.values()) or 1.0
    return [
        _compared([name], expected.get(name) or None, seconds, milliseconds, total=total)
        for name, seconds in parts.items()
    ]


def seconds_rows(seconds: StepSeconds) -> list[tuple[str, ...]]:
    """Rows (part, predicted, measured, difference, share of the measured step) in milliseconds of
    the mean rank, and their sum."""
    measured, predicted = seconds.mean(), seconds.mean_predicted()
    total = sum(measured.values())
    rows = [
        _compared([part], predicted.get(part), amount, milliseconds, total=total)
        for part, amount in measured.items()
    ]
    # Without predicted passes the sum of the predicted parts is not a step.
    has_passes = bool(predicted.keys() & {TOGETHER, *PASSES})
    whole = sum(predicted.values()) if has_passes else None
    return [*rows, _compared(["whole step"], whole, total, milliseconds, total=total)]


#: Smallest share of the whole, and smallest ratio (or inverse) of measured to predicted time and to
#: bytes, for which a difference is explained.
_LARGE_SHARE, _LARGE_TIME, _LARGE_BYTES = 0.05, 1.5, 1.1
#: Reasons for the difference of a part: longer passes, longer waits, other bytes.
_SLOWER = (
    "the prediction is for uniform routing, and for the speed of a small model of such layers "
    "before the first step; other programs on the machine add to it"
)
_WAITS_TOO = (
    "the prediction counts bytes and operations on links that wait for no rank; a rank that has "
    "less to compute waits here for the others"
)
_UNIFORM = "the prediction is for uniform routing, and the chapter on expert load shows the run's"


def large_differences(
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    ratio: float = _LARGE_BYTES,
    reason_of: Callable[[str, float], str] = lambda part, times: _UNIFORM,
) -> list[str]:
    """A sentence on each part whose prediction is wrong by the factor `ratio` or more, with the
    reason for (part, measured over predicted). Parts below 5 % of the whole, and parts without a
    prediction, have none."""
    total, sentences = sum(measured.values()), list[str]()
    for part, amount in measured.items():
        expected = predicted.get(part, 0.0)
        times = amount / expected if expected else 1.0
        if not 1 / ratio < times < ratio and max(amount, expected) >= _LARGE_SHARE * total:
            name = f"{part[:1].upper()}{part[1:]}"
            sentences.append(f"{name}: {times:.2g} times the prediction; {reason_of(part, times)}.")
    return sentences


def about_seconds(seconds: StepSeconds) -> list[str]:
    """Sentences on the source of the predicted seconds, and on parts that take far more or far
    less."""
    if not seconds.predicted:
        return []
    rates = [(part, seconds.rates[part]) for part in PASSES if part in seconds.rates]
    flops = [f"{part} {flop_rate(rate / 1e12)}" for part, rate in rates]
    source = (
        "Predicted are the FLOPs, bytes and operations of each part over the rates that all ranks "
        "reached at the same time before the first step, those of layers in a small model of the "
        f"same widths ({', '.join(flops)}, of rank 0)."
    )

    def reason(part: str, times: float) -> str:
        if times < 1:
            return "the rates before the first step were lower than those during the steps"
        return _WAITS_TOO if is_communication(part) else _SLOWER

    predicted, measured = seconds.mean_predicted(), seconds.mean()
    return [source, *large_differences(predicted, measured, _LARGE_TIME, reason)]


def about_memory(predicted: Sequence[MemoryProfile], measured: MemoryProfile) -> list[str]:
    """Sentences on classes of memory of one rank that differ from their prediction."""
    # Without a prediction the rank is compared with itself: nothing differs.
    prediction = next((profile for profile in predicted if profile.rank == measured.rank), measured)
    expected, actual = (
        {name.replace("_", " "): size for name, size in profile.parts().items()}
        for profile in (prediction, measured)
    )
    return large_differences(expected, actual)


def about_traffic(
    predicted: Mapping[int, Ledger], measured: Mapping[int, Ledger], *, steps: int
) -> list[str]:
    """Sentences on axes whose bytes differ from their prediction."""
    expected, sent = (
        {f"over {axis}, {phase}": size for (axis, phase), size in sizes.items()}
        for sizes in (by_axis_and_phase(predicted), by_axis_and_phase(measured, steps=steps))
    )
    return large_differences(expected, sent)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"


def difference(predicted: float, measured: float) -> str:
    """Relative error of the prediction as text, "0 %" if both are equal; for a prediction of more
    than ten times the measured value, that ratio; "not measured" for a measured value of 0."""
    if predicted == measured:
        return "0 %"
    if measured and predicted > 10 * measured:
        return f"{predicted / measured:,.0f} times"
    return f"{predicted / measured - 1:+.2%}".replace("%", " %") if measured else "not measured"


#: Colours of the classes of memory; neighbours differ in lightness, for prints in grey.
MEMORY_COLOURS: dict[str, str] = {
    "dense_weights": "#1f5fa8",
    "expert_weights": "#9cc4ee",
    "gathered_weights": "#5b3fa0",
    "weight_versions": "#c9d6df",
    "gradients": "#16704a",
    "optimizer": "#cfb0e2",
    "activations": "#b34700",
    "buffers": "#f3cd83",
    "snapshots": "#7a7f85",
}
#: Most bars of traffic and of ranks, and the height of a row in pixels.
_MAX_TRAFFIC, _MAX_RANKS, _STACKED_ROW = 24, 32, 24


class StackedBar(NamedTuple):
    """A row of a figure: its name, pieces (part, size, text of the size), a text to their right,
    and the position of a line across it (None: no line)."""

    name: str
    pieces: Sequence[tuple[str, float, str]]
    text: str
    mark: float | None = None


def stacked_bars(
    identity: str,
    title: str,
    description: str,
    bars: Sequence[StackedBar],
    *,
    colours: Mapping[str, str] | None = None,
    mark: str = "",
    unit: str = "bytes",
) -> str:
    """A figure of stacked bars on one scale; each piece has the colour of its part (by default the
    next of the palette). `mark` is the legend's name of the lines across the bars."""
    if colours is None:
        parts = dict.fromkeys(part for bar in bars for part, _, _ in bar.pieces)
        palette = (*svg.COLOURS, *map(svg.tint, svg.COLOURS))
        colours = dict(zip(parts, palette, strict=False))
    marks = [(f"{mark} (line)", svg.INK)] if mark else []
    legend, height = svg.legend([*colours.items(), *marks], left=0, top=4)
    left = max(66.0, *(svg.text_width(bar.name) + 16 for bar in bars))
    text_width = max(svg.text_width(bar.text, 11) for bar in bars) + 16
    top, right = height + 26, svg.WIDTH - max(130.0, text_width)
    highest = max(
        max(sum(size for _, size, _ in bar.pieces), bar.mark or 0.0) for bar in bars
    ) or 1.0  # fmt: skip
    bottom = top + len(bars) * _STACKED_ROW
    body, scale = [legend], 1.0  # ticks are round multiples of the scale
    while unit == "bytes" and highest / scale >= 1024:
        scale *= 1024
    for value in (tick * scale for tick in svg.ticks(0, highest / scale, 6)):
        x = left + value / highest * (right - left)
        name = format_bytes(value) if unit == "bytes" else f"{svg.short(value)} {unit}"
        body.append(svg.line(x, top, x, bottom, svg.GRID))
        body.append(svg.text(x, top - 6, name, anchor="middle", fill=svg.MUTED, size=11))
    for index, bar in enumerate(bars):
        y, x = top + index * _STACKED_ROW, left
        body.append(svg.text(left - 8, y + 16, bar.name, anchor="end"))
        for part, size, size_text in bar.pieces:
            width = size / highest * (right - left)
            if width >= 0.05:
                hint = f"{bar.name}, {part}: {size_text}"
                edge = f' stroke="{svg.INK}" stroke-width="0.5"'
                fill, look = colours[part], {"title": hint, "more": edge}
                body.append(svg.rectangle(x, y + 4, width, _STACKED_ROW - 8, fill, **look))
            x += width
        if bar.mark is not None:
            mark_x = left + bar.mark / highest * (right - left)
            body.append(svg.line(mark_x, y + 1, mark_x, y + _STACKED_ROW - 1, svg.INK, 2.5))
            x = max(x, mark_x)
        body.append(svg.text(x + 8, y + 16, bar.text, fill=svg.MUTED, size=11))
    body.append(svg.line(left, top, left, bottom, svg.INK))
    return svg.figure(identity, title, description, bottom + 8, body)


def traffic_bars(
    ledgers: Mapping[int, Ledger], predicted: Mapping[int, Ledger] | None = None, *, steps: int = 1
) -> str:
    """A bar for each axis and phase: bytes sent by all ranks in a step, coloured by axis, with a
    line at the prediction. "" without traffic."""
    measured = by_axis_and_phase(ledgers, steps=steps)
    expected = by_axis_and_phase(predicted or {})
    sent = {key: max(measured.get(key, 0.0), expected.get(key, 0.0)) for key in measured | expected}
    keys = sorted((key for key in sent if sent[key] > 0), key=lambda key: (-sent[key], key))
    if not keys:
        return ""
    shown = keys[:_MAX_TRAFFIC]
    bars: list[StackedBar] = []
    for axis, phase in shown:
        size, prediction = measured.get((axis, phase), 0.0), expected.get((axis, phase))
        text = format_bytes(size)
        text += "" if prediction is None else f", predicted {format_bytes(prediction)}"
        name = svg.clip(f"{axis} · {phase}", 26)
        bars.append(StackedBar(name, [(axis, size, format_bytes(size))], text, prediction))
    note = f" The {len(keys) - len(shown)} smallest are left out." if len(keys) > len(shown) else ""
    axis, phase = shown[0]
    description = (
        f"Bytes sent in one step by all ranks, by axis and phase; most: {axis} · {phase}, "
        f"{format_bytes(sent[shown[0]])}.{note}"
    )
    axes = sorted({axis for axis, _ in keys})
    colours = {axis: svg.COLOURS[index % len(svg.COLOURS)] for index, axis in enumerate(axes)}
    mark = "predicted" if expected else ""
    title = "Traffic of all ranks per step"
    return stacked_bars("traffic", title, description, bars, colours=colours, mark=mark)


def memory_bars(profiles: MemoryProfiles) -> str:
    """A stacked bar for each rank; of more than 32 ranks, those with the highest peaks. "" without
    ranks."""
    if not profiles.ranks:
        return ""
    fullest = sorted(profiles.ranks, key=lambda profile: (-profile.peak, profile.rank))
    shown = sorted(fullest[:_MAX_RANKS], key=lambda profile: profile.rank)
    which = f"the {len(shown)} fullest of " if len(shown) < len(profiles.ranks) else ""
    description = (
        f"Memory of {which}{len(profiles.ranks)} ranks by what it holds; "
        f"highest peak {format_bytes(profiles.peak)} on rank {fullest[0].rank}."
    )
    names = {name: name.replace("_", " ") for name in PARTS}
    bars = [
        StackedBar(
            f"rank {rank.rank}",
            [(names[part], n, format_bytes(n)) for part, n in rank.parts().items() if n],
            f"peak {format_bytes(rank.peak)}",
            rank.peak,
        )
        for rank in shown
    ]
    filled = [part for part in PARTS if any(rank.parts()[part] for rank in shown)]
    colours = {names[part]: MEMORY_COLOURS[part] for part in filled}
    return stacked_bars(
        "memory", "Memory per rank", description, bars, colours=colours, mark="peak"
    )
