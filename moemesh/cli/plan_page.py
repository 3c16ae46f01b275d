"""The answer of `moemesh plan` as a page."""

from __future__ import annotations

from collections import defaultdict

from moemesh.cli.plan_text import (
    COLUMNS,
    INTERVAL,
    PARTS,
    between,
    cells,
    command_lines,
    legend,
    memory_unit,
    mfu_words,
    rival_sentences,
    step_parts,
)
from moemesh.planner.estimate import Estimate, estimate
from moemesh.planner.layout_sources import plan_of, untrained
from moemesh.planner.search.command import Planned
from moemesh.planner.search.rival import MEMORY_PARTS
from moemesh.planner.search.search import Candidate
from moemesh.planner.traffic.by_axis import by_axis
from moemesh.report.plan_page import Bar, Bars, Part, PlanPage, WhyNot, render
from moemesh.report.section import Table
from moemesh.report.svg import COLOURS
from moemesh.trace.memory import PREDICTED_PEAK, format_bytes


def plan_html(planned: Planned, asked: str) -> str:
    """The page of a plan; `asked` are options that `moemesh estimate` takes, too."""
    best, cluster = planned.candidates[0], planned.cluster
    nodes = f"{cluster.nodes:,} {'node' if cluster.nodes == 1 else 'nodes'}"
    capacity = cluster.memory_bytes * planned.usable_share
    page = PlanPage(
        title=f"{planned.model.shape.name} on {cluster.num_devices:,} devices of {cluster.name}",
        subtitle=f"{nodes}; {best.layout.seq_len:,} tokens a sequence, "
        f"{best.layout.global_batch:,} sequences a step",
        choice=[(COLUMNS[name], value) for name, value in cells(best.layout).items()],
        facts=_facts(planned, best),
        tables=_tables(planned),
        legend=[
            *legend([cells(one.layout) for one in planned.candidates]),
            f"memory: {PREDICTED_PEAK}, of the fullest device: what is held, and what allocator "
            "and libraries add",
            INTERVAL,
            mfu_words(planned),
        ],
        charts=[_time_bars(planned), _memory_bars(planned, capacity)],
        why_not=_why_not(planned, best, capacity),
        traffic=_traffic(planned, best),
        notes=_notes(planned),
        command="\n".join(command_lines(planned, best, asked)),
    )
    return render(page)


def _facts(planned: Planned, best: Candidate) -> list[tuple[str, str]]:
    speed, memory = planned.speed(best), best.memory.needed
    name, unit = memory_unit(planned)
    facts = [
        ("seconds a step", f"{best.seconds:.4g}"),
        ("80 % interval, seconds", between(planned.seconds_interval(best), 1.0)),
        (f"memory: {PREDICTED_PEAK}", format_bytes(round(memory))),
        (f"80 % interval, {name}", between(planned.memory_interval(best), unit)),
        ("tokens a second", f"{speed.tokens_per_second:,.0f}"),
        ("tokens a second and device", f"{speed.tokens_per_second_per_gpu:,.1f}"),
        ("MFU", f"{speed.mfu:.1%}"),
    ]
    if (tokens := planned.tokens) is not None:
        facts += [
            (f"days for {tokens:.4g} tokens", f"{speed.days(tokens):,.1f}"),
            ("GPU-hours", f"{speed.gpu_hours(tokens):,.0f}"),
        ]
    return facts


def _tables(planned: Planned) -> list[Table]:
    numbered = list(enumerate(planned.candidates, start=1))
    name, unit = memory_unit(planned)
    layouts = Table(
        caption="The fastest layouts that fit",
        header=("#", *COLUMNS.values()),
        rows=[(str(number), *cells(one.layout).values()) for number, one in numbered],
    )
    figures = Table(
        caption="Time, memory and speed of each",
        header=(
            "#",
            "Seconds a step",
            "80 % interval, s",
            f"Memory, {name}",
            f"80 % interval, {name}",
            "Tokens/s",
            "Tokens/s a device",
            "MFU",
        ),
        rows=[
            (
                str(number),
                f"{one.seconds:.3f}",
                between(planned.seconds_interval(one), 1.0),
                f"{one.memory.needed / unit:.1f}",
                between(planned.memory_interval(one), unit),
                f"{planned.speed(one).tokens_per_second:,.0f}",
                f"{planned.speed(one).tokens_per_second_per_gpu:,.1f}",
                f"{planned.speed(one).mfu:.1%}",
            )
            for number, one in numbered
        ],
    )
    return [layouts, figures]


def _time_bars(planned: Planned) -> Bars:
    """Seconds of each layout by part; parts beyond the colours there are count as other."""
    shares = [step_parts(one.breakdown) for one in planned.candidates]
    largest: defaultdict[str, float] = defaultdict(float)
    for share in shares:
        for name, seconds, _ in share:
            largest[name] = max(largest[name], seconds)
    shown = sorted(largest, key=lambda name: (name == "other", -largest[name]))
    if len(shown) > len(COLOURS):
        shown = shown[: len(COLOURS) - 1]
    bars: list[Bar] = []
    for number, share in enumerate(shares, start=1):
        parts = [
            Part(name=name, size=seconds, text=f"{seconds:.4g} s ({percent:.1f} %)")
            for wanted in shown
            for name, seconds, percent in share
            if name == wanted and seconds > 0
        ]
        rest = [(seconds, percent) for name, seconds, percent in share if name not in shown]
        if rest:
            seconds, percent = (sum(column) for column in zip(*rest, strict=True))
            text = f"{seconds:.4g} s ({percent:.1f} %)"
            parts.append(Part(name="other", size=max(seconds, 0.0), text=text))
        total = planned.candidates[number - 1].seconds
        bars.append(Bar(name=f"layout {number}", parts=parts, text=f"{total:.4g} s"))
    note = "; ".join(f"{name}: {PARTS[name]}" for name in shown if name in PARTS)
    return Bars(title="Seconds of a step, by part", note=note, bars=bars)


def _memory_bars(planned: Planned, capacity: float) -> Bars:
    bars: list[Bar] = []
    for number, one in enumerate(planned.candidates, start=1):
        parts = [(name, getattr(one.memory, name)) for name in MEMORY_PARTS]
        parts.append(("libraries", one.memory.needed - sum(size for _, size in parts)))
        bars.append(
            Bar(
                name=f"layout {number}, pipeline rank {one.memory.rank}",
                parts=[
                    Part(name=name, size=size, text=format_bytes(round(size)))
                    for name, size in parts
                    if size > 0
                ],
                text=format_bytes(round(one.memory.needed)),
            )
        )
    return Bars(
        title=f"Memory of the fullest device ({PREDICTED_PEAK}), by part",
        note="states: weights, gradients and optimizer; activations: kept for the backward; "
        "working: what exists while one layer runs; libraries: of device, collectives, kernels",
        bars=bars,
        limit=capacity,
        limit_text=f"usable: {format_bytes(round(capacity))} ({planned.usable_share:.1%})",
    )


def _why_not(planned: Planned, best: Candidate, capacity: float) -> list[WhyNot]:
    named = [
        WhyNot(name=rival.asked, sentences=rival_sentences(rival, best, capacity))
        for rival in planned.rivals
    ]
    near = [
        WhyNot(name=change, sentences=[rest.strip()])
        for change, _, rest in (line.rpartition(": ") for line in planned.advice.why_not)
    ]
    return [*named, *near]


def _traffic(planned: Planned, best: Candidate) -> Table | None:
    priced = _priced(planned, best)
    rows = by_axis(priced.traffic)
    if not rows:
        return None
    return Table(
        caption=f"One device of pipeline rank {priced.traffic_rank}, in a step",
        header=("Axis", "Operation", "Transfers", "Bytes of one", "Bytes of all", "Share of bytes"),
        rows=[
            (
                row.axis,
                row.op,
                f"{row.transfers:,}",
                format_bytes(round(row.bytes_each)),
                format_bytes(row.total_bytes),
                f"{row.share:.2%}",
            )
            for row in rows
        ],
        num_names=2,
    )


def _priced(planned: Planned, best: Candidate) -> Estimate:
    # Of weights that do not train the closed forms know, a plan says nothing.
    is_exact = planned.model.run is None and not untrained(best.layout, planned.model)
    plan = plan_of(best.layout) if is_exact else None
    return estimate(planned.model, best.layout, planned.cluster, plan)


def _notes(planned: Planned) -> list[str]:
    certificate = planned.certificate
    return [
        f"{certificate.examined:,} layouts were examined; none of them that fits is faster under "
        f"this model. Computing alone takes {certificate.compute_floor_seconds:.3f} s.",
        f"Binding: {planned.advice.binding}.",
        *(f"Assumed: {assumption}." for assumption in certificate.assumptions),
    ]
