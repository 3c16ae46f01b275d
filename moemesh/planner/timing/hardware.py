"""Accelerators and their nodes: data-sheet numbers, the basis of every prediction."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from moemesh.config.cluster import Cluster

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
    #: Rate of the best matrix products, relative to the same share of the peak on NVIDIA's devices.
    sustained: float = 1.0


#: Generation -> `sustained`. The power limit holds an MI300X at 620 of its 1,307 TFLOP/s in 16 bit
#: where an H100 reaches 720 of 989 (SemiAnalysis, "MI300X vs H100", December 2024); half of the gap
#: is assumed for CDNA 4.
_SUSTAINED = {"cdna3": 0.65, "cdna4": 0.8}

#: Data sheets. NVIDIA without sparsity, NVLink one way (PCIe for devices without NVLink), one
#: network card a device (HDR200, NDR400, CX-8 800); AMD CDNA 3 and 4 with Infinity Fabric one way;
#: Intel, Huawei, Google. A800 and H800 are A100 and H100 with slower NVLink. Devices without a
#: calibrated relative of their generation get the constants that all clusters share.
ACCELERATORS: dict[str, Accelerator] = {
    name: Accelerator(
        name=name,
        generation=generation,
        peak_flops=(tflops[0] * 1e12, tflops[1] * 1e12, tflops[2] * 1e12),
        memory_bytes=memory * GIB,
        memory_bandwidth=terabytes * 1e12,
        intra_node_bandwidth=links[0] * 1e9,
        inter_node_bandwidth=links[1] * 1e9,
        node_size=node_size,
        sustained=_SUSTAINED.get(generation, 1.0),
    )
    # 10^12 operations/s of each width, GiB, TB/s of memory, GB/s inside and between nodes, devices.
    for name, generation, tflops, memory, terabytes, links, node_size in (
        ("V100", "volta", (125, 125, 125), 16, 0.9, (150, 3.1), 8),
        ("A100-40G", "ampere", (312, 312, 312), 40, 1.555, (300, 25), 8),
        ("A100-80G", "ampere", (312, 312, 312), 80, 2.039, (300, 25), 8),
        ("A800-80G", "ampere", (312, 312, 312), 80, 2.039, (200, 25), 8),
        ("H100-80G", "hopper", (989.5, 1979, 1979), 80, 3.35, (450, 50), 8),
        ("H800-80G", "hopper", (989.5, 1979, 1979), 80, 3.35, (200, 50), 8),
        ("H20-96G", "hopper", (148, 296, 296), 96, 4.0, (450, 50), 8),
        ("H200-141G", "hopper", (989.5, 1979, 1979), 141, 4.8, (450, 50), 8),
        ("B200", "blackwell", (2250, 4500, 9000), 180, 8.0, (900, 50), 8),
        ("B300", "blackwell", (2250, 4500, 13500), 268, 8.0, (900, 100), 8),
        ("GB200", "blackwell", (2500, 5000, 10000), 186, 8.0, (900, 50), 72),
        ("GB300", "blackwell", (2500, 5000, 15000), 278, 8.0, (900, 100), 72),
        ("H100-PCIE", "hopper", (756, 1513, 1513), 80, 2.0, (64, 50), 8),
        ("H100-NVL", "hopper", (835, 1671, 1671), 94, 3.9, (300, 50), 8),
        ("GH200", "hopper", (989.5, 1979, 1979), 96, 4.0, (450, 50), 1),
        ("A40", "ampere", (150, 150, 150), 48, 0.696, (32, 25), 8),
        ("A10", "ampere", (125, 125, 125), 24, 0.6, (32, 12.5), 4),
        ("A6000", "ampere", (155, 155, 155), 48, 0.768, (56, 25), 8),
        ("RTX3090", "ampere", (71, 71, 71), 24, 0.936, (25, 12.5), 8),
        ("RTX4090", "ada", (165, 330, 330), 24, 1.008, (25, 12.5), 8),
        ("RTX5090", "blackwell_rtx", (210, 419, 1676), 32, 1.792, (50, 12.5), 8),
        ("L4", "ada", (121, 242, 242), 24, 0.3, (25, 12.5), 8),
        ("L40S", "ada", (362, 733, 733), 48, 0.864, (32, 25), 8),
        ("MI250X", "cdna2", (383, 383, 383), 128, 3.2, (200, 25), 8),
        ("MI300X", "cdna3", (1307, 2615, 2615), 192, 5.3, (448, 50), 8),
        ("MI325X", "cdna3", (1307, 2615, 2615), 256, 6.0, (448, 50), 8),
        ("MI350X", "cdna4", (2307, 4614, 9228), 288, 8.0, (538, 50), 8),
        ("MI355X", "cdna4", (2517, 5033, 10066), 288, 8.0, (538, 50), 8),
        ("Gaudi2", "gaudi2", (432, 865, 865), 96, 2.45, (262, 37.5), 8),
        ("Gaudi3", "gaudi3", (1835, 1835, 1835), 128, 3.7, (525, 75), 8),
        ("Ascend910B", "ascend", (376, 376, 376), 64, 1.6, (196, 25), 8),
        ("TPUv4", "tpu4", (275, 275, 275), 32, 1.2, (150, 25), 64),
        ("TPUv5e", "tpu5", (197, 197, 197), 16, 0.82, (100, 25), 256),
        ("TPUv5p", "tpu5", (459, 459, 459), 95, 2.765, (300, 25), 64),
        ("TPUv6e", "tpu6", (918, 918, 918), 32, 1.64, (224, 25), 256),
    )
}

#: Other names of devices in descriptions.
_ALIASES = {
    "TPUv4": "TPU v4", "TPUv5e": "TPU ?v5 ?lite|v5e", "TPUv5p": "v5p", "TPUv6e": "v6e|Trillium",
    "RTX4090": "4090", "RTX3090": "3090", "RTX5090": "5090", "A10": "A10G",
    "L40S": "L40", "Ascend910B": "910B",
}  # fmt: skip


def _named(name: str) -> str:
    """Pattern of a device's name in a description: any separators, not inside a longer name."""
    parts = re.findall(r"[A-Za-z]+|\d+", name)
    words = "[ _-]?".join(parts) + "".join(f"|{alias}" for alias in (_ALIASES.get(name),) if alias)
    return rf"(?<![A-WYZ])(?:{words})(?!\d)"


#: Pattern -> device. A name without its memory is that of the last one in the table.
_NAMES = {_named(name): name for name in ACCELERATORS}
_NAMES |= {_named(name.partition("-")[0]): name for name in ACCELERATORS if name[-1] == "G"}

#: Cards of a node with their rate ("8x200G", "IB8x50GB/s"), or the rate of a whole node.
_CARDS = re.compile(r"(\d+) ?[x×] ?(\d+) ?(GB/s|G(?:b(?:it|ps|/s)?)?)(?![\w/])")
_NODE_RATE = re.compile(r"(?<![-\w(x×])((?:1|2|4|8|16|32)00) ?(GB/s|G(?:b(?:it|ps|/s)?)?)(?![\w/])")


def accelerator_of(text: str) -> Accelerator | None:
    """The device and network of a free description ("A100-80G 4x100G RoCE per node").

    Reads the device, its memory, ``NVL<n>`` nodes, bidirectional NVLink in brackets ("(400GB/s)"),
    and network rates for several cards ("8x200G"), a whole node ("1600G", "200G HDR") or each
    device ("400G per GPU"). None for an unknown device.
    """
    matches = [
        (match.start(), -match.end(), name)
        for pattern, name in _NAMES.items()
        if (match := re.search(pattern, text, re.IGNORECASE))
    ]
    if not matches:
        return None
    device = ACCELERATORS[min(matches)[2]]
    folded = text.upper()
    if memory := re.search(r"(?:-(\d+)G\b|(\d+) ?GI?B\b(?!/S))", folded):
        size = int(memory.group(1) or memory.group(2))
        device = ACCELERATORS.get(f"{device.name.partition('-')[0]}-{size}G", device)
        device = replace(device, memory_bytes=size * GIB)
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


def accelerator_of_cluster(cluster: Cluster) -> Accelerator:
    """The accelerator of a Cluster, with the cluster's numbers."""
    peaks = cluster.peak_flops
    half = peaks.get("bfloat16") or peaks.get("float16") or max(peaks.values())
    eight = peaks.get("float8") or half
    known = accelerator_of(cluster.accelerator or cluster.name)
    return Accelerator(
        name=known.name if known else cluster.name,
        generation=known.generation if known else "",
        peak_flops=(half, eight, peaks.get("float4") or eight),
        memory_bytes=float(cluster.memory_bytes),
        memory_bandwidth=cluster.memory_bandwidth,
        intra_node_bandwidth=cluster.intra_node_bandwidth,
        inter_node_bandwidth=cluster.inter_node_bandwidth,
        node_size=cluster.gpus_per_node,
    )
