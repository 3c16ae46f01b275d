"""Estimates as text for a person."""

from __future__ import annotations

import textwrap

from moemesh.cli.table import table
from moemesh.planner.estimate import Estimate
from moemesh.trace.memory import format_bytes

#: Parts of a rank's memory, in the order of the table.
_PARTS = (
    "dense_weights", "expert_weights", "gradients", "optimizer", "activations", "logits",
    "buffers", "total",
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


def _large(number: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.3f} {unit}"
    return str(number)


def _indented(text: str) -> str:
    return textwrap.indent(text, "  ")
