"""Tokens a second, MFU, days and device-hours of a step; arithmetic intensity; the KV cache.

    MFU = model FLOPs of a step / (seconds of it * devices * peak of one device)

Model FLOPs are :func:`moemesh.planner.parameters.training_flops` (causal attention, without
recomputation: PaLM's definition, arXiv:2204.02311; without gradients of weights that only adapters
change). The peak is the dense one for the number type of the matrix products, from the cluster
file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moemesh.config.cluster import Cluster
from moemesh.config.data import read_tokens
from moemesh.config.devices import Accelerator, accelerator_of
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.section import LARGEST_SIZE
from moemesh.planner.parameters import training_flops
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.shape import ModelShape


def mfu(tflops_per_rank: float, peak_flops: float) -> float:
    """Model FLOPs utilization, a share. `tflops_per_rank`: 10^12 model FLOPs per second of a rank;
    `peak_flops`: operations per second of its device."""
    return tflops_per_rank * 1e12 / peak_flops


def peak_flops(cluster: Cluster, dtype: str) -> float:
    """Dense operations per second of one device in products of `dtype`. A format without a peak in
    the cluster file takes that of the next wider one, a wide type that of 16 bit."""
    device = accelerator_of_cluster(cluster)
    return device.peak(dtype) or device.peak_flops[0]


def without_peak(cluster: Cluster, dtype: str) -> str:
    """Note for the user that products in `dtype` are priced by the peak of another type, because
    the cluster file has no peak of `dtype`; "" if it has one."""
    peaks, half = cluster.peak_flops, _half_type(cluster)
    if dtype in peaks or {dtype, half} == {"bfloat16", "float16"}:
        return ""
    used = "float8" if dtype == "float4" and "float8" in peaks else half
    return f"{cluster.name} has no peak_flops.{dtype}: seconds and MFU are those of {used}"


def _half_type(cluster: Cluster) -> str:
    """The 16-bit type of the cluster file, or its fastest type if it has none of 16 bits."""
    peaks = cluster.peak_flops
    return next(
        (x for x in ("bfloat16", "float16") if x in peaks), max(peaks, key=lambda x: peaks[x])
    )


def device_peak_flops(name: str, dtype: str) -> float | None:
    """Peak from the data sheet of the device in `name` ("NVIDIA H100 80GB HBM3"); None for an
    unknown device or type."""
    device = accelerator_of(name)
    return (device.peak(dtype) or None) if device else None


def accelerator_of_cluster(cluster: Cluster) -> Accelerator:
    """The accelerator of a Cluster, with the cluster's numbers."""
    peaks = cluster.peak_flops
    half = peaks[_half_type(cluster)]
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
        wide_flops=(peaks.get("float32", 0.0), peaks.get("float64", 0.0)),
        sustained=known.sustained if known else 1.0,
    )


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A step of `tokens` in `seconds` on `devices`, each of `peak_flops` operations per second;
    `flops_per_token`: model FLOPs of a token."""

    seconds: float
    tokens: int
    devices: int
    flops_per_token: float
    peak_flops: float
    #: Price of a device-hour, if known.
    price: float | None = None

    @classmethod
    def of(
        cls, shape: ModelShape, layout: PlannedLayout, cluster: Cluster, seconds: float
    ) -> Speed:
        """A step of `layout` that takes `seconds`."""
        return cls(
            seconds=seconds,
            tokens=layout.global_batch * layout.seq_len,
            devices=layout.world_size,
            flops_per_token=training_flops(shape, layout.seq_len, adapters=layout.adapters),
            peak_flops=peak_flops(cluster, layout.precision),
            price=cluster.gpu_hour_price,
        )

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / self.devices

    @property
    def tflops_per_rank(self) -> float:
        """10^12 model FLOPs per second of one device, as in a run's metrics.jsonl."""
        return self.tokens_per_second_per_gpu * self.flops_per_token / 1e12

    @property
    def mfu(self) -> float:
        return mfu(self.tflops_per_rank, self.peak_flops)

    def days(self, tokens: float) -> float:
        """Days of steps for `tokens` tokens, without evaluations, checkpoints and restarts."""
        return tokens / self.tokens_per_second / 86_400

    def gpu_hours(self, tokens: float) -> float:
        return self.days(tokens) * 24 * self.devices

    def money(self, tokens: float) -> float | None:
        """Price of the device-hours of `tokens` tokens; None without a price of an hour."""
        return None if self.price is None else self.price * self.gpu_hours(tokens)

    def to_json(self, tokens: float | None = None) -> dict[str, float]:
        """The key "speed" of ``plan --json`` and ``estimate --json``."""
        rates = ("tokens_per_second", "tokens_per_second_per_gpu", "tflops_per_rank", "mfu")
        values: dict[str, float] = {name: getattr(self, name) for name in rates}
        values["model_flops_per_token"] = self.flops_per_token
        values["peak_flops"] = self.peak_flops
        if tokens is not None:
            days, hours = self.days(tokens), self.gpu_hours(tokens)
            values |= {"tokens": tokens, "days": days, "gpu_hours": hours}
        paid = {"money_per_step": self.tokens, "money_per_billion_tokens": 1e9, "money": tokens}
        if self.price is not None:
            values["gpu_hour_price"] = self.price
            values |= {
                name: self.price * self.gpu_hours(number)
                for name, number in paid.items()
                if number is not None
            }
        return values


# Arithmetic intensity: operations for each byte of memory traffic, of a step and of a device.
#
# A product of M x K by K x N is 2MNK operations on w (MK + KN + MN) bytes. A device is bound by its
# arithmetic if that ratio exceeds its balance, peak over memory bandwidth, else by its memory. With
# few rows M (a small microbatch, few tokens per expert, decoding) the weights dominate: 2M/w.
# Source: S. Williams et al., Roofline, CACM 52 (2009).


def device_balance(cluster: Cluster, dtype: str) -> float:
    """FLOP per byte above which a device of the cluster is bound by its arithmetic."""
    return peak_flops(cluster, dtype) / cluster.memory_bandwidth


def product_intensity(m: float, k: float, n: float, element_bytes: float) -> float:
    """FLOP per byte of one product of m x k by k x n."""
    return 2 * m * n * k / (element_bytes * (m * k + k * n + m * n))


def decoding_intensity(batch: int, element_bytes: float) -> float:
    """FLOP per byte of weights of decoding one token for each of `batch` sequences."""
    return 2 * batch / element_bytes


def layer_intensities(shape: ModelShape, layout: PlannedLayout) -> dict[str, float]:
    """FLOP per byte of the first product of each block of a layer, for one microbatch on one rank:
    "attention" (in latent attention the queries, as if from the stream), "mlp" for models with
    dense layers, "experts" for models with MoE layers (rows of one expert under uniform
    routing)."""
    w, h, t = layout.element_bytes, shape.hidden_size, layout.tp
    gates = 2 if shape.gated else 1
    width = shape.query_width / t
    if shape.attention == "gqa":
        width += 2 * max(shape.kv_width / t, shape.head_dim)  # at least one head on a rank
    intensities = {"attention": product_intensity(layout.tokens, h, width, w)}
    kinds = shape.kind_counts
    if any(not kind.moe for kind in kinds):
        wide = gates * shape.intermediate_size / t
        intensities["mlp"] = product_intensity(layout.tokens, h, wide, w)
    if any(kind.moe for kind in kinds):
        arriving = shape.experts_per_token * layout.tokens / t * layout.ep * layout.etp
        rows = arriving / shape.num_experts
        wide = gates * shape.expert_intermediate_size / layout.etp
        intensities["experts"] = product_intensity(rows, h, wide, w)
    return intensities


# Bytes of the key-value cache of a model that generates.
#
# Bytes per token, for L layers and w bytes a number: GQA 2 L h_kv w, with h_kv the width of all
# key/value heads; MLA L (r_kv + d_r) w, because all heads share the latent and the rotary key.
# Multi-head attention in 16 bit comes to 4 b L h (s + n) for b sequences of s + n tokens.


class CacheSize(NamedTuple):
    """Number of sequences, and tokens of each: s of the prompt plus n generated ones."""

    batch: int
    tokens: int


def read_cache_size(text: str) -> CacheSize:
    """The size in a user's text: "32x4096", "32x4k". Raises ConfigError."""
    parts = text.lower().replace("×", "x").split("x")
    try:
        numbers = [read_tokens(part, 1024) for part in parts]
    except ConfigError:
        numbers = []
    if len(numbers) != 2 or not all(n <= LARGEST_SIZE and n == int(n) for n in numbers):
        message = "a cache has at least 1 sequence of at least 1 token (prompt and answer)"
        fix = "such as --kv-cache 32x4096"
        raise ConfigError([Problem.of("out-of-range", "kv_cache", text, message, fix)])
    return CacheSize(*map(int, numbers))


def kv_cache_bytes(shape: ModelShape, batch: int, tokens: int) -> int:
    """Bytes of the cache of `batch` sequences of `tokens` (s + n: prompt and generated tokens) over
    all ranks, in 16 bit; a layer with a window keeps only the last tokens of it."""
    per_token = 2 * shape.num_kv_heads * shape.head_dim
    if shape.attention == "mla":
        per_token = shape.kv_lora_rank + shape.qk_rotary_head_dim
    windows = (kind.window for kind in shape.kinds)
    kept = sum(min(tokens, window) if window else tokens for window in windows)
    return 2 * batch * kept * per_token
