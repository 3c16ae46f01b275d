"""Estimates and plans as text for a person."""

from __future__ import annotations

import textwrap

from moemesh.cli.table import table
from moemesh.planner.estimate import Estimate
from moemesh.planner.layout import PlannedLayout
from moemesh.planner.layout_sources import untrained
from moemesh.planner.search.command import Planned, not_trained, plan_keys, train_command
from moemesh.trace.memory import format_bytes

#: Parts of a rank's memory, in the order of the table.
_PARTS = (
    "dense_weights", "expert_weights", "gradients", "optimizer", "activations", "logits",
    "buffers", "total",
)  # fmt: skip
#: Columns of the table of plans; "mb" are microbatches, "exit" is the attention's.
_HEADS = (
    "#", "pp", "dp", "cp", "tp", "ep", "etp", "schedule", "mb", "data", "recompute", "exit",
    "dispatcher", "seconds", "memory",
)  # fmt: skip


def estimate_text(found: Estimate) -> str:
    """One layout: parameters, operations, memory, traffic and seconds."""
    parameters, memory = found.parameters, found.memory
    causal, full = found.causal.training / 1e9, found.full.training / 1e9
    fits = "fits" if found.peak["fits"] else "does NOT fit"
    device = format_bytes(found.cluster.memory_bytes)
    lines = [
        f"model       {_large(parameters.total)} parameters, {_large(parameters.active)} active   "
        f"({found.shape.name})",
        f"plan        {found.layout.world_size} devices   {found.text or found.layout.key}",
        f"arithmetic  {causal:.2f} GFLOP a token (causal), {full:.2f} (full attention)",
        "",
        f"memory      {format_bytes(found.peak['needed_bytes'])} needed, {device} there: {fits}",
    ]
    if isinstance(near := found.instead, str):
        lines.append(f"            {near}")
    elif near is not None:
        slower = near.seconds / found.seconds["total"] - 1
        lines += [
            f"            nearest that fits: {near.change}: {format_bytes(round(near.needed))}, "
            f"{near.seconds:.4g} s a step ({slower:+.1%})",
            f"            --plan {near.layout.text}",
        ]
    lines.append("            (the exact parts below, and what an allocator adds to them)")
    ranks = memory.first, memory.last, memory.worst
    held = [
        (part.replace("_", " "), *(format_bytes(getattr(rank, part)) for rank in ranks))
        for part in _PARTS
    ]
    sent = [
        (one.axis, one.op, one.phase, one.caller, str(one.count), format_bytes(one.wire_bytes))
        for one in found.traffic.entries()
    ]
    parts = [
        (name, f"{seconds:.4g} s")
        for name, seconds in found.seconds.items()
        if name != "total" and seconds
    ]
    lines += [
        _indented(table(("rank", "first", "last", "worst"), held)),
        "",
        "traffic     of one rank and step",
        _indented(table(("axis", "operation", "phase", "caller", "count", "sent"), sent, left=4)),
        "",
        _indented(table(("step", f"{found.seconds['total']:.4g} s"), parts)).lstrip(),
        "",
        *found.notes,
    ]
    return "\n".join(lines)


def plan_text(planned: Planned, asked: str) -> str:
    """The best layouts; `asked` are options that `moemesh estimate` takes, too."""
    best, cluster, certificate = planned.candidates[0], planned.cluster, planned.certificate
    rows: list[tuple[str, ...]] = []
    for number, found in enumerate(planned.candidates, start=1):
        keys = plan_keys(found.layout)
        chunks = f" x{keys['stages_per_rank']}" if keys["stages_per_rank"] > 1 else ""
        shown = (
            *(keys[name] for name in _HEADS[1:7]),
            keys["schedule"] + chunks if keys["pp"] > 1 else "-",
            keys["microbatches"],
            keys["data"],
            keys["recompute"],
            keys["attention_exit"] if keys["tp"] > 1 else "-",
            keys["dispatcher"] if keys["ep"] > 1 else "-",
            f"{found.seconds:.3f}",
            format_bytes(round(found.memory.needed)),
        )
        rows.append((str(number), *map(str, shown)))
    parts = [
        (name, f"{seconds:.4f} s", f"{seconds / best.seconds:.1%}")
        for name, seconds in sorted(best.breakdown.items(), key=lambda item: -item[1])
        if name != "total" and seconds > 0.0005 * best.seconds
    ]
    memory = best.memory
    kept = ("states", "activations", "logits", "working")
    held = ", ".join(f"{name} {format_bytes(round(getattr(memory, name)))}" for name in kept)
    gap = best.seconds / certificate.lower_bound_seconds - 1
    lines = [
        f"{planned.model.shape.name} on {cluster.num_devices} devices of {cluster.name} "
        f"({cluster.nodes:,} {'node' if cluster.nodes == 1 else 'nodes'}), "
        f"{best.layout.seq_len} tokens a sequence, {best.layout.global_batch} sequences a step",
        "",
        table(_HEADS, rows),
        "",
        _indented(table(("a step of the first:", "", ""), parts)).lstrip(),
        "",
        f"memory of pipeline rank {memory.rank}: {held}",
        _wrapped(f"binding: {planned.advice.binding}"),
        *(_wrapped(f"why not {line}") for line in planned.advice.why_not),
        "",
        _wrapped(
            f"certificate: {certificate.examined:,} layouts examined; none of them that fits is "
            f"faster under this model (lower bound {certificate.lower_bound_seconds:.3f} s, gap "
            f"{gap:.1%}); computing alone takes {certificate.compute_floor_seconds:.3f} s"
        ),
        _wrapped(
            "left out: "
            + "; ".join(f"{name} {count:,}" for name, count in certificate.rejected.items())
        ),
        _wrapped("assumed: " + "; ".join(certificate.assumptions)),
        "",
    ]
    if not (refused := not_trained(best.layout, planned.model)):
        return "\n".join([*lines, train_command(best.layout, planned.model)])
    lines += [
        f"moemesh estimate {asked} --plan {best.layout.text}",
        _wrapped(f"this version plans {', '.join(refused)} and does not train it"),
    ]
    if not untrained(PlannedLayout(seq_len=1, global_batch=1), planned.model):
        lines.append("the best of what it trains: the same call with --trainable")
    return "\n".join(lines)


def _large(number: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.3f} {unit}"
    return str(number)


def _indented(text: str) -> str:
    return textwrap.indent(text, "  ")


def _wrapped(line: str) -> str:
    """The line in pieces of at most 100 columns."""
    return textwrap.fill(line, 100, subsequent_indent="    ", break_on_hyphens=False)
