"""Machines and batch that a row states by nodes, degrees, tokens, microbatches, time and rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from moemesh.config.devices import Accelerator
from moemesh.planner.accuracy.cells import measured_in, whole_in

#: Relative rounding of printed times and rates.
ROUNDED = 0.02
#: Tokens of a binary M over those of a decimal one; its root is that of a K.
_BINARY = 2**20 / 1e6


def one_a_stage(row: Mapping[str, str]) -> str:
    """Sequences of a microbatch when a replica's batch is cut into pp microbatches."""
    try:
        size, rest = divmod(
            whole_in(row, "gbs", 0), whole_in(row, "dp", 1) * whole_in(row, "pp", 1)
        )
    except (ValueError, ZeroDivisionError):
        return ""
    return str(size) if size and not rest else ""


def machines(row: Mapping[str, str], device: Accelerator | None) -> tuple[str, Accelerator | None]:
    """Number of devices of a row (the product of its degrees if nothing else states it), "" if
    unknown; and its device, with the devices of a node that the row prints or that follow from its
    devices and several nodes."""
    gpus, nodes, each = (row.get(name, "") for name in ("gpus", "nodes", "node_gpus"))
    if gpus.isdecimal() and nodes.isdecimal() and not each:
        size, rest = divmod(int(gpus), max(int(nodes), 1))
        each = str(size) if int(nodes) > 1 and not rest else ""
    if device is not None and each.isdecimal():
        device = replace(device, node_size=int(each))
    size = int(each) if each.isdecimal() else device.node_size if device else 0
    if not gpus and nodes.isdecimal() and size and (not each or each.isdecimal()):
        gpus = str(int(nodes) * size)
    degrees = [row.get(name, "") for name in ("tp", "pp", "dp")]
    if not gpus and not nodes and all(degree.isdecimal() for degree in degrees):
        gpus = str(prod(map(int, [*degrees, row.get("cp") or "1"])))
    return gpus, device


def batch(row: Mapping[str, str]) -> str:
    """Sequences of a step whose table prints none: those of its tokens, of its microbatches, those
    that its time and rate imply, else one microbatch for each replica; "" if none follows. With a
    pipeline the rate depends on the number of microbatches, so one is not assumed."""
    try:
        world, seq = whole_in(row, "gpus", 1), whole_in(row, "seq", 0)
        others = whole_in(row, "tp", 1) * whole_in(row, "cp", 1) * whole_in(row, "pp", 1)
        replicas, size = whole_in(row, "dp", 0) or max(world // others, 1), whole_in(row, "mbs", 0)
        if (tokens := measured_in(row, "batch_tokens")) and seq:
            return _whole_batch(tokens / seq, replicas * max(size, 1))
        if size and (accumulation := whole_in(row, "accumulation", 0)):
            return str(size * accumulation * replicas)
        seconds, rate = measured_in(row, "step_time_s"), measured_in(row, "tokens_s_gpu")
        if seconds and rate and seq:
            implied = seconds * rate * world / seq
            return str(round(implied)) if abs(implied / round(implied) - 1) < ROUNDED else ""
    except (ValueError, ZeroDivisionError):
        return ""
    return str(size * replicas) if size and row.get("pp", "") in ("", "1") else ""


def _whole_batch(sequences: float, multiple: int) -> str:
    """The number near `sequences` that `multiple` divides; "" if none is near. A power of two of
    tokens is often printed with a binary K or M."""
    for exact in (sequences * _BINARY, sequences * _BINARY**0.5, sequences):
        number = max(round(exact / multiple), 1) * multiple
        if abs(number / exact - 1) < (1e-9 if exact > sequences else ROUNDED):
            return str(number)
    return ""
