"""Estimates as text for a person."""

from __future__ import annotations

import textwrap

from moemesh.cli.terminal import table
from moemesh.planner.estimate import Estimate, by_axis
from moemesh.planner.memory import CacheSize, kv_bytes_per_token, kv_cache_bytes
from moemesh.planner.speed import decoding_intensity, layer_intensities
from moemesh.trace.memory_profile import PREDICTED_HELD, PREDICTED_PEAK, format_bytes

#: Parts of a rank's memory, in the order of the table.
_PARTS = (
    "dense_weights", "expert_weights", "gradients", "optimizer", "activations", "logits",
    "buffers", "total",
)  # fmt: skip


def estimate_text(found: Estimate, cache: CacheSize | None = None) -> str:
    """One layout: parameters, operations, memory, traffic and seconds; the KV cache of `cache`."""
    parameters, memory = found.parameters, found.memory
    causal, full = found.causal.training / 1e9, found.full.training / 1e9
    fits = "fits" if found.peak["fits"] else "does NOT fit"
    needed = format_bytes(found.peak["needed_bytes"])
    device = format_bytes(found.cluster.memory_bytes)
    low, high = (format_bytes(round(value)) for value in found.memory_interval)
    lines = [
        f"model       {_large(parameters.total)} parameters, {_large(parameters.active)} active   "
        f"({found.shape.name})",
        f"plan        {found.layout.world_size} devices   {found.text or found.layout.key}",
        f"arithmetic  {causal:.2f} GFLOP a token (causal), {full:.2f} (full attention)",
        *_intensity(found),
        *_cache(found, cache),
        "",
        f"memory      {needed} {PREDICTED_PEAK}, of {device}: {fits}",
        f"            80 % interval {low} to {high}; "
        f"{found.usable_share:.1%} of the device is usable",
        *_worst_routing(found),
    ]
    if found.peak["fits"] and found.memory_interval.high > found.cluster.memory_bytes:
        lines.append(
            "            it may run out of memory: the interval reaches above the device; "
            f"it fits with {found.fits_chance:.0%}"
        )
    if isinstance(near := found.instead, str):
        lines.append(f"            {near}")
    elif near is not None:
        slower = near.seconds / found.seconds["total"] - 1
        lines += [
            f"            nearest that fits: {near.change}: {format_bytes(round(near.needed))}, "
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
            format_bytes(round(one.wire_bytes / one.count)),
            format_bytes(one.wire_bytes),
        )
        for one in found.traffic.entries()
    ]
    axes = [
        (
            *(one.axis, one.op, f"{one.transfers:,}", format_bytes(round(one.bytes_each))),
            *(format_bytes(one.total_bytes), f"{one.share:.2%}"),
        )
        for one in by_axis(found.traffic)
    ]
    speed, (least, most) = found.speed, found.seconds_interval
    parts = [
        (name, f"{seconds:.4g} s")
        for name, seconds in found.seconds.items()
        if name != "total" and seconds
    ]
    lines += [
        _indented(table(("rank", "first", "last", "worst"), held)),
        "",
        f"traffic     of pipeline rank {found.traffic_rank} of {found.layout.pp}, one device, in a "
        "step (--rank shows another)",
        _indented(table(("axis", "operation", "transfers", "one", "all", "share"), axes, left=2)),
        "",
        "            by phase and caller",
        _indented(
            table(("axis", "operation", "phase", "caller", "count", "one", "sent"), sent, left=4)
        ),
        "",
        _indented(table(("step", f"{found.seconds['total']:.4g} s"), parts)).lstrip(),
        f"  80 % interval {least:.4g} to {most:.4g} s",
        f"  {speed.tokens_per_second:,.0f} tokens/s, {speed.tokens_per_second_per_gpu:,.1f} a "
        f"device, MFU {speed.mfu:.1%} of {speed.peak_flops / 1e12:,.4g} TFLOP/s",
        "",
        *found.notes,
    ]
    return "\n".join(lines)


def _worst_routing(found: Estimate) -> list[str]:
    """What the fullest rank needs when the router sends it all rows that it can."""
    worst = found.worst_routing
    if worst is None or worst.rows <= worst.balanced_rows:
        return []
    bound = worst.rows_at_once
    blocks = "" if bound is None else f" in {worst.blocks} blocks of at most {bound:,}"
    lines = [
        f"            worst routing: {format_bytes(round(found.crowded_bytes))}, "
        + ("which fits" if found.fits(found.crowded_bytes) else "which does NOT fit"),
        f"            {worst.rows:,} rows of a layer at one rank, {worst.times_mean:.4g} times "
        f"the mean{blocks}",
    ]
    if worst.dropped_choices:
        lines.append(f"            {worst.dropped_choices:,} choices above the capacity dropped")
    return lines


def _intensity(found: Estimate) -> list[str]:
    """Operations a byte of one microbatch's products, beside what the device asks for."""
    blocks = layer_intensities(found.shape, found.layout)
    shown = ", ".join(f"{name} {value:,.0f}" for name, value in blocks.items())
    return [
        f"intensity   {shown} FLOP/byte in a microbatch; the device is bound",
        f"            by arithmetic from {found.device_balance:,.0f} FLOP/byte on, else by memory",
    ]


def _cache(found: Estimate, cache: CacheSize | None) -> list[str]:
    """The key-value cache of a model that generates."""
    each = kv_bytes_per_token(found.shape)
    lines = [f"KV cache    {each:,.0f} B a token of context in 16 bit, over all ranks"]
    if cache is not None:
        whole = format_bytes(round(kv_cache_bytes(found.shape, *cache)))
        intensity = decoding_intensity(cache.batch, 2)
        lines += [
            f"            {whole} for {cache.batch:,} sequences of {cache.tokens:,} tokens",
            f"            decoding one token of each: {intensity:,.0f} FLOP/byte of the weights",
        ]
    return lines


def _large(number: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.3f} {unit}"
    return str(number)


def _indented(text: str) -> str:
    return textwrap.indent(text, "  ")
