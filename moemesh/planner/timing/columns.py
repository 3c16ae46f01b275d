"""Models, layouts and hardware as columns of numbers, one row each: what the formulas read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from moemesh.planner.arithmetic import Number
from moemesh.planner.flops import attention_matmul, mlp_matmul
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.stage_cut import Stages
from moemesh.planner.timing.hardware import Accelerator
from moemesh.schedule.step import PipelineStep

Kernel = Literal["flash", "first_flash", "fused", "eager", "masked"]

#: Columns hold numbers only: kernels by their place in this list.
KERNELS: tuple[Kernel, ...] = ("flash", "first_flash", "fused", "eager", "masked")
FLASH, FIRST_FLASH, FUSED, EAGER, MASKED = range(5)


@dataclass(frozen=True, kw_only=True)
class Software:
    """Habits of a training framework that no layout names. Defaults are those of a recent Megatron.

    `kernel` of the attention core: "masked" is the fused softmax of 2021 with all scores written.
    """

    kernel: Kernel = "flash"
    #: The attention kernel was written for the device's generation; FlashAttention-2 was not for
    #: Hopper (35 % of its peak where FlashAttention-3 reaches 75 %, arXiv:2407.08608).
    native_kernel: bool = True
    fused_norm: bool = True
    #: Stages hold equal weights, embedding and head counted, instead of equal numbers of layers
    #: (for whoever describes a run: the cut itself stands in its layout).
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
    """Sizes of models; 0 where a model has none of a thing. A name beside a column is that of the
    shape's own number."""

    layers: Number
    hidden: Annotated[Number, "hidden_size"]
    vocab: Annotated[Number, "vocab_size"]
    heads: Annotated[Number, "num_heads"]
    kv_heads: Annotated[Number, "num_kv_heads"]
    #: Head sizes in the attention product (d_qk) and of values (d_v); the part without position.
    query_dim: Annotated[Number, "query_head_dim"]
    value_dim: Annotated[Number, "value_head_dim"]
    nope_dim: Number
    #: 1 for latent attention, its ranks and the width of the shared rotary key.
    latent: Number
    query_rank: Annotated[Number, "q_lora_rank"]
    query_inner: Number
    kv_rank: Annotated[Number, "kv_lora_rank"]
    rotary_dim: Annotated[Number, "qk_rotary_head_dim"]
    mlp_width: Annotated[Number, "intermediate_size"]
    #: 3 with a gate, else 2.
    mlp_matrices: Number
    moe_layers: Number
    experts: Annotated[Number, "num_experts"]
    top_k: Annotated[Number, "experts_per_token"]
    expert_width: Annotated[Number, "expert_intermediate_size"]
    shared_width: Annotated[Number, "shared_intermediate_size"]
    tied: Number
    #: Window in tokens and the share of layers that have one.
    window: Number
    window_share: Number
    #: Router groups and how many of them a token may use (1 and 1: no limit).
    groups: Annotated[Number, "router_groups"]
    groups_kept: Annotated[Number, "router_groups_kept"]


@dataclass(frozen=True, kw_only=True)
class RankColumns:
    """The work of one pipeline rank for a microbatch, and what must have ended before it starts.

    Layers by kind, its part of embedding and head, and the messages that it sends; of the stages
    in front of its first one the layers and how many there are.
    """

    dense: Number
    routed: Number
    embedding: Number
    head: Number
    sends: Number
    dense_before: Number
    routed_before: Number
    stages_before: Number


@dataclass(frozen=True, kw_only=True)
class LayoutColumns(Software):
    """Degrees, batch and software of layouts, as numbers."""

    tp: Number
    pp: Number
    #: 1 where weight gradients may follow everything else; where steps do not wait for their end.
    splits_backward: Number
    is_stream: Number
    #: Microbatches that enter at the first stage, over all (half with two pipes).
    pipe_share: Number
    #: First, last and heaviest inner pipeline rank.
    ranks: tuple[RankColumns, ...]
    #: Number of the last stage, and its layers by kind.
    last_stage: Number
    last_dense: Number
    last_routed: Number
    dp: Number
    cp: Number
    ep: Number
    etp: Number
    sequence_parallel: Number
    #: 1 where attention leaves its block by an all-to-all.
    all_to_all_exit: Number
    zero: Number
    zero_group: Number
    parameter_server: Number
    servers: Number
    microbatch: Number
    microbatches: Number
    #: Pieces of a sequence that pass the pipeline one after the other.
    slices: Number
    seq_len: Number
    #: 0, 1, 2: matrix products in 16, 8 or 4 bit.
    precision: Number
    #: 1 where that is computed again in the backward; the share of layers that are as a whole.
    again_full: Number
    again_attention: Number
    again_norm: Number
    again_moe: Number
    again_experts: Number
    again_shared: Number
    #: Place among :data:`KERNELS`.
    kernel: Number = FLASH


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


def stacked(rows: Sequence[T]) -> T:
    """One object whose fields are arrays, from one object a row; tuples of such objects too."""
    kind: Any = type(rows[0])
    found: dict[str, Any] = {}
    for item in fields(kind):
        values = [getattr(row, item.name) for row in rows]
        if isinstance(values[0], tuple):
            found[item.name] = tuple(stacked(part) for part in zip(*values, strict=True))
        else:
            found[item.name] = np.array(values, dtype=np.float64)
    return kind(**found)


def picked(columns: T, rows: NDArray[np.int64]) -> T:
    """Some rows of an object of :func:`stacked`."""
    source: Any = columns
    found: dict[str, Any] = {}
    for item in fields(source):
        value: Any = getattr(source, item.name)
        is_column = isinstance(value, np.ndarray)
        found[item.name] = value[rows] if is_column else tuple(picked(one, rows) for one in value)
    return type(source)(**found)


_OF_SHAPE: dict[str, str] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(ModelColumns, include_extras=True).items()
    if get_origin(hint) is Annotated
}


def model_row(shape: ModelShape) -> ModelColumns:
    """One model."""
    windowed = [window for window in shape.windows if window]
    latent = shape.attention == "mla"
    return ModelColumns(
        **{name: getattr(shape, source) for name, source in _OF_SHAPE.items()},
        layers=shape.num_layers + shape.num_mtp_layers,
        nope_dim=shape.qk_nope_head_dim if latent else shape.head_dim,
        latent=int(latent),
        query_inner=shape.q_lora_rank or shape.hidden_size,
        mlp_matrices=3 if shape.gated else 2,
        moe_layers=shape.num_moe_layers + (shape.num_mtp_layers if shape.is_moe else 0),
        tied=int(shape.tied_embeddings),
        window=max(windowed, default=0),
        window_share=len(windowed) / shape.num_layers,
    )


_PRECISIONS = {"float8": 1, "float4": 2}


def precision_of(layout: PlannedLayout) -> int:
    """0, 1 or 2: the layout's matrix products run in 16, 8 or 4 bit."""
    return _PRECISIONS.get(layout.precision, 0)


def layout_row(shape: ModelShape, layout: PlannedLayout, traits: Software) -> LayoutColumns:
    """One layout of a model. Fields that a layout or its software has by the same name are taken
    as they are."""
    again = layout.recompute
    kernel = traits.kernel
    if kernel == "flash" and layout.attention_kernel != "flash":
        kernel = layout.attention_kernel
    stages = Stages.of(shape, layout)
    special: dict[str, Any] = {
        "splits_backward": stages.step.splits_backward,
        "is_stream": stages.step.is_stream,
        "pipe_share": stages.step.share,
        "ranks": _rank_columns(stages.shape, stages.step.of(stages.step.unit), stages.sizes),
        "last_stage": stages.last,
        "last_dense": stages.layers[-1][0],
        "last_routed": stages.layers[-1][1],
        "slices": stages.step.slices,
        "all_to_all_exit": layout.attention_exit == "all_to_all",
        "precision": precision_of(layout),
        "again_full": 1.0 if "full" in again else traits.recomputed_share,
        "again_attention": "attention" in again,
        "again_norm": bool(again & {"norm", "activation", "operators", "mla_up"}),
        "again_moe": "moe" in again,
        "again_experts": "experts" in again,
        "again_shared": "shared_expert" in again,
        "kernel": KERNELS.index(kernel),
        "fused_norm": traits.fused_norm and layout.fused_norm,
        "fsdp": traits.fsdp or layout.zero == 3,
    }
    for item in fields(LayoutColumns):
        if item.name not in special:
            source = traits if hasattr(traits, item.name) else layout
            special[item.name] = getattr(source, item.name)
    for name, value in special.items():
        if isinstance(value, bool):
            special[name] = int(value)
    return LayoutColumns(**special)


@lru_cache(maxsize=4096)
def _rank_columns(
    shape: ModelShape, step: PipelineStep, sizes: tuple[int, ...]
) -> tuple[RankColumns, ...]:
    """The first and last rank, and of those between the heaviest (of equal ones the last)."""
    stages = Stages(shape, step, sizes)
    weigh = (
        attention_matmul(shape) + mlp_matmul(shape, False),
        attention_matmul(shape) + mlp_matmul(shape, True),
    )
    found = [rank_row(stages, rank) for rank in range(step.ranks)]

    def load(rank: int) -> tuple[float, int]:
        one = found[rank]
        return one.dense * weigh[0] + one.routed * weigh[1], rank

    inner = max(range(1, step.ranks - 1), key=load, default=0)
    return found[0], found[-1], found[inner]


def rank_row(stages: Stages, rank: int) -> RankColumns:
    """The work of one rank."""
    step, own = stages.step, stages.on(rank)
    before = min(own)
    ahead = [stages.layers[stage] for stage in range(before)]
    return RankColumns(
        dense=step.share * sum(stages.layers[stage][0] for stage in own),
        routed=step.share * sum(stages.layers[stage][1] for stage in own),
        embedding=step.share * (0 in own),
        head=step.share * (stages.last in own),
        sends=step.share * step.messages_of(rank),
        dense_before=sum(dense for dense, _ in ahead),
        routed_before=sum(routed for _, routed in ahead),
        stages_before=before,
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
