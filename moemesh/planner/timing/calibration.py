"""Calibrated constants of the time model: priors, shipped values, deviations of clusters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from statistics import fmean
from typing import Annotated, Any, cast, get_type_hints

import numpy as np

from moemesh.config.devices import ACCELERATORS
from moemesh.config.sources import read_preset_table
from moemesh.planner.arithmetic import FloatArray, Number
from moemesh.planner.memory import Allocation
from moemesh.planner.timing.own_runs import OwnRuns


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The fitted numbers of the time model, which data sheets lack. All are positive.

    Efficiencies are shares of the data-sheet peak, `*_bytes` bytes per number (per score, or per
    token and channel, where stated), `*_us` microseconds, `*_ms` milliseconds, `*_exposed` the
    share of a transfer that computation does not hide. The default is the prior of the value that
    all clusters share; the annotation is the standard deviation of its logarithm.
    """

    #: Best share of the peak that a large matrix product reaches, by width of its numbers.
    gemm_efficiency: Annotated[Number, 0.08] = 0.78
    gemm_efficiency_8bit: Annotated[Number, 0.15] = 0.65
    gemm_efficiency_4bit: Annotated[Number, 0.25] = 0.48
    #: Losses r and n of products with few rows and with narrow sides, in the formula of
    #: :mod:`moemesh.planner.timing.compute`; r is that of an A100 and grows with the peak.
    gemm_row_loss: Annotated[Number, 0.5] = 0.8
    gemm_width_loss: Annotated[Number, 0.5] = 0.55
    #: Attention core: share of the 16-bit peak.
    attention_efficiency: Annotated[Number, 0.15] = 0.72
    #: Speed of FlashAttention-1 over FlashAttention-2, from curves of both (arXiv:2307.08691), and
    #: of a kernel for an earlier device generation over that for the device's own.
    attention_first_flash: Annotated[Number, 0.07] = 0.55
    attention_foreign: Annotated[Number, 0.15] = 0.5
    #: Head size and sequence length at which half of the speed is lost; backward over forward time.
    attention_head_loss: Annotated[Number, 0.5] = 15.0
    attention_short_loss: Annotated[Number, 0.3] = 650.0
    attention_backward: Annotated[Number, 0.1] = 2.8
    #: Memory traffic per score of kernels that write their scores (forward).
    eager_score_bytes: Annotated[Number, 0.3] = 26.0
    fused_score_bytes: Annotated[Number, 0.3] = 11.0
    masked_score_bytes: Annotated[Number, 0.3] = 10.0
    #: Element-wise kernels: traffic over its ideal, share of HBM bandwidth.
    elementwise_traffic: Annotated[Number, 0.3] = 1.1
    memory_efficiency: Annotated[Number, 0.05] = 0.87
    #: Extra bytes per token and channel: of unfused norms, of quantizing to 8 or 4 bit (with the
    #: factor `block_scale_traffic` if each block has a scale), of permuting rows and back.
    unfused_norm_bytes: Annotated[Number, 0.4] = 60.0
    quantize_bytes: Annotated[Number, 0.5] = 2.5
    block_scale_traffic: Annotated[Number, 0.3] = 1.5
    permute_bytes: Annotated[Number, 0.4] = 8.0
    #: Reading and writing the gradient accumulator in each microbatch.
    accumulate_bytes: Annotated[Number, 0.3] = 4.0
    #: Links: share of the data-sheet bandwidth inside and between nodes; exponent c, if the network
    #: bandwidth of a group on n nodes is divided by n^c; latency of one collective.
    intra_node_efficiency: Annotated[Number, 0.2] = 0.7
    inter_node_efficiency: Annotated[Number, 0.3] = 0.75
    network_contention: Annotated[Number, 0.15] = 0.06
    collective_latency_us: Annotated[Number, 0.6] = 25.0
    #: Extra tensor-parallel backward traffic with sequence parallelism (re-gathered inputs).
    sequence_parallel_regather: Annotated[Number, 0.4] = 0.3
    #: Exposed shares: expert exchange and tensor-parallel traffic that are overlapped by design,
    #: context exchange, pipeline sends, a gradient reduction far shorter than the backward of a
    #: microbatch, weight gathering.
    overlapped_exchange_exposed: Annotated[Number, 0.5] = 0.4
    overlapped_tensor_exposed: Annotated[Number, 0.5] = 0.5
    context_exposed: Annotated[Number, 0.5] = 0.55
    pipeline_exposed: Annotated[Number, 0.3] = 1.0
    gradient_exposed: Annotated[Number, 0.5] = 0.4
    weight_exposed: Annotated[Number, 0.4] = 0.6
    #: Slowdown of overlapped computation in FSDP: share of the transfer that is added to it.
    overlap_slowdown: Annotated[Number, 0.5] = 0.25
    #: Bytes per gradient that FSDP reduces.
    reduce_bytes: Annotated[Number, 0.2] = 3.5
    #: Load imbalance of natural routing above one.
    routing_imbalance: Annotated[Number, 0.5] = 0.4
    #: Share of the choices that a capacity of one keeps.
    capacity_kept: Annotated[Number, 0.06] = 0.9
    #: Launches and gaps of a layer's forward.
    layer_overhead_us: Annotated[Number, 0.6] = 80.0
    #: Host time of an MoE block's forward with few local experts (16 of them double it): the layer
    #: takes the longer of this and the time of the device. Then the shares of it that remain with
    #: CUDA graphs, and with tokens dropped at capacity.
    expert_overhead_us: Annotated[Number, 0.4] = 1000.0
    graph_overhead: Annotated[Number, 0.4] = 0.3
    capacity_overhead: Annotated[Number, 0.3] = 0.5
    #: Fixed time of a step.
    step_overhead_ms: Annotated[Number, 0.8] = 40.0
    #: Start-up time of every pipelined step with two stages, in microbatches of one stage, on
    #: clusters that show it; p stages take 2/p of it.
    startup_microbatches: Annotated[Number, 0.5] = 6.0


#: Constant -> the number of a cluster file of which it is a share. A cluster file that sets one of
#: these constants may set it to at most 1.
EFFICIENCIES = {
    "gemm_efficiency": "peak_flops.bfloat16",
    "gemm_efficiency_8bit": "peak_flops.float8",
    "gemm_efficiency_4bit": "peak_flops.float4",
    "attention_efficiency": "peak_flops.bfloat16",
    "memory_efficiency": "memory_bandwidth",
    "intra_node_efficiency": "intra_node_bandwidth",
    "inter_node_efficiency": "inter_node_bandwidth",
}


#: Constants that are fitted per software stack: name -> standard deviation of the logarithm around
#: the shared value. A cluster deviates from its stack by :data:`CLUSTER_SHARE` of that.
OWN: dict[str, float] = {
    "gemm_efficiency": 0.08,
    "gemm_efficiency_8bit": 0.12,
    "gemm_row_loss": 0.3,
    "attention_efficiency": 0.12,
    "elementwise_traffic": 0.35,
    "intra_node_efficiency": 0.25,
    "inter_node_efficiency": 0.3,
    "network_contention": 0.8,
    "gradient_exposed": 0.4,
    "weight_exposed": 0.4,
    "overlap_slowdown": 0.7,
    "layer_overhead_us": 0.4,
    "expert_overhead_us": 0.25,
}
#: Standard deviation of a cluster around its stack, over that of the stack around all stacks.
CLUSTER_SHARE = 0.75
#: Constants that change between releases of a stack (kernels and host overhead), with the standard
#: deviation of the logarithm.
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
SPREADS: FloatArray = np.array([
    hint.__metadata__[0] for hint in get_type_hints(Constants, include_extras=True).values()
])  # fmt: skip


#: The mean over the stacks that are relatives of an unknown cluster counts this many further stacks
#: without any deviation: stacks on one generation of devices differ more than generations do.
_PULL = 3.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Shared constants, deviations of clusters ("stack/device" -> name -> factor), and memory
    allocation of software stacks (stack, or "stack/device" -> settings)."""

    shared: Mapping[str, float]
    #: Deviations of a software stack, used for devices without runs of this stack; and of its
    #: releases ("stack release") from the stack.
    stacks: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Any])
    releases: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Any])
    clusters: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Any])
    allocations: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Any])
    #: Corrections of clusters that have own runs.
    own: Mapping[str, OwnRuns] = field(default_factory=dict[str, OwnRuns])

    def constants(self, cluster: str, release: str = "") -> Constants:
        """The constants of a cluster, calibrated or not, with a release of its software."""
        values = dict(self.shared)
        for factors in (self.deviations(cluster), self.release_factors(release)):
            for name, factor in factors.items():
                values[name] = values[name] * factor
        return Constants(**values)

    def release_factors(self, release: str) -> dict[str, float]:
        """Factors of a release ("stack 26.02"). An unknown release has the factors of the last
        known release before it, or else of the first one."""
        if release in self.releases or not release:
            return dict(self.releases.get(release, {}))
        stack = stack_of(release, " ")
        known = sorted(name for name in self.releases if stack_of(name, " ") == stack)
        earlier = [name for name in known if name <= release]
        return dict(self.releases[(earlier or known[:1])[-1]]) if known else {}

    def deviations(self, cluster: str) -> dict[str, float]:
        """Factors on the shared constants: the cluster's own, else its software stack's, else the
        mean of stacks on devices of its generation (an H800 computes like an H100). A stack counts
        once, on however many devices it ran."""
        if cluster in self.clusters:
            return dict(self.clusters[cluster])
        stack, _, device = cluster.rpartition("/")
        if stack in self.stacks:
            return dict(self.stacks[stack])
        generation = _generation(device)
        relatives: dict[str, list[Mapping[str, float]]] = {}
        for key, factors in self.clusters.items():
            if _generation(key.rpartition("/")[2]) == generation:
                relatives.setdefault(stack_of(key), []).append(factors)
        if not relatives:
            return {}
        means = {
            name: [
                fmean(math.log(factors.get(name, 1.0)) for factors in clusters)
                for clusters in relatives.values()
            ]
            for name in OWN
        }
        return {name: math.exp(sum(logs) / (len(logs) + _PULL)) for name, logs in means.items()}

    def allocation(self, cluster: str) -> Allocation:
        """Memory allocation of the software of a cluster."""
        stack = stack_of(cluster)
        settings = {**self.allocations.get(stack, {}), **self.allocations.get(cluster, {})}
        return Allocation(**cast("dict[str, Any]", settings))


def stack_of(cluster: str, mark: str = "/") -> str:
    """The software stack of a cluster, "stack/device", or of a release, "stack 26.02"."""
    return cluster.rpartition(mark)[0]


def release_years(release: str) -> float:
    """The date of a release in years, from year, month and patch ("stack 26.02.01"); 0 without."""
    year, month, patch, *_ = (*map(int, re.findall(r"\d+", release.rpartition(" ")[2])), 0, 0, 0)
    return year + month / 12 + patch / 52


def _generation(device: str) -> str:
    """The generation of a device; an unknown device is a generation of its own."""
    known = ACCELERATORS.get(device)
    return known.generation if known else device


@cache
def shipped_calibration() -> Calibration:
    """The packaged constants, which were fitted to published runs."""
    return read_calibration(read_preset_table("published", "calibration"))


def prior_calibration() -> Calibration:
    """A calibration without any fit: the priors of all constants."""
    return Calibration(shared=dict(zip(NAMES, (float(value) for value in PRIORS), strict=True)))


def read_calibration(table: Mapping[str, Any]) -> Calibration:
    """A calibration from the parsed text of
    :func:`moemesh.planner.accuracy.calibration_file.calibration_toml`."""
    stacks, releases, clusters = (table.get(level, {}) for level in ("stack", "release", "cluster"))
    return Calibration(
        shared={**prior_calibration().shared, **table.get("shared", {})},
        stacks=stacks,
        releases=releases,
        clusters=clusters,
        allocations=table.get("memory", {}),
    )
