"""Models, layouts and hardware as columns of numbers, one row each: what the formulas read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import numpy as np

from moemesh.planner.layout import PlannedLayout
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.timing.arithmetic import Number
from moemesh.planner.timing.hardware import Accelerator

Kernel = Literal["flash", "first_flash", "fused", "eager", "masked"]

#: Columns hold numbers only: kernels by their place in this list.
KERNELS: tuple[Kernel, ...] = ("flash", "first_flash", "fused", "eager", "masked")
FLASH, FIRST_FLASH, FUSED, EAGER, MASKED = range(5)


@dataclass(frozen=True, kw_only=True)
class Software:
    """What a training framework does that no layout says. Defaults are those of a recent Megatron.

    `kernel` of the attention core: "masked" is the fused softmax of 2021 with all scores written.
    """

    kernel: Kernel = "flash"
    #: The attention kernel was written for the device's generation; FlashAttention-2 was not for
    #: Hopper (35 % of its peak where FlashAttention-3 reaches 75 %, arXiv:2407.08608).
    native_kernel: bool = True
    fused_norm: bool = True
    #: Stages hold equal weights, embedding and head counted, instead of equal numbers of layers.
    balanced_stages: bool = False
    #: Stage borders send 1/tp of the activation from each tensor rank.
    scatter_gather: bool = True
    #: A token crosses to a node once, whatever number of its experts live there.
    deduplicated: bool = False
    #: The expert exchange runs beside another microbatch's computation.
    overlapped_exchange: bool = False
    #: Experts are chosen by the router itself; otherwise a benchmark forces an even load.
    natural_routing: bool = False
    #: Choices beyond capacity are dropped.
    token_drop: bool = False
    #: A whole step is replayed as one CUDA graph.
    graphs: bool = False
    #: 8-bit numbers have a scale for each block of 32 (MXFP8) or 16 (NVFP4).
    block_scales: bool = False
    #: Only low-rank adapters are trained: no weight gradients.
    adapters: bool = False
    #: Attention and MLP read the same norm and end in one reduction (parallel block).
    parallel_block: bool = False
    #: Window of every layer in tokens where the run changed the model; 0: as the model says.
    window: int = 0
    #: Gathers and reduces weights unit by unit (FSDP), also where only gradients are sharded.
    fsdp: bool = False
    #: Every pipelined step starts up slowly (`startup_microbatches`).
    slow_startup: bool = False
    #: Share of the layers that is computed again without the layout saying so.
    recomputed_share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelColumns:
    """Sizes of models; 0 where a model has none of a thing."""

    layers: Number
    hidden: Number
    vocab: Number
    heads: Number
    kv_heads: Number
    #: Head sizes in the attention product (d_qk) and of values (d_v); the part without position.
    query_dim: Number
    value_dim: Number
    nope_dim: Number
    #: 1 for latent attention, its ranks and the width of the shared rotary key.
    latent: Number
    query_rank: Number
    kv_rank: Number
    rotary_dim: Number
    mlp_width: Number
    #: 3 with a gate, else 2.
    mlp_matrices: Number
    moe_layers: Number
    experts: Number
    top_k: Number
    expert_width: Number
    shared_width: Number
    tied: Number
    #: Window in tokens and the share of layers that have one.
    window: Number
    window_share: Number
    #: Router groups and how many of them a token may use (1 and 1: no limit).
    groups: Number
    groups_kept: Number


@dataclass(frozen=True, kw_only=True)
class LayoutColumns:
    """Degrees, batch and software of layouts, as numbers."""

    tp: Number
    pp: Number
    stages_per_rank: Number
    #: Waiting of the schedule over that of 1F1B, (p-1)(F+B).
    fill_share: Number
    dp: Number
    cp: Number
    ep: Number
    etp: Number
    sequence_parallel: Number
    zero: Number
    zero_group: Number
    microbatch: Number
    microbatches: Number
    seq_len: Number
    #: 0, 1, 2: matrix products in 16, 8 or 4 bit.
    precision: Number
    #: 1 where that is computed again in the backward; the share of layers that are as a whole.
    again_full: Number
    again_attention: Number
    again_norm: Number
    again_moe: Number
    again_shared: Number
    kernel: Number
    native_kernel: Number
    fused_norm: Number
    balanced_stages: Number
    scatter_gather: Number
    deduplicated: Number
    overlapped_exchange: Number
    natural_routing: Number
    token_drop: Number
    graphs: Number
    block_scales: Number
    adapters: Number
    parallel_block: Number
    window: Number
    fsdp: Number
    slow_startup: Number


@dataclass(frozen=True, kw_only=True)
class HardwareColumns:
    """Data-sheet numbers: operations/s in 16 bit and in the layout's width, bytes/s, devices."""

    peak_16bit: Number
    peak: Number
    memory_bandwidth: Number
    intra: Number
    inter: Number
    node_size: Number


T = TypeVar("T")


def _stack(rows: Sequence[T]) -> T:
    """One object whose fields are arrays, from one object a row."""
    kind: Any = type(rows[0])
    return kind(
        **{
            item.name: np.array([getattr(row, item.name) for row in rows], dtype=np.float64)
            for item in fields(kind)
        }
    )


def model_columns(shapes: Sequence[ModelShape]) -> ModelColumns:
    """The columns of several models, one row each."""
    return _stack([model_row(shape) for shape in shapes])


def layout_columns(layouts: Sequence[PlannedLayout], software: Sequence[Software]) -> LayoutColumns:
    """The columns of several layouts, one row each."""
    rows = zip(layouts, software, strict=True)
    return _stack([layout_row(layout, traits) for layout, traits in rows])


def hardware_columns(
    accelerators: Sequence[Accelerator], layouts: Sequence[PlannedLayout]
) -> HardwareColumns:
    """The columns of the devices that several layouts run on."""
    pairs = zip(accelerators, layouts, strict=True)
    return _stack([hardware_row(device, precision_of(layout)) for device, layout in pairs])


def model_row(shape: ModelShape) -> ModelColumns:
    """One model."""
    windowed = [window for window in shape.windows if window]
    latent = shape.attention == "mla"
    return ModelColumns(
        layers=shape.num_layers + shape.num_mtp_layers,
        hidden=shape.hidden_size,
        vocab=shape.vocab_size,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        query_dim=shape.query_head_dim,
        value_dim=shape.value_head_dim,
        nope_dim=shape.qk_nope_head_dim if latent else shape.head_dim,
        latent=int(latent),
        query_rank=shape.q_lora_rank,
        kv_rank=shape.kv_lora_rank,
        rotary_dim=shape.qk_rotary_head_dim,
        mlp_width=shape.intermediate_size,
        mlp_matrices=3 if shape.gated else 2,
        moe_layers=shape.num_moe_layers + (shape.num_mtp_layers if shape.is_moe else 0),
        experts=shape.num_experts,
        top_k=shape.experts_per_token,
        expert_width=shape.expert_intermediate_size,
        shared_width=shape.shared_intermediate_size,
        tied=int(shape.tied_embeddings),
        window=max(windowed, default=0),
        window_share=len(windowed) / shape.num_layers,
        groups=shape.router_groups,
        groups_kept=shape.router_groups_kept,
    )


_PRECISIONS = {"float8": 1, "float4": 2}


def precision_of(layout: PlannedLayout) -> int:
    """0, 1 or 2: the layout's matrix products run in 16, 8 or 4 bit."""
    return _PRECISIONS.get(layout.precision, 0)


#: Waiting over 1F1B's where it does not depend on p, for F = I = W (B = I + W).
_FILL_SHARES: dict[str, float] = {
    "zb_h1": 1 / 3, "zb_h2": 0.0, "zb_v": 0.0, "dualpipe_v": 2 / 3, "chimera": 0.5,
    "pipedream": 0.0, "pipedream_2bw": 0.0, "ampnet": 0.0,
}  # fmt: skip


def fill_share(schedule: str, pp: int) -> float:
    """Idle time of a schedule over (p-1)(F+B) with forward, input and weight gradients alike.

    ZB1P waits (p-1)(F+B-2W); DualPipe (p/2-1)(F&B+B-3W), F&B = 3F (arXiv:2401.10241, 2412.19437);
    ZB-H2 and ZB-V only at the optimizer; asynchronous schedules never. Interleaving divides by its
    chunks elsewhere.
    """
    if schedule == "dualpipe" and pp > 1:
        return max(pp - 2, 0) / (3 * (pp - 1))
    return _FILL_SHARES.get(schedule, 1.0)


def _chunks(layout: PlannedLayout) -> int:
    """Chunks that divide the fill: those of interleaving; V-shapes have their own closed form."""
    return layout.stages_per_rank if layout.schedule == "interleaved_1f1b" else 1


def layout_row(layout: PlannedLayout, traits: Software) -> LayoutColumns:
    """One layout."""
    again = layout.recompute
    kernel = traits.kernel
    if kernel == "flash" and layout.attention_kernel != "flash":
        kernel = layout.attention_kernel
    return LayoutColumns(
        tp=layout.tp,
        pp=layout.pp,
        stages_per_rank=_chunks(layout),
        fill_share=fill_share(layout.schedule, layout.pp),
        dp=layout.dp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        sequence_parallel=int(layout.sequence_parallel),
        zero=layout.zero,
        zero_group=layout.zero_group,
        microbatch=layout.microbatch,
        microbatches=layout.microbatches,
        seq_len=layout.seq_len,
        precision=precision_of(layout),
        again_full=1.0 if "full" in again else traits.recomputed_share,
        again_attention=int("attention" in again),
        again_norm=int(bool(again & {"norm", "activation", "operators", "mla_up"})),
        again_moe=int("moe" in again),
        again_shared=int("shared_expert" in again),
        kernel=KERNELS.index(kernel),
        native_kernel=int(traits.native_kernel),
        fused_norm=int(traits.fused_norm and layout.fused_norm),
        balanced_stages=int(traits.balanced_stages),
        scatter_gather=int(traits.scatter_gather),
        deduplicated=int(traits.deduplicated),
        overlapped_exchange=int(traits.overlapped_exchange),
        natural_routing=int(traits.natural_routing),
        token_drop=int(traits.token_drop),
        graphs=int(traits.graphs),
        block_scales=int(traits.block_scales),
        adapters=int(traits.adapters),
        parallel_block=int(traits.parallel_block),
        window=traits.window,
        fsdp=int(traits.fsdp or layout.zero == 3),
        slow_startup=int(traits.slow_startup),
    )


def hardware_row(device: Accelerator, precision: int = 0) -> HardwareColumns:
    """One device, its peak that of the precision (0, 1, 2: 16, 8, 4 bit)."""
    return HardwareColumns(
        peak_16bit=device.peak_flops[0],
        peak=device.peak_flops[precision],
        memory_bandwidth=device.memory_bandwidth,
        intra=device.intra_node_bandwidth,
        inter=device.inter_node_bandwidth,
        node_size=device.node_size,
    )
