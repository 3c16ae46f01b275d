"""The answer of `moemesh plan` as text and as a page, one offline HTML file: the layouts, their
figures, reasons, and the command."""

from __future__ import annotations

import shlex
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import floor
from typing import Any

from moemesh.cli.terminal import table
from moemesh.config.plan import DEGREES, Plan
from moemesh.planner.estimate import by_axis, estimate
from moemesh.planner.intervals import Interval, shipped_intervals
from moemesh.planner.layout_sources import plan_of, untrained
from moemesh.planner.planned_layout import PlannedLayout, shown
from moemesh.planner.search.command import (
    PlannedAnswer,
    not_trained,
    plan_keys,
    still_to_choose,
    train_command,
)
from moemesh.planner.search.rival import MEMORY_PARTS, Rival
from moemesh.planner.search.search import Candidate, counted
from moemesh.report.section import Table
from moemesh.report.svg import COLOURS, DARK
from moemesh.trace.memory_profile import PREDICTED_PEAK, format_bytes

WIDTH = 80
#: Keys of [plan] that the table of the page shows.
COLUMNS = (
    *DEGREES, "schedule", "stages_per_rank", "microbatches", "data", "recompute", "attention_exit",
    "dispatcher",
)  # fmt: skip
INTERVAL = "80 %: the interval that held four in five runs of sources which the fit had not seen"
#: What the parts of a step are.
PARTS = {
    "compute": "dense matrix products",
    "attention": "attention cores",
    "elementwise": "norms, residuals, activations",
    "experts": "products of experts and their exchange",
    "launches": "the device waits for its host",
    "head": "logits and loss",
    "tensor": "collectives over tp",
    "context": "collectives over cp",
    "data": "exposed gradients and weights",
    "pipeline": "messages between stages",
    "bubble": "waiting of the schedule",
    "optimizer": "update of the weights",
    "other": "all smaller parts",
}
#: A bar: its name, its text, and pieces of (name, size, text).
_Bar = tuple[str, str, list[tuple[str, float, str]]]


def plan_text(planned: PlannedAnswer, asked: str, file: str = "", *, explain: bool = False) -> str:
    """The answer in about twenty lines; `asked` are options that `moemesh estimate` takes, too,
    `file` the configuration that was written, `explain` adds what the answer rests on."""
    best, cluster = planned.candidates[0], planned.cluster
    capacity = cluster.memory_bytes * planned.usable_share
    lines = [
        *wrapped(f"{heading(planned)}, {batch_words(best)}"),
        *_rows(planned),
        "",
        *wrapped(risk_of_memory(planned)),
        *wrapped(str(planned.likeness or "")),
        *(line for told in published(planned) for line in wrapped(told)),
        *wrapped(cheapest(planned)),
        *wrapped(certified(planned)),
    ]
    for rival in planned.rivals:
        lines += ["", f"why not {rival.asked}?"]
        for sentence in rival_sentences(rival, best, capacity):
            lines += wrapped(f"  {sentence}", "    ")
    lines += _handoff(planned, best, file)
    if not explain:
        return "\n".join([*lines, "more: --explain, --html FILE, --why PLAN, --headroom, --tokens"])
    memory = best.memory
    kept = ("states", "activations", "logits", "working")
    rest = memory.needed - sum(getattr(memory, name) for name in kept)
    parts = [(name, getattr(memory, name)) for name in kept] + [("libraries", rest)]
    held = ", ".join(f"{name} {format_bytes(round(size))}" for name, size in parts if size >= 1)
    free = format_bytes(round(capacity - memory.needed))
    rows = [
        (f"  {name}", f"{seconds:.4g} s", f"{percent:.1f}%", f"  {PARTS.get(name, '')}")
        for name, seconds, percent in step_parts(best.breakdown)
    ]
    rows.append(("  together", f"{best.seconds:.4g} s", "100.0%", ""))
    step_lines = table(("a step of the first", "", ""), [row[:3] for row in rows]).split("\n")
    texts = ["", *(row[3] for row in rows)]
    lines += [
        "",
        *wrapped(
            f"{format_bytes(cluster.memory_bytes)} a device, {format_bytes(round(capacity))} of it "
            f"usable ({planned.usable_share:.1%}; --headroom leaves more)"
        ),
        *wrapped(f"{memory_unit(planned)[0]}: {PREDICTED_PEAK}, of the fullest device; {INTERVAL}"),
        *wrapped(mfu_words(planned)),
        "",
        *(f"{line}{text}".rstrip() for line, text in zip(step_lines, texts, strict=True)),
        "",
        *wrapped(
            f"memory ({PREDICTED_PEAK}) of pipeline rank {memory.rank}: "
            f"{format_bytes(memory.needed)}: {held}; {free} of the usable are free"
        ),
        *wrapped(f"binding: {planned.advice.binding}"),
    ]
    if planned.advice.why_not:
        lines += ["", "faster, and too large for the memory:"]
        lines += [line for why in planned.advice.why_not for line in wrapped(f"- {why}", "  ")]
    trains = not not_trained(best.layout, planned.model)
    left_out, assumed = counted(planned.certificate.rejected), planned.certificate.assumptions
    lines += [
        "",
        *wrapped(
            f"computing alone takes {planned.certificate.compute_floor_seconds:.3f} s a step; left "
            f"out: {left_out}"
        ),
        *wrapped(f"assumed: {'; '.join(assumed)}"),
        *(wrapped(f"still to choose: {still_to_choose(planned, best)}, --out") if trains else ()),
        "",
        *command_lines(planned, best, asked),
    ]
    return "\n".join(lines)


def heading(planned: PlannedAnswer) -> str:
    """The model and the machine."""
    cluster = planned.cluster
    devices = f"{cluster.num_devices:,} {'device' if cluster.num_devices == 1 else 'devices'}"
    nodes = f"{cluster.nodes:,} {'node' if cluster.nodes == 1 else 'nodes'}"
    return f"{planned.model.shape.name} on {devices} of {cluster.name} ({nodes})"


def batch_words(best: Candidate) -> str:
    """The batch of a step."""
    layout = best.layout
    return f"{layout.global_batch:,} x {layout.seq_len:,} tokens a step"


def figures(planned: PlannedAnswer) -> list[tuple[str, ...]]:
    """Of every layout: seconds and memory, each with its interval, speeds, days and GPU-hours."""
    _, unit = memory_unit(planned)
    rows: list[tuple[str, ...]] = []
    for found in planned.candidates:
        speed, tokens = planned.speed(found), planned.tokens
        costs = (f"{speed.days(tokens):,.1f}", f"{speed.gpu_hours(tokens):,.0f}") if tokens else ()
        rows.append(
            (
                *(f"{found.seconds:.3f}", between(planned.seconds_interval(found), 1)),
                f"{found.memory.needed / unit:.1f}",
                between(planned.memory_interval(found), unit),
                f"{speed.tokens_per_second:,.0f}",
                f"{speed.tokens_per_second_per_gpu:,.1f}",
                *(f"{speed.mfu:.1%}", *costs),
            )
        )
    return rows


def _rows(planned: PlannedAnswer) -> list[str]:
    """Figures of every layout, each above its roles and keys: the first's, and where others differ
    from these."""
    first, texts = plan_keys(planned.candidates[0].layout), list[str]()
    for number, found in enumerate(planned.candidates, start=1):
        keys, usual = plan_keys(found.layout), vars(Plan()) if number == 1 else first
        said = keys_text({key: x for key, x in keys.items() if x != usual.get(key)})
        roles = f"{', '.join(found.roles)}: " if found.roles else ""
        alike = f" (+{found.alike} like it)" if found.alike else ""
        texts.append(f"{roles}{said}{'' if number == 1 else ', else as 1'}{alike}")
    heads = ("seconds", "80 %", memory_unit(planned)[0], "80 %", "tokens/s", "a GPU", "MFU")
    # With costs the line is full without the speed of one device.
    rows = [(*row[:5], *row[6:]) if planned.tokens else row for row in figures(planned)]
    heads = (*heads[:5], "MFU", "days", "GPU-hours") if planned.tokens else heads
    numbered = [(str(number), *row) for number, row in enumerate(rows, start=1)]
    top, *lines = table(("#", *heads), numbered).split("\n")
    found = [top]
    for line, text in zip(lines, texts, strict=True):
        found += [line, *wrapped(f"   {text}", "   ")]
    return found


def keys_text(keys: Mapping[str, Any]) -> str:
    """Keys of [plan] as a person reads them: "pp=2 dp=8 schedule=zb_v"."""
    return " ".join(f"{key}={shown(x)}" for key, x in keys.items() if key != "ranks_per_node")


def cells(layout: PlannedLayout) -> dict[str, str]:
    """The values of a layout by key of [plan]; "-" for what has no meaning in it."""
    keys = plan_keys(layout)
    found = {name: str(keys[name]) for name in COLUMNS}
    for key, name in (("pp", "schedule"), ("tp", "attention_exit"), ("ep", "dispatcher")):
        if keys[key] == 1:
            found[name] = "-"
    return found


def memory_unit(planned: PlannedAnswer) -> tuple[str, float]:
    """Name and bytes of the unit in which the memory of all layouts is shown."""
    is_small = max(found.memory.needed for found in planned.candidates) < 2**30
    return ("MiB", 2.0**20) if is_small else ("GiB", 2.0**30)


def mfu_words(planned: PlannedAnswer) -> str:
    """What MFU is, with the numbers of the cluster."""
    peak = planned.speed(planned.candidates[0]).peak_flops / 1e12
    devices = planned.cluster.num_devices
    return f"MFU: model FLOPs of a step / (seconds x {devices} devices x {peak:,.4g} TFLOP/s)"


def between(interval: Interval, unit: float) -> str:
    """An interval in `unit`, with about three digits."""
    low, high = (value / unit for value in interval)
    digits = 3 if high < 1 else 2 if high < 10 else 1 if high < 100 else 0
    return f"{low:,.{digits}f}-{high:,.{digits}f}"


def step_parts(breakdown: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """(part, seconds, percent) of a step, the largest first: percents are rounded to tenths that
    add up to 100, what is below 0.05 % is `other`."""
    total = breakdown["total"]
    parts = {name: x for name, x in breakdown.items() if name != "total"}
    large = {name: x for name, x in parts.items() if x >= 0.0005 * total}
    rest = total - sum(large.values())
    if abs(rest) >= 0.0005 * total:
        large["other"] = rest
    ordered = sorted(large.items(), key=lambda item: -item[1])
    whole = sum(x for _, x in ordered)
    exact = [1000 * x / whole for _, x in ordered]
    tenths = [floor(x) for x in exact]
    # The largest remainders round up, so that the sum is right.
    order = sorted(range(len(exact)), key=lambda i: tenths[i] - exact[i])
    for index in order[: 1000 - sum(tenths)]:
        tenths[index] += 1
    return [(name, x, tenth / 10) for (name, x), tenth in zip(ordered, tenths, strict=True)]


def risk_of_memory(planned: PlannedAnswer) -> str:
    """Whether the first layout may run out of memory on another software, and what would not."""
    first, *others = planned.candidates
    device = format_bytes(planned.cluster.memory_bytes)
    high = format_bytes(round(planned.memory_interval(first).high))
    if planned.is_safe(first):
        return f"risk: none seen; the 80 % interval of 1 ends at {high} of a device's {device}"
    told = f"risk: 1 may run out of memory: its 80 % interval ends at {high} of a device's {device}"
    for number, one in enumerate(others, start=2):
        if planned.is_safe(one):
            slower = one.seconds / first.seconds - 1
            return f"{told}; {number} is the first whose interval fits, {slower:.1%} slower"
    if planned.has_safe:
        return f"{told}; a larger --top shows the first whose interval fits"
    return f"{told}, and no layout's fits: more --nodes leave more room"


def published(planned: PlannedAnswer) -> list[str]:
    """Runs of others beside the predictions of their layouts."""
    lines: list[str] = []
    for run in planned.published:
        low, high = shipped_intervals().of_seconds(run.predicted, planned.generation)
        words = "within its error" if low <= run.seconds <= high else "other software"
        told = f"published: {run.layout.world_size:,} x {run.device}, {run.seconds:.4g} s"
        if planned.tokens is not None:
            told += f", {run.speed.gpu_hours(planned.tokens):,.0f} GPU-hours"
        told += f" in {run.layout.precision} ({run.source}); predicted for it "
        told += f"{run.predicted:.4g} s, x {run.predicted / run.seconds:.2f}: {words}"
        if run.here != run.predicted:
            told += f"; in your number type {run.here:.4g} s"
        lines.append(told)
    return lines


def cheapest(planned: PlannedAnswer) -> str:
    """The layout of fewer nodes with the fewest GPU-hours; nothing without a number of tokens."""
    tokens, found = planned.tokens, planned.cheapest
    if tokens is None:
        return ""
    if found is None:
        return "cheapest: 1, to one percent: fewer nodes save no GPU-hours"
    hours, first = (planned.speed(one).gpu_hours(tokens) for one in (found, planned.candidates[0]))
    nodes = found.layout.world_size // planned.cluster.gpus_per_node
    keys = plan_keys(found.layout)
    said = keys_text({key: x for key, x in keys.items() if x != vars(Plan()).get(key)})
    return (
        f"cheapest: --nodes {nodes}: {hours:,.0f} GPU-hours ({hours / first - 1:+.1%}), "
        f"{planned.speed(found).days(tokens):,.1f} days, {said}"
    )


def certified(planned: PlannedAnswer) -> str:
    """The certificate in a sentence."""
    proof, best = planned.certificate, planned.candidates[0]
    gap = best.seconds / proof.lower_bound_seconds - 1
    return (
        f"certificate: of {proof.examined:,} layouts none that fits beats "
        f"{proof.lower_bound_seconds:.3f} s (1: {gap:+.1%})"
    )


def rival_sentences(rival: Rival, best: Candidate, capacity: float) -> list[str]:
    """What speaks against a layout, `best` being the answer."""
    if rival.candidate is None:
        return [
            f"illegal: {problem.message}"
            + (f"; nearest legal: {problem.fix}" if problem.fix else "")
            for problem in rival.problems
        ]
    found = rival.candidate
    words = found.layout.text.replace("=", " ").replace(",", ", ")
    told = [f"the best layout with it: {words}"]
    if rival.verdict == "chosen":
        return [*told, "it is the first of the table"]
    if rival.beyond:
        told.append(f"outside of what the search assumes and varies: {', '.join(rival.beyond)}")
    if rival.short:
        needed, usable = (format_bytes(round(size)) for size in (found.memory.needed, capacity))
        excess = ", ".join(
            f"{name} {format_bytes(round(size))} more" for name, size in rival.memory if size > 0
        )
        told.append(
            f"does not fit: needs {needed} on pipeline rank {found.memory.rank}, {usable} are "
            f"usable, {format_bytes(round(rival.short))} short"
            + (f"; against the first: {excess}" if excess else "")
        )
        if near := rival.nearest:
            size = format_bytes(round(near.needed))
            told.append(f"nearest that fits: {near.change}: {size}, {near.seconds:.4g} s")
    if rival.verdict == "equal":
        return [*told, "as fast as the first: the time model does not tell them apart"]
    share, word = rival.slower / best.seconds, "slower" if rival.slower > 0 else "faster"
    told.append(f"{abs(share):.1%} {word}: {found.seconds:.4g} s, the first {best.seconds:.4g} s")
    least = 0.001 * best.seconds
    changed = [f"{name} {more:+.4g} s" for name, more in rival.parts if abs(more) >= least]
    if changed:
        told.append(f"by part: {', '.join(changed)}")
    return told


def _handoff(planned: PlannedAnswer, best: Candidate, file: str) -> list[str]:
    """The two calls that run the answer, or why there are none."""
    if refused := not_trained(best.layout, planned.model):
        lines = wrapped(f"this version plans {', '.join(refused)} and does not train it")
        if not untrained(PlannedLayout(seq_len=1, global_batch=1), planned.model):
            lines.append("the best of what it trains: the same call with --trainable")
        return lines
    name = shlex.quote(file or "plan.toml")
    calls = [f"  moemesh train {name}", f"  moemesh launch --slurm {name}"]
    if not file:
        return [f"the same call with --write {name}, then:", *calls]
    left = wrapped(f"still to choose in it: {still_to_choose(planned, best)}")
    return [f"wrote {name}:", *calls, *left]


def command_lines(planned: PlannedAnswer, best: Candidate, asked: str) -> list[str]:
    """The call that trains the layout; of what is not trained, the one that prices it."""
    if not not_trained(best.layout, planned.model):
        return folded(train_command(best.layout, planned.model))
    return folded(f"moemesh estimate {asked} --plan {best.layout.text}")


def wrapped(line: str, indent: str = "    ") -> list[str]:
    """The line in pieces of at most 80 columns; a word that is longer stays whole."""
    return textwrap.wrap(
        line, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def folded(command: str) -> list[str]:
    """A call in lines of at most 80 columns that a shell reads as one: broken before options."""
    lines = [""]
    for part in command.replace(" --", "\n--").split("\n"):
        joined = f"{lines[-1]} {part}" if lines[-1] else part
        if lines[-1] and len(joined) > WIDTH - 2:
            lines[-1] += " \\"
            lines.append(f"  {part}")
        else:
            lines[-1] = joined
    return lines


def plan_html(planned: PlannedAnswer, asked: str) -> str:
    """The page of a plan, the same bytes for the same plan; `asked` are options that `moemesh
    estimate` takes, too."""
    # Its imports take a second, which only a page waits for.
    from moemesh.report.page import from_template

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
    choices = [cells(one.layout) for one in planned.candidates]
    alike = {
        key: value for key, value in choices[0].items() if all(c[key] == value for c in choices)
    }
    layouts = Table(
        caption="Layouts that fit",
        header=("#", "Role", "Like it", *(key for key in COLUMNS if key not in alike)),
        rows=[
            [f"{number}", ", ".join(one.roles), f"{one.alike}"]
            + [value for key, value in choice.items() if key not in alike]
            for number, (one, choice) in enumerate(
                zip(planned.candidates, choices, strict=True), start=1
            )
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
            *([f"in every row: {', '.join(map(' '.join, alike.items()))}"] if alike else []),
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
