"""One layout of one step: a plan with all that published runs and other trainers also vary."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import ceil, lcm
from typing import Any, Literal

from moemesh.config.errors import ConfigError, Problem
from moemesh.config.layout import Layout
from moemesh.config.pipeline import V_SCHEDULES
from moemesh.config.plan import AttentionExit, Context, ScheduleName
from moemesh.config.section import nearest_divisors
from moemesh.config.toml import format_value

AttentionKernel = Literal["flash", "eager", "fused"]
Precision = Literal["bfloat16", "float16", "float32", "float64", "float8", "float4"]

#: What can be computed again in the backward instead of kept: whole layers; or the attention core
#: (scores), norms, the MLP's activation, the routed experts, the shared expert, the expansion of
#: MLA's low ranks; or every second operator.
RECOMPUTABLE = (
    "full", "attention", "norm", "activation", "moe", "shared_expert", "mla_up", "operators",
)  # fmt: skip

#: Bytes of one element.
ELEMENT_BYTES: dict[str, float] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
    "float4": 0.5,
}


@dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """Degrees, batch and every strategy of one step; equal to a Plan where that can say it.

    `microbatch` is in sequences a data-parallel replica, `global_batch` in sequences a step. A
    sequence is `seq_len` tokens. Raises ConfigError with every rule that is broken.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    seq_len: int
    global_batch: int
    microbatch: int = 1

    schedule: ScheduleName = "1f1b"
    #: Stages (virtual chunks) of one pipeline rank.
    stages_per_rank: int = 1
    #: Layers of each of the pp * stages_per_rank stages; empty cuts evenly, longer stages first.
    layers_per_stage: tuple[int, ...] = ()

    #: Activations outside of tensor-parallel blocks are cut along tokens over tp.
    sequence_parallel: bool = True
    attention_exit: AttentionExit = "reduce_scatter"
    #: The same for MLPs; and how gradients return through the entry of a block.
    mlp_exit: Literal["reduce_scatter", "all_reduce"] = "reduce_scatter"
    input_gradient: Literal["reduce_scatter", "all_reduce"] = "reduce_scatter"
    #: What is gathered once more for the weight gradients of a block: nothing (it was kept), its
    #: input, or (weight gradients computed later) its input and the gradient of its output.
    rebuild: Literal["none", "input", "input_and_gradient"] = "none"
    #: Each tensor-parallel rank sends its tokens to the next stage, not all of them. None: where
    #: the stream is cut along tokens.
    shard_messages: bool | None = None
    context: Context = "ring"
    dispatcher: str = "all_to_all"
    payload: Literal["same", "fp8"] = "same"
    combine: Literal["fast", "exact"] = "fast"
    dispatch_chunks: int = 1
    spare_slots: int = 0

    #: 0 replicates; 1 shards optimizer states, 2 also gradients, 3 also weights.
    zero: int = 0
    #: Shards of ZeRO stay inside groups of so many ranks; 0: all ranks that hold the same weights.
    zero_group: int = 0
    #: One sum of gradients for each layer instead of one a step.
    bucket_per_layer: bool = False
    #: Gradients are summed for every microbatch (ZeRO-2 without a buffer to accumulate in).
    reduce_every_microbatch: bool = False
    recompute: frozenset[str] = frozenset()
    #: Layers of a rank's stage that recompute; None: all.
    recompute_layers: int | None = None
    attention_kernel: AttentionKernel = "flash"
    fused_norm: bool = True
    fused_activation: bool = True
    fused_loss: bool = True
    dropout: bool | None = None

    #: Of the matrix products; and of weights and activations as they are stored.
    precision: Precision = "bfloat16"
    dtype: Precision = "bfloat16"
    #: Bytes of an accumulated gradient, and of Adam's two moments and fp32 master together.
    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    ranks_per_node: int = 0
    #: Most loaded over mean expert rank: multiplies routed rows on the worst rank.
    imbalance: float = 1.0
    #: Choices beyond capacity are dropped (and rows padded to it); 0 drops none.
    capacity_factor: float = 0.0

    def __post_init__(self) -> None:
        if problems := _check(self):
            raise ConfigError(problems)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Expert replicas (D_e): what the other degrees leave over."""
        return self.stage_ranks // (self.ep * self.etp)

    @property
    def dense_replicas(self) -> int:
        """Ranks over which gradients of dense weights are summed: N = dp * cp."""
        return self.dp * self.cp

    @property
    def dense_shards(self) -> int:
        """Parts into which ZeRO cuts the states of dense weights."""
        return _shards(self.dense_replicas, self.zero_group)

    @property
    def expert_shards(self) -> int:
        """Parts into which ZeRO cuts the states of expert weights."""
        return _shards(self.edp, self.zero_group)

    @property
    def microbatches(self) -> int:
        """Microbatches of one step of one replica."""
        return ceil(ceil(self.global_batch / self.dp) / self.microbatch)

    @property
    def tokens(self) -> float:
        """Tokens of one microbatch on one rank before tp cuts them: u = b s / c."""
        return self.microbatch * self.seq_len / self.cp

    @property
    def token_shard(self) -> float:
        """The same on the residual stream: divided by tp with sequence parallelism."""
        return self.tokens / (self.tp if self.sequence_parallel else 1)

    @property
    def element_bytes(self) -> float:
        return ELEMENT_BYTES[self.dtype]

    @property
    def num_stages(self) -> int:
        """Stages of one pipe; a V has two on every rank."""
        if self.schedule in V_SCHEDULES:
            return 2 * self.pp
        return self.pp * self.stages_per_rank

    @property
    def mesh(self) -> Layout:
        """The two meshes, for groups of ranks."""
        return Layout(
            pp=self.pp,
            dp=self.dp,
            cp=self.cp,
            tp=self.tp,
            ep=self.ep,
            etp=self.etp,
            ranks_per_node=self.ranks_per_node,
        )

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that pipeline rank `rank` holds, in the order of its chunks.

        V-shaped schedules come back to where they started; DualPipe holds a stage of each
        direction; all others go round.
        """
        pp, last = self.pp, self.num_stages - 1
        if self.schedule in V_SCHEDULES:
            return (rank, last - rank)
        if self.schedule in ("dualpipe", "chimera") and pp > 1:
            return (rank, pp - 1 - rank)
        return tuple(chunk * pp + rank for chunk in range(self.stages_per_rank))

    def changed(self, **values: Any) -> PlannedLayout:
        """A copy with other values."""
        return replace(self, **values)

    @cached_property
    def key(self) -> str:
        """What differs from the defaults, for messages and tables: "tp=8,pp=4"."""
        parts: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                shown = "+".join(sorted(self.recompute)) if field.name == "recompute" else value
                parts.append(f"{field.name}={shown}")
        return ",".join(parts)

    @property
    def text(self) -> str:
        """As ``--plan`` reads it back: "tp=8,pp=4,microbatch=1"; sequence and batch apart."""
        parts: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            is_told = value != field.default or field.name == "microbatch"
            if not is_told or field.name in ("seq_len", "global_batch"):
                continue
            if field.name == "recompute":
                value = "+".join(sorted(self.recompute))
            parts.append(f"{field.name}={value if isinstance(value, str) else format_value(value)}")
        return ",".join(parts)


def _shards(replicas: int, group: int) -> int:
    return min(replicas, group) if group else replicas


def smallest_world(*, pp: int, tp: int, cp: int, ep: int, etp: int) -> int:
    """The fewest GPUs that hold these degrees: p lcm(t c, e x), not the product of all."""
    return pp * lcm(tp * cp, ep * etp)


def _check(layout: PlannedLayout) -> list[Problem]:
    problems: list[Problem] = []

    def complain(key: str, message: str, fix: str = "") -> None:
        value = getattr(layout, key)
        shown = "+".join(sorted(layout.recompute)) if key == "recompute" else value
        problems.append(
            Problem(code="layout", key=f"plan.{key}", value=shown, message=message, fix=fix)
        )

    for key in (
        "tp", "pp", "dp", "cp", "ep", "etp", "seq_len", "global_batch", "microbatch",
        "stages_per_rank", "dispatch_chunks",
    ):  # fmt: skip
        if getattr(layout, key) < 1:
            complain(key, f"{key} must be at least 1, not {getattr(layout, key)}", f"{key} = 1")
    if problems:
        return problems
    ranks, experts = layout.dp * layout.cp * layout.tp, layout.ep * layout.etp
    if ranks % experts:
        complain(
            "ep",
            f"ep*etp ({experts}) must divide dp*cp*tp ({ranks})",
            f"ep*etp = {nearest_divisors(ranks, experts)}",
        )
    if layout.zero not in (0, 1, 2, 3):
        complain("zero", "ZeRO has the stages 0 to 3", "zero = 3")
    if unknown := layout.recompute - set(RECOMPUTABLE):
        complain(
            "recompute",
            f"cannot recompute {', '.join(sorted(unknown))}",
            f"known: {', '.join(RECOMPUTABLE)}",
        )
    if layout.layers_per_stage and len(layout.layers_per_stage) != layout.num_stages:
        complain(
            "layers_per_stage",
            f"{len(layout.layers_per_stage)} numbers of layers for {layout.num_stages} stages",
        )
    if layout.imbalance < 1:
        complain("imbalance", "the most loaded rank has at least the mean load", "imbalance = 1.0")
    return problems
