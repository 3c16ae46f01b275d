"""Arithmetic intensity: operations for each byte of memory traffic, of a step and of a device.

A product of M x K by K x N is 2MNK operations on w (MK + KN + MN) bytes; a device is bound by its
arithmetic where that is more than its balance, peak over memory bandwidth, else by its memory. Few
rows M (a small microbatch, few tokens an expert, the decoding of one token) leave only the weights:
2M/w. Source: S. Williams et al., Roofline, CACM 52 (2009).
"""

from __future__ import annotations

from moemesh.config.cluster import Cluster
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.speed import peak_flops


def device_balance(cluster: Cluster, dtype: str) -> float:
    """FLOP a byte from which on a device of the cluster is bound by its arithmetic."""
    return peak_flops(cluster, dtype) / cluster.memory_bandwidth


def product_intensity(m: float, k: float, n: float, element_bytes: float) -> float:
    """FLOP a byte of one product of m x k by k x n."""
    return 2 * m * n * k / (element_bytes * (m * k + k * n + m * n))


def decoding_intensity(batch: int, element_bytes: float) -> float:
    """FLOP a byte of decoding one token of each of `batch` sequences, of the weights alone."""
    return 2 * batch / element_bytes


def layer_intensities(shape: ModelShape, layout: PlannedLayout) -> dict[str, float]:
    """FLOP a byte of the first product of each block of a layer, for one microbatch on one rank:
    "attention", "mlp" where there are dense layers, "experts" where there are MoE layers (rows of
    one expert under uniform routing)."""
    w, h, t = layout.element_bytes, shape.hidden_size, layout.tp
    gates = 2 if shape.gated else 1
    width = shape.query_width / t
    if shape.attention == "gqa":
        width += 2 * max(shape.kv_width / t, shape.head_dim)
    found = {"attention": product_intensity(layout.tokens, h, width, w)}
    kinds = shape.kind_counts
    if any(not kind.moe for kind in kinds):
        wide = gates * shape.intermediate_size / t
        found["mlp"] = product_intensity(layout.tokens, h, wide, w)
    if any(kind.moe for kind in kinds):
        arriving = shape.experts_per_token * layout.tokens / t * layout.ep * layout.etp
        rows = arriving / shape.num_experts
        wide = gates * shape.expert_intermediate_size / layout.etp
        found["experts"] = product_intensity(rows, h, wide, w)
    return found
