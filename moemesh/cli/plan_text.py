"""The answer of `moemesh plan` as text: the layouts, their figures, reasons, and the command."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from math import ceil, floor
from typing import Any

from moemesh.cli.table import table
from moemesh.config.train import TrainConfig
from moemesh.planner.intervals import Interval
from moemesh.planner.layout import PlannedLayout
from moemesh.planner.layout_sources import untrained
from moemesh.planner.search.command import Planned, not_trained, plan_keys, train_command
from moemesh.planner.search.rival import Rival
from moemesh.planner.search.search import Candidate
from moemesh.trace.memory import PREDICTED_PEAK, format_bytes

WIDTH = 80
#: Columns of the table of layouts, as keys of [plan], and their heads.
COLUMNS: dict[str, str] = {
    "pp": "pp",
    "dp": "dp",
    "cp": "cp",
    "tp": "tp",
    "ep": "ep",
    "etp": "etp",
    "schedule": "schedule",
    "microbatches": "parts",
    "data": "data",
    "recompute": "recompute",
    "attention_exit": "exit",
    "dispatcher": "dispatch",
}
#: Long values in the table.
_SHORT_WORDS = {
    "interleaved_1f1b": "1f1b",
    "replicate": "copies",
    "selective": "part",
    "reduce_scatter": "scatter",
    "all_reduce": "reduce",
    "all_to_all": "all2all",
    "hierarchical": "nodes",
}
_LEGEND = {
    "pp": "pp dp cp tp: pipeline, data, context and tensor ranks",
    "ep": "ep etp: ranks that share the experts, and that share one expert",
    "schedule": "schedule: of the pipeline; 1f1b x2 is interleaved_1f1b with stages_per_rank = 2",
    "microbatches": "parts: microbatches of a step and replica",
    "data": "data: copies (replicate), or zero1 to zero3",
    "recompute": "recompute: part is selective",
    "attention_exit": "exit: the collective behind attention (reduce_scatter, all_to_all)",
    "dispatcher": "dispatch: of tokens to experts (all_to_all; nodes is hierarchical)",
}
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


def plan_text(planned: Planned, asked: str) -> str:
    """The best layouts; `asked` are options that `moemesh estimate` takes, too."""
    best, cluster = planned.candidates[0], planned.cluster
    capacity = cluster.memory_bytes * planned.usable_share
    nodes = f"{cluster.nodes:,} {'node' if cluster.nodes == 1 else 'nodes'}"
    lines = [
        f"{planned.model.shape.name} on {cluster.num_devices} "
        f"{'device' if cluster.num_devices == 1 else 'devices'} of {cluster.name} ({nodes})",
        f"{best.layout.seq_len:,} tokens a sequence, {best.layout.global_batch:,} sequences a step",
        f"{format_bytes(cluster.memory_bytes)} a device, {format_bytes(round(capacity))} of it "
        f"usable ({planned.usable_share:.1%}; --headroom leaves more)",
        "",
        *_layouts(planned.candidates),
        "",
        _figures(planned),
        *wrapped(
            f"{memory_unit(planned)[0]}: {PREDICTED_PEAK}, of the fullest device; {INTERVAL}"
        ),
        *wrapped(risk_of_memory(planned, best, capacity)),
        *wrapped(mfu_words(planned)),
        "",
        *_step(best),
        "",
        *_memory(best, capacity),
        *wrapped(f"binding: {planned.advice.binding}"),
    ]  # fmt: skip
    if planned.advice.why_not:
        lines += ["", "faster, and too large for the memory:"]
        lines += [line for why in planned.advice.why_not for line in wrapped(f"- {why}", "  ")]
    for rival in planned.rivals:
        lines += ["", *rival_text(rival, best, capacity)]
    return "\n".join(
        [
            *lines,
            "",
            *_certificate(planned, best),
            *_still_to_choose(planned, best),
            "",
            *command_lines(planned, best, asked),
        ]
    )


def _layouts(candidates: Sequence[Candidate]) -> list[str]:
    """The table of layouts: what differs, or is no default, in columns; the rest in a line."""
    rows = [cells(found.layout) for found in candidates]
    shown = [
        name
        for name in COLUMNS
        if len({row[name] for row in rows}) > 1 or (name in ("pp", "dp", "cp", "tp", "ep"))
    ]
    header = ("#", *(COLUMNS[name] for name in shown))
    body = [
        (str(number), *(row[name] for name in shown)) for number, row in enumerate(rows, start=1)
    ]
    same = [f"{COLUMNS[name]} {rows[0][name]}" for name in COLUMNS if name not in shown]
    every = "every layout: " if len(rows) > 1 else "with "
    return [
        table(header, body),
        *(wrapped(every + ", ".join(same)) if same else ()),
        *wrapped("; ".join(legend(rows))),
    ]


def legend(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """The meanings of the columns of which a row (:func:`cells`) has a value."""
    return [text for name, text in _LEGEND.items() if any(row[name] != "-" for row in rows)]


def cells(layout: PlannedLayout) -> dict[str, str]:
    """The short words of a layout by key of [plan]; "-" for what has no meaning in it."""
    keys: Mapping[str, Any] = plan_keys(layout)
    found = {name: _SHORT_WORDS.get(str(keys[name]), str(keys[name])) for name in COLUMNS}
    if keys["stages_per_rank"] > 1:
        found["schedule"] += f" x{keys['stages_per_rank']}"
    for key, name in (("pp", "schedule"), ("tp", "attention_exit"), ("ep", "dispatcher")):
        if keys[key] == 1:
            found[name] = "-"
    return found


def _figures(planned: Planned) -> str:
    rows: list[tuple[str, ...]] = []
    tokens = planned.tokens
    name, unit = memory_unit(planned)
    for number, found in enumerate(planned.candidates, start=1):
        speed = planned.speed(found)
        memory = planned.memory_interval(found)
        row = (
            str(number),
            f"{found.seconds:.3f}",
            between(planned.seconds_interval(found), 1.0),
            f"{found.memory.needed / unit:.1f}",
            between(memory, unit),
            f"{speed.tokens_per_second:,.0f}",
            f"{speed.tokens_per_second_per_gpu:,.1f}",
            f"{speed.mfu:.1%}",
        )
        rows.append(row)
    header = ("#", "seconds", "80 %", name, "80 %", "tokens/s", "a GPU", "MFU")
    found = table(header, rows)
    if tokens is None:
        return found
    costs = [
        (
            str(number),
            f"{planned.speed(one).days(tokens):,.1f}",
            between(_scaled(planned, one, tokens), 1.0),
            f"{(hours := planned.speed(one).gpu_hours(tokens)):,.0f}",
            between(
                Interval(*(hours * x / one.seconds for x in planned.seconds_interval(one))), 1.0
            ),
        )
        for number, one in enumerate(planned.candidates, start=1)
    ]
    of_tokens = table(("#", "days", "80 %", "GPU-hours", "80 %"), costs)
    return f"{found}\n\n{tokens:.4g} tokens, steps alone (no evaluation, no restart):\n{of_tokens}"


def memory_unit(planned: Planned) -> tuple[str, float]:
    """Name and bytes of the unit in which the memory of all layouts is shown."""
    is_small = max(found.memory.needed for found in planned.candidates) < 2**30
    return ("MiB", 2.0**20) if is_small else ("GiB", 2.0**30)


def mfu_words(planned: Planned) -> str:
    """What MFU is, with the numbers of the cluster."""
    peak = planned.speed(planned.candidates[0]).peak_flops / 1e12
    devices = planned.cluster.num_devices
    return f"MFU: model FLOPs of a step / (seconds x {devices} devices x {peak:,.4g} TFLOP/s)"


def _scaled(planned: Planned, found: Candidate, tokens: float) -> Interval:
    days, interval = planned.speed(found).days(tokens), planned.seconds_interval(found)
    return Interval(*(days * one / found.seconds for one in interval))


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


def _step(best: Candidate) -> list[str]:
    rows = [
        (f"  {name}", f"{seconds:.4g} s", f"{percent:.1f}%", f"  {PARTS.get(name, '')}")
        for name, seconds, percent in step_parts(best.breakdown)
    ]
    rows.append(("  together", f"{best.seconds:.4g} s", "100.0%", ""))
    lines = table(("a step of the first", "", ""), [row[:3] for row in rows]).split("\n")
    texts = ["", *(row[3] for row in rows)]
    return [f"{line}{text}".rstrip() for line, text in zip(lines, texts, strict=True)]


def _memory(best: Candidate, capacity: float) -> list[str]:
    memory = best.memory
    kept = ("states", "activations", "logits", "working")
    rest = memory.needed - sum(getattr(memory, name) for name in kept)
    parts = [(name, getattr(memory, name)) for name in kept] + [("libraries", rest)]
    held = ", ".join(f"{name} {format_bytes(round(size))}" for name, size in parts if size >= 1)
    free = format_bytes(round(capacity - memory.needed))
    return wrapped(
        f"memory ({PREDICTED_PEAK}) of pipeline rank {memory.rank}: {format_bytes(memory.needed)}: "
        f"{held}; {free} of the usable are free"
    )


def risk_of_memory(planned: Planned, best: Candidate, capacity: float) -> str:
    """A sentence where the memory that fits may not do so on another software; else empty."""
    high = planned.memory_interval(best).high
    if high <= capacity:
        return ""
    return (
        f"the first layout may run out of memory: its 80 % interval reaches "
        f"{format_bytes(round(high))}, above the {format_bytes(round(capacity))} that are usable; "
        "a larger --headroom asks for a layout with more room"
    )


def rival_text(rival: Rival, best: Candidate, capacity: float) -> list[str]:
    """Why a layout that was named is not the answer."""
    lines = [f"why not {rival.asked}?"]
    for sentence in rival_sentences(rival, best, capacity):
        lines += wrapped(f"  {sentence}", "    ")
    return lines


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
        told += _too_large(rival, found, capacity)
    if rival.verdict == "equal":
        return [*told, "as fast as the first: the time model does not tell them apart"]
    share, word = rival.slower / best.seconds, "slower" if rival.slower > 0 else "faster"
    told.append(f"{abs(share):.1%} {word}: {found.seconds:.4g} s, the first {best.seconds:.4g} s")
    least = 0.001 * best.seconds
    changed = [f"{name} {more:+.4g} s" for name, more in rival.parts if abs(more) >= least]
    if changed:
        told.append(f"by part: {', '.join(changed)}")
    return told


def _too_large(rival: Rival, found: Candidate, capacity: float) -> list[str]:
    """By how much it does not fit, in which parts, and what would."""
    needed, usable = (format_bytes(round(size)) for size in (found.memory.needed, capacity))
    more = ", ".join(
        f"{name} {format_bytes(round(size))} more" for name, size in rival.memory if size > 0
    )
    told = [
        f"does not fit: needs {needed} on pipeline rank {found.memory.rank}, {usable} are usable, "
        f"{format_bytes(round(rival.short))} short"
        + (f"; against the first: {more}" if more else "")
    ]
    if near := rival.nearest:
        size = format_bytes(round(near.needed))
        told.append(f"nearest that fits: {near.change}: {size}, {near.seconds:.4g} s")
    return told


def _certificate(planned: Planned, best: Candidate) -> list[str]:
    certificate = planned.certificate
    gap = best.seconds / certificate.lower_bound_seconds - 1
    return [
        *wrapped(
            f"certificate: {certificate.examined:,} layouts examined; none of them that fits is "
            f"faster under this model (lower bound {certificate.lower_bound_seconds:.3f} s, gap "
            f"{gap:.1%}); computing alone takes {certificate.compute_floor_seconds:.3f} s"
        ),
        *wrapped(
            "left out: "
            + "; ".join(f"{name} {count:,}" for name, count in certificate.rejected.items())
        ),
        *wrapped("assumed: " + "; ".join(certificate.assumptions)),
    ]


def command_lines(planned: Planned, best: Candidate, asked: str) -> list[str]:
    """The call that trains the layout, or why there is none."""
    if not (refused := not_trained(best.layout, planned.model)):
        return folded(train_command(best.layout, planned.model))
    lines = [
        *folded(f"moemesh estimate {asked} --plan {best.layout.text}"),
        *wrapped(f"this version plans {', '.join(refused)} and does not train it"),
    ]
    if not untrained(PlannedLayout(seq_len=1, global_batch=1), planned.model):
        lines.append("the best of what it trains: the same call with --trainable")
    return lines


def _still_to_choose(planned: Planned, best: Candidate) -> list[str]:
    """What the command leaves at its default, which is made for a first run."""
    if not_trained(best.layout, planned.model):
        return []
    train = TrainConfig()
    steps = f"train.steps (now {train.steps})"
    if planned.tokens is not None:
        each = best.layout.seq_len * best.layout.global_batch
        steps = f"train.steps = {ceil(planned.tokens / each)} for the tokens"
    data = "data.path, data.tokenizer" if planned.model.path is None else "data.path"
    return wrapped(f"still to choose: {steps}, train.lr (now {train.lr:g}), {data}, --out")


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
