"""Layouts from a Plan, a run, ``tp=8,pp=4,…``, a packaged plan or a TOML file.

Also the reverse: the Plan of a layout, and the parts of it that `moemesh train` refuses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from math import ceil, prod
from typing import Any, NamedTuple, cast, get_args, get_type_hints

from moemesh.config.data import DataConfig
from moemesh.config.dispatcher_table import PREDICTED
from moemesh.config.errors import ConfigError, Problem, UserError, unknown_keys, whole
from moemesh.config.load import build_section
from moemesh.config.lora import is_adapter
from moemesh.config.model import ModelConfig
from moemesh.config.plan import DEGREES, RECOMPUTED, Plan, Recompute
from moemesh.config.rules import plan_problem
from moemesh.config.run import RunConfig
from moemesh.config.schedule_table import SCHEDULES
from moemesh.config.section import LARGEST_SIZE
from moemesh.config.sources import Leaf, parse_value, read_named_table
from moemesh.config.suggest import choices_of, nearest_choice, nearest_divisors
from moemesh.config.trainable import refusals
from moemesh.planner.planned_layout import (
    DATA,
    ELEMENT_BYTES,
    RECOMPUTABLE,
    TRAINED,
    PlannedLayout,
    Precision,
    shown,
    widths,
)
from moemesh.planner.shapes.load_shape import Model
from moemesh.schedule.plan_schedule import step_problems
from moemesh.sharding.parameters import tensors
from moemesh.sharding.stages import cut_layers

#: Keys with the same name and values in a Plan and in a layout.
_SAME = (
    *DEGREES, "schedule", "stages_per_rank", "attention_exit", "context", "dispatcher", "payload",
    "combine", "dispatch_chunks", "spare_slots", "servers", "reshard", "offload",
)  # fmt: skip


def from_plan(
    plan: Plan,
    model: ModelConfig | None = None,
    *,
    seq_len: int,
    global_batch: int,
    dtype: Precision = "bfloat16",
) -> PlannedLayout:
    """The layout of `moemesh train` with `plan`: gradients in fp32 at least, flash attention, a
    loss in chunks.

    With `model`, stages are cut as in a run. Raises ValueError for numbers out of range, for an
    impossible cut, and for a schedule from a file or a search: closed forms exist for named
    schedules only.
    """
    if problems := plan.range_problems():
        raise ConfigError(problems)
    if plan.schedule not in SCHEDULES:
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
        recompute=plan.recomputed_parts,
        dtype=dtype,
        **widths(dtype),
        ranks_per_node=plan.ranks_per_node or 0,
    )


def plan_of(layout: PlannedLayout) -> Plan:
    """The Plan nearest to a layout; it is exact if :func:`from_plan` returns the layout for it."""
    node, world, parts = layout.ranks_per_node, layout.world_size, layout.recompute
    # Recomputation that a plan cannot express becomes "none", its default.
    recompute: dict[str, Any] = {}
    if parts in RECOMPUTED.values():
        recompute = {"recompute": next(w for w, named in RECOMPUTED.items() if named == parts)}
    elif "activation" in parts and parts < RECOMPUTED["selective"]:
        recompute = {f"recompute_{part}": part in parts for part in ("attention", "experts")}
        recompute["recompute"] = "selective"
    return Plan(
        **{name: getattr(layout, name) for name in _SAME},
        layers_per_stage=layout.layers_per_stage,
        slices=layout.slices or None,
        microbatches=layout.microbatches,
        shard_group=layout.zero_group or None,
        data=layout.data,
        **recompute,
        # A plan without node borders has a single node.
        ranks_per_node=node if 0 < node < world else None,
    )


def untrained(layout: PlannedLayout, model: Model) -> list[Problem]:
    """Parts of a layout that `moemesh train` refuses or has no key for."""
    plan, seq_len, batch = plan_of(layout), layout.seq_len, layout.global_batch
    data = DataConfig(seq_len=seq_len, global_batch=batch)
    if model.config is None:
        problems = [Problem(code="not-available", key="model", message=model.why_not)]
        if model.sizes is not None:
            problems += RunConfig(model=model.sizes, plan=plan, data=data).check()
        return problems
    run = model.run or RunConfig()
    config = RunConfig(
        model=model.config,
        plan=plan,
        data=data,
        train=run.train.model_copy(update={"dtype": "bfloat16"}),
        lora=run.lora,
    )
    expressed = from_plan(plan, seq_len=seq_len, global_batch=batch)
    same = ("ranks_per_node", "layers_per_stage", *TRAINED)
    expressed = expressed.changed(**{name: getattr(layout, name) for name in same})
    missing = [
        plan_problem(layout, "not-available", item.name, "[plan] has no key for this", "")
        for item in fields(layout)
        if getattr(expressed, item.name) != getattr(layout, item.name)
    ]
    return [*missing, *config.check(), *refusals(config), *step_problems(plan)]


# Plans that `moemesh train` supports without changes: their ledger is predicted to the byte.
#
# The traffic of other plans comes from the closed forms of `volumes`.


#: Largest number of forwards in an exact ledger, because of the time that it takes.
LARGEST_LEDGER = 20_000


def exact_plan(model: ModelConfig, plan: Plan) -> Plan | str:
    """The plan with `auto` replaced by its dispatcher, if the ledger of a run with it can be
    predicted to the byte; else the reason why not, as text."""
    if model.architecture is not None:
        return "the bytes of transformers' code are counted, not listed one by one"
    for problem in refusals(RunConfig(model=model, plan=plan)):
        if problem.code != "not-available":
            return problem.message
        setting = f"{problem.key.partition('.')[2]} = {problem.value}"
        return f"`moemesh train` does not carry out {setting} yet"
    # Values of these keys with which the ledger of a run is complete.
    predicted = {"dispatcher": (*PREDICTED, "auto"), "replay": (None,)}
    for key, values in predicted.items():
        if (value := getattr(plan, key)) not in values:
            return f"{key} = {value} has no prediction of its bytes"
    is_auto = plan.dispatcher == "auto"
    # Without an exchange, and with spare slots, auto is always all_to_all.
    is_decided = plan.ep * plan.etp == 1 or plan.spreads_replicas
    if is_auto and not is_decided:
        return "dispatcher = auto is chosen on the ranks themselves"
    forwards = plan.microbatches * plan.num_stages * plan.num_slices
    if forwards > LARGEST_LEDGER:
        return f"{forwards} forwards of stages a step are too many to list ({LARGEST_LEDGER})"
    for problem in plan.check(model):
        return problem.message
    return plan.model_copy(update={"dispatcher": "all_to_all"}) if is_auto else plan


def trained_shares(config: RunConfig) -> dict[str, float | bool | str]:
    """Layout fields on what trains in a run: whether only adapters do, the form of the rest, and
    trained parameters per parameter of the model, for dense weights and for experts."""
    tuning = config.tuning
    if tuning.is_full:
        return {}
    # Parameters of the model, and trained ones with adapters; the keys are `is_expert`.
    existing, trained = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    only_adapters = True
    for tensor in tensors(config.model, Plan()):
        experts = tensor.shape[0] if tensor.is_expert else 0
        share = len(tuning.rows(tensor.name, experts)) / (experts or 1)
        numbers, is_new = prod(tensor.shape), is_adapter(tensor.name)
        trained[tensor.is_expert] += share * numbers
        if not is_new:
            existing[tensor.is_expert] += numbers
            only_adapters = only_adapters and not share
    return {
        "adapters": only_adapters and bool(config.lora.rank),
        "base": config.lora.base,
        "trained_dense": trained[False] / max(existing[False], 1),
        "trained_experts": trained[True] / max(existing[True], 1),
    }


# A layout from text, a table of keys or a file.


PLANS = "plans"

_LAYOUT_FIELDS = {item.name: item for item in fields(PlannedLayout)}
#: Keys of a layout that are options of the command instead of keys of a plan.
_BATCH = ("seq_len", "global_batch")
_KNOWN = tuple(
    dict.fromkeys(key for key in (*Plan.model_fields, *_LAYOUT_FIELDS) if key not in _BATCH)
)
_RECOMPUTE_CHOICES: tuple[str, ...] = get_args(Recompute)


#: Keys of a Plan that a layout has under another name.
_TRANSLATED = {"data", "microbatches", "recompute_attention", "recompute_experts"}
#: Keys of a layout that follow from a key of a Plan.
_FOLLOWS = {"zero": "data", "parameter_server": "data", "zero_group": "shard_group"}


class ReadLayout(NamedTuple):
    """A layout, and the equivalent Plan for `moemesh train`, if any. `unread` are given keys of
    [plan] that no formula of the planner uses."""

    layout: PlannedLayout
    plan: Plan | None
    unread: dict[str, object]

    @property
    def text(self) -> str:
        """All given keys as text for ``--plan``, with sequence length and batch."""
        rest = (f"{name}={shown(value)}" for name, value in self.unread.items())
        return ",".join([self.layout.key, *rest])


def read_plan(
    source: str | Mapping[str, Any],
    *,
    seq_len: int | None = None,
    global_batch: int | None = None,
    model: Model | None = None,
) -> ReadLayout:
    """The layout of `source` for a sequence length and a batch: key=value pairs, a packaged plan, a
    TOML file, or a table of keys such as `plan --json` prints.

    Keys are those of [plan] and of PlannedLayout. `microbatch` (sequences per microbatch) and
    `microbatches` (their number) exclude each other. Raises ConfigError with the problems,
    including those with `model`, and for a length or a batch that differs from the plan's own.
    """
    options, problems = {"seq_len": seq_len, "global_batch": global_batch}, list[Problem]()
    table = plan_table(source, options)
    batch = {name: table.pop(name, None) for name in _BATCH}
    for name, size in options.items():
        if None not in (size, batch[name]) and size != batch[name]:
            option = f"--{name.replace('_', '-')}"
            message = f"the plan has {name} = {batch[name]}, {option} is {size}"
            fix = f"leave {option} out, or {name} in the plan"
            problems.append(Problem.of("conflict", f"plan.{name}", batch[name], message, fix))
        batch[name] = batch[name] if size is None else size
    problems += [*unknown_keys("plan", table, _KNOWN), *_batch_problems(batch, table)]
    known = {key: value for key, value in table.items() if key in _KNOWN}
    # If the batch is invalid, the other keys are checked with legal numbers in its place.
    if any(problem.key == "seq_len" for problem in problems):
        batch["seq_len"] = 1
    if problems:
        batch["global_batch"] = smallest_batch(known)
    planned = None
    try:
        planned = _read(known, batch, None if model is None else model.config)
    except ConfigError as error:
        problems += error.problems
    if planned is not None and model is not None:
        problems += planned.layout.check(model.shape.sizes)
    if problems or planned is None:
        raise ConfigError(problems)
    return planned


def _read(
    known: Mapping[str, Any], batch: Mapping[str, int], config: ModelConfig | None
) -> ReadLayout:
    """The layout of known keys and a batch; its stages are cut as in a run of `config`."""
    # Recomputed parts of a list like "norm+moe"; None for a value of plan.recompute.
    parts, recompute = None, known.get("recompute", "none")
    if isinstance(recompute, str) and recompute not in _RECOMPUTE_CHOICES:
        parts = frozenset(part.strip() for part in recompute.split("+"))
        if unknown := sorted(parts - set(RECOMPUTABLE)):
            message = f"`{unknown[0]}` names nothing that can be recomputed"
            fix = nearest_choice(unknown[0], (*_RECOMPUTE_CHOICES, *RECOMPUTABLE[1:]))
            problem = Problem.of("not-a-choice", "plan.recompute", recompute, message, fix)
            raise ConfigError([problem])
        for key in ("recompute_attention", "recompute_experts"):
            if key in known:
                message = f"recompute = {recompute} lists all recomputed parts"
                raise ConfigError([_both(key, known[key], message, "recompute")])
    extra = {key: value for key, value in known.items() if key not in Plan.model_fields}
    is_plan = parts is None and extra.keys() <= {"dtype", "microbatch"}
    # Keys of a Plan are read first, except for a list of recomputed parts. A layout that is not a
    # plan has one sequence per microbatch by default.
    values = {key: value for key, value in known.items() if key not in extra}
    if parts is not None:
        del values["recompute"]
    microbatch = known.get("microbatch", None if is_plan else 1)
    is_legal = isinstance(microbatch, int) and microbatch > 0
    if is_legal and (is_plan or "microbatches" not in known):
        values["microbatches"] = batch["global_batch"] // max(values.get("dp", 1), 1) // microbatch
    leaves = {f"plan.{key}": Leaf(value=value, origin="") for key, value in values.items()}
    plan, problems = build_section(Plan, leaves)
    if not problems:
        problems = plan.check(seq_len=batch["seq_len"] if is_plan else None)
        dtype = known.get("dtype", "bfloat16")
        is_legal = all(problem.key.removeprefix("plan.") not in DEGREES for problem in problems)
        if is_legal and not (isinstance(dtype, str) and dtype in ELEMENT_BYTES):
            problems.append(_bad_choice("dtype", dtype, tuple(ELEMENT_BYTES)))
    if problems:
        raise ConfigError(problems)
    if not is_plan or (config is not None and plan.num_stages > config.num_layers):
        config = None
    layout = from_plan(plan, config, **batch, dtype=known.get("dtype", "bfloat16"))
    if not is_plan:
        # Fields that a Plan lacks.
        hints = get_type_hints(PlannedLayout)
        for key, value in extra.items():
            default: object = _LAYOUT_FIELDS[key].default
            # A field whose default is None has the first type of its annotation.
            kind = get_args(hints[key])[0] if default is None else type(default)
            is_whole = kind is float and isinstance(value, int)
            if type(value) is not kind and value is not default and not is_whole:
                message = f"{key} is a {kind.__name__}"
                problems.append(Problem.of("wrong-type", f"plan.{key}", value, message))
        for key, value in extra.items():
            if (choices := choices_of(hints[key])) and value not in choices:
                problems.append(_bad_choice(key, value, choices))
        for key, other in _FOLLOWS.items():
            if key in extra and other in values and extra[key] != (it := getattr(layout, key)):
                message = f"{other} = {shown(values[other])} is {key} = {shown(it)}"
                problems.append(_both(key, extra[key], message, other))
        if problems:
            raise ConfigError(problems)
        layout = layout.changed(**extra, recompute=layout.recompute if parts is None else parts)
    unread: dict[str, object] = {
        name: value
        for name, item in Plan.model_fields.items()
        if name not in _LAYOUT_FIELDS
        and name not in _TRANSLATED
        and (value := getattr(plan, name)) != item.default
    }
    return ReadLayout(layout, plan if is_plan else None, unread)


def smallest_batch(source: str | Mapping[str, Any]) -> int:
    """The smallest global batch that the plan `source` can divide, in sequences."""
    table = plan_table(source)
    values = (table.get(key, 1) for key in ("dp", "microbatch", "microbatches"))
    return prod(value for value in values if isinstance(value, int) and value > 0)


#: Options of a caller without any.
_NO_OPTIONS: Mapping[str, int | None] = {}
#: Blanks, a key and its equals sign.
_KEY = re.compile(r"\s+\w+\s*=")


def plan_table(
    source: str | Mapping[str, Any], options: Mapping[str, int | None] = _NO_OPTIONS
) -> dict[str, Any]:
    """Keys and values of the plan `source`. Raises ConfigError if it cannot be read.

    The file of a run has the batch and the number type outside of [plan]: there an option of the
    same name that is not None replaces it.
    """
    if not isinstance(source, str):
        return {key: whole(value) for key, value in source.items()}
    if "=" not in source:
        message, fix = "neither key=value pairs, a packaged plan nor a readable TOML file", ""
        degrees = re.findall(r"([a-z]+)[ :]?(\d+)", source.lower())  # "TP2 PP4"
        if degrees and all(key in DEGREES for key, _ in degrees):
            fix = f"--plan {','.join('='.join(degree) for degree in degrees)}"
        table = read_named_table(source, PLANS, "plan", message, fix)
        if not isinstance(plan := table.get("plan", table), dict):
            raise ConfigError([Problem.of("syntax", "plan", plan, "[plan] is a table of keys")])
        keys = dict(cast("dict[str, Any]", plan))
        for section, names in (("data", _BATCH), ("train", ("dtype",))):
            if isinstance(values := table.get(section), dict):
                given = cast("dict[str, Any]", values)
                left = [name for name in names if name in given and options.get(name) is None]
                keys |= {name: given[name] for name in left}
        return keys
    pairs: dict[str, Any] = {}
    problems: list[Problem] = []
    # Split at commas outside of brackets, and at blanks before a key, as answers print layouts.
    parts, depth = [""], 0
    for position, character in enumerate(source):
        depth += (character in "[{(") - (character in "]})")
        is_border = character == "," or (character.isspace() and _KEY.match(source, position))
        if is_border and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    for part in filter(str.strip, parts):
        key, equals, text = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not text:
            message = "a plan is a list of key=value, with commas between"
            problems.append(Problem.of("syntax", "plan", part, message, 'such as "tp=8,pp=4"'))
        elif key in pairs:
            problems.append(Problem.of("duplicate", key, text, f"{key} is given twice", "keep one"))
        else:
            value = parse_value(text, key, "--plan")
            if key == "layers_per_stage" and re.fullmatch(r"\d+(-\d+)*", text):
                value = [int(size) for size in text.split("-")]  # dashes need no shell quoting
            if isinstance(value, Problem):
                problems.append(value)
            else:
                pairs[key] = value
    if problems:
        raise ConfigError(problems)
    return pairs


def _batch_problems(batch: Mapping[str, Any], table: Mapping[str, Any]) -> list[Problem]:
    """Problems of a batch: invalid numbers, and replicas or microbatches of different sizes."""
    problems: list[Problem] = []
    for name in _BATCH:
        value = batch[name]
        option = f"--{name.replace('_', '-')}"
        if value is None:
            problems.append(
                Problem.of("missing", name, None, "it must be given", f"{option} NUMBER")
            )
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            message = f"{name} must be a whole number of at least 1"
            problems.append(Problem.of("out-of-range", name, value, message, f"{option} 1"))
        elif value > LARGEST_SIZE:
            message, fix = f"{name} must be at most {LARGEST_SIZE}", f"{option} {LARGEST_SIZE}"
            problems.append(Problem.of("out-of-range", name, value, message, fix))
    key, size = "plan.microbatch", table.get("microbatch", 1)
    if isinstance(size, int) and size < 1:
        message = f"a microbatch is at least 1 sequence, not {size}"
        problems.append(Problem.of("out-of-range", key, size, message, "microbatch = 1"))
    if "microbatch" in table and "microbatches" in table:
        message = "microbatch (sequences each) and microbatches (their number) exclude each other"
        problems.append(Problem.of("conflict", key, None, message, "keep one of them"))
    name = "microbatch" if "microbatch" in table else "microbatches"
    dp, value, global_batch = table.get("dp", 1), table.get(name, 1), batch["global_batch"]
    numbers = dp, table.get("microbatch", 1), table.get("microbatches", 1)
    if any(problem.key != "seq_len" for problem in problems) or not all(
        isinstance(number, int) and not isinstance(number, bool) and number >= 1
        for number in numbers
    ):
        return problems  # the checks of the keys report the rest

    def near(legal: str, step: int) -> str:
        below, above = global_batch // step * step, -(-global_batch // step) * step
        return f"{legal}, or global_batch = " + " or ".join(str(x) for x in (below, above) if x)

    share = global_batch // dp
    if global_batch % dp:
        message = f"dp ({dp}) must divide the global batch ({global_batch} sequences)"
        fix = near(f"dp = {nearest_divisors(global_batch, dp)}", dp)
        problems.append(Problem.of("not-divisible", "plan.dp", dp, message, fix))
    elif share % value:
        message = (
            f"{name} ({value}) must divide the sequences of a replica "
            f"({global_batch} / dp {dp} = {share})"
        )
        fix = near(f"{name} = {nearest_divisors(share, value)}", dp * value)
        problems.append(Problem.of("not-divisible", f"plan.{name}", value, message, fix))
    return problems


def _both(key: str, value: object, message: str, other: str) -> Problem:
    """Problem of two keys of a plan that give different values to one fact."""
    return Problem.of("conflict", f"plan.{key}", value, message, f"leave {key} out, or {other}")


def _bad_choice(key: str, value: object, choices: tuple[str, ...]) -> Problem:
    message, near = f"{key} is one of {', '.join(choices)}", nearest_choice(str(value), choices)
    return Problem.of("not-a-choice", f"plan.{key}", value, message, near)
