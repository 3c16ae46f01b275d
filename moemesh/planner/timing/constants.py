"""The calibrated constants of the time model: what each means, its prior, how far it may move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from moemesh.planner.arithmetic import FloatArray, Number


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Every number of the time model that no data sheet prints. All positive.

    Efficiencies are shares of the data-sheet peak, `*_bytes` bytes per number, `*_us` and `*_ms`
    times, `*_exposed` the share of a transfer that computation does not hide.
    """

    #: Best share of the peak that a large matrix product reaches, by width of its numbers.
    gemm_efficiency: Number = 0.78
    gemm_efficiency_8bit: Number = 0.65
    gemm_efficiency_4bit: Number = 0.48
    #: Loss with few rows (in units of 64 rows on an A100, more on faster devices), narrow sides.
    gemm_row_loss: Number = 0.8
    gemm_width_loss: Number = 0.55
    #: Attention core: share of the 16-bit peak; the first FlashAttention relative to the second; a
    #: kernel of the device generation before; head size and sequence at which half is lost;
    #: backward over forward.
    attention_efficiency: Number = 0.55
    attention_first_flash: Number = 0.6
    attention_foreign: Number = 0.5
    attention_head_loss: Number = 15.0
    attention_short_loss: Number = 220.0
    attention_backward: Number = 2.8
    #: Memory traffic per score where the scores are written out (forward).
    eager_score_bytes: Number = 26.0
    fused_score_bytes: Number = 11.0
    masked_score_bytes: Number = 10.0
    #: Element-wise kernels: traffic over its ideal, share of HBM bandwidth, extra bytes per channel
    #: of norms in fp32, of quantizing to 8 bit (and more with block scales), of (un)permuting rows.
    elementwise_traffic: Number = 1.1
    memory_efficiency: Number = 0.87
    unfused_norm_bytes: Number = 60.0
    quantize_bytes: Number = 2.5
    block_scale_traffic: Number = 1.5
    permute_bytes: Number = 8.0
    #: Reading and writing the gradient accumulator in each microbatch.
    accumulate_bytes: Number = 4.0
    #: Links: share of the data-sheet bandwidth inside and between nodes, loss per doubling of the
    #: nodes of a group, latency of one collective.
    intra_node_efficiency: Number = 0.7
    inter_node_efficiency: Number = 0.75
    network_contention: Number = 0.08
    collective_latency_us: Number = 25.0
    #: Extra tensor-parallel backward traffic with sequence parallelism (gathers again).
    sequence_parallel_regather: Number = 0.3
    #: Exposed shares: expert all-to-all that is overlapped by design, context exchange, pipeline
    #: sends, gradient reduction, weight gathering.
    overlapped_exchange_exposed: Number = 0.4
    context_exposed: Number = 0.55
    pipeline_exposed: Number = 1.0
    gradient_exposed: Number = 0.4
    weight_exposed: Number = 0.6
    #: Slowdown of overlapped computation in FSDP: what the shorter of the two adds.
    overlap_slowdown: Number = 0.25
    #: Bytes per gradient that FSDP reduces.
    reduce_bytes: Number = 3.5
    #: Load imbalance of natural routing above one.
    routing_imbalance: Number = 0.4
    #: Share of the choices that a capacity of one keeps.
    capacity_kept: Number = 0.9
    #: Launches and gaps of a layer's forward; what the host needs for an MoE block's (twice with 16
    #: local experts) while the device computes, and the share of it that CUDA graphs, or dropping
    #: tokens at capacity, leave; a step's.
    layer_overhead_us: Number = 80.0
    expert_overhead_us: Number = 1000.0
    graph_overhead: Number = 0.3
    capacity_overhead: Number = 0.5
    step_overhead_ms: Number = 40.0
    #: A start-up of every pipelined step, in microbatches of one stage, on clusters that show it.
    startup_microbatches: Number = 6.0


#: Standard deviations of a constant's logarithm, of the value that all clusters share.
_SPREAD: dict[str, float] = {
    "gemm_efficiency": 0.08,
    "gemm_efficiency_8bit": 0.15,
    "gemm_efficiency_4bit": 0.25,
    "gemm_row_loss": 0.5,
    "gemm_width_loss": 0.5,
    "attention_efficiency": 0.15,
    "attention_first_flash": 0.2,
    "attention_foreign": 0.15,
    "attention_head_loss": 0.5,
    "attention_short_loss": 0.6,
    "attention_backward": 0.1,
    "eager_score_bytes": 0.3,
    "fused_score_bytes": 0.3,
    "masked_score_bytes": 0.3,
    "elementwise_traffic": 0.3,
    "memory_efficiency": 0.05,
    "unfused_norm_bytes": 0.4,
    "quantize_bytes": 0.5,
    "block_scale_traffic": 0.3,
    "permute_bytes": 0.4,
    "accumulate_bytes": 0.3,
    "intra_node_efficiency": 0.2,
    "inter_node_efficiency": 0.3,
    "network_contention": 0.6,
    "collective_latency_us": 0.6,
    "sequence_parallel_regather": 0.4,
    "overlapped_exchange_exposed": 0.5,
    "context_exposed": 0.5,
    "pipeline_exposed": 0.3,
    "gradient_exposed": 0.5,
    "weight_exposed": 0.4,
    "overlap_slowdown": 0.5,
    "reduce_bytes": 0.2,
    "routing_imbalance": 0.5,
    "capacity_kept": 0.06,
    "layer_overhead_us": 0.6,
    "expert_overhead_us": 0.4,
    "graph_overhead": 0.4,
    "capacity_overhead": 0.3,
    "step_overhead_ms": 0.8,
    "startup_microbatches": 0.5,
}
#: What a software stack may set for itself, and how far (of the logarithm); one of its clusters
#: deviates from it by a share of that. The few fitted scalars of a cluster.
OWN: dict[str, float] = {
    "gemm_efficiency": 0.08,
    "gemm_efficiency_8bit": 0.12,
    "gemm_row_loss": 0.3,
    "attention_efficiency": 0.2,
    "elementwise_traffic": 0.35,
    "intra_node_efficiency": 0.25,
    "inter_node_efficiency": 0.3,
    "gradient_exposed": 0.4,
    "weight_exposed": 0.4,
    "overlap_slowdown": 0.7,
    "layer_overhead_us": 0.4,
    "expert_overhead_us": 0.25,
}
#: A cluster's own deviation from its stack, over the width of that of the stack.
CLUSTER_SHARE = 0.75
#: What changes between releases of one stack: kernels, and how the host is kept out of the way.
RELEASE: dict[str, float] = {
    "gemm_efficiency": 0.05,
    "gemm_efficiency_8bit": 0.05,
    "gemm_efficiency_4bit": 0.05,
    "elementwise_traffic": 0.15,
    "layer_overhead_us": 0.2,
    "expert_overhead_us": 0.5,
}

NAMES: tuple[str, ...] = tuple(item.name for item in fields(Constants))
PRIORS: FloatArray = np.array([item.default for item in fields(Constants)], dtype=np.float64)
SPREADS: FloatArray = np.array([_SPREAD[name] for name in NAMES], dtype=np.float64)


def constants_from(values: Mapping[str, Number]) -> Constants:
    """The constants with some of them set. Raises ValueError for a name that is none of them."""
    if unknown := set(values) - set(NAMES):
        raise ValueError(f"no constant of the time model is called {', '.join(sorted(unknown))}")
    return Constants(**dict(values))
