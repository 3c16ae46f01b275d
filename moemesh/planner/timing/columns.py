"""Models, layouts and hardware as columns of numbers, one row each: inputs of the formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, TypeVar, cast, get_args

import numpy as np
from numpy.typing import NDArray

from moemesh.config.devices import Accelerator
from moemesh.planner.arithmetic import Number
from moemesh.planner.parameters import attention_products, layer_matmul, mlp_matmul
from moemesh.planner.planned_layout import AttentionKernel, PlannedLayout, Precision
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.stage_cut import Stages
from moemesh.schedule.step import PipelineStep

#: Attention kernels; columns hold the index in this list, because they hold numbers only.
KERNELS: tuple[AttentionKernel, ...] = get_args(AttentionKernel)
FLASH, FIRST_FLASH, FUSED, EAGER, MASKED = range(5)


@dataclass(frozen=True, kw_only=True)
class Software:
    """Properties of a training framework that are not part of a layout. Defaults are those of a
    recent Megatron."""

    #: The attention kernel was written for the device's generation; FlashAttention-2 was not for
    #: Hopper (35 % of its peak where FlashAttention-3 reaches 75 %, arXiv:2407.08608).
    native_kernel: bool = True
    #: Stage borders send 1/tp of the activation from each tensor rank.
    scatter_gather: bool = True
    #: A token is sent to each node once, even to a node with several of its experts.
    deduplicated: bool = False
    #: All ranks that share experts receive all tokens (all-gather, then reduce-scatter).
    gathered: bool = False
    #: Fixed slots for rows over the chosen rows; 0: no more rows than chosen are sent.
    slots: float = 0.0
    #: The expert exchange overlaps with another microbatch's computation.
    overlapped_exchange: bool = False
    #: Tensor-parallel traffic is sent in pieces and overlaps with the products that need it.
    overlapped_tensor: bool = False
    #: The router chooses the experts, and nothing states the load of the fullest rank; otherwise
    #: the load is the layout's.
    natural_routing: bool = False
    #: Choices beyond the mean load are dropped, and nothing states their number.
    token_drop: bool = False
    #: A whole step is replayed as one CUDA graph.
    graphs: bool = False
    #: Numbers of 8 or 4 bit have a scale for each block of 32 (MXFP8) or 16 (NVFP4).
    block_scales: bool = False
    #: Share of the products that stay in 16 bit while the others are in 4 bit (arXiv:2509.25149
    #: keeps the last layers, about 15 % of the linear ones).
    wide_share: float = 0.0
    #: Attention and MLP read the same norm and end in one reduction (parallel block).
    parallel_block: bool = False
    #: Window of every layer in tokens, if the run changed the model's; 0: the model's windows.
    window: int = 0
    #: Weights are gathered and gradients reduced unit by unit (FSDP), under ZeRO-2 as under ZeRO-3.
    fsdp: bool = False
    #: Gradients are reduced after every microbatch, not once in a step (ZeRO-2 without a buffer).
    sums_each: bool = False
    #: Each matrix is gathered by itself into a list of shards, which are copied one by one, and
    #: without overlap (ZeRO-3 of 2021).
    listed_gathers: bool = False
    #: The owners of updated weights send them one after the other (ZeRO-1 and 2) instead of a
    #: gather over a ring: this may take longer than a ring.
    serial_gather: bool = False
    #: Bytes of a gradient on the wire; FSDP has the constant `reduce_bytes` instead.
    wire_gradient_bytes: float = 4.0
    #: Adapters are on the product of queries, keys and values alone; else on every product.
    adapts_qkv_alone: bool = False
    #: Every pipelined step starts up slowly (`startup_microbatches`).
    slow_startup: bool = False
    #: Share of the layers that is recomputed, in addition to the layout's recomputation.
    recomputed_share: float = 0.0


def column(of: str | Callable[[Any], Any]) -> Any:
    """A column that is read from an attribute of another name, or computed by a function."""
    return field(metadata={"of": of})


def mixer_factor(shape: ModelShape) -> float:
    """Ratio of the products of a counted model's mixers to those of attention with its sizes,
    averaged over layers; at least 0."""
    if not shape.counted:
        return 1.0
    mixers = sum(
        number * (layer_matmul(shape, kind.moe) - mlp_matmul(shape, kind.moe))
        for kind, number in shape.kind_counts.items()
    )
    return max(0.0, mixers / shape.num_layers / sum(attention_products(shape)))


@dataclass(frozen=True, kw_only=True)
class ModelColumns:
    """Sizes of models; 0 for parts that a model lacks."""

    layers: Number = column(lambda shape: shape.num_layers + shape.num_mtp_layers)
    hidden: Number = column("hidden_size")
    vocab: Number = column("vocab_size")
    heads: Number = column("num_heads")
    kv_heads: Number = column("num_kv_heads")
    #: Head sizes in the attention product (d_qk) and of values (d_v); the part without position.
    query_dim: Number = column("query_head_dim")
    value_dim: Number = column("value_head_dim")
    nope_dim: Number = column(lambda shape: shape.qk_nope_head_dim or shape.head_dim)
    #: 1 for latent attention.
    latent: Number = column(lambda shape: shape.attention == "mla")
    #: Ratio of the mixers' products to those of attention (:func:`mixer_factor`).
    mixer_factor: Number = column(lambda shape: mixer_factor(shape))
    query_rank: Number = column("q_lora_rank")
    query_inner: Number = column(lambda shape: shape.q_lora_rank or shape.hidden_size)
    kv_rank: Number = column("kv_lora_rank")
    rotary_dim: Number = column("qk_rotary_head_dim")
    mlp_width: Number = column("intermediate_size")
    #: Matrices of an MLP: 3 with a gate, else 2.
    mlp_matrices: Number = column(lambda shape: 2 + shape.gated)
    moe_layers: Number = column(
        lambda shape: shape.num_moe_layers + shape.is_moe * shape.num_mtp_layers
    )
    experts: Number = column("num_experts")
    top_k: Number = column("experts_per_token")
    expert_width: Number = column("expert_intermediate_size")
    shared_width: Number = column("shared_intermediate_size")
    tied: Number = column("tied_embeddings")
    #: Window in tokens and the share of layers that have one.
    window: Number = column(lambda shape: max(shape.windows, default=0))
    window_share: Number = column(lambda shape: sum(map(bool, shape.windows)) / shape.num_layers)
    #: Router groups, and the number of them that a token may use (1 and 1: no limit).
    groups: Number = column("router_groups")
    groups_kept: Number = column("router_groups_kept")


@dataclass(frozen=True, kw_only=True)
class RankColumns:
    """The work of one pipeline rank for a microbatch, and the work that precedes it.

    `dense` and `routed`: numbers of its layers by kind; `embedding` and `head`: 1 if it has them;
    `sends`: number of messages; all multiplied by the share of the microbatches that a stage runs
    (half with two pipes). `*_before`: numbers of layers and stages before its first stage.
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
    """Degrees, batch and software of layouts, as numbers. A column is computed from a
    :class:`_LayoutRow`, or is the field of this name of the software or the layout."""

    tp: Number
    pp: Number
    #: 1 if weight gradients may be deferred to the end of the step.
    splits_backward: Number = column(lambda row: row.stages.step.splits_backward)
    #: 1 if a step starts before the previous one has drained.
    is_stream: Number = column(lambda row: row.stages.step.is_stream)
    #: Share of the microbatches that enter at the first stage (half with two pipes).
    pipe_share: Number = column(lambda row: row.stages.step.share)
    #: First, last and heaviest inner pipeline rank.
    ranks: tuple[RankColumns, ...] = column("ranks")
    #: Index of the last stage, and its layers by kind.
    last_stage: Number = column(lambda row: row.stages.last)
    last_dense: Number = column(lambda row: row.stages.layers[-1][0])
    last_routed: Number = column(lambda row: row.stages.layers[-1][1])
    dp: Number
    cp: Number
    ep: Number
    etp: Number
    #: 1 if context parallelism exchanges heads for tokens (Ulysses).
    context_exchange: Number = column(lambda row: row.layout.context == "all_to_all")
    sequence_parallel: Number
    #: 1 if the exit of attention is an all-to-all.
    all_to_all_exit: Number = column(lambda row: row.layout.attention_exit == "all_to_all")
    zero: Number
    zero_group: Number
    parameter_server: Number
    servers: Number
    imbalance: Number
    capacity_factor: Number
    adapters: Number
    #: Trained weights per weight of the model; read only with adapters.
    trained_dense: Number
    trained_experts: Number
    #: 1 if the host steps the optimizer.
    offload: Number = column(lambda row: row.layout.offload == "optimizer")
    #: 1 if the frozen weights of the blocks are in NF4.
    packed: Number = column(lambda row: row.layout.base == "nf4")
    microbatch: Number
    microbatches: Number
    #: Slices of a sequence that pass the pipeline one after the other.
    slices: Number = column(lambda row: row.stages.step.slices)
    seq_len: Number
    #: 0, 1, 2: matrix products in 16, 8 or 4 bit.
    precision: Number = column(lambda row: {"float8": 1, "float4": 2}.get(row.layout.precision, 0))
    #: Share of the layers that are recomputed as a whole; for the other parts, 1 if recomputed.
    recompute_full: Number = column(
        lambda row: row.recomputed_layers if row.recomputes("full") else row.traits.recomputed_share
    )
    recompute_attention: Number = column(lambda row: row.recomputes("attention"))
    recompute_norm: Number = column(
        lambda row: row.recomputes("norm", "activation", "operators", "mla_up")
    )
    #: Share of the products outside of experts that is recomputed one by one.
    recompute_products: Number = column(lambda row: 0.5 * row.recomputes("operators"))
    recompute_moe: Number = column(lambda row: row.recomputes("moe"))
    recompute_experts: Number = column(lambda row: row.recomputes("experts"))
    recompute_shared: Number = column(lambda row: row.recomputes("shared_expert"))
    #: Index in :data:`KERNELS`.
    kernel: Number = column(lambda row: KERNELS.index(row.layout.attention_kernel))
    fused_norm: Number
    #: 1 for units of FSDP; 0 without FSDP, or if no weights have replicas that could share them.
    fsdp: Number = column(
        lambda row: (
            (row.traits.fsdp or row.layout.zero == 3)
            * ((row.layout.dense_replicas > 1) | (row.stages.shape.is_moe & (row.layout.edp > 1)))
        )
    )


@dataclass(frozen=True, kw_only=True)
class HardwareColumns:
    """Data-sheet numbers: operations/s in 16 bit and in the layout's width (as far as the device
    sustains them), bytes/s, devices."""

    peak_16bit: Number
    peak: Number
    #: 0, 1, 2: products in 16, 8 or 4 bit, as far as the device has the layout's format.
    width: Number
    memory_bandwidth: Number
    intra: Number
    inter: Number
    node_size: Number


T = TypeVar("T")


def stacked(rows: Sequence[T]) -> T:
    """One object whose fields are arrays [rows], from one object for each row. Fields that are
    tuples of such objects are stacked likewise."""
    kind: Any = type(rows[0])
    columns: dict[str, Any] = {}
    for item in fields(kind):
        values = [getattr(row, item.name) for row in rows]
        if isinstance(values[0], tuple):
            columns[item.name] = tuple(stacked(part) for part in zip(*values, strict=True))
        else:
            columns[item.name] = np.array(values, dtype=np.float64)
    return kind(**columns)


def picked(columns: T, rows: NDArray[np.int64]) -> T:
    """The given rows of an object of :func:`stacked`."""
    source: Any = columns
    values: dict[str, Any] = {}
    for item in fields(source):
        value: Any = getattr(source, item.name)
        is_column = isinstance(value, np.ndarray)
        values[item.name] = (
            value[rows] if is_column else tuple(picked(part, rows) for part in value)
        )
    return type(source)(**values)


def _row_of(kind: type[T], source: Any) -> T:
    """The columns of one source; booleans are 1 or 0."""
    values: dict[str, Any] = {}
    for item in fields(cast("Any", kind)):
        of = item.metadata.get("of", item.name)
        value = getattr(source, of) if isinstance(of, str) else of(source)
        values[item.name] = int(value) if isinstance(value, bool) else value
    return kind(**values)


def model_row(shape: ModelShape) -> ModelColumns:
    return _row_of(ModelColumns, shape)


@dataclass(frozen=True)
class _LayoutRow:
    """A layout of a model, with the software and the stages that run it."""

    layout: PlannedLayout
    traits: Software
    stages: Stages

    def __getattr__(self, name: str) -> Any:
        return getattr(self.traits if hasattr(self.traits, name) else self.layout, name)

    def recomputes(self, *parts: str) -> bool:
        """Whether the layout recomputes one of `parts`."""
        return not self.layout.recompute.isdisjoint(parts)

    @property
    def recomputed_layers(self) -> float:
        """Share of the layers that are recomputed, of those on an average rank."""
        limit, stages = self.layout.recompute_layers, self.stages
        of_rank = stages.shape.num_layers / (self.layout.pp * stages.step.share)
        return 1.0 if limit is None else min(limit / of_rank, 1.0)

    @property
    def ranks(self) -> tuple[RankColumns, ...]:
        stages = self.stages
        return _rank_columns(stages.shape, stages.step.of(stages.step.unit), stages.sizes)


def layout_row(shape: ModelShape, layout: PlannedLayout, traits: Software) -> LayoutColumns:
    return _row_of(LayoutColumns, _LayoutRow(layout, traits, Stages.of(shape, layout)))


@lru_cache(maxsize=4096)
def _rank_columns(
    shape: ModelShape, step: PipelineStep, sizes: tuple[int, ...]
) -> tuple[RankColumns, ...]:
    """The first rank, the last rank and the heaviest inner rank (the last one among equals)."""
    stages = Stages(shape, step, sizes)
    dense, routed = layer_matmul(shape, False), layer_matmul(shape, True)
    rows = [rank_row(stages, rank) for rank in range(step.ranks)]

    def load(rank: int) -> tuple[float, int]:
        return rows[rank].dense * dense + rows[rank].routed * routed, rank

    inner = max(range(1, step.ranks - 1), key=load, default=0)
    return rows[0], rows[-1], rows[inner]


def rank_row(stages: Stages, rank: int) -> RankColumns:
    """The work of one rank."""
    step, numbers = stages.step, stages.step.stages_of(rank)
    first = min(numbers)
    before = [stages.layers[stage] for stage in range(first)]
    return RankColumns(
        dense=step.share * sum(stages.layers[stage][0] for stage in numbers),
        routed=step.share * sum(stages.layers[stage][1] for stage in numbers),
        embedding=step.share * (0 in numbers),
        head=step.share * (stages.last in numbers),
        sends=step.share * step.messages_of(rank),
        dense_before=sum(dense for dense, _ in before),
        routed_before=sum(routed for _, routed in before),
        stages_before=first,
    )


def hardware_row(device: Accelerator, precision: Precision = "bfloat16") -> HardwareColumns:
    """One device with its peak in products of `precision`. With products of more than 16 bit
    everything runs in that type."""
    peak = device.peak(precision) or device.peak_flops[0]
    return HardwareColumns(
        peak_16bit=min(device.peak_flops[0], peak) * device.sustained,
        peak=peak * device.sustained,
        width=device.width(precision),
        memory_bandwidth=device.memory_bandwidth,
        intra=device.intra_node_bandwidth,
        inter=device.inter_node_bandwidth,
        node_size=device.node_size,
    )
