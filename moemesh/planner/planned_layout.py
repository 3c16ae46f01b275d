"""One layout of one step: a plan with the additional options of published runs and trainers."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import inf
from typing import Any, Literal

from moemesh.config.errors import ConfigError, Problem
from moemesh.config.layout import Layout, MeshDegrees
from moemesh.config.plan import (
    DEGREES,
    RECOMPUTED,
    AttentionExit,
    Context,
    DataStrategy,
    Offload,
    ScheduleName,
)
from moemesh.config.rules import (
    V_SCHEDULES,
    CutSizes,
    degree_problems,
    plan_problem,
    server_problems,
)
from moemesh.config.section import LARGEST_SIZE
from moemesh.config.shown import Shown
from moemesh.config.toml import format_value

#: Kernels of the attention core: FlashAttention 2 or newer, FlashAttention 1; a fused and a plain
#: softmax, which keep their scores; the fused softmax of 2021, which writes all scores.
AttentionKernel = Literal["flash", "first_flash", "fused", "eager", "masked"]
Precision = Literal["bfloat16", "float16", "float32", "float64", "float8", "float4"]

#: Parts that can be recomputed in the backward instead of kept. "full" is whole layers, "attention"
#: the attention core with its scores, "activation" that of the MLP; "experts" is gate and up of the
#: routed experts, "moe" their whole layer with its exchange; "mla_up" is the expansion of MLA's low
#: ranks, "operators" every second operator.
RECOMPUTABLE = (
    "full", "attention", "norm", "activation", "experts", "moe", "shared_expert", "mla_up",
    "operators",
)  # fmt: skip

#: Fields on the weights that train; in a run they come from other sections than [plan].
TRAINED = ("trained_dense", "trained_experts", "adapters", "base")

#: Value of `plan.data` for each stage of ZeRO.
DATA: tuple[DataStrategy, ...] = ("replicate", "zero1", "zero2", "zero3")

#: Bytes of one element.
ELEMENT_BYTES: dict[str, float] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
    "float4": 0.5,
}


#: Least values of numbers that a Plan lacks or has in another form, with messages.
_LEAST: dict[str, tuple[float, str]] = {
    "trained_dense": (0, "a share of the weights is at least 0"),
    "trained_experts": (0, "a share of the weights is at least 0"),
    "imbalance": (1, "the most loaded rank has at least the mean load"),
    "capacity_factor": (0, "a capacity is a multiple of the mean load; 0 drops nothing"),
    "gradient_bytes": (0, "bytes of a gradient are at least 0"),
    "optimizer_bytes": (0, "bytes of an optimizer's state are at least 0"),
    "zero_group": (0, "the number of ranks in a group of shards is at least 0; 0 is all of them"),
    "recompute_layers": (0, "the number of recomputed layers of a rank is at least 0"),
    "ranks_per_node": (0, "the number of ranks in a node is at least 0; 0 is one node"),
}


@dataclass(frozen=True, kw_only=True, repr=False)
class PlannedLayout(MeshDegrees, Shown):
    """Degrees, batch and every strategy of one step. Fields shared with Plan have its
    meaning; some are 0 where a Plan has None, and `recompute` is a set of parts.

    `microbatch` is in sequences per data-parallel replica, `global_batch` in sequences per step. A
    sequence has `seq_len` tokens. Raises ConfigError with every broken rule.
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
    #: Layers of each of the pp * stages_per_rank stages; None: the cut of `moemesh train`.
    layers_per_stage: tuple[int, ...] | None = None

    #: Slices of a sequence under TeraPipe; 0: one for each pipeline rank.
    slices: int = 0

    #: Activations outside of tensor-parallel blocks are cut along tokens over tp.
    sequence_parallel: bool = True
    attention_exit: AttentionExit = "reduce_scatter"
    #: Exit of MLPs, and collective of the input gradients of a block.
    mlp_exit: Literal["reduce_scatter", "all_reduce"] = "reduce_scatter"
    input_gradient: Literal["reduce_scatter", "all_reduce"] = "reduce_scatter"
    #: Tensors re-gathered for the weight gradients of a block: none (they were kept), its input, or
    #: (for deferred weight gradients) its input and the gradient of its output.
    rebuild: Literal["none", "input", "input_and_gradient"] = "none"
    #: Each tensor-parallel rank sends its shard of the tokens to the next stage instead of all of
    #: them. None: only if the stream is cut along tokens.
    shard_messages: bool | None = None
    context: Context = "ring"
    dispatcher: str = "all_to_all"
    payload: Literal["same", "fp8"] = "same"
    combine: Literal["fast", "exact"] = "fast"
    dispatch_chunks: int = 1
    spare_slots: int = 0

    #: 0 replicates; 1 shards optimizer states, 2 also gradients, 3 also weights.
    zero: int = 0
    #: The optimizer's states are on the device ("none"), or on its host, whose CPU updates them.
    offload: Offload = "none"
    #: Ranks push gradients to servers, which hold the optimizer, and pull weights from them.
    parameter_server: bool = False
    #: Number of servers among the ranks that hold the same weights.
    servers: int = 1
    #: Number of ranks in a group that shares ZeRO's shards; 0: all ranks with the same weights.
    zero_group: int = 0
    #: ZeRO-3 gathers weights for every forward and backward, or once a step.
    reshard: Literal["always", "step"] = "always"
    #: One sum of gradients for each layer instead of one per step.
    bucket_per_layer: bool = False
    #: Gradients are summed after every microbatch; ZeRO 2 and 3 always do.
    reduce_every_microbatch: bool = False
    recompute: frozenset[str] = frozenset()
    #: Number of recomputed layers of a rank; None: all.
    recompute_layers: int | None = None
    attention_kernel: AttentionKernel = "flash"
    fused_norm: bool = True
    fused_activation: bool = True
    #: Loss in chunks of the vocabulary, as in `moemesh train`, or with all logits and a fused or
    #: plain softmax, as in other trainers.
    loss: Literal["chunked", "fused", "plain"] = "chunked"
    #: None: the model's.
    dropout: bool | None = None

    #: Number type of the matrix products, and of stored weights and activations.
    precision: Precision = "bfloat16"
    dtype: Precision = "bfloat16"
    #: Bytes of an accumulated gradient, and of Adam's two moments and fp32 master together.
    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    #: Trained parameters per parameter of the model, for dense weights and for experts. With
    #: `adapters` these are additional parameters, and the model's have no weight gradients.
    trained_dense: float = 1.0
    trained_experts: float = 1.0
    adapters: bool = False
    #: Form of the weights of attention, MLPs and experts that do not train.
    base: Literal["same", "nf4"] = "same"
    #: 0: all ranks are in one node.
    ranks_per_node: int = 0
    #: Load of the most loaded expert rank over the mean: multiplies routed rows on the worst rank.
    imbalance: float = 1.0
    #: Capacity as a multiple of the mean load; choices beyond it are dropped. 0 drops none.
    capacity_factor: float = 0.0

    def __post_init__(self) -> None:
        if problems := self.check():
            raise ConfigError(problems)

    def check(self, sizes: CutSizes | None = None) -> list[Problem]:
        """Every broken rule: a Plan's rules for the degrees and (with its `sizes`) the model, and
        rules for fields that a Plan lacks. Key/value heads may be copied over tp, as in other
        trainers; the limits of `moemesh train` are in ``untrained`` and `Plan.check`.
        """
        least = (*DEGREES, "seq_len", "global_batch", "microbatch", "stages_per_rank",
                 "dispatch_chunks")  # fmt: skip
        problems: list[Problem] = []

        def complain(code: str, key: str, message: str, fix: str) -> None:
            problems.append(plan_problem(self, code, key, message, fix))

        for key in least:
            if (value := getattr(self, key)) < 1:
                message = f"{key} must be at least 1, not {value}"
                complain("out-of-range", key, message, f"{key} = 1")
        if problems:
            return problems
        problems += degree_problems(self, sizes, copied_kv_heads=True)
        if self.zero not in (0, 1, 2, 3):
            complain("out-of-range", "zero", "ZeRO has the stages 0 to 3", "zero = 3")
        if unknown := self.recompute - set(RECOMPUTABLE):
            value, fix = "+".join(sorted(self.recompute)), f"known: {', '.join(RECOMPUTABLE)}"
            message = f"cannot recompute {', '.join(sorted(unknown))}"
            problems.append(Problem.of("not-a-choice", "plan.recompute", value, message, fix))
        if self.parameter_server:
            if self.zero:
                message = "a parameter server holds the optimizer: ZeRO has nothing to shard"
                complain("conflict", "zero", message, "zero = 0")
            problems += server_problems(self)
        if self.layers_per_stage is not None and len(self.layers_per_stage) != self.num_stages:
            message = f"{len(self.layers_per_stage)} numbers for {self.num_stages} stages"
            complain("stages", "layers_per_stage", message, "")
        for name, (least, message) in _LEAST.items():
            value = getattr(self, name)
            # Written so that NaN is rejected, too.
            if value is not None and not least <= value < inf:
                fix = f"{name} = {type(value)(least) if value == value else least}"
                complain("out-of-range", name, message, fix)
            elif value is not None and value > LARGEST_SIZE:
                message = f"{name} must be at most {LARGEST_SIZE}"
                complain("out-of-range", name, message, f"{name} = {LARGEST_SIZE}")
        return problems

    @property
    def dense_replicas(self) -> int:
        """Ranks over which gradients of dense weights are summed: N = dp * cp."""
        return self.dp * self.cp

    @property
    def dense_shards(self) -> int:
        """Parts into which ZeRO cuts the states of dense weights."""
        return min(self.dense_replicas, self.zero_group) if self.zero_group else self.dense_replicas

    @property
    def expert_shards(self) -> int:
        """Parts into which ZeRO cuts the states of expert weights."""
        return min(self.edp, self.zero_group) if self.zero_group else self.edp

    @property
    def data(self) -> DataStrategy:
        """Value of `plan.data`."""
        return "parameter_server" if self.parameter_server else DATA[self.zero]

    @property
    def microbatches(self) -> int:
        """Microbatches of one step of one replica."""
        # Each division rounds up, with operators that also work on numpy columns.
        share = -(-self.global_batch // self.dp)
        return -(-share // self.microbatch)

    @property
    def tokens(self) -> float:
        """Tokens of one microbatch on one rank before tp cuts them: u = b s / c."""
        return self.microbatch * self.seq_len / self.cp

    @property
    def token_shard(self) -> float:
        """Tokens of one microbatch in a rank's residual stream: cut by tp with sequence
        parallelism."""
        return self.tokens / (self.tp if self.sequence_parallel else 1)

    @property
    def element_bytes(self) -> float:
        return ELEMENT_BYTES[self.dtype]

    @property
    def step_sizes(self) -> dict[str, Any]:
        """Sequence length, batch and number type, as keyword arguments of predictions of a run."""
        return {name: getattr(self, name) for name in ("seq_len", "global_batch", "dtype")}

    @property
    def num_stages(self) -> int:
        """Stages of one pipe; a V has two on every rank."""
        if self.schedule in V_SCHEDULES:
            return 2 * self.pp
        return self.pp * self.stages_per_rank

    @property
    def mesh(self) -> Layout:
        """The two meshes, for groups of ranks."""
        degrees: dict[str, int] = {name: getattr(self, name) for name in DEGREES}
        return Layout(**degrees, ranks_per_node=self.ranks_per_node)

    def changed(self, **values: Any) -> PlannedLayout:
        return replace(self, **values)

    @cached_property
    def key(self) -> str:
        """The whole layout for messages and JSON: "tp=8,…,seq_len=128,global_batch=32"."""
        return f"{self.text},seq_len={self.seq_len},global_batch={self.global_batch}"

    @property
    def text(self) -> str:
        """The layout as an argument of ``--plan``, without blanks: "tp=8,pp=4,microbatch=1".

        It has `microbatch` and all fields that differ from their default, without sequence length
        and batch.
        """
        parts: list[str] = []
        implied = widths(self.dtype)
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            is_default = value == implied.get(name, field.default) and name != "microbatch"
            if is_default or name in ("seq_len", "global_batch"):
                continue
            if name in ("zero", "parameter_server"):
                name, value = "data", self.data
            elif name == "recompute":
                words = (word for word, named in RECOMPUTED.items() if named == value)
                value = next(words, "+".join(sorted(self.recompute)))
            parts.append(f"{name}={shown(value)}")
        return ",".join(parts)


def widths(dtype: Precision) -> dict[str, Any]:
    """Fields of a layout that follow from a run's number type: that of products, and bytes of a
    gradient (4, or 8 with float64) and of optimizer states: two moments of the same width, and fp32
    masters of 16-bit weights."""
    wide = 8 if dtype == "float64" else 4
    masters = 4 if dtype in ("bfloat16", "float16") else 0
    return {"precision": dtype, "gradient_bytes": wide, "optimizer_bytes": 2 * wide + masters}


def shown(value: object) -> str:
    """A value as text for ``--plan``, without characters that a shell interprets."""
    if isinstance(value, tuple):
        return "-".join(map(str, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return value if isinstance(value, str) else format_value(value)
