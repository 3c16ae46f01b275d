"""The plan: how a model is spread over ranks, and every rule that a plan must keep."""

from __future__ import annotations

from math import ceil
from typing import Annotated, ClassVar, Literal, Protocol

from pydantic import AfterValidator

from moemesh.config.asynchronous import asynchronous_problems
from moemesh.config.errors import Problem, independent
from moemesh.config.layout import Layout
from moemesh.config.model import ModelConfig
from moemesh.config.rules import (
    V_SCHEDULES,
    degree_problems,
    node_problems,
    plan_problem,
    server_problems,
)
from moemesh.config.schedule_rules import is_schedule_file, pipeline_problems
from moemesh.config.section import Count, Positive, Range, Section, Size
from moemesh.config.suggest import divisors, nearest_divisors

# The rules of sharded states: `plan.reshard` and `plan.shard_group` belong to what they cut.


SHARDED_DATA = ("zero1", "zero2", "zero3")


class ShardedPlan(Protocol):
    """Values of a plan that the rules read."""

    @property
    def dp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def data(self) -> str: ...
    @property
    def reshard(self) -> str: ...
    @property
    def shard_group(self) -> int | None: ...


def sharding_problems(plan: ShardedPlan) -> list[Problem]:
    """Everything that is wrong with them."""
    problems: list[Problem] = []
    if plan.reshard != "always" and plan.data != "zero3":
        message = f"reshard = {plan.reshard} keeps weights that zero3 gathers, not {plan.data}"
        fix = "leave reshard out, or data = zero3"
        problems.append(plan_problem(plan, "conflict", "reshard", message, fix, "plan.data"))
    group, ranks = plan.shard_group, plan.dp * plan.cp
    if group is None or group < 1:
        return problems
    if plan.data not in SHARDED_DATA:
        message = f"shard_group ({group}) cuts states that data = {plan.data} does not shard"
        fix = "leave shard_group out, or data = zero1, zero2 or zero3"
        problems.append(plan_problem(plan, "conflict", "shard_group", message, fix, "plan.data"))
    elif ranks % group:
        keys = ("plan.dp", "plan.cp")
        message = f"shard_group ({group}) must divide the data-parallel ranks dp*cp ({ranks})"
        fix = f"shard_group = {nearest_divisors(ranks, group)}"
        problems.append(plan_problem(plan, "not-divisible", "shard_group", message, fix, *keys))
    return problems


AttentionExit = Literal["reduce_scatter", "all_reduce", "all_to_all"]
Context = Literal["ring", "all_gather", "all_to_all"]
Dispatcher = Literal["all_to_all", "all_gather", "hierarchical", "low_latency", "deepep", "auto"]
Combine = Literal["fast", "exact"]
Payload = Literal["same", "fp8"]
ScheduleName = Literal[
    "1f1b",
    "gpipe",
    "interleaved_1f1b",
    "terapipe",
    "chimera",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "dualpipe",
    "dualpipe_v",
    "pipedream",
    "pipedream_2bw",
    "ampnet",
]


def _schedule_file(name: str) -> str:
    if not is_schedule_file(name):
        raise ValueError("neither the name of a schedule nor a file")
    return name


#: A file that ``moemesh schedule --save`` wrote: text, or .csv.
ScheduleFile = Annotated[str, AfterValidator(_schedule_file)]
OptimizerValidation = Literal["before", "after"]
AmpnetBackward = Literal["recompute", "live"]
DataStrategy = Literal["replicate", "zero1", "zero2", "zero3", "parameter_server"]
Reshard = Literal["always", "step"]
Recompute = Literal["none", "selective", "full"]
SparePolicy = Literal["quota", "shadow"]

DEGREES = ("pp", "dp", "cp", "tp", "ep", "etp")

#: More ranks than any machine has; keeps products of degrees from growing without bound.
LARGEST_DEGREE = 2**20
Degree = Annotated[int, Range(1, LARGEST_DEGREE)]


class Plan(Section):
    """Degrees of the two meshes and the strategy on each axis."""

    section: ClassVar[str] = "plan"

    pp: Degree = 1
    dp: Degree = 1
    cp: Degree = 1
    tp: Degree = 1
    ep: Degree = 1
    etp: Degree = 1
    attention_exit: AttentionExit = "reduce_scatter"
    context: Context = "ring"
    dispatcher: Dispatcher = "all_to_all"
    combine: Combine = "fast"
    payload: Payload = "same"
    dispatch_chunks: Size = 1
    #: A name, a file of a schedule, or "search" for the best order that the automatic scheduler
    #: finds for the costs of this plan.
    schedule: ScheduleName | Literal["search"] | ScheduleFile = "1f1b"
    #: search: where operation times come from: "estimated" from the model, or the folder of a run.
    schedule_costs: str = "estimated"
    #: search: most activation on a rank, in microbatches on its share of layers; None: no bound.
    schedule_memory_cap: Positive | None = None
    stages_per_rank: Size = 1
    #: Layers of each pipeline stage; None cuts such that the costliest stage is cheapest.
    layers_per_stage: tuple[Size, ...] | None = None
    microbatches: Size = 1
    #: dualpipe, dualpipe_v: the forward and the backward of a block take turns, each while an
    #: exchange of the other is under way; else they run one after the other.
    overlap_blocks: bool = True
    #: When the norm and finiteness of the whole gradient are known: before the optimizer steps, or
    #: after, with the step taken back where it must be; then no step waits for all stages.
    optimizer_validation: OptimizerValidation = "before"
    #: pipedream_2bw, ampnet: microbatches whose gradients make one update; None takes a step.
    update_window: Size | None = None
    #: ampnet: microbatches under way at once; None takes pp.
    max_in_flight: Size | None = None
    #: ampnet: "recompute" reruns the stage with current weights in its backward; "live" uses the
    #: stored activations with current weights.
    ampnet_backward: AmpnetBackward = "recompute"
    #: ampnet: the folder of a run whose recorded order is carried out once more.
    replay: str | None = None
    #: terapipe: slices of a sequence; None takes pp.
    slices: Size | None = None
    data: DataStrategy = "replicate"
    #: zero3: gathered weights are freed behind every use, or kept until the step is over.
    reshard: Reshard = "always"
    #: zero1, zero2, zero3: consecutive ranks of an axis that share one copy of the sharded states;
    #: None takes the whole axis. Of an axis that it does not divide, the greatest common divisor.
    shard_group: Size | None = None
    #: parameter_server: data-parallel ranks that own the fp32 masters and the optimizer state.
    servers: Size = 1
    recompute: Recompute = "none"
    #: Parts that "selective" computes again: between the projections of attention blocks; gate and
    #: up of the routed experts.
    recompute_attention: bool = True
    recompute_experts: bool = True
    spare_slots: Count = 0
    #: What fills spare slots: few replicas with token quotas that even out all ranks, or the
    #: most loaded experts, on every rank (FasterMoE's shadows).
    spare_policy: SparePolicy = "quota"
    #: Where node borders lie; None takes them from the launcher.
    ranks_per_node: Size | None = None

    @property
    def layout(self) -> Layout:
        """The two meshes. Raises ValueError when ``check`` would report the degrees."""
        return Layout(
            pp=self.pp,
            dp=self.dp,
            cp=self.cp,
            tp=self.tp,
            ep=self.ep,
            etp=self.etp,
            ranks_per_node=self.ranks_per_node or 0,
            shard_group=self.shard_group or 0,
        )

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Expert replicas, the degree that follows from the others."""
        return self.layout.edp

    @property
    def num_stages(self) -> int:
        """Pipeline stages of one pipe."""
        return self.pp * (2 if self.schedule in V_SCHEDULES else self.stages_per_rank)

    @property
    def num_slices(self) -> int:
        """Slices into which a sequence is cut on its way through the pipeline."""
        return (self.slices or self.pp) if self.schedule == "terapipe" else self.slices or 1

    def owners(self, axis: str, ranks: int) -> int:
        """Of the `ranks` ranks over which gradients of `axis` are summed, those that own a part of
        the sharded states: the first so many. With servers, the same ranks in dp_cp and stage."""
        if self.data != "parameter_server":
            return ranks
        return min(self.servers * (self.tp if axis == "stage" else 1), ranks)

    @property
    def num_update_microbatches(self) -> int:
        """Microbatches whose gradients make one update of an asynchronous schedule."""
        return 1 if self.schedule == "pipedream" else self.update_window or self.microbatches

    def tokens_per_rank(self, seq_len: int, global_batch: int) -> int:
        """Most tokens of one microbatch that a rank's residual stream holds."""
        sequences = ceil(ceil(global_batch / self.dp) / self.microbatches)
        return ceil(sequences * ceil(seq_len / self.cp) / self.tp)

    def check(
        self,
        model: ModelConfig | None = None,
        *,
        seq_len: int | None = None,
        global_batch: int | None = None,
    ) -> list[Problem]:
        """Every rule between degrees, model and batch; an empty list is a legal plan.

        Without a model only the rules among the degrees are checked. Vocabulary, batch, sequence
        and token counts need not divide anything: shards may be uneven.
        """
        ranges = self.range_problems()
        if any(problem.key.removeprefix("plan.") in DEGREES for problem in ranges):
            # The other rules divide by degrees or multiply them: they would only echo this.
            return ranges
        rules = degree_problems(self, None if model is None else model.sizes)
        # Nothing must divide, but a plan may not ask for parts that hold nothing at all.
        problems: list[Problem] = []
        if global_batch is not None and self.microbatches > global_batch > 0:
            message = (
                f"microbatches ({self.microbatches}) exceeds data.global_batch "
                f"({global_batch} sequences): some would be empty"
            )
            fix = f"microbatches = {global_batch}"
            problems.append(
                plan_problem(self, "too-large", "microbatches", message, fix, "data.global_batch")
            )
        if seq_len is not None and self.cp > seq_len > 0:
            message = (
                f"cp ({self.cp}) exceeds data.seq_len ({seq_len} tokens): some ranks would "
                "never hold a token"
            )
            fix = f"cp = {max(n for n in divisors(self.cp) if n <= seq_len)}"
            problems.append(plan_problem(self, "too-large", "cp", message, fix, "data.seq_len"))
        rules += node_problems(self) + problems
        if self.data == "parameter_server":
            rules += server_problems(self)
        rules += sharding_problems(self)
        rules += asynchronous_problems(self, model) + pipeline_problems(self, seq_len)
        return ranges + independent(rules, {problem.key for problem in ranges})
