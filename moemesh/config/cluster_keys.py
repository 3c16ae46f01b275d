"""Meanings, units and examples of the keys of a cluster file."""

from __future__ import annotations

from typing import NamedTuple


class ClusterKey(NamedTuple):
    """The meaning of one key: in a comment of the file, and in a message about it."""

    meaning: str
    unit: str
    example: str


KEYS: dict[str, ClusterKey] = {
    "name": ClusterKey("Name of the cluster in answers", "text", '"my_cluster"'),
    "nodes": ClusterKey("Nodes; `plan --nodes` takes another number", "nodes", "2"),
    "gpus_per_node": ClusterKey(
        "Devices of a node, joined by its fast links: `nvidia-smi -L | wc -l`", "devices", "8"
    ),
    "memory_bytes": ClusterKey(
        "Memory of one device: the total of `nvidia-smi`, MiB times 1048576", "bytes", "85899345920"
    ),
    "memory_bandwidth": ClusterKey(
        "Rate of a device's memory (HBM), from its data sheet", "bytes/s", "3.35e12"
    ),
    "peak_flops": ClusterKey(
        "Dense peak of matrix products by number type: half of a figure printed with sparsity",
        "operations/s of one device",
        "{ bfloat16 = 989.4e12, float8 = 1978.9e12 }",
    ),
    "intra_node_bandwidth": ClusterKey(
        "Links inside a node (NVLink, else PCIe), one device, one direction: half of a figure that "
        "counts both ways",
        "bytes/s",
        "450e9",
    ),
    "intra_node_latency": ClusterKey("Latency of a message inside a node", "seconds", "3e-6"),
    "inter_node_bandwidth": ClusterKey(
        "Network between nodes (InfiniBand, RoCE, Ethernet), one device's share, one direction: "
        "Gb/s of a node's cards / 8 / devices of a node",
        "bytes/s",
        "50e9",
    ),
    "inter_node_latency": ClusterKey("Latency of a message between nodes", "seconds", "8e-6"),
    "accelerator": ClusterKey(
        "The device by name, for constants that were calibrated on its kind", "text", '"H100-80G"'
    ),
    "usable_share": ClusterKey(
        "Share of a device's memory that a job may take; left out: as calibrated", "0 to 1", "0.95"
    ),
    "constants": ClusterKey(
        "Constants of the time model, as `moemesh calibrate` writes them",
        "by name",
        "{ gemm_efficiency = 0.8 }",
    ),
    "links": ClusterKey(
        "Measured collectives, as `moemesh bench links` writes them", "a list of tables", "[]"
    ),
}


def example(name: str) -> str:
    """The key with a value, as a line of the file: `nodes = 2`; "" for an unknown key."""
    key = KEYS.get(name)
    return f"{name} = {key.example}" if key else ""


def told(name: str) -> str:
    """Meaning and unit for a message; "" for an unknown key."""
    key = KEYS.get(name)
    return f"{key.meaning[0].lower()}{key.meaning[1:]} [{key.unit}]" if key else ""
