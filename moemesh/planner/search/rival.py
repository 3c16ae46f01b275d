"""Comparison of a user's layout with the best one (`plan --why`); the nearest layout that fits.

The same search completes a rival: "tp=8,ep=64,data=zero3" is the best layout with these three
values. Keys that no search varies (a dispatcher, a payload, ...) are then set on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moemesh.config.cluster import Cluster
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.plan import DEGREES, RECOMPUTED, ScheduleName
from moemesh.config.suggest import choices_of, divisors
from moemesh.planner.layout_sources import plan_table, read_plan
from moemesh.planner.planned_layout import DATA, TRAINED, PlannedLayout
from moemesh.planner.search.search import Candidate, SearchSpace, difference, what_would_fit
from moemesh.planner.search.space import EXITS, PROPOSED_SCHEDULES, Space, families
from moemesh.planner.shapes.load_shape import Model
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.timing.price import pricing
from moemesh.schedule.build import is_defined

# The smallest change of a layout that makes it fit: the fastest change of one key, else of two.
#
# The number of devices is unchanged: dp follows from the other degrees. Every change is priced with
# the exact memory model.


def nearest_that_fits(
    shape: ModelShape, cluster: Cluster, layout: PlannedLayout
) -> Candidate | None:
    """The fastest of the smallest changes that fit; None if no change of two keys fits."""
    prices = pricing(cluster)
    for count in (1, 2):
        fitting: list[Candidate] = []
        for other in edits(shape, layout, count, node_size=cluster.gpus_per_node):
            memory = prices.memory(shape, other)
            if memory.fits(cluster.memory_bytes, prices.usable_share):
                change, parts = difference(layout, other), prices.seconds(shape, other)
                fitting.append(
                    Candidate(layout=other, breakdown=parts, memory=memory, change=change)
                )
        if fitting:
            return min(fitting, key=lambda near: near.seconds)
    return None


def instead(shape: ModelShape, cluster: Cluster, layout: PlannedLayout) -> Candidate | str:
    """The layout to run instead of one that does not fit: the nearest that fits, else the fastest
    that fits, else a sentence on why none does."""
    if (near := nearest_that_fits(shape, cluster, layout)) is not None:
        return near
    space = Space(
        num_devices=layout.world_size,
        node_size=cluster.gpus_per_node,
        trained={name: getattr(layout, name) for name in (*TRAINED, "loss", "offload")},
        **{name: getattr(layout, name) for name in ("seq_len", "global_batch", "precision")},
    )
    try:
        search = SearchSpace(shape, cluster, space)
    except ConfigError:
        return "no change of two keys makes it fit"
    if best := search.fitting(search.capacity, 1):
        other = search.candidate(best[0])
        return replace(other, change=difference(layout, other.layout))
    return f"no layout of {layout.world_size} such devices fits: {what_would_fit(search)}"


def edits(
    shape: ModelShape, layout: PlannedLayout, count: int, *, node_size: int
) -> Iterator[PlannedLayout]:
    """The legal layouts of the same number of devices that differ in exactly `count` keys (and in
    dp), with values that a search proposes, and with smaller microbatches.

    Tensor groups span nodes of `node_size` devices only if they do in `layout`.
    """
    world = layout.world_size
    inside = [degree for degree in divisors(world) if degree <= node_size]
    share = max(layout.global_batch // layout.dp, 1)
    experts = divisors(shape.num_experts) if shape.is_moe else []
    widths = divisors(shape.expert_intermediate_size) if shape.is_moe else []
    every: dict[str, list[Any]] = {
        "pp": [degree for degree in divisors(world) if degree <= shape.num_layers],
        "schedule": list(PROPOSED_SCHEDULES) if layout.pp > 1 else [],
        "stages_per_rank": [1, 2, 3, 4],
        "cp": divisors(world),
        "tp": inside,
        "ep": [degree for degree in experts if world % degree == 0],
        "etp": [degree for degree in widths if degree in inside],
        "zero": [0, 1, 2, 3],
        "recompute": list(RECOMPUTED.values()),
        "microbatch": [size for size in divisors(share) if size < layout.microbatch],
        "attention_exit": list(EXITS) if layout.tp > 1 else [],
    }
    alternatives = {
        name: [value for value in values if value != getattr(layout, name)]
        for name, values in every.items()
    }
    choices = {name: values for name, values in alternatives.items() if values}
    for names in combinations(choices, count):
        for chosen in product(*(choices[name] for name in names)):
            values: dict[str, Any] = dict(zip(names, chosen, strict=True))
            edited = {name: values.get(name, getattr(layout, name)) for name in every}
            dp, rest = divmod(world, edited["pp"] * edited["cp"] * edited["tp"])
            if rest or layout.global_batch % (dp * edited["microbatch"]):
                continue
            if {"pp", "schedule", "stages_per_rank"} & set(values):
                values["layers_per_stage"] = None  # the given cut was for other stages
            try:
                other = layout.changed(**values, dp=dp)
            except ConfigError:
                continue
            # Rules that a layout does not check by itself.
            if other.seq_len % other.cp or other.check(shape.sizes):
                continue
            if other.zero and other.dp * other.cp == 1:
                continue
            # ZeRO-2 and 3 send gradients (and weights) for every microbatch of a pipeline, so the
            # search proposes neither with one.
            if other.zero >= 2 and other.pp > 1 and not (layout.zero >= 2 and layout.pp > 1):
                continue
            if (other.schedule == "interleaved_1f1b") != (other.stages_per_rank > 1):
                continue  # only interleaved_1f1b has stages_per_rank above 1, and it always does
            if is_defined(other.schedule, other.pp, other.microbatches, other.stages_per_rank):
                yield other


Verdict = Literal["illegal", "does not fit", "slower", "faster", "equal", "chosen"]

#: Degrees whose product is the number of devices.
_WORLD = ("pp", "dp", "cp", "tp")
_FIXED = (*DEGREES, "stages_per_rank", "microbatch", "microbatches")
#: Keys that the search varies.
_SEARCHED = (*_FIXED, "schedule", "data", "zero", "recompute", "attention_exit")
#: Value of `data` that no search varies: it is set on the best layout without ZeRO.
_SERVER = "parameter_server"
#: Codes of problems that a layout has with any degrees.
_UNSOLVABLE = frozenset({"unknown-key", "not-a-choice", "wrong-type", "out-of-range", "conflict"})
#: Largest share of a step that is attributed to rounding.
_EQUAL = 1e-9
#: Parts of the memory that a device needs.
MEMORY_PARTS = ("states", "activations", "logits", "working", "libraries")


@dataclass(frozen=True, kw_only=True)
class Rival:
    """Comparison of a user's layout with the best one, which is the recommended one of a search.

    An illegal layout has `problems` and nothing else. For a legal one, `candidate` is the best
    layout with the user's values, and `short` the bytes by which it exceeds the device (0 if it
    fits).
    `slower`, `parts` and `memory` are this layout minus the best one: seconds of a step, seconds of
    each part (largest first), bytes of each part of the memory. `nearest` is the smallest change
    that fits. `beyond` lists the assumptions and limits of the search that the layout violates, and
    the user's values of keys that no search varies.
    """

    #: The user's text.
    asked: str
    verdict: Verdict
    problems: tuple[Problem, ...] = ()
    candidate: Candidate | None = None
    change: str = ""
    short: float = 0.0
    slower: float = 0.0
    parts: tuple[tuple[str, float], ...] = ()
    memory: tuple[tuple[str, float], ...] = ()
    nearest: Candidate | None = None
    beyond: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """An element of the key "why" of ``plan --json``."""
        head: dict[str, Any] = {"asked": self.asked, "verdict": self.verdict}
        if self.candidate is None:
            keys = ("key", "message", "fix")
            rows = [{key: getattr(problem, key) for key in keys} for problem in self.problems]
            return head | {"problems": rows}
        return head | {
            "plan": self.candidate.layout.text,
            "change": self.change,
            "seconds": self.candidate.seconds,
            "memory_bytes": self.candidate.memory.needed,
            "short_bytes": self.short,
            "slower_seconds": self.slower,
            "parts": dict(self.parts),
            "memory": dict(self.memory),
            "nearest_that_fits": None if self.nearest is None else self.nearest.layout.text,
            "beyond": list(self.beyond),
        }


def rival_table(asked: str, model: Model | None, seq_len: int, global_batch: int) -> dict[str, Any]:
    """The keys of a user's layout ("tp=8,ep=64,data=zero3"), for :func:`why_not`. Raises
    ConfigError for an unreadable text, and for keys and values that no other degrees make legal."""
    table = plan_table(asked, {"seq_len": seq_len, "global_batch": global_batch})
    complete = {**table, "microbatch": table.get("microbatch", 1)}
    if "microbatches" in table:
        del complete["microbatch"]
    problems = _problems(complete, model, seq_len, global_batch)
    if unsolvable := [problem for problem in problems if problem.code in _UNSOLVABLE]:
        raise ConfigError(unsolvable)
    for name in ("seq_len", "global_batch"):
        table.pop(name, None)
    return table


def why_not(search: SearchSpace, model: Model, best: Candidate, asked: str) -> Rival:
    """Compare a user's layout ("tp=8,ep=64,data=zero3") with `best`, the recommended one of a
    search. Raises ConfigError for an unreadable text."""
    space = search.space
    table = rival_table(asked, model, space.seq_len, space.global_batch)
    if problems := _world_problems(table, space.num_devices):
        return _illegal(asked, table, problems, search)
    narrow, beyond = _space_of(table, space)
    narrowed = None
    # If `moemesh train` supports no layout with the user's values, all layouts are searched.
    for trainable in dict.fromkeys((space.trainable, False)):
        with suppress(ConfigError):
            limited = replace(narrow, trainable=trainable)
            narrowed = SearchSpace(search.shape, search.cluster, limited)
            break
    if narrowed is None:
        return _illegal(asked, table, _why_illegal(table, model, space), search)
    if narrowed.space.trainable != space.trainable:
        beyond = (*beyond, "only what `moemesh train` carries out")
    fitting = narrowed.fitting(narrowed.capacity, 1)
    # If nothing fits, compare the layout that needs the least memory.
    candidate = narrowed.candidate(fitting[0] if fitting else narrowed.smallest())
    layout = candidate.layout
    # Keys that no search varies are set on the best layout.
    if unsearched := {
        key: value
        for key, value in table.items()
        if (key not in _SEARCHED or value == _SERVER) and value != getattr(layout, key, None)
    }:
        user_table = {**plan_table(layout.key), **unsearched}
        changed = read_plan(user_table, model=model).layout
        memory, breakdown = search.pricing.price(search.shape, changed)
        candidate = Candidate(layout=changed, breakdown=breakdown, memory=memory)
        beyond = (*beyond, *(f"{key} = {value}" for key, value in unsearched.items()))
    if candidate.layout.microbatch > (most := space.most_sequences(search.shape)):
        beyond = (*beyond, f"microbatch above {most}")
    if candidate.layout.cp > space.largest_context:
        beyond = (*beyond, f"cp above {space.largest_context}")
    short = max(candidate.memory.needed - search.capacity, 0.0)
    slower = candidate.seconds - best.seconds
    seconds, best_seconds = candidate.breakdown, best.breakdown
    names = {*seconds, *best_seconds} - {"total"}
    differences = {name: seconds.get(name, 0.0) - best_seconds.get(name, 0.0) for name in names}
    parts = sorted(differences.items(), key=lambda item: (-item[1], item[0]))
    memory_parts = [
        (part, getattr(candidate.memory, part) - getattr(best.memory, part))
        for part in MEMORY_PARTS
    ]
    memory_parts.sort(key=lambda item: -item[1])
    verdict: Verdict = "slower" if slower > 0 else "faster"
    if abs(slower) <= _EQUAL * best.seconds:
        verdict = "equal"
    if candidate.layout == best.layout:
        verdict = "chosen"
    nearest = None
    if short:
        verdict = "does not fit"
        nearest = nearest_that_fits(search.shape, search.cluster, candidate.layout)
    return Rival(
        asked=asked,
        verdict=verdict,
        candidate=candidate,
        change=difference(best.layout, candidate.layout),
        short=short,
        slower=slower,
        parts=tuple(parts),
        memory=tuple(memory_parts),
        nearest=nearest,
        beyond=beyond,
    )


def _illegal(
    asked: str, table: Mapping[str, Any], problems: Sequence[Problem], search: SearchSpace
) -> Rival:
    """The comparison of an illegal layout: each problem has the nearest legal change as its fix."""
    fixes = {problem.key: _nearest_legal(problem, table, search) for problem in problems}
    fixed = (replace(problem, fix=fixes[problem.key]) for problem in problems)
    return Rival(asked=asked, verdict="illegal", problems=tuple(fixed))


def _nearest_legal(problem: Problem, table: Mapping[str, Any], search: SearchSpace) -> str:
    """One key of `table` (the wrong one if possible) with its nearest values that are legal in the
    space; the problem's own fix if the search does not vary the key."""
    broken = problem.key.removeprefix("plan.")
    keys = [key for key in _FIXED if key in table]
    if broken in _FIXED:
        keys.sort(key=lambda key: key != broken)
    elif problem.code != "no-plan":
        return problem.fix
    for key in keys:
        # Legal values of `key` in layouts with all other values of the table.
        rest = {name: value for name, value in table.items() if name != key}
        space, _ = _space_of(rest, search.space)
        space = replace(space, largest_microbatch=space.global_batch, tensor_inside_node=False)
        legal: set[int] = set()
        for family in families(search.shape, space, Counter()):
            if hasattr(family.columns, key):
                cuts: NDArray[np.bool_] = np.any(family.legal, axis=(0, 1, 2))
                values: NDArray[np.int64] = getattr(family.columns.where(cuts), key)
                legal.update(values.flatten().tolist())
            else:
                legal.add(int(getattr(family, key)))
        below = max((value for value in legal if value < table[key]), default=0)
        near = below, min((value for value in legal if value > table[key]), default=0)
        if any(near):
            return f"{key} = {' or '.join(str(value) for value in near if value)}"
    return "none by one of these keys alone; name fewer"


def _world_problems(table: Mapping[str, Any], devices: int) -> list[Problem]:
    """Problem of degrees whose product does not divide (or equal) the number of devices."""
    named = {key: table[key] for key in _WORLD if key in table}
    product, is_whole = prod(named.values()), len(named) == len(_WORLD)
    if devices % product == 0 and (not is_whole or product == devices):
        return []
    key = "dp" if is_whole else max(named, key=lambda name: named[name])
    shown = " x ".join(f"{k} {v}" for k, v in named.items())
    if len(named) > 1:
        shown += f" = {product}"
    message = f"{shown} {'is not' if is_whole else 'does not divide'} the {devices} devices"
    return [Problem(code="not-divisible", key=f"plan.{key}", value=named[key], message=message)]


def _why_illegal(table: Mapping[str, Any], model: Model, space: Space) -> tuple[Problem, ...]:
    """The broken rules of a table without a legal layout: it is completed with every pp and the
    rest of the devices in dp, tp or cp, and the completion with the fewest problems counts."""
    problems: list[list[Problem]] = []
    open_keys = [key for key in ("dp", "tp", "cp") if key not in table]
    for pp in [table["pp"]] if "pp" in table else divisors(space.num_devices):
        filled = {"pp": pp, **table}
        if "microbatches" not in table:
            filled.setdefault("microbatch", 1)
        left, rest = divmod(space.num_devices, prod(filled.get(key, 1) for key in _WORLD))
        if rest or (left > 1 and not open_keys):
            continue
        for key in open_keys or ("pp",):
            complete = filled if left == 1 else {**filled, key: left}
            problems.append(_problems(complete, model, space.seq_len, space.global_batch))
    if best := min(problems, key=len, default=list[Problem]()):
        return tuple(best)
    shown = ", ".join(f"{key} = {value}" for key, value in table.items())
    message = f"no layout of {space.num_devices} devices and {space.global_batch} sequences has it"
    return (Problem(code="no-plan", key="plan", value=shown, message=message),)


def _problems(
    table: Mapping[str, Any], model: Model | None, seq_len: int, global_batch: int
) -> list[Problem]:
    """Problems of a complete plan."""
    try:
        read_plan(table, seq_len=seq_len, global_batch=global_batch, model=model)
    except ConfigError as error:
        return list(error.problems)
    return []


def _space_of(table: Mapping[str, Any], space: Space) -> tuple[Space, tuple[str, ...]]:
    """The space with the table's values fixed, and the assumptions that they violate."""
    fixed, beyond = {key: table[key] for key in _FIXED if key in table}, list[str]()
    changes: dict[str, Any] = {"fixed": fixed}
    if (schedule := table.get("schedule")) in choices_of(ScheduleName):
        changes["schedules"] = (schedule,)
        changes["fewest_stages"] = 1 if table.get("pp") == 1 else 2
        if schedule not in PROPOSED_SCHEDULES:
            beyond.append(f"schedule = {schedule}")
    zero = table.get("zero")
    if (data := table.get("data")) in (_SERVER, *DATA):
        zero = 0 if data == _SERVER else DATA.index(data)
    if zero is not None:
        changes["zero"] = (zero,)
        if zero >= 2 and table.get("pp", 1) > 1:
            changes["sharded_pipelines"] = True
            beyond.append("ZeRO-2 or 3 with a pipeline")
    if (recompute := table.get("recompute")) in RECOMPUTED:
        changes["recompute"] = (recompute,)
    if (attention_exit := table.get("attention_exit")) is not None:
        changes["exits"] = (attention_exit,)
        if attention_exit not in EXITS:
            beyond.append(f"attention_exit = {attention_exit}")
    if max(table.get("tp", 1), table.get("etp", 1)) > space.node_size:
        changes["tensor_inside_node"] = False
        beyond.append("tensor groups across nodes")
    if "microbatch" in table or "microbatches" in table:
        changes["largest_microbatch"] = space.global_batch
    changes["largest_context"] = max(space.largest_context, table.get("cp", 1))
    return replace(space, **changes), tuple(beyond)
