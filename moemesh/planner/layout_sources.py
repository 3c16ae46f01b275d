"""A layout by whatever names it: a Plan, a run, ``tp=8,pp=4,…``, a packaged plan, a TOML file.

And back: a layout as a Plan, and what of it `moemesh train` refuses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args, get_type_hints

from moemesh.config.data import DataConfig
from moemesh.config.errors import ConfigError, Problem, UserError
from moemesh.config.limits import parse_toml
from moemesh.config.load import build_section
from moemesh.config.lora import is_adapter
from moemesh.config.model import ModelConfig
from moemesh.config.plan import DEGREES, Plan, Recompute, ScheduleName
from moemesh.config.rules import plan_problem
from moemesh.config.run import RunConfig
from moemesh.config.section import LARGEST_SIZE
from moemesh.config.sources import Leaf, parse_value, preset_names, read_preset_table
from moemesh.config.suggest import aliases, choices_of, nearest_choice, nearest_divisors
from moemesh.config.toml import unreadable
from moemesh.config.trainable import refusals
from moemesh.planner.planned_layout import (
    DATA,
    ELEMENT_BYTES,
    RECOMPUTABLE,
    RECOMPUTED,
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
    """The layout of `moemesh train` under `plan`: fp32 gradients, flash attention, a loss
    in chunks.

    With `model`, stages are cut as a run would cut them. Raises ValueError when they cannot be, and
    for a plan whose schedule has no name: closed forms are those of names.
    """
    if plan.schedule not in get_args(ScheduleName):
        raise UserError(
            f"schedule = {plan.schedule} has no formulas to be priced by: give the name of a "
            "schedule like it (1f1b, zb_h1, ...); `moemesh schedule` simulates a file or a search"
        )
    share = ceil(ceil(global_batch / plan.dp) / plan.microbatches)
    recompute, layers_per_stage = RECOMPUTED[plan.recompute], plan.layers_per_stage
    if plan.recompute == "selective":
        switches = {"attention": plan.recompute_attention, "experts": plan.recompute_experts}
        recompute -= {part for part, is_on in switches.items() if not is_on}
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
        recompute=recompute,
        dtype=dtype,
        **widths(dtype),
        ranks_per_node=plan.ranks_per_node or 0,
    )


def plan_of(layout: PlannedLayout) -> Plan:
    """The Plan next to a layout: equal to it where :func:`from_plan` gives the layout back."""
    node, world, again = layout.ranks_per_node, layout.world_size, layout.recompute
    # Where no word of a plan says what is computed again: "none", its default.
    recompute: dict[str, Any] = {}
    if again in RECOMPUTED.values():
        recompute = {"recompute": next(w for w, parts in RECOMPUTED.items() if parts == again)}
    elif "activation" in again and again < RECOMPUTED["selective"]:
        recompute = {f"recompute_{part}": part in again for part in ("attention", "experts")}
        recompute["recompute"] = "selective"
    return Plan(
        **{name: getattr(layout, name) for name in _SAME},
        layers_per_stage=layout.layers_per_stage,
        slices=layout.slices or None,
        microbatches=layout.microbatches,
        shard_group=layout.zero_group or None,
        data="parameter_server" if layout.parameter_server else DATA[layout.zero],
        **recompute,
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
    again = from_plan(plan, seq_len=seq_len, global_batch=batch)
    same = ("ranks_per_node", "layers_per_stage", *TRAINED)
    again = again.changed(**{name: getattr(layout, name) for name in same})
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
    for problem in refusals(RunConfig(model=model, plan=plan)):
        if problem.code != "not-available":
            return problem.message
        setting = f"{problem.key.partition('.')[2]} = {problem.value}"
        return f"`moemesh train` does not carry out {setting} yet"
    for key, values in _ENTERED.items():
        if (value := getattr(plan, key)) not in values:
            return f"{key} = {value} does not say what it sends"
    is_auto = plan.dispatcher == "auto"
    alone = plan.ep * plan.etp == 1 or (plan.spare_slots and plan.ep > 1)
    if is_auto and not alone:
        return "dispatcher = auto is chosen on the ranks themselves"
    forwards = plan.microbatches * plan.num_stages * plan.num_slices
    if forwards > LARGEST_LEDGER:
        return f"{forwards} forwards of stages a step are too many to list ({LARGEST_LEDGER})"
    for problem in plan.check(model):
        return problem.message
    return plan.model_copy(update={"dispatcher": "all_to_all"}) if is_auto else plan


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


# A layout from text, a table of keys or a file.


PLANS = "plans"

_LAYOUT_FIELDS = {item.name: item for item in fields(PlannedLayout)}
_KNOWN = tuple(dict.fromkeys([*Plan.model_fields, *_LAYOUT_FIELDS]))
#: Set by the command, not by a plan.
_BATCH = ("seq_len", "global_batch")
_RECOMPUTE_CHOICES: tuple[str, ...] = get_args(Recompute)


#: Keys of a Plan that a layout says in its own way.
_TRANSLATED = {"data", "microbatches", "recompute_attention", "recompute_experts"}


class ReadLayout(NamedTuple):
    """A layout, and the Plan that says the same to `moemesh train` (None: no plan can). `unread`
    are keys of [plan] that were given and that no formula of the planner reads."""

    layout: PlannedLayout
    plan: Plan | None
    unread: dict[str, object]

    @property
    def text(self) -> str:
        """All that was given, as ``--plan`` reads it back, sequence and batch with it."""
        rest = (f"{name}={shown(value)}" for name, value in self.unread.items())
        return ",".join([self.layout.key, *rest])


def read_plan(
    source: str | Mapping[str, Any],
    *,
    seq_len: int | None = None,
    global_batch: int | None = None,
    model: Model | None = None,
) -> ReadLayout:
    """The layout that `source` names, for a sequence length and a batch: key=value pairs, a
    packaged plan, a TOML file, or a table of keys such as `plan --json` prints.

    Keys are those of [plan] and of PlannedLayout. `microbatch` (sequences a microbatch) and
    `microbatches` (how many) say the same thing: give one. Raises ConfigError with every problem
    found, those with `model` among them.
    """
    table = plan_table(source)
    batch: dict[str, Any] = {"seq_len": seq_len, "global_batch": global_batch}
    for name in _BATCH:
        written = table.pop(name, None)
        batch[name] = written if batch[name] is None else batch[name]
    problems: list[Problem] = []
    for key, value in table.items():
        if key not in _KNOWN:
            fix = nearest_choice(key, tuple(name for name in _KNOWN if name not in _BATCH))
            if (foreign := aliases().get(key, "")).startswith("plan."):
                fix = f"here it is called {foreign.removeprefix('plan.')}"
            message = f"a plan has no key `{key}`"
            problems.append(Problem.of("unknown-key", f"plan.{key}", value, message, fix))
    problems += _batch_problems(batch, table)
    known = {key: value for key, value in table.items() if key in _KNOWN}
    planned = None
    try:
        # Broken numbers of the batch leave the rest to be checked with harmless ones.
        legal = smallest_batch(known) if problems else batch["global_batch"]
        is_broken = any(problem.key == "seq_len" for problem in problems)
        sequence = 1 if is_broken else batch["seq_len"]
        # Parts that recomputation names one by one ("norm+moe"); None: what a Plan can say.
        parts, again = None, known.get("recompute", "none")
        if isinstance(again, str) and again not in _RECOMPUTE_CHOICES:
            parts = frozenset(part.strip() for part in again.split("+"))
            if unknown := sorted(parts - set(RECOMPUTABLE)):
                message = f"`{unknown[0]}` names nothing that can be recomputed"
                fix = nearest_choice(unknown[0], (*_RECOMPUTE_CHOICES, *RECOMPUTABLE[1:]))
                problem = Problem.of("not-a-choice", "plan.recompute", again, message, fix)
                raise ConfigError([problem])
        dtype = known.get("dtype", "bfloat16")
        beyond = set(known) - set(Plan.model_fields) - {"dtype", "microbatch"}
        is_plan = not beyond and parts is None
        own, config = dict(known), None if model is None else model.config
        # Keys of a Plan are translated first, but for a recomputation that it has no word for; a
        # microbatch is of one sequence where nothing is said of it.
        if parts is not None:
            del own["recompute"]
        if not is_plan and "microbatches" in own:
            own.pop("microbatch", None)
        elif not is_plan:
            own.setdefault("microbatch", 1)
        said = _plan(own, legal, sequence if is_plan else None)
        if not is_plan or (config is not None and said.num_stages > config.num_layers):
            config = None
        layout = from_plan(said, config, seq_len=sequence, global_batch=legal, dtype=dtype)
        if not is_plan:
            layout = _changed(layout, known, layout.recompute if parts is None else parts)
        unread: dict[str, object] = {
            name: value
            for name, item in Plan.model_fields.items()
            if name not in _LAYOUT_FIELDS
            and name not in _TRANSLATED
            and (value := getattr(said, name)) != item.default
        }
        planned = ReadLayout(layout, said if is_plan else None, unread)
    except ConfigError as error:
        problems += error.problems
    if planned is not None and model is not None:
        problems += planned.layout.check(model.shape.sizes)
    if problems:
        raise ConfigError(problems)
    assert planned is not None
    return planned


def smallest_batch(source: str | Mapping[str, Any]) -> int:
    """The smallest global batch that the plan `source` can divide, in sequences."""
    table = plan_table(source)
    values = (table.get(key, 1) for key in ("dp", "microbatch", "microbatches"))
    return prod(value for value in values if isinstance(value, int) and value > 0)


def plan_table(source: str | Mapping[str, Any]) -> dict[str, Any]:
    """Keys and values of what names a plan. Raises ConfigError for what cannot be read."""
    if not isinstance(source, str):
        return dict(source)
    if source in preset_names(PLANS):
        return read_preset_table(source, PLANS)
    if "=" not in source:
        path = Path(source)
        try:
            table = parse_toml(path.read_text(encoding="utf-8-sig"))
        except OSError:
            message = "neither key=value pairs, a packaged plan nor a readable TOML file"
            fix = nearest_choice(source, preset_names(PLANS))
            raise ConfigError([Problem.of("no-file", "plan", source, message, fix)]) from None
        except ValueError as error:
            message = unreadable(error)
            raise ConfigError([Problem.of("syntax", "plan", source, message)]) from None
        return dict(cast("dict[str, Any]", table.get("plan", table)))
    found: dict[str, Any] = {}
    problems: list[Problem] = []
    # Split at commas outside of brackets.
    parts, depth = [""], 0
    for character in source:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    for part in filter(str.strip, parts):
        key, equals, text = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not text:
            message = "a plan is a list of key=value, with commas between"
            problems.append(Problem.of("syntax", "plan", part, message, 'such as "tp=8,pp=4"'))
        elif key in found:
            problems.append(Problem.of("duplicate", key, text, f"{key} is given twice", "keep one"))
        else:
            value = parse_value(text, key, "--plan")
            if key == "layers_per_stage" and re.fullmatch(r"\d+(-\d+)*", text):
                value = [int(size) for size in text.split("-")]  # no bracket for a shell to read
            if isinstance(value, Problem):
                problems.append(value)
            else:
                found[key] = value
    if problems:
        raise ConfigError(problems)
    return found


def _batch_problems(batch: Mapping[str, Any], table: Mapping[str, Any]) -> list[Problem]:
    """Broken numbers of a batch; and every replica must run the same number of equal
    microbatches."""
    found: list[Problem] = []
    for name in _BATCH:
        value = batch[name]
        option = f"--{name.replace('_', '-')}"
        if value is None:
            found.append(Problem.of("missing", name, None, "it must be given", f"{option} NUMBER"))
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            message = f"{name} must be a whole number of at least 1"
            found.append(Problem.of("out-of-range", name, value, message, f"{option} 1"))
        elif value > LARGEST_SIZE:
            message, fix = f"{name} must be at most {LARGEST_SIZE}", f"{option} {LARGEST_SIZE}"
            found.append(Problem.of("out-of-range", name, value, message, fix))
    key, each = "plan.microbatch", table.get("microbatch", 1)
    if isinstance(each, int) and each < 1:
        message = f"a microbatch is at least 1 sequence, not {each}"
        found.append(Problem.of("out-of-range", key, each, message, "microbatch = 1"))
    if "microbatch" in table and "microbatches" in table:
        message = "microbatch (sequences each) and microbatches (how many) say the same thing"
        found.append(Problem.of("conflict", key, None, message, "keep one of them"))
    name = "microbatch" if "microbatch" in table else "microbatches"
    dp, value, global_batch = table.get("dp", 1), table.get(name, 1), batch["global_batch"]
    numbers = dp, table.get("microbatch", 1), table.get("microbatches", 1)
    if any(problem.key != "seq_len" for problem in found) or not all(
        isinstance(number, int) and not isinstance(number, bool) and number >= 1
        for number in numbers
    ):
        return found  # the checks of the keys themselves name the rest

    def near(legal: str, step: int) -> str:
        below, above = global_batch // step * step, -(-global_batch // step) * step
        return f"{legal}, or global_batch = " + " or ".join(str(x) for x in (below, above) if x)

    share = global_batch // dp
    if global_batch % dp:
        message = f"dp ({dp}) must divide the global batch ({global_batch} sequences)"
        fix = near(f"dp = {nearest_divisors(global_batch, dp)}", dp)
        found.append(Problem.of("not-divisible", "plan.dp", dp, message, fix))
    elif share % value:
        message = (
            f"{name} ({value}) must divide the sequences of a replica "
            f"({global_batch} / dp {dp} = {share})"
        )
        fix = near(f"{name} = {nearest_divisors(share, value)}", dp * value)
        found.append(Problem.of("not-divisible", f"plan.{name}", value, message, fix))
    return found


def _plan(table: Mapping[str, Any], global_batch: int, seq_len: int | None = None) -> Plan:
    values = {key: value for key, value in table.items() if key in Plan.model_fields}
    if "microbatch" in table and isinstance(table["microbatch"], int) and table["microbatch"] > 0:
        values["microbatches"] = global_batch // max(values.get("dp", 1), 1) // table["microbatch"]
    leaves = {f"plan.{key}": Leaf(value=value, origin="") for key, value in values.items()}
    plan, broken = build_section(Plan, leaves)
    if broken:
        raise ConfigError(broken)
    problems = plan.check(seq_len=seq_len)
    if any(problem.key.removeprefix("plan.") in DEGREES for problem in problems):
        # A layout cannot be made of broken degrees.
        raise ConfigError(problems)
    if (dtype := table.get("dtype", "bfloat16")) not in ELEMENT_BYTES:
        problems.append(_bad_choice("dtype", dtype, tuple(ELEMENT_BYTES)))
    if problems:
        raise ConfigError(problems)
    return plan


def _bad_choice(key: str, value: object, choices: tuple[str, ...]) -> Problem:
    message, near = f"{key} is one of {', '.join(choices)}", nearest_choice(str(value), choices)
    return Problem.of("not-a-choice", f"plan.{key}", value, message, near)


def _changed(
    base: PlannedLayout, table: Mapping[str, Any], recompute: frozenset[str]
) -> PlannedLayout:
    """The layout with the fields that a Plan does not have."""
    own = _LAYOUT_FIELDS.keys() - Plan.model_fields.keys()
    values = {key: value for key, value in table.items() if key in own}
    problems: list[Problem] = []
    for key, value in values.items():
        default: object = _LAYOUT_FIELDS[key].default
        is_whole = isinstance(default, float) and isinstance(value, int)
        if default is not None and type(value) is not type(default) and not is_whole:
            message = f"{key} is a {type(default).__name__}"
            problems.append(Problem.of("wrong-type", f"plan.{key}", value, message))
    hints = get_type_hints(PlannedLayout)
    for key, value in values.items():
        if (choices := choices_of(hints[key])) and value not in choices:
            problems.append(_bad_choice(key, value, choices))
    if problems:
        raise ConfigError(problems)
    return base.changed(**values, recompute=recompute)
