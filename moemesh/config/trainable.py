"""Refusals: legal configurations that `moemesh train` cannot run yet, in one module.

`moemesh train` and `config check` report them as problems, the planner lists them with a plan, and
``plan --trainable`` leaves such plans out. Other refusals depend on the machine, too, such as that
of a missing kernel, or on files.
"""

from __future__ import annotations

from collections.abc import Iterator

from moemesh.config.dispatcher_table import dispatcher_row
from moemesh.config.errors import Problem
from moemesh.config.lora import NF4_BLOCK
from moemesh.config.plan import Plan
from moemesh.config.rules import ASYNCHRONOUS_SCHEDULES, DEFERRING_SCHEDULES
from moemesh.config.run import RunConfig, projections
from moemesh.config.schedule_table import SCHEDULES
from moemesh.config.section import Section
from moemesh.config.suggest import nearest_divisors
from moemesh.config.toml import format_value


def refusals(config: RunConfig) -> list[Problem]:
    """Problems of legal settings that `moemesh train` cannot carry out together."""
    problems = [
        *_code_of_transformers(config),
        *_optimizer_states(config),
        *_dispatchers(config),
        *_experts_that_move(config),
        *_slices(config),
        *_adapters(config),
        *_frozen(config),
    ]
    train, schedule = config.train, config.plan.schedule
    if train.on_spike == "skip" and schedule in ASYNCHRONOUS_SCHEDULES:
        message = f"with schedule = {schedule} stages update before a loss is known"
        fix = "on_spike = rollback or alarm"
        problems.append(train.problem("conflict", "on_spike", message, fix, "plan.schedule"))
    return problems


#: Schedules that cut a model of transformers into stages.
STAGE_SCHEDULES_OF_HUB = ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1")
#: Legal values of keys for a model that the code of transformers computes, by section and key.
_OF_HUB: dict[tuple[str, str], tuple[object, ...]] = {
    ("plan", "tp"): (1,),
    ("plan", "cp"): (1,),
    ("plan", "recompute"): ("none", "full"),
    ("plan", "combine"): ("fast",),
    ("plan", "spare_slots"): (0,),
    ("train", "rebalance_every"): (0,),
}


def _code_of_transformers(config: RunConfig) -> Iterator[Problem]:
    """Refused keys of a model whose forward is the code of transformers."""
    if config.model.implementation == "transformers" and config.model_path is None:
        message = "implementation = transformers reads a folder, and model.path names none"
        fix = "model.path = FOLDER, or implementation = auto"
        yield config.model.problem("missing", "implementation", message, fix, "model.path")
    architecture = config.model.architecture
    if architecture is None:
        return
    plan, kind = config.plan, architecture.model_type
    not_ours = f"cannot be carried out for {kind}, whose layers are computed by the code of "
    not_ours += "transformers"

    def refused(key: str, message: str, fix: str, section: Section = plan) -> Problem:
        return section.problem("not-available", key, message, fix, "model.implementation")

    for (name, key), values in _OF_HUB.items():
        section = getattr(config, name)
        if (value := getattr(section, key)) not in values:
            could = f"dp, pp, {'ep, ' * bool(architecture.num_experts)}microbatches, plan.data"
            message = f"{key} = {format_value(value)} {not_ours}; {could} and recompute = full can"
            yield refused(key, message, f"{key} = {' or '.join(map(str, values))}", section)
    if plan.etp > 1:
        fix = f"etp = 1, ep = {plan.ep * plan.etp}"
        if not architecture.cuts_experts:
            message = (
                f"etp = {plan.etp} cannot be carried out for {kind}: results of its experts, as "
                "transformers computes them, are not sums over parts of their width"
            )
            yield refused("etp", message, fix)
        is_adapted, is_packed = config.lora.adapts_mlps, config.lora.is_packed
        if is_adapted or is_packed or trains_some_experts(config):
            what = "experts in NF4" if is_packed else "experts of which only some train"
            what = "adapters of experts" if is_adapted else what
            message = (
                f"etp = {plan.etp} shares the width of experts, and {what} are whole on every rank "
                f"in {kind}"
            )
            yield refused("etp", message, fix)
    if plan.num_stages > 1 and architecture.uncut:
        message = f"the layers of {kind} cannot be cut into pipeline stages: {architecture.uncut}"
        yield refused("pp", message, "pp = 1")
    elif plan.num_stages > 1 and plan.schedule not in STAGE_SCHEDULES_OF_HUB:
        fix = f"schedule = {' or '.join(STAGE_SCHEDULES_OF_HUB)}"
        yield refused("schedule", f"schedule = {plan.schedule} {not_ours}", fix)
    if architecture.reads_between and plan.data == "zero3":
        message = f"data = zero3 frees weights of {kind} that its code reads between the layers"
        yield refused("data", message, "data = zero2, zero1 or replicate")


def _clash(
    plan: Plan, name: str, why: str, fix: str, other: str, setting: str, default: object = 0
) -> Problem:
    """The conflict of the value of `name` in [plan], which is refused because it `why`, with the
    `setting` of the key `other`; with the `default` of that key there is none."""
    message = f"{name} = {getattr(plan, name)} {why}: it cannot be trained with {setting}"
    fix = f"{fix}, or {other.partition('.')[2]} = {default}"
    return plan.problem("conflict", name, message, fix, other)


def _optimizer_states(config: RunConfig) -> Iterator[Problem]:
    """Conflicts of states that are sharded over data-parallel ranks, that belong to whole matrices,
    or that are in host memory."""
    plan, train = config.plan, config.train
    is_asynchronous = plan.schedule in ASYNCHRONOUS_SCHEDULES
    updates_alone = "updates the weights of a stage while its ranks compute"
    other = "plan.data", f"data = {plan.data}", "replicate"
    if plan.data == "zero3" and plan.schedule in DEFERRING_SCHEDULES:
        why = "defers weight gradients to a time when the weights that they read have been freed"
        fix = f"schedule = {SCHEDULES[plan.schedule].undeferred}, or data = zero2"
        yield _clash(plan, "schedule", why, fix, *other)
    elif plan.data in ("zero2", "zero3") and is_asynchronous:
        why = "keeps versions of whole weights, and of what they have given by then"
        yield _clash(plan, "schedule", why, "schedule = 1f1b, or data = zero1", *other)
    if train.updates_matrices:
        setting = f"optimizer = {train.optimizer}"
        if is_asynchronous and plan.num_stages > 1:
            other = "train.optimizer", setting, "adamw"
            yield _clash(plan, "schedule", updates_alone, "schedule = 1f1b", *other)
        if train.rebalance_every:
            message = f"experts cannot move to other ranks with {setting}"
            fix = "rebalance_every = 0, or optimizer = adamw"
            yield train.problem("conflict", "rebalance_every", message, fix, "train.optimizer")
        if rank := config.lora.rank:
            message = f"{setting} updates weight matrices, and adapters (rank = {rank}) are none"
            yield train.problem("conflict", "optimizer", message, "optimizer = adamw", "lora.rank")
        if config.model.architecture is not None:
            message = f"{setting} knows the matrices of moemesh's own models only"
            key = "model.implementation"
            yield train.problem("not-available", "optimizer", message, "optimizer = adamw", key)
    if plan.offload == "none":
        return
    setting = f"offload = {plan.offload}"
    other = "plan.offload", setting, "none"
    if is_asynchronous:
        yield _clash(plan, "schedule", updates_alone, "schedule = 1f1b", *other)
    if plan.optimizer_validation == "after":
        why = "keeps a second copy of the states for an update that is undone"
        yield _clash(plan, "optimizer_validation", why, "optimizer_validation = before", *other)
    for key, value, default in (
        ("optimizer", train.updates_matrices and train.optimizer, "adamw"),
        ("rebalance_every", train.rebalance_every, 0),
        ("on_mismatch", train.on_mismatch == "majority" and train.on_mismatch, "stop"),
    ):
        if value:
            message = f"{key} = {value} needs the states of the optimizer on the device: {setting}"
            fix = f"{key} = {default}, or offload = none"
            yield train.problem("conflict", key, message, fix, "plan.offload")


def _dispatchers(config: RunConfig) -> Iterator[Problem]:
    """Conflicts of a dispatcher with the form of its rows and the order of its sums."""
    plan, row = config.plan, dispatcher_row(config.plan.dispatcher)
    if plan.ep * plan.etp == 1:
        return
    if plan.payload == "fp8" and not row.encodes:
        why = "sends rows in the dtype of the run"
        wanted = "plan.payload", "payload = fp8", "same"
        yield _clash(plan, "dispatcher", why, "dispatcher = all_to_all", *wanted)
    if plan.combine == "exact" and not row.sums_exactly:
        why = "adds the results of a rank"
        wanted = "plan.combine", "combine = exact", "fast"
        yield _clash(plan, "dispatcher", why, "dispatcher = all_to_all", *wanted)


def _experts_that_move(config: RunConfig) -> Iterator[Problem]:
    """Conflicts of expert replicas and expert migration with other settings."""
    plan, is_exact = config.plan, config.plan.combine == "exact"
    if plan.spare_slots:
        other = "plan.spare_slots", f"spare_slots = {plan.spare_slots}"
        if not dispatcher_row(plan.dispatcher).accepts_replicas:
            why = "sends rows to the homes of experts, not to their replicas"
            yield _clash(plan, "dispatcher", why, "dispatcher = all_to_all", *other)
        if is_exact:
            why = "adds rows in an order that does not depend on where experts are"
            yield _clash(plan, "combine", why, "combine = fast", *other)
        if plan.schedule == "ampnet" and plan.ampnet_backward == "live":
            why = "reads weights in the backward that replicas have fetched in the forward"
            yield _clash(plan, "ampnet_backward", why, "ampnet_backward = recompute", *other)
    if every := config.train.rebalance_every:
        other = "train.rebalance_every", f"rebalance_every = {every}"
        if is_exact:
            why = "adds rows in the order of the experts' places, which may not change"
            yield _clash(plan, "combine", why, "combine = fast", *other)
        if plan.schedule in ASYNCHRONOUS_SCHEDULES:
            why = "never drains, and experts can only move between steps"
            yield _clash(plan, "schedule", why, "schedule = 1f1b", *other)
        elif plan.optimizer_validation == "after":
            name = "optimizer_validation"
            why = "takes a step back when the next one has begun, and experts have moved in between"
            yield _clash(plan, name, why, "optimizer_validation = before", *other)


def _slices(config: RunConfig) -> Iterator[Problem]:
    """Conflicts of slices, which are computed one after the other: with choices that compare all
    tokens of a sequence, and with cp, whose ranks have positions of several slices."""
    model, plan, keys = config.model, config.plan, ("plan.schedule", "plan.slices")
    if plan.num_slices == 1:
        return
    name, fix = "capacity_factor", "capacity_factor = 0"
    setting = f"capacity_factor ({model.capacity_factor})" if model.capacity_factor else ""
    if model.router_selection != "token_choice":
        name, fix = "router_selection", "router_selection = token_choice"
        setting = f"{name} = {model.router_selection}"
    if model.num_experts and setting:
        message = (
            f"{setting} compares all tokens of a sequence, but schedule = "
            f"{plan.schedule} routes slices one by one"
        )
        fix = f"{fix}, or another schedule such as 1f1b"
        yield model.problem("conflict", name, message, fix, *keys)
    if plan.cp > 1 and plan.num_slices > 1:
        message = (
            f"cp ({plan.cp}) spreads the positions of a sequence, but schedule = "
            f"{plan.schedule} computes them in {plan.num_slices} slices, one after the other"
        )
        fix = "cp = 1, or another schedule such as 1f1b"
        yield plan.problem("conflict", "cp", message, fix, *keys)


def _adapters(config: RunConfig) -> Iterator[Problem]:
    """Conflicts of adapters of experts: with replicas, which do not fetch adapters, and with layers
    of which only some experts train, since their experts are in another order. Conflicts of a base
    in NF4: with experts that train or move, and with cuts through blocks."""
    plan, train, lora = config.plan, config.train, config.lora
    is_adapted = lora.adapts_mlps
    setting = f"rank = {lora.rank} of experts"
    if is_adapted and plan.spare_slots:
        why = "fetches the weights of experts for their replicas, but not their adapters"
        yield _clash(plan, "spare_slots", why, "spare_slots = 0", "lora.rank", setting)
    if is_adapted and trains_some_experts(config):
        message = f"some experts of a layer would train beside {setting}"
        fix = "train_only = [], or lora.targets without gate_proj, up_proj and down_proj"
        yield train.problem("conflict", "train_only", message, fix, "lora.rank")
    if not lora.is_packed:
        return
    setting = "lora.base = nf4, whose experts are frozen in 4 bits"
    for section, key, verb in (
        (plan, "spare_slots", "copies"),
        (train, "rebalance_every", "moves"),
    ):
        if value := getattr(section, key):
            message = f"{key} = {value} {verb} experts: it cannot be trained with {setting}"
            yield section.problem("conflict", key, message, f"{key} = 0", "lora.base")
    if trains_some_experts(config):
        key = "train_only" if train.esft is None else "esft"
        message = f"some experts would train, and cannot with {setting}"
        fix = f"leave {key} out, or base = same"
        yield train.problem("conflict", key, message, fix, "lora.base")
    architecture = config.model.architecture
    rows = [(f"{item.target} of {item.block}", item.inputs) for item in projections(config.model)]
    if architecture is not None:
        records = [record for record in architecture.parameters if record.parts]
        rows = [(record.name, record.shape[-1]) for record in records]
    for name, size in rows:
        if size % 2:
            message = f"{name} has {size} numbers a row, and base = nf4 packs two of them in a byte"
            yield lora.problem("not-available", "base", message, 'base = "same"')
            break
    axes = {"experts": "etp", "attention": "tp", "mlp": "tp", "shared experts": "tp"}
    for item in () if architecture is not None else projections(config.model):
        axis, inputs = axes[item.block], item.inputs
        degree = int(getattr(plan, axis))
        # The other projections are cut by their outputs, or not at all.
        is_cut = item.target == "down_proj" or (
            item.target == "o_proj" and plan.attention_exit != "all_to_all"
        )
        if is_cut and degree > 1 and inputs % (NF4_BLOCK * degree):
            message = (
                f"{axis} = {degree} cuts the {inputs} inputs of {item.target} of {item.block} "
                f"inside blocks of {NF4_BLOCK}, which lora.base = nf4 keeps whole"
            )
            legal = nearest_divisors(max(inputs // NF4_BLOCK, 1), degree)
            yield plan.problem("conflict", axis, message, f"{axis} = {legal}", "lora.base")


def trains_some_experts(config: RunConfig) -> bool:
    """Whether some experts of a layer train, and others do not."""
    tuning, model = config.tuning, config.model
    layers = model.routed_layers
    return any(tuning.chosen(model.expert_stacks(layer), model.num_experts) for layer in layers)


def _frozen(config: RunConfig) -> Iterator[Problem]:
    """Conflicts of frozen weights with schedules that keep versions of all weights, and of layers
    of which only some experts train with settings that move or copy experts."""
    plan, train = config.plan, config.train
    if config.tuning.is_full:
        return
    key = "freeze" if train.freeze else "train_only" if train.train_only else "esft"
    setting, default = f"{key} = {format_value(getattr(train, key))}", "[]"
    if key == "esft":
        default = "none"
    key = f"train.{key}"
    if config.lora.rank:
        key, setting, default = "lora.rank", f"rank = {config.lora.rank}", "0"
    trains_some = trains_some_experts(config)
    if trains_some and train.rebalance_every:
        message = "experts of a layer of which only some train cannot move to other ranks"
        fix = f"rebalance_every = 0, or {key.partition('.')[2]} = {default}"
        yield train.problem("conflict", "rebalance_every", message, fix, key)
    other = key, setting, default
    if plan.schedule in ASYNCHRONOUS_SCHEDULES:
        why = "keeps versions of all weights, which all train"
        yield _clash(plan, "schedule", why, "schedule = 1f1b", *other)
    if trains_some and plan.combine == "exact":
        why = "adds rows in the order of experts' places, where those that train come first"
        yield _clash(plan, "combine", why, "combine = fast", *other)
    if trains_some and plan.spare_slots:
        why = "copies experts that train like others"
        yield _clash(plan, "spare_slots", why, "spare_slots = 0", *other)
