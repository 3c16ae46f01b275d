"""Settings of every benchmark: the options of its verb, checked before a rank starts."""

# Light to import: the command reads it to know its options.
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Literal

from benchmarks.routing_shape import WORKLOADS, RoutingShape
from benchmarks.shapes import SHAPES
from moemesh.bench.settings import (
    BenchError,
    HostSettings,
    Settings,
    check_divides,
    counts_in,
    names_in,
)
from moemesh.config.dispatcher_table import PREDICTED

if TYPE_CHECKING:
    from moemesh.config.plan import Plan

#: In the order of the table. "all" means these.
DISPATCHERS = (*PREDICTED, "auto")


@dataclass(frozen=True, kw_only=True)
class LayerSettings(Settings):
    """One MoE layer; the tokens of a shape are those of all ranks together."""

    shape: Annotated[
        Literal["A", "B", "tiny", "all"], "A, few wide experts; B, many narrow ones; all: both."
    ] = "all"
    ranks: Annotated[str, "Numbers of ranks, with commas."] = "1,4"
    dtype: Annotated[Literal["float32", "bfloat16", "all"], "Number type."] = "float32"
    rounds: Annotated[int, "Timed repetitions.", {"min": 1}] = 15
    workload: Annotated[
        str, "Loads with commas, or all (see below); default: the router's own choice."
    ] = ""

    @property
    def shapes(self) -> tuple[str, ...]:
        return ("A", "B") if self.shape == "all" else (self.shape,)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("float32", "bfloat16") if self.dtype == "all" else (self.dtype,)

    @property
    def workloads(self) -> tuple[str, ...]:
        return names_in(self.workload, WORKLOADS, "workload") if self.workload else ("",)

    def check(self) -> None:
        assert self.workloads
        for name in self.shapes:
            for count in counts_in(self.ranks):
                check_divides("ranks", count, f"experts of shape {name}", SHAPES[name].num_experts)


@dataclass(frozen=True, kw_only=True)
class DeviceSettings(Settings):
    """One MoE layer on simulated devices; `cluster` has their data sheet and links."""

    shape: Annotated[
        Literal["A", "B", "Q", "tiny"],
        "Shape, as of `benchmarks.layer`; Q is counted scaled down, and measured whole on a GPU.",
    ] = "B"
    cluster: Annotated[str, "Preset or file: rates of its devices and links."] = "dgx_h100"
    ranks: Annotated[int, "Devices that share the experts; 1: no exchanges.", {"min": 1}] = 4
    calls: Annotated[
        bool, "Count calls of Python functions and operations of ATen, of a layer and of a step."
    ] = False
    out: Annotated[str, "File that gets each row as a line of JSON when it is measured."] = ""

    def check(self) -> None:
        check_divides("ranks", self.ranks, "experts", SHAPES[self.shape].num_experts)


@dataclass(frozen=True, kw_only=True)
class DispatchSettings(HostSettings):
    """Dispatchers under a load: `tokens` of all ranks together, `width` of one expert."""

    workload: Annotated[str, "Loads with commas, or all (see below)."] = "W0"
    dispatcher: Annotated[str, "Names with commas, or all."] = "all"
    experts: Annotated[int, "Experts of the layer.", {"min": 1}] = 64
    top_k: Annotated[int, "Experts per token.", {"min": 1}] = 8
    groups: Annotated[int, "Placement groups of the workload.", {"min": 1}] = 8
    tokens: Annotated[int, "Tokens of all ranks together.", {"tokens": True}] = 4096
    hidden: Annotated[int, "Numbers of a token's row.", {"min": 1}] = 512
    width: Annotated[int, "Width of one expert.", {"min": 1}] = 256
    payload: Annotated[Literal["same", "fp8"], "Dispatched rows."] = "same"
    dtype: Annotated[Literal["float32", "bfloat16", "float64"], "Number type."] = "float32"
    mode: Annotated[
        Literal["dispatch_only", "moe_fwd_bwd"], "Exchanges alone, or a layer's whole step."
    ] = "dispatch_only"
    chunks: Annotated[int, "Also measure so many chunks.", {"min": 1}] = 1
    rounds: Annotated[int, "Timed steps of each.", {"min": 1}] = 10
    seed: Annotated[int, "Seed of the routing.", {"min": 0}] = 0

    @property
    def workloads(self) -> tuple[str, ...]:
        return names_in(self.workload, WORKLOADS, "workload")

    @property
    def dispatchers(self) -> tuple[str, ...]:
        return names_in(self.dispatcher, DISPATCHERS, "dispatcher")

    def check(self) -> None:
        check_divides("ranks", self.ranks, "experts", self.experts)
        super().check()
        assert self.dispatchers and self.workloads
        for name in self.workloads:
            RoutingShape(self.experts, self.top_k, self.groups).check(name)


@dataclass(frozen=True, kw_only=True)
class PipelineSettings(Settings):
    """A schedule with stages that sleep; a backward takes twice as long as a forward."""

    schedule: Annotated[str, "Name of a schedule."] = "1f1b"
    ranks: Annotated[int, "Pipeline ranks.", {"min": 1}] = 4
    microbatches: Annotated[int, "Microbatches of a step.", {"min": 1}] = 16
    stages_per_rank: Annotated[int, "Chunks on a rank.", {"min": 1}] = 1
    seconds: Annotated[float, "Seconds that a stage sleeps for F, I and W each.", {"min": 0}] = 0.0
    rounds: Annotated[int, "Timed steps.", {"min": 1}] = 5


@dataclass(frozen=True, kw_only=True)
class BalancersSettings(Settings):
    """Loads of every shape, and the places of their experts."""

    layers: Annotated[int, "Layers of each load shape.", {"min": 1}] = 58
    experts: Annotated[int, "Experts of a layer.", {"min": 1}] = 256
    replicas: Annotated[int, "Slots of a layer.", {"min": 1}] = 288
    groups: Annotated[int, "Groups of experts.", {"min": 1}] = 8
    nodes: Annotated[int, "Nodes.", {"min": 1}] = 4
    gpus: Annotated[int, "GPUs of the static placement.", {"min": 1}] = 32
    ranks: Annotated[int, "Ranks of the exact loads.", {"min": 1}] = 64
    spare_slots: Annotated[int, "Spare slots of each rank.", {"min": 0}] = 2
    rounds: Annotated[int, "Timed repetitions.", {"min": 1}] = 3
    seed: Annotated[int, "Seed of the loads.", {"min": 0}] = 0
    drift_layers: int = 4
    drift_steps: int = 8
    next_layers: int = 8

    def check(self) -> None:
        check_divides("ranks", self.ranks, "experts", self.experts)


@dataclass(frozen=True, kw_only=True)
class ReplicasSettings(Settings):
    """Spare slots in a model whose experts dominate the step; its sizes are no options."""

    ranks: Annotated[str, "Numbers of ranks, with commas."] = "2,4"
    workload: Annotated[str, "Loads with commas, or all (see below)."] = "W2,W6"
    spare_slots: Annotated[int, "Spare slots of each rank.", {"min": 1}] = 2
    policy: Annotated[Literal["quota", "shadow"], "Experts that get replicas."] = "quota"
    rounds: Annotated[int, "Timed steps of each.", {"min": 1}] = 7
    layers: int = 2
    hidden: int = 128
    width: int = 512
    num_experts: int = 32
    experts_per_token: int = 4
    sequences: int = 16
    seq_len: int = 128
    seed: int = 0

    @property
    def workloads(self) -> tuple[str, ...]:
        return names_in(self.workload, WORKLOADS, "workload")

    def check(self) -> None:
        assert self.workloads
        if self.spare_slots < 1 or self.rounds < 1:
            raise BenchError(
                f"--spare-slots ({self.spare_slots}) and --rounds ({self.rounds}) must be at "
                "least 1"
            )
        for count in counts_in(self.ranks):
            if count < 2 or self.num_experts % count:
                raise BenchError(
                    f'--ranks "{self.ranks}": numbers such as 2,4 that divide {self.num_experts} '
                    "experts; one rank has nowhere to put a replica"
                )


#: Values of `plan.data` in the order of the table of `benchmarks.memory`; the first is the base.
STRATEGIES = ("replicate", "zero1", "zero2", "zero3", "parameter_server")


@dataclass(frozen=True, kw_only=True)
class MemorySettings(Settings):
    """A model of many layers on few tokens, so that model states are most of a rank's memory."""

    ranks: Annotated[int, "Ranks, all data-parallel.", {"min": 2}] = 4
    strategy: Annotated[str, "Values of plan.data with commas, or all."] = "all"
    servers: Annotated[int, "Servers of parameter_server.", {"min": 1}] = 1
    rounds: Annotated[int, "Timed steps of each.", {"min": 1}] = 7
    dtype: Annotated[Literal["float32", "bfloat16"], "Type of the weights."] = "float32"
    layers: Annotated[int, "Layers.", {"min": 1}] = 12
    hidden: Annotated[int, "Hidden size.", {"min": 8}] = 256
    width: Annotated[int, "Width of an expert.", {"min": 1}] = 384
    experts: Annotated[int, "Experts of a layer.", {"min": 2}] = 4
    sequences: Annotated[int, "Sequences of a step.", {"min": 1}] = 4
    seq_len: Annotated[int, "Tokens of a sequence.", {"tokens": True}] = 32
    microbatches: Annotated[int, "Microbatches of a step.", {"min": 1}] = 1
    seed: int = 0

    @property
    def wanted(self) -> tuple[str, ...]:
        """The strategies, replicate first: the others are compared with it."""
        named = names_in(self.strategy, STRATEGIES, "strategy")
        return tuple(name for name in STRATEGIES if name in named or name == STRATEGIES[0])

    def check(self) -> None:
        if "parameter_server" in self.wanted and not 1 <= self.servers < self.ranks:
            raise BenchError(
                f"--servers ({self.servers}) must be fewer than --ranks ({self.ranks}): "
                f"at most {self.ranks - 1}"
            )
        check_divides("4 heads", 4, "hidden", self.hidden)
        if self.sequences < self.ranks * self.microbatches:
            least = self.ranks * self.microbatches
            raise BenchError(
                f"--sequences ({self.sequences}) must be at least ranks * microbatches ({least})"
            )


@dataclass(frozen=True, kw_only=True)
class TokenizeSettings(Settings):
    """Text of the standard library and a tokenizer that is trained on it."""

    megabytes: Annotated[int, "Megabytes of text.", {"min": 1}] = 8
    document_bytes: Annotated[int, "Bytes of a document, about.", {"min": 1}] = 2000
    vocabulary: Annotated[int, "Ids of the tokenizer.", {"min": 300}] = 16000
    processes: Annotated[int, "Processes, as of moemesh tokenize.", {"min": 1}] = 1
    rounds: Annotated[int, "Timed rounds; all take turns in each.", {"min": 1}] = 5


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(Settings):
    """A state of a given size, saved by ranks that hold equal shares of it."""

    megabytes: Annotated[int, "Size of the state of all ranks, in MiB.", {"min": 1}] = 256
    ranks: Annotated[int, "Ranks.", {"min": 1}] = 2
    rounds: Annotated[int, "Timed saves of each kind, behind a first one.", {"min": 1}] = 5
    folder: Annotated[str, "The disk to write to; default: that of temporary files."] = ""


#: Tokens that `benchmarks.step --work generate` writes behind a prompt.
GENERATED = 128
#: Goals of the ratio to transformers, by plan (or the work that is no training) and number type,
#: for the sizes that are the defaults and full tuning on CPUs (docs/results/step.md).
STEP_GOALS = {
    ("", "float32"): 0.87,
    ("", "bfloat16"): 0.50,
    ("neighbours=1", "float32"): 0.65,
    ("neighbours=1", "bfloat16"): 0.65,
    ("dp=2", "float32"): 0.95,
    ("dp=2", "bfloat16"): 0.65,
    ("dp=2,ep=2", "float32"): 0.95,
    ("dp=2,ep=2", "bfloat16"): 0.65,
    ("evaluate", "float32"): 0.85,
    ("evaluate", "bfloat16"): 0.85,
    ("generate", "float32"): 1.00,
    ("generate", "bfloat16"): 1.00,
}


@dataclass(frozen=True, kw_only=True)
class StepSettings(Settings):
    """A whole training step of a Qwen3-MoE model; `sequences` are those of all ranks together."""

    plan: Annotated[str, 'Keys of [plan] with commas, "dp=2,ep=2"; default: one rank.'] = ""
    dtype: Annotated[Literal["float32", "bfloat16", "all"], "Number type."] = "all"
    work: Annotated[
        Literal["train", "evaluate", "generate"],
        f"A step, the loss of as many tokens, or {GENERATED} tokens behind a prompt.",
    ] = "train"
    lora: Annotated[int, "Rank of adapters (the peer: peft); 0: full tuning.", {"min": 0}] = 0
    implementation: Annotated[
        Literal["moemesh", "transformers"], "Whose model code our own loop runs."
    ] = "moemesh"
    rounds: Annotated[int, "Timed steps of each.", {"min": 2}] = 15
    layers: Annotated[int, "Layers.", {"min": 1}] = 6
    hidden: Annotated[int, "Hidden size, in 64s.", {"min": 64}] = 256
    width: Annotated[int, "Width of an expert.", {"min": 1}] = 256
    experts: Annotated[int, "Experts of a layer.", {"min": 2}] = 16
    top_k: Annotated[int, "Experts per token.", {"min": 1}] = 4
    vocabulary: Annotated[int, "Entries of the vocabulary.", {"min": 256}] = 1024
    sequences: Annotated[int, "Sequences of a step.", {"min": 1}] = 8
    seq_len: Annotated[int, "Tokens of a sequence.", {"tokens": True}] = 256
    neighbours: Annotated[int, "Other processes that compute all the time.", {"min": 0}] = 0
    #: Folder of the turns, in a process of one contender; the caller leaves it empty.
    turns: Annotated[str, "Used by the benchmark itself.", {"hidden": True}] = ""
    device: Annotated[Literal["cpu", "cuda"], "Device of a rank."] = "cpu"
    kernels: Annotated[
        int, "Rows of our step's profile by operation and by kernel; 0: none.", {"min": 0}
    ] = 0

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("float32", "bfloat16") if self.dtype == "all" else (self.dtype,)

    @property
    def flops(self) -> int:
        """Operations of the experts' products in a training step."""
        rows = self.layers * self.sequences * self.seq_len * self.top_k
        return 18 * rows * self.hidden * self.width

    def goal(self, dtype: str) -> float | None:
        """The goal of the ratio; None where there is none for these settings."""
        kept = ("plan", "dtype", "rounds", "neighbours", "work", "kernels")
        sizes = replace(self, **{one.name: one.default for one in fields(self) if one.name in kept})
        case = self.plan if self.work == "train" else self.work
        if self.neighbours:
            case = f"{case} neighbours={self.neighbours}".strip()
        return STEP_GOALS.get((case, dtype)) if sizes == StepSettings() else None

    @property
    def layout(self) -> "Plan":
        from moemesh.sharding.load_run import load_run

        keys = [f"plan.{key}" for key in filter(None, self.plan.split(","))]
        sizes = {"seq_len": self.seq_len, "global_batch": self.sequences}
        keys += [f"data.{name}={size}" for name, size in sizes.items()]
        return load_run([], keys, {}).config.plan

    def check(self) -> None:
        check_divides("64", 64, "hidden", self.hidden)
        check_divides("ranks", self.layout.world_size, "sequences", self.sequences)
        if self.work == "generate" and self.plan:
            raise BenchError("--work generate runs on one rank: leave out --plan")


@dataclass(frozen=True, kw_only=True)
class LoadSettings(Settings):
    """A folder of weights of a given size, read by ranks that spread its experts."""

    megabytes: Annotated[int, "Size of the folder in MiB, about; 8192 are 8 GiB.", {"min": 16}] = 64
    ranks: Annotated[int, "Ranks.", {"min": 1}] = 4
    tp: Annotated[int, "Ranks that share the heads and the width of an expert.", {"min": 1}] = 1
    rounds: Annotated[int, "Timed repetitions.", {"min": 1}] = 3
    folder: Annotated[str, "Folder of the weights; default: among temporary files."] = ""

    @property
    def plan(self) -> "Plan":
        """Experts are spread over all groups of `tp` ranks."""
        from moemesh.config.plan import Plan

        groups = self.ranks // self.tp
        return Plan(dp=groups, tp=self.tp, ep=groups, etp=self.tp)

    def check(self) -> None:
        check_divides("tp", self.tp, "ranks", self.ranks)
        check_divides("ranks / tp", self.ranks // self.tp, "32 experts", 32)
        check_divides("tp", self.tp, "4 key heads", 4)
