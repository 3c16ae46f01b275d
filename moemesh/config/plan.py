"""The section [plan]: how a model is spread over ranks, and every rule that a plan must keep."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Annotated, ClassVar, Literal, cast

from pydantic import AfterValidator, model_validator
from typing_extensions import TypeAliasType

from moemesh.config.dispatcher_table import DISPATCHERS
from moemesh.config.errors import Problem, independent
from moemesh.config.layout import Layout, MeshDegrees
from moemesh.config.model import ModelConfig
from moemesh.config.names import Names
from moemesh.config.rules import (
    ASYNCHRONOUS_SCHEDULES,
    MIRRORED_SCHEDULES,
    SLICED_SCHEDULES,
    V_SCHEDULES,
    WINDOWED_SCHEDULES,
    degree_problems,
    server_problems,
)
from moemesh.config.schedule_table import SCHEDULES
from moemesh.config.section import Count, Positive, Range, Section, Size, UsedWith
from moemesh.config.suggest import divisors, nearest_divisors

AttentionExit = Literal["reduce_scatter", "all_reduce", "all_to_all"]
Context = Literal["ring", "all_gather", "all_to_all"]
Dispatcher = TypeAliasType("Dispatcher", Annotated[str, Names(DISPATCHERS, "auto")])
Combine = Literal["fast", "exact"]
Payload = Literal["same", "fp8"]
ScheduleName = TypeAliasType("ScheduleName", Annotated[str, Names(SCHEDULES)])


#: Suffixes that mark the value of `schedule` as a file; a slash does, too.
SCHEDULE_FILES = (".txt", ".csv")


def is_schedule_file(name: str) -> bool:
    """Whether `name` is a file rather than a schedule with a generator."""
    return name.endswith(SCHEDULE_FILES) or "/" in name


def _schedule_file(name: str) -> str:
    if not is_schedule_file(name):
        raise ValueError("neither the name of a schedule nor a file")
    return name


#: A file that ``moemesh schedule --save`` wrote: text, or .csv.
ScheduleFile = Annotated[str, AfterValidator(_schedule_file)]
DataStrategy = Literal["replicate", "zero1", "zero2", "zero3", "parameter_server"]
Reshard = Literal["always", "step"]
Offload = Literal["none", "optimizer"]
Recompute = Literal["none", "selective", "full"]
#: Value of `plan.recompute` -> recomputed parts (`moemesh.parallel.recompute`), all switches on.
#: Published tables call the attention core "selective"; ours adds the product of a dense or shared
#: SwiGLU ("activation"), and gate and up of the routed experts ("experts"). The product of the
#: routed experts' SwiGLU is always recomputed.
RECOMPUTED: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "selective": frozenset({"attention", "activation", "experts"}),
    "full": frozenset({"full"}),
}
SparePolicy = Literal["quota", "shadow"]
#: Values of `data` that shard states.
SHARDED_DATA = ("zero1", "zero2", "zero3")
#: Value of `data` -> states of which each rank keeps a part; the others are whole on every rank.
#: Sharded gradients are summed after every backward, others once an update.
SHARDED_STATES: dict[str, tuple[str, ...]] = {
    "replicate": (),
    "parameter_server": ("optimizer",),
    "zero1": ("optimizer",),
    "zero2": ("optimizer", "gradients"),
    "zero3": ("optimizer", "gradients", "weights"),
}
_AMPNET, _SEARCH = UsedWith("schedule", ("ampnet",)), UsedWith("schedule", ("search",))

DEGREES = ("pp", "dp", "cp", "tp", "ep", "etp")

#: More ranks than any machine has; keeps products of degrees from growing without bound.
LARGEST_DEGREE = 2**20
Degree = Annotated[int, Range(1, LARGEST_DEGREE)]


class Plan(MeshDegrees, Section):
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
    #: A name, a file, or "search" for the best order for the costs of this plan.
    schedule: ScheduleName | Literal["search"] | ScheduleFile = "1f1b"
    #: search: source of operation times: "estimated" from the model, or the folder of a run.
    schedule_costs: Annotated[str, _SEARCH] = "estimated"
    #: search: most activation memory of a rank, in units of one microbatch on all layers of the
    #: rank; None: no bound.
    schedule_memory_cap: Annotated[Positive | None, _SEARCH] = None
    stages_per_rank: Size = 1
    #: Layers of each pipeline stage; None: the cut whose costliest stage costs least.
    layers_per_stage: tuple[Size, ...] | None = None
    microbatches: Size = 1
    #: dualpipe, dualpipe_v: the forward and the backward of a block alternate, each during an
    #: exchange of the other; False: one runs after the other.
    overlap_blocks: bool = True
    #: Check of the whole gradient (norm, finiteness) before the optimizer steps, or after. With
    #: "after" no step waits for all stages, and a step that fails the check is undone.
    optimizer_validation: Literal["before", "after"] = "before"
    #: pipedream_2bw, ampnet: microbatches whose gradients make one update; None: those of a step.
    update_window: Annotated[Size | None, UsedWith("schedule", WINDOWED_SCHEDULES)] = None
    #: ampnet: largest number of microbatches in flight; None: pp.
    max_in_flight: Annotated[Size | None, _AMPNET] = None
    #: ampnet: "recompute" reruns the stage with current weights in its backward; "live" uses the
    #: stored activations with current weights.
    ampnet_backward: Annotated[Literal["recompute", "live"], _AMPNET] = "recompute"
    #: ampnet: folder of a run whose recorded order is repeated.
    replay: Annotated[str | None, _AMPNET] = None
    #: terapipe: slices of a sequence; None: pp.
    slices: Size | None = None
    data: DataStrategy = "replicate"
    #: zero3: gathered weights are freed after every use, or kept until the end of the step.
    reshard: Annotated[Reshard, UsedWith("data", ("zero3",))] = "always"
    #: zero1, zero2, zero3: consecutive ranks of an axis that share one copy of the sharded states;
    #: None: the whole axis. If it does not divide an axis, the greatest common divisor is taken.
    shard_group: Annotated[Size | None, UsedWith("data", SHARDED_DATA)] = None
    #: parameter_server: data-parallel ranks that own the fp32 masters and the optimizer state.
    servers: Size = 1
    #: Memory of masters and optimizer states: the device, or its host, which then runs the updates.
    offload: Offload = "none"
    recompute: Recompute = "none"
    #: Parts of "selective": attention between projections; gate and up of routed experts.
    recompute_attention: bool = True
    recompute_experts: bool = True
    spare_slots: Count = 0
    #: Content of the spare slots: a few replicas with token quotas that balance all ranks, or the
    #: most loaded experts on every rank (FasterMoE's shadows).
    spare_policy: SparePolicy = "quota"
    #: Consecutive ranks on one node; None: the number that the launcher reports.
    ranks_per_node: Size | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_chunks(cls, values: object) -> object:
        """Adds the default of interleaved_1f1b, two stages a rank: with one it would be 1F1B that
        keeps more activations."""
        if not isinstance(values, dict):
            return values
        given = cast("dict[str, object]", values)
        default = {"stages_per_rank": 2} if given.get("schedule") == "interleaved_1f1b" else {}
        return default | given

    @property
    def layout(self) -> Layout:
        """The two meshes. Raises ValueError for a degree below 1, and if ep*etp does not divide
        dp*cp*tp."""
        return Layout(
            **{name: getattr(self, name) for name in DEGREES},
            ranks_per_node=self.ranks_per_node or 0,
            shard_group=self.shard_group or 0,
        )

    @property
    def recomputed_parts(self) -> frozenset[str]:
        """Parts of a layer that are recomputed (`moemesh.planner.planned_layout.RECOMPUTABLE`)."""
        if self.recompute != "selective":
            return RECOMPUTED[self.recompute]
        switches = {"attention": self.recompute_attention, "experts": self.recompute_experts}
        return RECOMPUTED["selective"] - {part for part, is_on in switches.items() if not is_on}

    @property
    def without_offload(self) -> Plan:
        """The plan for ranks on a CPU: optimizer states are in host memory anyway."""
        return self.model_copy(update={"offload": "none"})

    @property
    def spreads_replicas(self) -> bool:
        """Whether experts get replicas, which needs other ranks that hold them."""
        return self.spare_slots > 0 and self.ep > 1

    @property
    def num_stages(self) -> int:
        """Pipeline stages of one pipe."""
        return self.pp * (2 if self.schedule in V_SCHEDULES else self.stages_per_rank)

    @property
    def num_slices(self) -> int:
        """Slices of a sequence in the pipeline, 1 for schedules that do not cut it."""
        return self.slices or (self.pp if self.schedule in SLICED_SCHEDULES else 1)

    def owners(self, axis: str, ranks: int) -> int:
        """Number of ranks that own sharded states, among the `ranks` over which gradients of `axis`
        are summed: the first ones. A server of dp_cp is tp ranks of stage, the same ones."""
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

        Rules of a model, a batch or a length that is not given are left out. Vocabulary, batch,
        sequence and token counts need not divide anything: shards may be uneven.
        """
        ranges = self.range_problems()
        if any(problem.key.removeprefix("plan.") in DEGREES for problem in ranges):
            # The other rules divide by degrees or multiply them: they would report the same fault.
            return ranges
        rules = [
            *degree_problems(self, None if model is None else model.sizes),
            *self._size_rules(seq_len, global_batch),
            *self.unused_problems(),
            *self._asynchronous_rules(model),
            *self._schedule_rules(seq_len),
        ]
        return ranges + independent(rules, {problem.key for problem in ranges})

    def _size_rules(self, seq_len: int | None, global_batch: int | None) -> Iterator[Problem]:
        """Rules of nodes, servers, shard groups and batches. Sequences and tokens need not divide,
        but no microbatch may be empty, nor a rank of cp."""
        node, world = self.ranks_per_node, self.world_size
        if node is not None and node >= 1 and world % node:
            name, keys = "ranks_per_node", ("pp", "dp", "cp", "tp")
            message = f"{name} ({node}) must divide the number of ranks pp*dp*cp*tp ({world})"
            fix = f"{name} = {nearest_divisors(world, node)}"
            yield self.problem("not-divisible", name, message, fix, *keys)
        if self.data == "parameter_server":
            yield from server_problems(self)
        group, ranks = self.shard_group or 0, self.dp * self.cp
        if group > 0 and self.data in SHARDED_DATA and ranks % group:
            message = f"shard_group ({group}) must divide the data-parallel ranks dp*cp ({ranks})"
            fix = f"shard_group = {nearest_divisors(ranks, group)}"
            yield self.problem("not-divisible", "shard_group", message, fix, "dp", "cp")
        if global_batch is not None and self.microbatches > global_batch > 0:
            message = (
                f"microbatches ({self.microbatches}) exceeds data.global_batch "
                f"({global_batch} sequences): some would be empty"
            )
            fix, key = f"microbatches = {global_batch}", "data.global_batch"
            yield self.problem("too-large", "microbatches", message, fix, key)
        if seq_len is not None and self.cp > seq_len > 0:
            message = (
                f"cp ({self.cp}) exceeds data.seq_len ({seq_len} tokens): some ranks would "
                "never hold a token"
            )
            fix = f"cp = {max(n for n in divisors(self.cp) if n <= seq_len)}"
            yield self.problem("too-large", "cp", message, fix, "data.seq_len")

    def _asynchronous_rules(self, model: ModelConfig | None) -> Iterator[Problem]:
        """Rules of update windows, of backwards with live weights, and of weights on two stages."""
        window, pp, microbatches = self.update_window or 0, self.pp, self.microbatches
        if window > 0 and self.schedule in WINDOWED_SCHEDULES:
            if microbatches % window:
                message = f"update_window ({window}) must divide microbatches ({microbatches})"
                fix = f"update_window = {nearest_divisors(microbatches, window)}"
                keys = ("microbatches", "schedule")
                yield self.problem("not-divisible", "update_window", message, fix, *keys)
            elif self.schedule == "pipedream_2bw" and window < pp:
                # 2BW's two versions are enough when a window fills the pipeline.
                message = f"pipedream_2bw needs update_window ({window}) >= pp ({pp})"
                enough = next((n for n in divisors(microbatches) if n >= pp), None)
                fix = f"update_window = {enough or f'{pp}, microbatches = {pp}'}"
                yield self.problem("too-small", "update_window", message, fix, "pp", "schedule")
        if self.ampnet_backward == "live" and self.recompute != "none":
            message = (
                "ampnet_backward = live keeps the activations of the forward, recompute = "
                f"{self.recompute} does not"
            )
            fix = 'ampnet_backward = "recompute", or recompute = "none"'
            yield self.problem("conflict", "ampnet_backward", message, fix, "recompute")
        if self.schedule not in ASYNCHRONOUS_SCHEDULES or model is None:
            return
        if pp > 1 and model.ends_share_a_table:
            what, fix = "tied embeddings put a weight", "tied_embeddings = false"
            if model.num_mtp_layers:
                what = "extra prediction layers put the embedding"
                fix = "num_mtp_layers = 0"
            message = (
                f"{self.schedule} updates every stage by itself, but {what} "
                f"on the first and the last of pp = {pp} stages"
            )
            keys = ("pp", f"model.{fix.partition(' ')[0]}")
            fix += ", pp = 1, or a synchronous schedule such as 1f1b"
            yield self.problem("conflict", "schedule", message, fix, *keys)
        if self.ampnet_backward == "live" and model.router_dtype == "model":
            message = (
                "ampnet_backward = live reads weights where they are, "
                "router_dtype = model works on a rounded copy"
            )
            fix = 'ampnet_backward = "recompute"'
            yield self.problem("conflict", "ampnet_backward", message, fix, "model.router_dtype")

    def _schedule_rules(self, seq_len: int | None) -> Iterator[Problem]:
        """Rules of slices (if `seq_len` is known), and of steps that are validated afterwards."""
        schedule, pp = self.schedule, self.pp
        if schedule not in SLICED_SCHEDULES and not is_schedule_file(schedule):
            if self.slices is not None:
                sliced = f"schedule = {' or '.join(SLICED_SCHEDULES)}"
                message = f"slices belongs to {sliced}, not {schedule}"
                fix = f"leave slices out, or {sliced}"
                yield self.problem("conflict", "slices", message, fix, "schedule")
        elif seq_len is not None and 0 < seq_len < self.num_slices:
            number = f"slices ({self.slices})" if self.slices else f"pp ({pp}, slices by default)"
            message = (
                f"{number} exceeds data.seq_len ({seq_len} tokens): some slices would be empty"
            )
            fix, keys = f"slices = {seq_len}", ("pp", "schedule", "data.seq_len")
            yield self.problem("too-large", "slices", message, fix, *keys)
        # Validation after the step needs stages that step together, and no sums between stages.
        message, fix = "", "optimizer_validation = before"
        if schedule in ASYNCHRONOUS_SCHEDULES:
            message = f"{schedule} updates every stage by itself: no step is taken together"
        elif schedule in MIRRORED_SCHEDULES:
            message = (
                f"{schedule} keeps two replicas of every stage, whose gradients and loads are "
                f"summed between both ends of pp ({pp}) before a step"
            )
            fix += f", or schedule = {'zb_v' if schedule == 'chimera' else 'dualpipe_v'}"
        elif pp < 2:
            message = f"pp ({pp}) is one stage: its step waits for no other"
            fix += ", or pp = 2"
        if message and self.optimizer_validation != "before":
            yield self.problem("conflict", "optimizer_validation", message, fix, "schedule", "pp")
