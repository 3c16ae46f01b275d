"""Seconds of the parts of a step on one rank, from rates that were measured on its machine."""

from __future__ import annotations

from collections.abc import Mapping

from moemesh.config.run import RunConfig
from moemesh.planner.parameters import (
    all_kinds,
    attention_products,
    core_flops,
    mlp_matmul,
    repeated_flops,
    training_flops,
)
from moemesh.planner.shapes.counted import shape_of
from moemesh.trace import step_seconds as parts
from moemesh.trace.ledger import Ledger
from moemesh.trace.memory_profile import MemoryProfile

#: Name of the rate of reading and writing memory, in bytes/s.
MEMORY = "memory"
#: Phases of communication outside of steps.
_OUTSIDE = ("evaluate", "control")


def latency(axis: str) -> str:
    """Name of the rate of `axis` in seconds per operation."""
    return f"seconds of an operation over {axis}"


def bandwidth(axis: str) -> str:
    """Name of the rate of `axis` in bytes/s that a rank sends."""
    return f"bytes/s over {axis}"


def predicted_seconds(
    config: RunConfig,
    rates: Mapping[str, float],
    ledger: Ledger,
    memory: MemoryProfile,
    bubble: float,
) -> dict[str, float]:
    """Seconds of each part of a step of `config` on one rank.

    A part that computes takes its FLOPs of forward, backward and recomputation over the part's
    rate. Communication over an axis takes the axis's latency for each operation of the predicted
    `ledger`, and its bytes over the bandwidth. The optimizer takes the bytes of weights, gradients
    and states of the predicted `memory` over the rate of memory. `bubble` is the share of a step in
    which a rank waits for other pipeline ranks. Parts without a rate are left out.
    """
    seconds = {
        part: flops / rates[part] for part, flops in pass_flops(config).items() if rates.get(part)
    }
    if 0 < bubble < 1:
        waiting = sum(seconds.values()) * bubble / (1 - bubble)
        seconds[parts.communication("pp")] = waiting
    for entry in ledger.entries():
        part, rate = parts.communication(entry.axis), rates.get(bandwidth(entry.axis))
        if rate and entry.phase not in _OUTSIDE:
            amount = entry.count * rates[latency(entry.axis)] + entry.wire_bytes / rate
            seconds[part] = seconds.get(part, 0.0) + amount
    if rate := rates.get(MEMORY):
        # The norm reads gradients, clipping with the update reads and writes them once; the update
        # reads and writes weights and states.
        weights = memory.dense_weights + memory.expert_weights
        touched = 2 * weights + 3 * memory.gradients + 2 * memory.optimizer
        seconds[parts.OPTIMIZER] = touched / rate
    return seconds


def pass_flops(config: RunConfig) -> dict[str, float]:
    """FLOPs of a step on an average rank by part, recomputation and extra prediction layers
    included. Empty for a run that trains some of the weights, or adapters of a packed base."""
    shape, plan, seq_len = shape_of(config.model), config.plan, config.data.seq_len
    tokens = config.data.global_batch * seq_len / plan.world_size
    adapters, recompute = config.trains_adapters, plan.recomputed_parts
    if config.lora.is_packed or not (adapters or config.tuning.is_full):
        return {}
    flops = dict.fromkeys((*parts.PASSES, parts.TOGETHER), 0.0)
    # Forward, gradient of the input, and gradient of the weight if it trains. Products with
    # adapters are narrow and not counted.
    passes = 2 if adapters else 3
    if shape.counted:
        flops[parts.TOGETHER] = training_flops(shape, seq_len, adapters=adapters)
    else:
        ahead, hidden = shape.num_mtp_layers, shape.hidden_size
        heads = (1 + ahead) * shape.vocab_size + ahead * 2 * hidden
        flops[parts.HEAD] = passes * 2.0 * hidden * heads
    for kind, number in all_kinds(shape).items():
        attention, mlp = repeated_flops(shape, kind, seq_len, "causal", recompute)
        if not shape.counted:
            core = core_flops(shape, seq_len, kind.window, "causal")
            attention += passes * 2.0 * sum(attention_products(shape)) + 3 * core
            mlp += passes * 2.0 * mlp_matmul(shape, kind.moe)
        flops[parts.TOGETHER if shape.counted else parts.ATTENTION] += number * attention
        flops[parts.EXPERTS if kind.moe else parts.DENSE_MLPS] += number * mlp
    return {part: tokens * amount for part, amount in flops.items() if amount}
