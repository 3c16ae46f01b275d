"""Accelerators and their nodes: data-sheet numbers, for clusters that are given by device."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, cast

from moemesh.config.sources import read_preset_table

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device and its usual node. Rates per second, for one device and one direction.

    `peak_flops` counts dense operations of (16 bit, 8 bit, 4 bit) matrix products; a format that
    the device lacks has the rate of the next wider one. `node_size` devices share the fast links.
    """

    name: str
    generation: str
    peak_flops: tuple[float, float, float]
    memory_bytes: float
    memory_bandwidth: float
    intra_node_bandwidth: float
    inter_node_bandwidth: float
    node_size: int
    #: Dense operations of products in float32 and float64; 0: unknown.
    wide_flops: tuple[float, float] = (0.0, 0.0)
    #: Share of a card's memory that a device of a program has.
    visible: float = 1.0
    #: Share of the peak that the best matrix products reach, relative to that of NVIDIA's devices.
    sustained: float = 1.0

    def width(self, precision: str) -> int:
        """Index into `peak_flops`: 0, 1, 2 for products in 16, 8, 4 bit; a format that the device
        lacks counts as the next wider one."""
        place = {"float8": 1, "float4": 2}.get(precision, 0)
        while place and self.peak_flops[place] == self.peak_flops[place - 1]:
            place -= 1
        return place

    def peak(self, precision: str) -> float:
        """Dense operations of products in a number type; 0 where the data sheet lacks it."""
        if precision in ("float32", "float64"):
            return self.wide_flops[precision == "float64"]
        return self.peak_flops[self.width(precision)]


_TABLE: dict[str, Any] = read_preset_table("devices", "calibration")

#: Device -> its data sheet, from ``presets/calibration/devices.toml``.
ACCELERATORS: dict[str, Accelerator] = {
    name: Accelerator(
        name=name,
        generation=row["generation"],
        peak_flops=cast("tuple[float, float, float]", tuple(1e12 * x for x in row["tflops"])),
        memory_bytes=row["memory"] * GIB * (visible := row.get("visible", 1.0)),
        visible=visible,
        memory_bandwidth=row["terabytes"] * 1e12,
        intra_node_bandwidth=row["links"][0] * 1e9,
        inter_node_bandwidth=row["links"][1] * 1e9,
        node_size=row["node_size"],
        wide_flops=(1e12 * row.get("float32", 0.0), 0.0),
        sustained=_TABLE["sustained"].get(row["generation"], 1.0),
    )
    for name, row in _TABLE["device"].items()
}


def _named(name: str) -> str:
    """Pattern of a device's name in a description: with or without one separator between its parts,
    not inside a longer name. An x may precede it, as in "8xH100"."""
    words = "[ _-]?".join(re.findall(r"[A-Za-z]+|\d+", name))
    if alias := _TABLE["device"].get(name, {}).get("alias"):
        words += f"|{alias}"
    return rf"(?<![A-WYZ])(?:{words})(?!\d)"


#: Pattern -> device. A name without its memory ("A100") means the last of its devices in the table
#: (A100-40G and A100-80G).
_NAMES = {_named(name): name for name in ACCELERATORS} | {
    _named(name.partition("-")[0]): name for name in ACCELERATORS if name[-1] == "G"
}


#: Groups: nodes, count before the name, name, count after it.
_COUNTS = re.compile(
    r"(?:(\d+) ?[x×*] ?(?=\d+ ?[x×*]))?(?:(\d+) ?[x×*] ?)?(.+?)(?:(?: |(?<=\d))[x×*] ?(\d+))?", re.S
)
#: Words of a description that change no number.
_PLAIN = re.compile(
    r"(nvidia|amd|intel|google|huawei|tpu|tesla|geforce|instinct|sxm\d?|hbm\d?e?|gpus?|oam|\W)+",
    re.I,
)


def counted(text: str) -> tuple[int | None, int | None, str]:
    """Nodes, number and name of "H100", "8xH100", "H100 x 8" and "2x8xH100" (2 nodes of 8)."""
    groups = cast("re.Match[str]", _COUNTS.fullmatch(text.strip() or " ")).groups()
    nodes, before, name, after = groups
    count = before or after
    return int(nodes) if nodes else None, int(count) if count else None, name


def described_device(text: str) -> Accelerator | None:
    """The device of a text that describes only a device, such as "NVIDIA H100 80GB SXM5" and "GB200
    NVL72"; None for any other text."""
    for pattern in _NAMES:
        rest = re.sub(pattern, " ", text, count=1, flags=re.IGNORECASE)
        rest = re.sub(r"-\d+G\b|\b\d+ ?Gi?B\b|\bNVL\d+", " ", rest, flags=re.IGNORECASE)
        if _PLAIN.fullmatch(f" {rest}") or re.fullmatch(pattern, text, re.IGNORECASE):
            return accelerator_of(text)
    return None


#: Machine types of clouds (:func:`machine_of`).
MACHINES: tuple[str, ...] = tuple(_TABLE["machine"])


def machine_of(name: str) -> Accelerator | None:
    """The devices and the network of a cloud's machine type ("p5.48xlarge", "a3-megagpu-8g",
    "Standard_ND96isr_H100_v5"); None for any other text."""
    row = _TABLE["machine"].get(name.strip().lower().removeprefix("standard_"))
    if row is None:
        return None
    _, size, device = counted(row["devices"])
    return replace(
        ACCELERATORS[device],
        node_size=size,
        inter_node_bandwidth=row["gigabits"] * 1e9 / 8 / size,
    )


#: Cards of a node with their rate ("8x200G", "IB8x50GB/s"), or one rate: of a node, or "per GPU".
_CARDS = re.compile(r"(\d+) ?[x×] ?(\d+) ?(GB/s|G(?:b(?:it|ps|/s)?)?)(?![\w/])")
_NODE_RATE = re.compile(r"(?<![-\w(x×])((?:1|2|4|8|16|32)00) ?(GB/s|G(?:b(?:it|ps|/s)?)?)(?![\w/])")


def accelerator_of(text: str) -> Accelerator | None:
    """The device and network of a free description ("A100-80G 4x100G RoCE per node").

    Reads the device, its memory and the rate of that ("4.8TB/s"), ``NVL<n>`` nodes, bidirectional
    NVLink in brackets ("(400GB/s)"), and network rates for several cards ("8x200G"), a whole node
    ("1600G", "200G HDR") or each device ("400G per GPU"); without a device a cloud's machine type.
    None for an unknown device.
    """
    matches = [
        (match.start(), -match.end(), name)
        for pattern, name in _NAMES.items()
        if (match := re.search(pattern, text, re.IGNORECASE))
    ]
    if not matches:
        return next((machine_of(name) for name in MACHINES if name in text.lower()), None)
    device = ACCELERATORS[min(matches)[2]]  # the first match; if several begin there, the longest
    folded = text.upper()
    if memory := re.search(r"(?:-(\d+)G\b|(\d+) ?GI?B\b(?!/S))", folded):
        size = int(memory.group(1) or memory.group(2))
        device = ACCELERATORS.get(f"{device.name.partition('-')[0]}-{size}G", device)
        # A size above the device's own is that of the card.
        share = device.visible if size * GIB > device.memory_bytes else 1.0
        device = replace(device, memory_bytes=size * GIB * share)
    if both_ways := re.search(r"\((\d+)GB/S\)", folded):
        device = replace(device, intra_node_bandwidth=float(both_ways.group(1)) * 0.5e9)
    if rate := re.search(r"(\d+\.\d+)TB/S", folded):
        device = replace(device, memory_bandwidth=float(rate.group(1)) * 1e12)
    if node := re.search(r"NVL(\d+)", folded):
        device = replace(device, node_size=int(node.group(1)))
    if cards := _CARDS.search(text):
        number, rate, unit = cards.groups()
    elif node := _NODE_RATE.search(text):
        per_device = re.search(r"(per|a|each) (gpu|card|device)", text, re.IGNORECASE)
        number, (rate, unit) = device.node_size if per_device else 1, node.groups()
    else:
        return device
    per_node = int(number) * float(rate) * (1e9 if unit == "GB/s" else 1e9 / 8)
    return replace(device, inter_node_bandwidth=per_node / device.node_size)
