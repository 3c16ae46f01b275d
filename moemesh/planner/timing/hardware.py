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


#: NVIDIA data sheets: V100, A100, H100, H200, HGX B200 and B300, GB200 and GB300 NVL72, without
#: sparsity; NVLink one way; one network card a device (HDR200, NDR400, CX-8 800). A800 and H800
#: are A100 and H100 with slower NVLink. Devices without a calibrated relative of their generation
#: (AMD Instinct, TPU, L40S) get the constants that all clusters share.
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
        ("L40S", "ada", (362, 733, 733), 48, 0.864, (32, 25), 8),
        ("MI250X", "cdna2", (383, 383, 383), 128, 3.2, (200, 25), 8),
        ("MI300X", "cdna3", (1307, 2615, 2615), 192, 5.3, (448, 50), 8),
        ("MI325X", "cdna3", (1307, 2615, 2615), 256, 6.0, (448, 50), 8),
        ("TPUv4", "tpu4", (275, 275, 275), 32, 1.2, (150, 25), 64),
        ("TPUv5e", "tpu5", (197, 197, 197), 16, 0.82, (100, 25), 256),
        ("TPUv5p", "tpu5", (459, 459, 459), 95, 2.765, (300, 25), 64),
        ("TPUv6e", "tpu6", (918, 918, 918), 32, 1.64, (224, 25), 256),
    )
}

#: (text in a description, device), more specific texts first.
_NAMES: tuple[tuple[str, str], ...] = (
    ("GB300", "GB300"), ("GB200", "GB200"), ("B300", "B300"), ("B200", "B200"),
    ("H800", "H800-80G"), ("H200", "H200-141G"), ("H100", "H100-80G"), ("H20", "H20-96G"),
    ("A100/A800", "A100-80G"), ("A100-40G", "A100-40G"), ("A100", "A100-80G"),
    ("A800", "A800-80G"), ("V100", "V100"), ("L40S", "L40S"), ("MI250X", "MI250X"),
    ("MI325X", "MI325X"), ("MI300X", "MI300X"), ("V5LITE", "TPUv5e"), ("V5E", "TPUv5e"),
    ("V5P", "TPUv5p"), ("V6E", "TPUv6e"), ("TRILLIUM", "TPUv6e"), ("TPUV4", "TPUv4"),
    ("TPU V4", "TPUv4"),
)  # fmt: skip


def accelerator_of(text: str) -> Accelerator | None:
    """The device and network of a free description ("A100-80G 4x100G RoCE per node").

    Reads the device, ``NVL<n>`` nodes, bidirectional NVLink in brackets ("(400GB/s)"), and network
    rates in Gb/s for several cards ("8x200G") or a whole node ("1600G", "200G HDR"). None for an
    unknown device.
    """
    folded = text.upper()
    key = next((key for name, key in _NAMES if name in folded), None)
    if key is None:
        return None
    device = ACCELERATORS[key]
    if both_ways := re.search(r"\((\d+)GB/S\)", folded):
        device = replace(device, intra_node_bandwidth=float(both_ways.group(1)) * 0.5e9)
    if memory := re.search(r"-(\d+)G\b", folded):
        device = replace(device, memory_bytes=int(memory.group(1)) * GIB)
    if rate := re.search(r"(\d+\.\d+)TB/S", folded):
        device = replace(device, memory_bandwidth=float(rate.group(1)) * 1e12)
    if node := re.search(r"NVL(\d+)", folded):
        device = replace(device, node_size=int(node.group(1)))
    if cards := re.search(r"(\d+)X(\d+)GB/S", folded):
        per_node = int(cards.group(1)) * float(cards.group(2)) * 1e9
    elif cards := re.search(r"(\d+)X(\d+)G\b", folded):
        per_node = int(cards.group(1)) * float(cards.group(2)) * 1e9 / 8
    elif whole := re.search(r"\b(\d{4}|\d{3}(?=G HDR))G\b", folded):
        per_node = float(whole.group(1)) * 1e9 / 8
    else:
        return device
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
