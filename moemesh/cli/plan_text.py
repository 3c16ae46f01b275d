"""Text and page of the answers of `moemesh estimate` and `moemesh plan`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from math import floor
from textwrap import indent
from typing import NamedTuple

from moemesh.cli.terminal import folded, table, wrapped
from moemesh.config.plan import DEGREES, Plan
from moemesh.planner.estimate import Estimate, by_axis, estimate, worst_routing
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
from moemesh.planner.speed import (
    CacheSize,
    Speed,
    decoding_intensity,
    kv_cache_bytes,
    layer_intensities,
)
from moemesh.planner.timing.price import pricing
from moemesh.report.bars import StackedBar, stacked_bars
from moemesh.report.document import Chapter, PageDocument, Table, figures, glossary, plural
from moemesh.trace.ledger import Ledger
from moemesh.trace.memory_profile import PREDICTED_HELD, PREDICTED_PEAK, format_bytes

#: Keys of [plan] in the table of the page.
COLUMNS = (
    *DEGREES, "schedule", "stages_per_rank", "microbatches", "data", "recompute", "attention_exit",
    "dispatcher",
)  # fmt: skip
INTERVAL = "80 %: the interval that held four in five runs of sources which the fit had not seen"
#: Explanation of the parts of a step.
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
_MEMORY_NOTE = (
    "states: weights, gradients and optimizer; activations: kept for the backward; working: what "
    "exists while one layer runs; libraries: of device, collectives, kernels"
)
#: Units of a number of parameters.
_LARGE = (("T", 10**12), ("B", 10**9), ("M", 10**6))


def estimate_text(priced: Estimate, cache: CacheSize | None = None) -> str:
    """Text of one layout: parameters, operations, memory, traffic and seconds; KV cache for
    `cache`."""
    memory = priced.memory
    total_parameters, active = (
        next((f"{n / size:.3f} {unit}" for unit, size in _LARGE if n >= size), str(n))
        for n in (priced.parameters.total, priced.parameters.active)
    )
    causal, full = priced.causal.training / 1e9, priced.full.training / 1e9
    low, high = map(_size, priced.memory_interval)
    blocks = layer_intensities(priced.shape, priced.layout)
    intensities = ", ".join(f"{name} {value:,.0f}" for name, value in blocks.items())
    token_bytes = kv_cache_bytes(priced.shape, 1, 1)
    lines = [
        f"model       {total_parameters} parameters, {active} active   ({priced.shape.name})",
        f"plan        {priced.layout.world_size} devices   {priced.text or priced.layout.key}",
        f"arithmetic  {causal:.2f} GFLOP a token (causal), {full:.2f} (full attention)",
        f"intensity   {intensities} FLOP/byte in a microbatch; the device is bound",
        f"            by arithmetic from {priced.device_balance:,.0f} FLOP/byte on, else by memory",
        f"KV cache    {token_bytes:,.0f} B a token of context in 16 bit, over all ranks",
    ]
    if cache is not None:
        size, intensity = kv_cache_bytes(priced.shape, *cache), decoding_intensity(cache.batch, 2)
        lines += [
            f"            {_size(size)} for {cache.batch:,} sequences of {cache.tokens:,} tokens",
            f"            decoding one token of each: {intensity:,.0f} FLOP/byte of the weights",
        ]
    # Whether the layout fits: with balanced and with the worst routing, else the nearest that does.
    lines += [
        "",
        f"memory      {format_bytes(priced.peak.needed)} {PREDICTED_PEAK}, of "
        f"{format_bytes(priced.cluster.memory_bytes)}: "
        + ("fits" if priced.fits(priced.peak.needed) else "does NOT fit"),
        f"            80 % interval {low} to {high}; "
        f"{priced.pricing.usable_share:.1%} of the device is usable",
    ]
    worst = priced.worst_routing
    if worst is not None and worst.rows > worst.balanced_rows:
        bound, fits = worst.rows_at_once, priced.fits(priced.crowded_bytes)
        split = "" if bound is None else f" in {worst.blocks} blocks of at most {bound:,}"
        lines += [
            f"            worst routing: {_size(priced.crowded_bytes)}, which "
            + ("fits" if fits else "does NOT fit"),
            f"            {worst.rows:,} rows of a layer at one rank, {worst.times_mean:.4g} times "
            f"the mean{split}",
        ]
        if worst.dropped_choices:
            dropped = f"{worst.dropped_choices:,} choices above the capacity dropped"
            lines.append(f"            {dropped}")
    if (
        priced.fits(priced.peak.needed)
        and priced.memory_interval.high > priced.cluster.memory_bytes
    ):
        lines.append(
            "            it may run out of memory: the interval reaches above the device; "
            f"it fits with {priced.fits_chance:.0%}"
        )
    if isinstance(near := priced.instead, str):
        lines.append(f"            {near}")
    elif near is not None:
        slower = near.seconds / priced.seconds["total"] - 1
        lines += [
            f"            nearest that fits: {near.change}: {_size(near.memory.needed)}, "
            f"{near.seconds:.4g} s a step ({slower:+.1%})",
            f"            --plan {near.layout.text}",
        ]
    lines.append(
        f"            (what is {PREDICTED_HELD}, below, and what allocator and libraries add)"
    )
    # Tables of memory by rank, of traffic, and of the parts of a step.
    ranks = memory.first, memory.last, memory.worst
    held = [
        (part.replace("_", " "), *(format_bytes(getattr(rank, part)) for rank in ranks))
        for part in (*_PARTS, *(["host"] if memory.worst.host else []))
    ]
    sent = [
        (
            *(entry.axis, entry.op, entry.phase, entry.caller, str(entry.count)),
            *(_size(entry.wire_bytes / entry.count), format_bytes(entry.wire_bytes)),
        )
        for entry in priced.traffic.entries()
    ]
    axes = ("axis", "operation", "transfers", "one", "all", "share")
    callers = ("axis", "operation", "phase", "caller", "count", "one", "sent")
    speed, (least, most), total = priced.speed, priced.seconds_interval, priced.seconds["total"]
    times = priced.seconds.items()
    parts = [(name, f"{size:.4g} s") for name, size in times if size and name != "total"]
    lines += [
        indent(table(("rank", "first", "last", "worst"), held), "  "),
        "",
        f"traffic     of pipeline rank {priced.traffic_rank} of {priced.layout.pp}, one device, in "
        "a step (--rank shows another)",
        indent(table(axes, _axis_rows(priced.traffic), left=2), "  "),
        "",
        "            by phase and caller",
        indent(table(callers, sent, left=4), "  "),
        "",
        indent(table(("step", f"{total:.4g} s"), parts), "  ").lstrip(),
        f"  80 % interval {least:.4g} to {most:.4g} s",
        f"  {speed.tokens_per_second:,.0f} tokens/s, {speed.tokens_per_second_per_gpu:,.1f} a "
        f"device, MFU {speed.mfu:.1%} of {speed.peak_flops / 1e12:,.4g} TFLOP/s",
        *(f"  {words}" for words in costs_of(speed)),
        "",
        *priced.notes,
    ]
    return "\n".join(lines)


def costs_of(speed: Speed, tokens: float | None = None) -> list[str]:
    """Sentence on money, if an hour of a device has a price."""
    step, billion = speed.money(speed.tokens), speed.money(1e9)
    if speed.price is None or step is None or billion is None:
        return []
    words = f"at {speed.price:g} a GPU-hour a step costs {step:,.4g}, 10^9 tokens {billion:,.4g}"
    whole = None if tokens is None else speed.money(tokens)
    return [words if whole is None else f"{words}, the training {whole:,.0f}"]


def _axis_rows(traffic: Ledger) -> list[tuple[str, ...]]:
    """Rows of axis, operation, transfers, bytes of one and of all, and their share."""
    return [
        (
            *(row.axis, row.op, f"{row.transfers:,}", _size(row.bytes_each)),
            *(format_bytes(row.total_bytes), f"{row.share:.2%}"),
        )
        for row in by_axis(traffic)
    ]


def _size(number: float) -> str:
    return format_bytes(round(number))


def plan_text(
    planned: PlannedAnswer, arguments: str, file: str = "", *, explain: bool = False
) -> str:
    """The answer in about twenty lines. `arguments`: options that `moemesh estimate` accepts, too;
    `file`: the written configuration; `explain`: add parts, limits and assumptions."""
    best, cluster = planned.candidates[0], planned.cluster
    capacity = cluster.memory_bytes * planned.pricing.usable_share
    # Figures of every layout, each above its roles and keys: all keys of the first layout, and the
    # differing keys of the others.
    columns = layout_figures(planned)
    if planned.tokens:  # the costs replace the speed of one device, to keep the line short
        columns = [column for column in columns if column.head != "a GPU"]
    cells = zip(*(column.cells for column in columns), strict=True)
    numbered = [(str(number), *row) for number, row in enumerate(cells, start=1)]
    heads = ("#", *(column.head for column in columns))
    top, *rows = table(heads, numbered, wraps=False).split("\n")
    lines = [*wrapped(", ".join(heading(planned))), top]
    for row, candidate in zip(rows, planned.candidates, strict=True):
        keys = keys_text(candidate.layout, None if candidate is best else best.layout)
        roles = f"{', '.join(candidate.roles)}: " if candidate.roles else ""
        alike = f" (+{candidate.alike} like it)" if candidate.alike else ""
        keys_line = f"   {roles}{keys}{'' if candidate is best else ', else as 1'}{alike}"
        lines += [row, *wrapped(keys_line, "   ")]
    lines.append("")
    lines += [line for sentence in judged(planned) for line in wrapped(sentence)]
    for rival in planned.rivals:
        lines += ["", f"why not {rival.asked}?"]
        for sentence in rival_sentences(rival, best, capacity):
            lines += wrapped(f"  {sentence}", "    ")
    # The two commands that run the answer, or the reason why it cannot run.
    refused, name = not_trained(best.layout, planned.model), shlex.quote(file or "plan.toml")
    if refused:
        lines += wrapped(f"`moemesh train` does not take this answer: {'; '.join(refused)}")
        if not untrained(PlannedLayout(seq_len=1, global_batch=1), planned.model):
            lines.append("for the best layout that it trains: the same call with --trainable")
    else:
        lines.append(f"wrote {name}:" if file else f"the same call with --write {name}, then:")
        lines += [f"  moemesh train {name}", f"  moemesh launch --slurm {name}"]
        lines += wrapped(f"still to choose in it: {still_to_choose(planned, best)}") if file else []
    if not explain:
        return "\n".join([*lines, "more: --explain, --html FILE, --why PLAN, --headroom, --tokens"])
    # With --explain: the parts of time and memory, the limits, and the command.
    memory = best.memory
    parts = memory_parts(best)
    held = ", ".join(f"{name} {_size(size)}" for name, size in parts if size >= 1)
    free = _size(capacity - memory.needed)
    cells = [
        (f"  {name}", f"{seconds:.4g} s", f"{percent:.1f}%", f"  {PARTS.get(name, '')}")
        for name, seconds, percent in step_parts(best.breakdown)
    ]
    cells.append(("  together", f"{best.seconds:.4g} s", "100.0%", ""))
    named = ("a step of the first", "", "")
    step = table(named, [row[:3] for row in cells], wraps=False).split("\n")
    texts = ["", *(row[3] for row in cells)]
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
    proof = planned.certificate
    lines += [
        "",
        *wrapped(
            f"computing alone takes {proof.compute_floor_seconds:.3f} s a step; left out: "
            f"{counted(proof.rejected)}"
        ),
        *wrapped(f"assumed: {'; '.join(proof.assumptions)}"),
        *(
            wrapped(f"still to choose: {still_to_choose(planned, best)}, --out")
            if not refused
            else ()
        ),
        "",
        *command_lines(planned, best, arguments),
    ]
    return "\n".join(lines)


def heading(planned: PlannedAnswer) -> tuple[str, str]:
    """Title with model and machine, and the batch of a step."""
    cluster, layout = planned.cluster, planned.candidates[0].layout
    devices, nodes = plural(cluster.num_devices, "device"), plural(cluster.nodes, "node")
    return (
        f"{planned.model.shape.name} on {devices} of {cluster.name} ({nodes})",
        f"{layout.global_batch:,} x {layout.seq_len:,} tokens a step",
    )


class FigureColumn(NamedTuple):
    """A figure of every layout, with its head in the text and on the page."""

    head: str
    page_head: str
    cells: list[str]


def layout_figures(planned: PlannedAnswer) -> list[FigureColumn]:
    """Step time and memory with intervals, throughput, MFU, days, GPU-hours and money."""
    (unit, size), tokens, layouts = memory_unit(planned), planned.tokens, planned.candidates
    seconds = [between(planned.seconds_interval(candidate), 1) for candidate in layouts]
    memory = [between(planned.memory_interval(candidate), size) for candidate in layouts]
    needed = [f"{candidate.memory.needed / size:.1f}" for candidate in layouts]
    speeds = [planned.speed(candidate) for candidate in layouts]
    columns = [
        FigureColumn("seconds", "Seconds a step", [f"{x.seconds:.3f}" for x in layouts]),
        FigureColumn("80 %", "80 % interval, s", seconds),
        FigureColumn(unit, f"Memory, {unit}", needed),
        FigureColumn("80 %", f"80 % interval, {unit}", memory),
        FigureColumn("tokens/s", "Tokens/s", [f"{x.tokens_per_second:,.0f}" for x in speeds]),
        FigureColumn("a GPU", "Tokens/s a device",
                     [f"{x.tokens_per_second_per_gpu:,.1f}" for x in speeds]),
        FigureColumn("MFU", "MFU", [f"{x.mfu:.1%}" for x in speeds]),
    ]  # fmt: skip
    if tokens:
        hours = [f"{x.gpu_hours(tokens):,.0f}" for x in speeds]
        columns.append(FigureColumn("days", "Days", [f"{x.days(tokens):,.1f}" for x in speeds]))
        columns.append(FigureColumn("GPU-hours", "GPU-hours", hours))
        if planned.cluster.gpu_hour_price is not None:
            money = [f"{x.money(tokens) or 0:,.0f}" for x in speeds]
            columns.append(FigureColumn("money", "money", money))
    return columns


def keys_text(layout: PlannedLayout, usual: PlannedLayout | None = None) -> str:
    """Keys of [plan] that differ from those of `usual`, or from the defaults, as text: "pp=2 dp=8
    schedule=zb_v"."""
    known = vars(Plan()) if usual is None else plan_keys(usual)
    keys = plan_keys(layout).items()
    differing = [(key, x) for key, x in keys if x != known.get(key) and key != "ranks_per_node"]
    return " ".join(f"{key}={shown(x)}" for key, x in differing)


def memory_unit(planned: PlannedAnswer) -> tuple[str, float]:
    """Name and bytes of the unit for the memory of all layouts."""
    is_small = max(candidate.memory.needed for candidate in planned.candidates) < 2**30
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
    """(part, seconds, percent) of a step, largest first: percents are rounded to tenths that add up
    to 100; parts below 0.05 % are summed as `other`."""
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
    """Sentence on the risk that the first layout runs out of memory, with other software or under
    the worst routing, and on a safer layout, or on a faster one if the first is safe."""
    first, *others = planned.candidates
    device = planned.cluster.memory_bytes
    high = _size(planned.memory_interval(first).high)
    end = f"ends at {high} of a device's {format_bytes(device)}"
    # Same criterion as `moemesh estimate`, independent of `headroom`.
    usable = pricing(planned.cluster.model_copy(update={"usable_share": None})).usable_share
    rank = first.memory.rank * first.layout.stage_ranks
    worst = worst_routing(planned.model, first.layout, _exact_plan(planned), rank=rank)
    crowded = first.memory.needed + (0.0 if worst is None else worst.more_bytes)
    routing = "" if crowded <= usable * device else f"the worst routing needs {_size(crowded)}"
    if planned.is_safe(first):
        risk = f"risk: {routing or 'none seen'}; the 80 % interval of 1 {end}"
        faster = [
            (n, candidate)
            for n, candidate in enumerate(others, 2)
            if candidate.seconds < first.seconds
        ]
        if not faster:
            return risk
        number, candidate = min(faster, key=lambda pair: pair[1].seconds)
        reaches = _size(planned.memory_interval(candidate).high)
        return f"{risk}; that of {number}, which is faster, ends at {reaches}"
    risk = f"risk: 1 may run out of memory: its 80 % interval {end}{routing and f', {routing}'}"
    for number, candidate in enumerate(others, start=2):
        if planned.is_safe(candidate):
            slower = candidate.seconds / first.seconds - 1
            return f"{risk}; {number} is the first whose interval fits, {slower:.1%} slower"
    if planned.has_safe:
        return f"{risk}; a larger --top shows the first whose interval fits"
    options = " or ".join(["more --nodes", *planned.safer])
    return f"{risk}, and no layout's fits: {options} leave more room"


def _exact_plan(planned: PlannedAnswer) -> Plan | None:
    """The plan of the first layout if `moemesh train` can run it, else None; also None for a model
    with frozen weights, which only the closed forms cover."""
    layout = planned.candidates[0].layout
    is_exact = planned.model.run is None and not untrained(layout, planned.model)
    return plan_of(layout) if is_exact else None


def published(planned: PlannedAnswer) -> list[str]:
    """Sentences on published runs, with the predictions of their layouts."""
    lines: list[str] = []
    for run in planned.published:
        width = shipped_intervals().seconds_width(planned.pricing.device.generation)
        low, high = Interval.around(run.predicted, width)
        words = "within its error" if low <= run.seconds <= high else "other software"
        batch = f"{run.layout.global_batch:,} x {run.layout.seq_len:,} tokens"
        line = f"published: {batch} on {run.layout.world_size:,} x {run.device} in "
        line += f"{run.seconds:.4g} s"
        if planned.tokens is not None:
            line += f", {run.speed.gpu_hours(planned.tokens):,.0f} GPU-hours"
        line += f" in {run.layout.precision} ({run.source}); predicted for it "
        line += f"{run.predicted:.4g} s, x {run.predicted / run.seconds:.2f}: {words}"
        if run.here != run.predicted:
            line += f"; in your number type {run.here:.4g} s"
        lines.append(line)
    return lines


def judged(planned: PlannedAnswer) -> list[str]:
    """Sentences on the memory risk, own and published runs, the layout of fewer nodes with the
    fewest GPU-hours (if the number of tokens is given), costs, and the certificate."""
    best, cheapest, sentences = planned.candidates[0], planned.cheapest, list[str]()
    if planned.tokens is not None and cheapest is None:
        sentences.append("cheapest: 1, to one percent: fewer nodes save no GPU-hours")
    elif planned.tokens is not None and cheapest is not None:
        hours, first = (
            planned.speed(candidate).gpu_hours(planned.tokens) for candidate in (cheapest, best)
        )
        nodes = cheapest.layout.world_size // planned.cluster.gpus_per_node
        days = planned.speed(cheapest).days(planned.tokens)
        sentences.append(
            f"cheapest: --nodes {nodes}: {hours:,.0f} GPU-hours ({hours / first - 1:+.1%}), "
            f"{days:,.1f} days, {keys_text(cheapest.layout)}"
        )
    sentences += [f"1: {words}" for words in costs_of(planned.speed(best), planned.tokens)]
    proof = planned.certificate
    gap = best.seconds / proof.lower_bound_seconds - 1
    sentences.append(
        f"certificate: of {proof.examined:,} layouts none that fits beats "
        f"{proof.lower_bound_seconds:.3f} s (1: {gap:+.1%})"
    )
    return [risk_of_memory(planned), *planned.notes, *published(planned), *sentences]


def rival_sentences(rival: Rival, best: Candidate, capacity: float) -> list[str]:
    """Reasons against the layout `rival`, compared with the answer `best`."""
    if rival.candidate is None:
        return [
            f"illegal: {problem.message}"
            + (f"; nearest legal: {problem.fix}" if problem.fix else "")
            for problem in rival.problems
        ]
    candidate = rival.candidate
    words = candidate.layout.text.replace("=", " ").replace(",", ", ")
    reasons = [f"the best layout with it: {words}"]
    if rival.verdict == "chosen":
        return [*reasons, "it is the first of the table"]
    if rival.beyond:
        reasons.append(f"outside of what the search assumes and varies: {', '.join(rival.beyond)}")
    if rival.short:
        needed, usable = (_size(size) for size in (candidate.memory.needed, capacity))
        excess = ", ".join(f"{name} {_size(size)} more" for name, size in rival.memory if size > 0)
        reasons.append(
            f"does not fit: needs {needed} on pipeline rank {candidate.memory.rank}, {usable} are "
            f"usable, {_size(rival.short)} short"
            + (f"; against the first: {excess}" if excess else "")
        )
        if near := rival.nearest:
            size = _size(near.memory.needed)
            reasons.append(f"nearest that fits: {near.change}: {size}, {near.seconds:.4g} s")
    if rival.verdict == "equal":
        return [*reasons, "as fast as the first: the time model cannot distinguish them"]
    share, word = rival.slower / best.seconds, "slower" if rival.slower > 0 else "faster"
    times = f"{candidate.seconds:.4g} s, the first {best.seconds:.4g} s"
    reasons.append(f"{abs(share):.1%} {word}: {times}")
    least = 0.001 * best.seconds
    changed = [f"{name} {more:+.4g} s" for name, more in rival.parts if abs(more) >= least]
    if changed:
        reasons.append(f"by part: {', '.join(changed)}")
    return reasons


def command_lines(planned: PlannedAnswer, best: Candidate, arguments: str) -> list[str]:
    """The command that trains the layout; if it cannot be trained, the one that prices it."""
    if not not_trained(best.layout, planned.model):
        return folded(train_command(best.layout, planned.model))
    return folded(f"moemesh estimate {arguments} --plan {best.layout.text}")


def memory_parts(candidate: Candidate) -> list[tuple[str, float]]:
    """(part, bytes) of the fullest device."""
    return [(name, getattr(candidate.memory, name)) for name in MEMORY_PARTS]


def plan_document(planned: PlannedAnswer, arguments: str) -> PageDocument:
    """The page of a plan; `arguments`: options that `moemesh estimate` accepts, too."""
    best = planned.candidates[0]
    capacity = planned.cluster.memory_bytes * planned.pricing.usable_share
    (title, batch), columns = heading(planned), layout_figures(planned)
    heads = [column.page_head for column in columns]
    rows = list(zip(*(column.cells for column in columns), strict=True))
    # Values of every layout by key of [plan]; "-" for keys without an effect.
    choices: list[dict[str, str]] = []
    for candidate in planned.candidates:
        keys = plan_keys(candidate.layout)
        choices.append({name: str(keys[name]) for name in COLUMNS})
        for key, name in (("pp", "schedule"), ("tp", "attention_exit"), ("ep", "dispatcher")):
            if keys[key] == 1:
                choices[-1][name] = "-"
    same = {key for key in COLUMNS if len({choice[key] for choice in choices}) == 1}
    effective = {key: value for key, value in choices[0].items() if value != "-"}
    alike = ", ".join(f"{key} {value}" for key, value in effective.items() if key in same)
    differing = [key for key in COLUMNS if key not in same]
    layouts = Table(
        caption="Layouts that fit",
        header=("#", "Role", "Like it", *differing),
        rows=[
            (f"{n}", ", ".join(x.roles), f"{x.alike or ''}", *(choice[key] for key in differing))
            for n, (x, choice) in enumerate(zip(planned.candidates, choices, strict=True), start=1)
        ],
        num_names=2,
    )
    of_each = Table(
        caption="Time, memory and speed of each",
        header=("#", *heads),
        rows=[(str(number), *row) for number, row in enumerate(rows, start=1)],
    )
    legend = [
        *([f"in every row: {alike}"] if alike else []),
        f"memory: {PREDICTED_PEAK}, of the fullest device: what is held, and what allocator "
        "and libraries add",
        INTERVAL,
        mfu_words(planned),
    ]
    sentences = [*judged(planned), f"binding: {planned.advice.binding}"]
    sentences += [f"assumed: {assumption}" for assumption in planned.certificate.assumptions]
    notes = [f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences]
    named = [(rival.asked, rival_sentences(rival, best, capacity)) for rival in planned.rivals]
    priced = estimate(planned.model, best.layout, planned.cluster, _exact_plan(planned))
    traffic = Table(
        caption=f"One device of pipeline rank {priced.traffic_rank}, in a step",
        header=["Axis", "Operation", "Transfers", "Bytes of one", "Bytes of all", "Share of bytes"],
        rows=_axis_rows(priced.traffic),
        num_names=2,
    )
    # Pictures of the time and of the memory of each layout, by part.
    order, bars = {name: place for place, name in enumerate(PARTS)}, list[StackedBar]()
    for number, candidate in enumerate(planned.candidates, start=1):
        shares = sorted(step_parts(candidate.breakdown), key=lambda share: order.get(share[0], 99))
        pieces = [(name, x, f"{x:.4g} s ({percent:.1f} %)") for name, x, percent in shares if x > 0]
        bars.append(StackedBar(f"layout {number}", pieces, f"{candidate.seconds:.4g} s"))
    times, drawn = "Seconds of a step, by part", {name for bar in bars for name, *_ in bar.pieces}
    summary = f"{times}, of {len(bars)} layouts."
    time_picture = stacked_bars("layout-times", times, summary, bars, unit="s")
    parts = "; ".join(f"{name}: {text}" for name, text in PARTS.items() if name in drawn)
    bars = [
        StackedBar(
            f"layout {number}, pipeline rank {candidate.memory.rank}",
            [(name, size, _size(size)) for name, size in memory_parts(candidate) if size > 0],
            _size(candidate.memory.needed),
            capacity,
        )
        for number, candidate in enumerate(planned.candidates, start=1)
    ]
    memory = f"Memory of the fullest device ({PREDICTED_PEAK}), by part"
    usable = f"usable: {_size(capacity)} ({planned.pricing.usable_share:.1%})"
    summary = f"{memory}; {usable}."
    memory_picture = stacked_bars("layout-memory", memory, summary, bars, mark=usable)
    # The chapters of the page.
    cards = [("Layout", [*effective.items()]), ("Figures", [*zip(heads, rows[0], strict=True)])]
    code = "\n".join(command_lines(planned, best, arguments))
    pairs = (line.rpartition(": ") for line in planned.advice.why_not)
    near = [(change, [rest.strip()]) for change, _, rest in pairs]
    chapters = [
        Chapter("choice", "The choice", cards=cards),
        Chapter("command", "The command", code=("", code)),
        Chapter("alternatives", "Alternatives", tables=[layouts, of_each], lists=[("", legend)]),
        Chapter("chart-1", times, note=parts, figures=figures((times, time_picture))),
        Chapter("chart-2", memory, note=_MEMORY_NOTE, figures=figures((memory, memory_picture))),
        *([Chapter("traffic", "Traffic by axis", tables=[traffic])] if traffic.rows else []),
        Chapter("why-not", "Why not another layout", lists=[*named, *near]),
        Chapter("notes", "How far to trust it", lists=[("", notes)]),
    ]
    chapters.append(glossary(chapters))
    return PageDocument(
        kind="moemesh plan", title=title, lines=[batch], chapters=chapters, source="plan"
    )
