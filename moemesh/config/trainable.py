"""Refusals: legal configurations that `moemesh train` cannot run yet, in one table.

`moemesh train` and `config check` refuse by it, the planner names what it finds here beside a plan,
and ``plan --trainable`` keeps to the rest. Only the machine itself adds to it (is a kernel there?).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from moemesh.config.errors import Problem
from moemesh.config.plan import Plan
from moemesh.config.rules import ASYNCHRONOUS_SCHEDULES
from moemesh.config.run import RunConfig
from moemesh.config.toml import format_value

#: Schedules that run weight gradients by themselves, with the nearest one that does not.
DEFERRING_SCHEDULES = {
    "zb_h1": "1f1b",
    "zb_h2": "1f1b",
    "zb_v": "1f1b",
    "dualpipe": "chimera",
    "dualpipe_v": "1f1b",
}


class Clash(NamedTuple):
    """Two settings that are not trained together: whether both are set, why not, the fix."""

    meets: bool
    why: str
    fix: str


def refusals(config: RunConfig) -> list[Problem]:
    """Legal settings that `moemesh train` would have to ignore; it refuses them instead."""
    return [
        *_sharded_states(config),
        *_experts_that_move(config),
        *_slices(config),
        *_context(config),
        *_adapters(config),
        *_frozen(config),
        *_spikes(config),
    ]


def _spikes(config: RunConfig) -> Iterator[Problem]:
    """A step that is not applied because of its loss, where stages update before it is known."""
    if config.train.on_spike == "skip" and config.plan.schedule in ASYNCHRONOUS_SCHEDULES:
        yield Problem(
            code="conflict",
            key="train.on_spike",
            value="skip",
            message=f"with schedule = {config.plan.schedule} stages update before a loss is known",
            fix="on_spike = rollback or alarm",
            related=("plan.schedule",),
        )


def _adapters(config: RunConfig) -> Iterator[Problem]:
    """Adapters of experts beside replicas, which would have to fetch them, and beside experts that
    train themselves, which stand in another order."""
    model, lora = config.model, config.lora
    if not any(map(lora.adapts, ("gate_proj", "up_proj", "down_proj"))):
        return
    setting = f"rank = {lora.rank} of experts"
    why = "fetches the weights of experts for their replicas, but not their adapters"
    clash = Clash(config.plan.spare_slots > 0, why, "spare_slots = 0")
    yield from _clashes(config.plan, {"spare_slots": clash}, "lora.rank", setting)
    if any(config.tuning.chosen(layer, model.num_experts) for layer in model.routed_layers):
        yield Problem(
            code="conflict",
            key="train.train_only",
            value=config.train.train_only,
            message=f"some experts of a layer would train beside {setting}",
            fix="train_only = [], or lora.targets without gate_proj, up_proj and down_proj",
            related=("lora.rank",),
        )


def _sharded_states(config: RunConfig) -> Iterator[Problem]:
    """Conflicts of states that are sharded over data-parallel ranks."""
    plan = config.plan
    if plan.data not in ("zero2", "zero3"):
        return
    clash = Clash(
        plan.schedule in ASYNCHRONOUS_SCHEDULES,
        "keeps versions of whole weights, and of what they have given by then",
        "schedule = 1f1b, or data = zero1",
    )
    if plan.data == "zero3" and plan.schedule in DEFERRING_SCHEDULES:
        clash = Clash(
            True,
            "defers weight gradients to a time when the weights that they read have been freed",
            f"schedule = {DEFERRING_SCHEDULES[plan.schedule]}, or data = zero2",
        )
    setting = f"data = {plan.data}"
    yield from _clashes(plan, {"schedule": clash}, "plan.data", setting, "replicate")


def _slices(config: RunConfig) -> Iterator[Problem]:
    """A choice that compares all tokens of a sequence cannot be made while slices are to come."""
    model = config.model
    if not model.num_experts or config.plan.num_slices == 1:
        return
    if model.router_selection != "token_choice":
        name, fix = "router_selection", "router_selection = token_choice"
        setting = f"{name} = {model.router_selection}"
    elif model.capacity_factor:
        name, fix = "capacity_factor", "capacity_factor = 0"
        setting = f"{name} ({model.capacity_factor})"
    else:
        return
    yield Problem(
        code="conflict",
        key=f"model.{name}",
        value=getattr(model, name),
        message=f"{setting} compares all tokens of a sequence, but schedule = "
        f"{config.plan.schedule} routes slices one by one",
        fix=f"{fix}, or another schedule such as 1f1b",
        related=("plan.schedule", "plan.slices"),
    )


def _context(config: RunConfig) -> Iterator[Problem]:
    """Slices of a sequence come one after the other; the positions of a rank of cp are spread."""
    plan = config.plan
    if plan.cp > 1 and plan.num_slices > 1:
        yield Problem(
            code="conflict",
            key="plan.cp",
            value=plan.cp,
            message=f"cp ({plan.cp}) spreads the positions of a sequence, but schedule = "
            f"{plan.schedule} computes them in {plan.num_slices} slices, one after the other",
            fix="cp = 1, or another schedule such as 1f1b",
            related=("plan.schedule", "plan.slices"),
        )


def _frozen(config: RunConfig) -> Iterator[Problem]:
    """Weights that do not train beside schedules that keep versions of all, and some experts of a
    layer beside what moves or copies experts."""
    model, plan, train = config.model, config.plan, config.train
    if config.tuning.is_full:
        return
    key = "freeze" if train.freeze else "train_only" if train.train_only else "esft"
    setting, default = f"{key} = {format_value(getattr(train, key))}", "[]"
    if key == "esft":
        default = "none"
    key = f"train.{key}"
    if config.lora.rank:
        key, setting, default = "lora.rank", f"rank = {config.lora.rank}", "0"
    clashes = {
        "schedule": Clash(
            plan.schedule in ASYNCHRONOUS_SCHEDULES,
            "keeps versions of all weights, which all train",
            "schedule = 1f1b",
        )
    }
    if any(config.tuning.chosen(layer, model.num_experts) for layer in model.routed_layers):
        clashes["combine"] = Clash(
            plan.combine == "exact",
            "adds rows in the order of experts' places, where those that train come first",
            "combine = fast",
        )
        clashes["spare_slots"] = Clash(
            plan.spare_slots > 0, "copies experts that train like others", "spare_slots = 0"
        )
        if train.rebalance_every:
            yield Problem(
                code="conflict",
                key="train.rebalance_every",
                value=train.rebalance_every,
                message="experts of a layer of which only some train cannot move to other ranks",
                fix=f"rebalance_every = 0, or {key.partition('.')[2]} = {default}",
                related=(key,),
            )
    yield from _clashes(plan, clashes, key, setting, default)


def _experts_that_move(config: RunConfig) -> Iterator[Problem]:
    """Conflicts of expert replicas and expert migration with other settings."""
    plan = config.plan
    if plan.spare_slots:
        wanted, setting = "plan.spare_slots", f"spare_slots = {plan.spare_slots}"
        yield from _clashes(
            plan,
            {
                "dispatcher": Clash(
                    plan.dispatcher not in ("all_to_all", "auto"),
                    "sends rows to the homes of experts, not to their replicas",
                    "dispatcher = all_to_all",
                ),
                "combine": Clash(
                    plan.combine == "exact",
                    "adds rows in an order that does not depend on where experts are",
                    "combine = fast",
                ),
                "ampnet_backward": Clash(
                    plan.schedule == "ampnet" and plan.ampnet_backward == "live",
                    "reads weights in the backward that replicas have fetched in the forward",
                    "ampnet_backward = recompute",
                ),
            },
            wanted,
            setting,
        )
    if every := config.train.rebalance_every:
        wanted, setting = "train.rebalance_every", f"rebalance_every = {every}"
        asynchronous = plan.schedule in ASYNCHRONOUS_SCHEDULES
        yield from _clashes(
            plan,
            {
                "combine": Clash(
                    plan.combine == "exact",
                    "adds rows in the order of the experts' places, which may not change",
                    "combine = fast",
                ),
                "schedule": Clash(
                    asynchronous,
                    "never drains: there is no moment at which experts could move",
                    "schedule = 1f1b",
                ),
                "optimizer_validation": Clash(
                    plan.optimizer_validation == "after" and not asynchronous,
                    "takes a step back when the next one has begun, and experts have moved in "
                    "between",
                    "optimizer_validation = before",
                ),
            },
            wanted,
            setting,
        )


def _clashes(
    plan: Plan, clashes: dict[str, Clash], wanted: str, setting: str, default: object = 0
) -> Iterator[Problem]:
    """Problems of the plan's keys in `clashes` with the key `wanted`, whose `setting` is refused
    beside them and whose `default` is not."""
    for name, clash in clashes.items():
        if clash.meets:
            value = getattr(plan, name)
            yield Problem(
                code="conflict",
                key=f"plan.{name}",
                value=value,
                message=f"{name} = {value} {clash.why}: it cannot be trained with {setting}",
                fix=f"{clash.fix}, or {wanted.partition('.')[2]} = {default}",
                related=(wanted,),
            )
