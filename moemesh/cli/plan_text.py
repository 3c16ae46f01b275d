"""Layouts as text and as a page: the answers of `moemesh estimate` and `moemesh plan`."""

from __future__ import annotations

import shlex
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, count
from math import floor
from typing import Any

from moemesh.cli.terminal import table
from moemesh.config.plan import DEGREES, Plan
from moemesh.planner.estimate import Estimate, by_axis, estimate
from moemesh.planner.intervals import Interval, shipped_intervals
from moemesh.planner.layout_sources import plan_of, untrained
from moemesh.planner.memory import CacheSize, kv_cache_bytes
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
from moemesh.planner.speed import decoding_intensity, layer_intensities
from moemesh.report.section import Table, plural
from moemesh.report.svg import COLOURS, DARK
from moemesh.trace.ledger import Ledger
from moemesh.trace.memory_profile import PREDICTED_HELD, PREDICTED_PEAK, format_bytes

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
#: Parts of a rank's memory, in the order of the table of an estimate.
_PARTS = (
    "dense_weights", "expert_weights", "gradients", "optimizer", "activations", "logits",
    "buffers", "total",
)  # fmt: skip
#: A bar: its name, its text, and pieces of (name, size, text).
_Bar = tuple[str, str, list[tuple[str, float, str]]]


def estimate_text(found: Estimate, cache: CacheSize | None = None) -> str:
    """One layout: parameters, operations, memory, traffic and seconds; the KV cache of `cache`."""
    parameters, memory = found.parameters, found.memory
    causal, full = found.causal.training / 1e9, found.full.training / 1e9
    low, high = map(_size, found.memory_interval)
    blocks = layer_intensities(found.shape, found.layout)
    intensities = ", ".join(f"{name} {value:,.0f}" for name, value in blocks.items())
    each = kv_cache_bytes(found.shape, 1, 1)
    lines = [
        f"model       {_large(parameters.total)} parameters, {_large(parameters.active)} active   "
        f"({found.shape.name})",
        f"plan        {found.layout.world_size} devices   {found.text or found.layout.key}",
        f"arithmetic  {causal:.2f} GFLOP a token (causal), {full:.2f} (full attention)",
        f"intensity   {intensities} FLOP/byte in a microbatch; the device is bound",
        f"            by arithmetic from {found.device_balance:,.0f} FLOP/byte on, else by memory",
        f"KV cache    {each:,.0f} B a token of context in 16 bit, over all ranks",
    ]
    if cache is not None:
        whole, intensity = kv_cache_bytes(found.shape, *cache), decoding_intensity(cache.batch, 2)
        lines += [
            f"            {_size(whole)} for {cache.batch:,} sequences of {cache.tokens:,} tokens",
            f"            decoding one token of each: {intensity:,.0f} FLOP/byte of the weights",
        ]
    lines += [
        "",
        f"memory      {format_bytes(found.peak.needed)} {PREDICTED_PEAK}, of "
        f"{format_bytes(found.cluster.memory_bytes)}: "
        + ("fits" if found.fits(found.peak.needed) else "does NOT fit"),
        f"            80 % interval {low} to {high}; "
        f"{found.pricing.usable_share:.1%} of the device is usable",
        *_worst_routing(found),
    ]
    if found.fits(found.peak.needed) and found.memory_interval.high > found.cluster.memory_bytes:
        lines.append(
            "            it may run out of memory: the interval reaches above the device; "
            f"it fits with {found.fits_chance:.0%}"
        )
    if isinstance(near := found.instead, str):
        lines.append(f"            {near}")
    elif near is not None:
        slower = near.seconds / found.seconds["total"] - 1
        lines += [
            f"            nearest that fits: {near.change}: {_size(near.memory.needed)}, "
            f"{near.seconds:.4g} s a step ({slower:+.1%})",
            f"            --plan {near.layout.text}",
        ]
    lines.append(
        f"            (what is {PREDICTED_HELD}, below, and what allocator and libraries add)"
    )
    ranks = memory.first, memory.last, memory.worst
    held = [
        (part.replace("_", " "), *(format_bytes(getattr(rank, part)) for rank in ranks))
        for part in _PARTS
    ]
    sent = [
        (
            *(one.axis, one.op, one.phase, one.caller, str(one.count)),
            *(_size(one.wire_bytes / one.count), format_bytes(one.wire_bytes)),
        )
        for one in found.traffic.entries()
    ]
    axes = ("axis", "operation", "transfers", "one", "all", "share")
    callers = ("axis", "operation", "phase", "caller", "count", "one", "sent")
    speed, (least, most), total = found.speed, found.seconds_interval, found.seconds["total"]
    times = found.seconds.items()
    parts = [(name, f"{size:.4g} s") for name, size in times if size and name != "total"]
    lines += [
        _indented(table(("rank", "first", "last", "worst"), held)),
        "",
        f"traffic     of pipeline rank {found.traffic_rank} of {found.layout.pp}, one device, in a "
        "step (--rank shows another)",
        _indented(table(axes, _axis_rows(found.traffic), left=2)),
        "",
        "            by phase and caller",
        _indented(table(callers, sent, left=4)),
        "",
        _indented(table(("step", f"{total:.4g} s"), parts)).lstrip(),
        f"  80 % interval {least:.4g} to {most:.4g} s",
        f"  {speed.tokens_per_second:,.0f} tokens/s, {speed.tokens_per_second_per_gpu:,.1f} a "
        f"device, MFU {speed.mfu:.1%} of {speed.peak_flops / 1e12:,.4g} TFLOP/s",
        "",
        *found.notes,
    ]
    return "\n".join(lines)


def _worst_routing(found: Estimate) -> list[str]:
    """Memory of the fullest rank when the router sends it all rows that it can."""
    worst = found.worst_routing
    if worst is None or worst.rows <= worst.balanced_rows:
        return []
    bound, fits = worst.rows_at_once, found.fits(found.crowded_bytes)
    blocks = "" if bound is None else f" in {worst.blocks} blocks of at most {bound:,}"
    lines = [
        f"            worst routing: {_size(found.crowded_bytes)}, which "
        + ("fits" if fits else "does NOT fit"),
        f"            {worst.rows:,} rows of a layer at one rank, {worst.times_mean:.4g} times "
        f"the mean{blocks}",
    ]
    if worst.dropped_choices:
        lines.append(f"            {worst.dropped_choices:,} choices above the capacity dropped")
    return lines


def _axis_rows(traffic: Ledger) -> list[tuple[str, ...]]:
    """Axis, operation, transfers, bytes of one and of all, and their share."""
    return [
        (
            *(row.axis, row.op, f"{row.transfers:,}", _size(row.bytes_each)),
            *(format_bytes(row.total_bytes), f"{row.share:.2%}"),
        )
        for row in by_axis(traffic)
    ]


def _large(number: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.3f} {unit}"
    return str(number)


def _indented(text: str) -> str:
    return textwrap.indent(text, "  ")


def _size(number: float) -> str:
    return format_bytes(round(number))


def plan_text(planned: PlannedAnswer, asked: str, file: str = "", *, explain: bool = False) -> str:
    """The answer in about twenty lines; `asked` are options that `moemesh estimate` takes, too,
    `file` the configuration that was written, `explain` adds what the answer rests on."""
    best, cluster = planned.candidates[0], planned.cluster
    capacity = cluster.memory_bytes * planned.pricing.usable_share
    lines = [
        *wrapped(f"{heading(planned)}, {batch_words(best)}"),
        *_rows(planned),
        "",
        *wrapped(risk_of_memory(planned)),
        *wrapped(planned.own_runs),
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
    held = ", ".join(f"{name} {_size(size)}" for name, size in parts if size >= 1)
    free = _size(capacity - memory.needed)
    rows = [
        (f"  {name}", f"{seconds:.4g} s", f"{percent:.1f}%", f"  {PARTS.get(name, '')}")
        for name, seconds, percent in step_parts(best.breakdown)
    ]
    rows.append(("  together", f"{best.seconds:.4g} s", "100.0%", ""))
    step = table(("a step of the first", "", ""), [row[:3] for row in rows]).split("\n")
    texts = ["", *(row[3] for row in rows)]
    lines += [
        "",
        *wrapped(
            f"{format_bytes(cluster.memory_bytes)} a device, {_size(capacity)} of it "
            f"usable ({planned.pricing.usable_share:.1%}; --headroom leaves more)"
        ),
        *wrapped(f"{memory_unit(planned)[0]}: {PREDICTED_PEAK}, of the fullest device; {INTERVAL}"),
        *wrapped(mfu_words(planned)),
        "",
        *(f"{line}{text}".rstrip() for line, text in zip(step, texts, strict=True)),
        "",
        *wrapped(
            f"memory ({PREDICTED_PEAK}) of pipeline rank {memory.rank}: "
            f"{format_bytes(memory.needed)}: {held}; {free} of the usable are free"
        ),
        *wrapped(f"binding: {planned.advice.binding}"),
    ]
    if planned.advice.why_not:
        lines += ["", "faster than the first, and too large for the memory:"]
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
    devices, nodes = plural(cluster.num_devices, "device"), plural(cluster.nodes, "node")
    return f"{planned.model.shape.name} on {devices} of {cluster.name} ({nodes})"


def batch_words(best: Candidate) -> str:
    """The batch of a step."""
    return f"{best.layout.global_batch:,} x {best.layout.seq_len:,} tokens a step"


def figures(planned: PlannedAnswer) -> list[tuple[str, ...]]:
    """Of every layout: seconds and memory, each with its interval, speeds, days and GPU-hours."""
    unit, tokens = memory_unit(planned)[1], planned.tokens
    rows: list[tuple[str, ...]] = []
    for found in planned.candidates:
        speed = planned.speed(found)
        costs = (f"{speed.days(tokens):,.1f}", f"{speed.gpu_hours(tokens):,.0f}") if tokens else ()
        rows.append(
            (
                *(f"{found.seconds:.3f}", between(planned.seconds_interval(found), 1)),
                *(
                    f"{found.memory.needed / unit:.1f}",
                    between(planned.memory_interval(found), unit),
                ),
                f"{speed.tokens_per_second:,.0f}",
                f"{speed.tokens_per_second_per_gpu:,.1f}",
                *(f"{speed.mfu:.1%}", *costs),
            )
        )
    return rows


def _rows(planned: PlannedAnswer) -> list[str]:
    """Figures of every layout, each above its roles and keys: the first's, and where others differ
    from these."""
    heads = ("#", "seconds", "80 %", memory_unit(planned)[0], "80 %", "tokens/s", "a GPU", "MFU")
    numbered = [(str(number), *row) for number, row in enumerate(figures(planned), start=1)]
    if planned.tokens:  # with costs the line is full without the speed of one device
        heads = (*heads[:6], "MFU", "days", "GPU-hours")
        numbered = [(*row[:6], *row[7:]) for row in numbered]
    top, *lines = table(heads, numbered).split("\n")
    first, found = plan_keys(planned.candidates[0].layout), [top]
    for line, one in zip(lines, planned.candidates, strict=True):
        is_first = one is planned.candidates[0]
        keys, usual = plan_keys(one.layout), vars(Plan()) if is_first else first
        said = keys_text({key: x for key, x in keys.items() if x != usual.get(key)})
        roles = f"{', '.join(one.roles)}: " if one.roles else ""
        alike = f" (+{one.alike} like it)" if one.alike else ""
        text = f"{roles}{said}{'' if is_first else ', else as 1'}{alike}"
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
    """The definition of MFU, with the numbers of the cluster."""
    peak, devices = planned.speed(planned.candidates[0]).peak_flops, planned.cluster.num_devices
    return (
        f"MFU: model FLOPs of a step / (seconds x {devices} devices x {peak / 1e12:,.4g} TFLOP/s)"
    )


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
    high = _size(planned.memory_interval(first).high)
    end = f"ends at {high} of a device's {format_bytes(planned.cluster.memory_bytes)}"
    if planned.is_safe(first):
        told = f"risk: none seen; the 80 % interval of 1 {end}"
        faster = [(n, one) for n, one in enumerate(others, 2) if one.seconds < first.seconds]
        if not faster:
            return told
        number, one = min(faster, key=lambda found: found[1].seconds)
        reaches = _size(planned.memory_interval(one).high)
        return f"{told}; that of {number}, which is faster, ends at {reaches}"
    told = f"risk: 1 may run out of memory: its 80 % interval {end}"
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
        low, high = shipped_intervals().of_seconds(run.predicted, planned.pricing.device.generation)
        words = "within its error" if low <= run.seconds <= high else "other software"
        batch = f"{run.layout.global_batch:,} x {run.layout.seq_len:,} tokens"
        told = f"published: {batch} on {run.layout.world_size:,} x {run.device} in "
        told += f"{run.seconds:.4g} s"
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
        needed, usable = (_size(size) for size in (found.memory.needed, capacity))
        excess = ", ".join(f"{name} {_size(size)} more" for name, size in rival.memory if size > 0)
        told.append(
            f"does not fit: needs {needed} on pipeline rank {found.memory.rank}, {usable} are "
            f"usable, {_size(rival.short)} short"
            + (f"; against the first: {excess}" if excess else "")
        )
        if near := rival.nearest:
            size = _size(near.memory.needed)
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
    capacity = planned.cluster.memory_bytes * planned.pricing.usable_share
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
    same = {key for key in COLUMNS if len({one[key] for one in choices}) == 1}
    alike = ", ".join(f"{key} {choices[0][key]}" for key in COLUMNS if key in same)
    differing = [key for key in COLUMNS if key not in same]
    layouts = Table(
        caption="Layouts that fit",
        header=("#", "Role", "Like it", *differing),
        rows=[
            (f"{number}", ", ".join(one.roles), f"{one.alike}", *(own[key] for key in differing))
            for number, one, own in zip(count(1), planned.candidates, choices, strict=False)
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
            *([f"in every row: {alike}"] if alike else []),
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
    for name, seconds, _ in chain(*shares):
        largest[name] = max(largest[name], seconds)
    shown = sorted(largest, key=lambda name: (name == "other", -largest[name]))
    if len(shown) > len(COLOURS):
        shown = shown[: len(COLOURS) - 1]
    bars: list[_Bar] = []
    for number, (one, share) in enumerate(zip(planned.candidates, shares, strict=True), start=1):
        sums = {name: (seconds, percent) for name, seconds, percent in share if name in shown}
        if rest := [(seconds, percent) for name, seconds, percent in share if name not in shown]:
            sums["other"] = (max(sum(x for x, _ in rest), 0.0), sum(x for _, x in rest))
        parts: list[tuple[str, float, str]] = []
        for name in dict.fromkeys([*shown, "other"]):
            seconds, percent = sums.get(name, (-1.0, 0.0))
            if seconds > 0 or (name == "other" and name in sums):
                parts.append((name, seconds, f"{seconds:.4g} s ({percent:.1f} %)"))
        bars.append((f"layout {number}", f"{one.seconds:.4g} s", parts))
    note = "; ".join(f"{name}: {PARTS[name]}" for name in shown if name in PARTS)
    return _chart("Seconds of a step, by part", note, bars)


def _memory_bars(planned: PlannedAnswer, capacity: float) -> Any:
    bars: list[_Bar] = []
    for number, one in enumerate(planned.candidates, start=1):
        parts = [(name, getattr(one.memory, name)) for name in MEMORY_PARTS]
        parts.append(("libraries", one.memory.needed - sum(size for _, size in parts)))
        sized = [(name, size, _size(size)) for name, size in parts if size > 0]
        name = f"layout {number}, pipeline rank {one.memory.rank}"
        bars.append((name, _size(one.memory.needed), sized))
    return _chart(
        f"Memory of the fullest device ({PREDICTED_PEAK}), by part",
        "states: weights, gradients and optimizer; activations: kept for the backward; "
        "working: what exists while one layer runs; libraries: of device, collectives, kernels",
        bars,
        capacity,
        f"usable: {_size(capacity)} ({planned.pricing.usable_share:.1%})",
    )


def _traffic(planned: PlannedAnswer, best: Candidate) -> Table | None:
    # Of weights that do not train the closed forms know, a plan says nothing.
    is_exact = planned.model.run is None and not untrained(best.layout, planned.model)
    plan = plan_of(best.layout) if is_exact else None
    priced = estimate(planned.model, best.layout, planned.cluster, plan)
    rows = _axis_rows(priced.traffic)
    return (
        None
        if not rows
        else Table(
            caption=f"One device of pipeline rank {priced.traffic_rank}, in a step",
            header=(
                "Axis",
                "Operation",
                "Transfers",
                "Bytes of one",
                "Bytes of all",
                "Share of bytes",
            ),
            rows=rows,
            num_names=2,
        )
    )
