"""A Plan or a run as a layout, a layout as a Plan, and what of it `moemesh train` refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from math import ceil, prod
from typing import Any, get_args

from moemesh.config.data import DataConfig
from moemesh.config.errors import ConfigError, Problem, UserError
from moemesh.config.lora import is_adapter
from moemesh.config.model import ModelConfig
from moemesh.config.plan import DEGREES, Plan, ScheduleName
from moemesh.config.rules import plan_problem
from moemesh.config.run import RunConfig
from moemesh.config.trainable import refusals
from moemesh.planner.planned_layout import (
    DATA,
    RECOMPUTED,
    TRAINED,
    PlannedLayout,
    Precision,
    widths,
)
from moemesh.planner.shapes.load_shape import Model
from moemesh.schedule.plan_schedule import step_problems
from moemesh.sharding.load_run import load_run
from moemesh.sharding.parameters import tensors
from moemesh.sharding.stages import cut_layers

#: Keys that a Plan and a layout share, values included.
_SAME = (
    *DEGREES, "schedule", "stages_per_rank", "attention_exit", "context", "dispatcher", "payload",
    "combine", "dispatch_chunks", "spare_slots", "servers", "reshard",
)  # fmt: skip


def from_plan(
    plan: Plan,
    model: ModelConfig | None = None,
    *,
    seq_len: int,
    global_batch: int,
    dtype: Precision = "bfloat16",
) -> PlannedLayout:
    """The layout of `moemesh train` under `plan`: fp32 gradients, flash attention, fused loss.

    With `model`, stages are cut as a run would cut them. Raises ValueError when they cannot be, and
    for a plan whose schedule has no name: closed forms are those of names.
    """
    if plan.schedule not in get_args(ScheduleName):
        raise UserError(
            f"schedule = {plan.schedule} has no formulas to be priced by: give the name of a "
            "schedule like it (1f1b, zb_h1, ...); `moemesh schedule` simulates a file or a search"
        )
    share = ceil(ceil(global_batch / plan.dp) / plan.microbatches)
    layers_per_stage = plan.layers_per_stage
    if model is not None and layers_per_stage is None and plan.num_stages > 1:
        layers_per_stage = tuple(len(cut) for cut in cut_layers(model, plan.num_stages))
    return PlannedLayout(
        **{key: getattr(plan, key) for key in _SAME},
        seq_len=seq_len,
        global_batch=global_batch,
        microbatch=max(share, 1),
        layers_per_stage=layers_per_stage,
        slices=plan.slices or 0,
        zero=DATA.index(plan.data) if plan.data in DATA else 0,
        zero_group=plan.shard_group or 0,
        parameter_server=plan.data == "parameter_server",
        recompute=recomputed(plan),
        dtype=dtype,
        **widths(dtype),
        ranks_per_node=plan.ranks_per_node or 0,
    )


def recomputed(plan: Plan) -> frozenset[str]:
    """The parts that `plan` computes again."""
    parts = RECOMPUTED[plan.recompute]
    if plan.recompute != "selective":
        return parts
    switches = {"attention": plan.recompute_attention, "experts": plan.recompute_experts}
    return parts - {part for part, is_on in switches.items() if not is_on}


def _recompute_keys(parts: frozenset[str]) -> dict[str, Any]:
    """The keys of a plan that computes `parts` again; those of "none" where no plan says it."""
    for word, all_parts in RECOMPUTED.items():
        if parts == all_parts:
            return {"recompute": word}
    if "activation" not in parts or parts - RECOMPUTED["selective"]:
        return {}
    switches = {f"recompute_{part}": part in parts for part in ("attention", "experts")}
    return {"recompute": "selective", **switches}


def plan_of(layout: PlannedLayout) -> Plan:
    """The Plan next to a layout: equal to it where :func:`from_plan` gives the layout back."""
    node, world = layout.ranks_per_node, layout.world_size
    return Plan(
        **{name: getattr(layout, name) for name in _SAME},
        layers_per_stage=layout.layers_per_stage,
        slices=layout.slices or None,
        microbatches=layout.microbatches,
        shard_group=layout.zero_group or None,
        data="parameter_server" if layout.parameter_server else DATA[layout.zero],
        **_recompute_keys(layout.recompute),
        # A single node is what a plan without node borders has.
        ranks_per_node=node if 0 < node < world else None,
    )


def untrained(layout: PlannedLayout, model: Model) -> list[Problem]:
    """Parts of a layout that `moemesh train` refuses or has no key for."""
    if model.config is None:
        return [Problem(code="not-available", key="model", message=model.why_not)]
    plan, seq_len, batch = plan_of(layout), layout.seq_len, layout.global_batch
    of_what_trains = model.run or RunConfig()
    config = RunConfig(
        model=model.config,
        plan=plan,
        data=DataConfig(seq_len=seq_len, global_batch=batch),
        train=of_what_trains.train.model_copy(update={"dtype": "bfloat16"}),
        lora=of_what_trains.lora,
    )
    again = from_plan(plan, seq_len=seq_len, global_batch=batch).changed(
        ranks_per_node=layout.ranks_per_node,
        layers_per_stage=layout.layers_per_stage,
        **{name: getattr(layout, name) for name in TRAINED},
    )
    unsaid = [
        plan_problem(layout, "not-available", item.name, "no key of [plan] says this", "")
        for item in fields(layout)
        if getattr(again, item.name) != getattr(layout, item.name)
    ]
    return [*unsaid, *config.check(), *refusals(config), *step_problems(plan)]


# Plans that `moemesh train` carries out as they stand: their ledger is known to the byte.
#
# Others are planned all the same: their traffic comes from the closed forms of `volumes`.


#: Values of plan keys with which a run enters all that it sends into its ledger.
_ENTERED: dict[str, tuple[object, ...]] = {
    "dispatcher": ("all_to_all", "all_gather", "hierarchical", "low_latency", "auto"),
    "replay": (None,),
}
#: More forwards than this would take longer to list than anyone waits.
LARGEST_LEDGER = 20_000


def exact_plan(model: ModelConfig, plan: Plan) -> Plan | str:
    """The plan with the dispatcher that `auto` stands for; or why a run of it enters a ledger that
    is not known to the byte."""
    carried_out = plan
    if plan.dispatcher == "auto":
        carried_out = plan.model_copy(update={"dispatcher": "all_to_all"})
    return next(_why_not_exact(model, plan), carried_out)


def _why_not_exact(model: ModelConfig, plan: Plan) -> Iterator[str]:
    for problem in refusals(RunConfig(model=model, plan=plan)):
        setting = f"{problem.key.partition('.')[2]} = {problem.value}"
        is_planned = problem.code == "not-available"
        yield f"`moemesh train` does not carry out {setting} yet" if is_planned else problem.message
    for key, values in _ENTERED.items():
        if (value := getattr(plan, key)) not in values:
            yield f"{key} = {value} does not say what it sends"
    alone = plan.ep * plan.etp == 1 or (plan.spare_slots and plan.ep > 1)
    if plan.dispatcher == "auto" and not alone:
        yield "dispatcher = auto is chosen on the ranks themselves"
    forwards = plan.microbatches * plan.num_stages * plan.num_slices
    if forwards > LARGEST_LEDGER:
        yield f"{forwards} forwards of stages a step are too many to list ({LARGEST_LEDGER})"
    yield from (problem.message for problem in plan.check(model))


# Runs in which some weights do not train: the settings that say so, and the shares that do.


#: What may be set beside a plan: what trains.
KEYS = ("lora.", "train.freeze", "train.train_only", "train.esft")


def read_tuned(model_words: Sequence[str], settings: Sequence[str]) -> RunConfig:
    """The configuration that `settings` of what trains ("lora.rank=8"), as ``--set`` takes them,
    make with the model that `model_words` name ("model.preset=tiny"). Raises ConfigError with every
    problem found."""
    for setting in settings:
        key = setting.partition("=")[0].strip()
        if not key.startswith(KEYS):
            message = "a search takes from --set what trains, and chooses the rest itself"
            fix = "keys such as lora.rank, train.freeze or train.train_only"
            raise ConfigError([Problem.of("conflict", key, None, message, fix)])
    return load_run([], [*model_words, *settings], environ={}).config


def trained_shares(config: RunConfig) -> dict[str, float | bool]:
    """Whether adapters alone train in a run, and how many numbers train for each of the model's
    own, dense ones and those of experts."""
    tuning = config.tuning
    if tuning.is_full:
        return {}
    own, trained = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    only_adapters = True
    for tensor in tensors(config.model, Plan()):
        experts = tensor.shape[0] if tensor.is_expert else 0
        share = len(tuning.rows(tensor.name, experts)) / (experts or 1)
        numbers, is_new = prod(tensor.shape), is_adapter(tensor.name)
        trained[tensor.is_expert] += share * numbers
        if not is_new:
            own[tensor.is_expert] += numbers
            only_adapters = only_adapters and not share
    return {
        "adapters": only_adapters and bool(config.lora.rank),
        "trained_dense": trained[False] / max(own[False], 1),
        "trained_experts": trained[True] / max(own[True], 1),
    }
