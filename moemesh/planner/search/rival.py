"""A layout that the user names: compared with the best (`plan --why`); the nearest that fits.

What a rival leaves open is filled in by the same search: "tp=8,ep=64,data=zero3" is the best layout
that has these three. Keys that no search varies (a dispatcher, a payload, ...) are set on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import prod
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from moemesh.config.cluster import Cluster
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.plan import DEGREES, ScheduleName
from moemesh.config.suggest import divisors
from moemesh.planner.layout_sources import plan_table, read_plan
from moemesh.planner.planned_layout import DATA, RECOMPUTED, TRAINED, PlannedLayout
from moemesh.planner.search.search import Candidate, SearchSpace, difference, what_would_fit
from moemesh.planner.search.space import EXITS, SCHEDULES, Space, families
from moemesh.planner.shapes.load_shape import Model
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.timing.price import pricing
from moemesh.schedule.build import is_defined

# The smallest change of a layout that makes it fit: one key, else two; of those the fastest.
#
# The devices stay as many as they are: dp takes what the other degrees leave over. Every change is
# priced with the exact memory model, none is guessed.


#: Keys that an edit changes at once, at most.
MOST_CHANGES = 2


def nearest_that_fits(
    shape: ModelShape, cluster: Cluster, layout: PlannedLayout
) -> Candidate | None:
    """The fastest of the smallest changes that fit; None when no change of two keys does."""
    known = pricing(cluster)
    for count in range(1, MOST_CHANGES + 1):
        found: list[Candidate] = []
        for other in edits(shape, layout, count, node_size=cluster.gpus_per_node):
            memory = known.memory(shape, other)
            if memory.fits(cluster.memory_bytes, known.usable_share):
                change, parts = difference(layout, other), known.seconds(shape, other)
                found.append(Candidate(layout=other, breakdown=parts, memory=memory, change=change))
        if found:
            return min(found, key=lambda near: near.seconds)
    return None


def instead(shape: ModelShape, cluster: Cluster, layout: PlannedLayout) -> Candidate | str:
    """The layout to run in place of one that does not fit: the nearest; where none is near, the
    fastest that fits at all; else a sentence about what there is."""
    if (near := nearest_that_fits(shape, cluster, layout)) is not None:
        return near
    space = Space(
        num_devices=layout.world_size,
        node_size=cluster.gpus_per_node,
        trained={name: getattr(layout, name) for name in (*TRAINED, "loss")},
        **{name: getattr(layout, name) for name in ("seq_len", "global_batch", "precision")},
    )
    try:
        found = SearchSpace(shape, cluster, space)
    except ConfigError:
        return "no change of two keys makes it fit"
    if best := found.fitting(found.capacity, 1):
        other = found.candidate(best[0])
        return replace(other, change=difference(layout, other.layout))
    return f"no layout of {layout.world_size} such devices fits: {what_would_fit(found)}"


def edits(
    shape: ModelShape, layout: PlannedLayout, count: int, *, node_size: int
) -> Iterator[PlannedLayout]:
    """Every legal layout of as many devices that differs in exactly `count` keys.

    Tensor groups leave a node of `node_size` devices only where they did before.
    """
    world = layout.world_size
    inside = [degree for degree in divisors(world) if degree <= node_size]
    share = max(layout.global_batch // layout.dp, 1)
    experts = divisors(shape.num_experts) if shape.is_moe else []
    widths = divisors(shape.expert_intermediate_size) if shape.is_moe else []
    every: dict[str, list[Any]] = {
        "pp": [degree for degree in divisors(world) if degree <= shape.num_layers],
        "schedule": list(SCHEDULES) if layout.pp > 1 else [],
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
    found = {
        name: [value for value in values if value != getattr(layout, name)]
        for name, values in every.items()
    }
    choices = {name: values for name, values in found.items() if values}
    for names in combinations(choices, count):
        for chosen in product(*(choices[name] for name in names)):
            values: dict[str, Any] = dict(zip(names, chosen, strict=True))
            now = {name: values.get(name, getattr(layout, name)) for name in every}
            # dp is what the other degrees leave.
            dp, rest = divmod(world, now["pp"] * now["cp"] * now["tp"])
            if rest or layout.global_batch % (dp * now["microbatch"]):
                continue
            if {"pp", "schedule", "stages_per_rank"} & set(values):
                values["layers_per_stage"] = None
            try:
                other = layout.changed(**values, dp=dp)
            except ConfigError:
                continue
            # Rules beyond those that a layout checks by itself.
            if other.seq_len % other.cp or other.check(shape.sizes):
                continue
            if other.zero and other.dp * other.cp == 1:
                continue
            # Gradients (and weights) would travel for every microbatch, as the search assumes.
            if other.zero >= 2 and other.pp > 1 and not (layout.zero >= 2 and layout.pp > 1):
                continue
            if (other.schedule == "interleaved_1f1b") != (other.stages_per_rank > 1):
                continue  # one chunk is 1F1B, and only this schedule has more
            if is_defined(other.schedule, other.pp, other.microbatches, other.stages_per_rank):
                yield other


Verdict = Literal["illegal", "does not fit", "slower", "faster", "equal", "chosen"]

#: Degrees whose product is the number of devices.
_WORLD = ("pp", "dp", "cp", "tp")
_FIXED = (*DEGREES, "stages_per_rank", "microbatch", "microbatches")
#: Keys that say what the search varies.
_SEARCHED = (*_FIXED, "schedule", "data", "zero", "recompute", "attention_exit")
#: The value of `data` that no search varies: it is set on the best layout without ZeRO.
_SERVER = "parameter_server"
#: Kinds of problems that no other degrees could mend.
_WORDS = frozenset({"unknown-key", "not-a-choice", "wrong-type", "out-of-range", "conflict"})
#: Shares of a step that are rounding.
_EQUAL = 1e-9
MEMORY_PARTS = ("states", "activations", "logits", "working")


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A layout that somebody names, judged. `asked` is the text; `problems` why it is illegal;
    else `candidate` is the best layout with what was asked, `short` the bytes that it lacks (0
    where it fits), `slower` the seconds of a step and `parts` those of each part that it takes
    beyond the best (negative where it takes less), the largest first; `memory` the bytes of each
    part of the memory beyond the best; `nearest` the smallest change that fits; `beyond` the
    assumptions and limits of the search that it is outside of, where it may be faster."""

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
        """One of the key "why" of ``plan --json``."""
        found: dict[str, Any] = {"asked": self.asked, "verdict": self.verdict}
        if self.candidate is None:
            keys = ("key", "message", "fix")
            said = [{key: getattr(one, key) for key in keys} for one in self.problems]
            return found | {"problems": said}
        return found | {
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
    """The keys of the layout `asked` ("tp=8,ep=64,data=zero3"), for :func:`why_not`. Raises
    ConfigError for a text that is no plan, with every key and value that no other degrees mend."""
    table = plan_table(asked)
    for name in ("seq_len", "global_batch"):
        table.pop(name, None)
    one = {**table, "microbatch": table.get("microbatch", 1)}
    if "microbatches" in table:
        del one["microbatch"]
    found = _problems(one, model, seq_len, global_batch)
    if problems := [problem for problem in found if problem.code in _WORDS]:
        raise ConfigError(problems)
    return table


def why_not(found: SearchSpace, model: Model, best: Candidate, asked: str) -> Rival:
    """Judge the layout `asked` ("tp=8,ep=64,data=zero3") against the best of `found`. Raises
    ConfigError for a text that is no plan."""
    space = found.space
    table = rival_table(asked, model, space.seq_len, space.global_batch)
    if problems := _world_problems(table, space.num_devices):
        return _illegal(asked, table, problems, found)
    narrow, beyond = _space_of(table, space)
    within = None
    for trainable in dict.fromkeys((space.trainable, False)):
        with suppress(ConfigError):
            limited = replace(narrow, trainable=trainable)
            within = SearchSpace(found.shape, found.cluster, limited)
            break
    if within is None:
        return _illegal(asked, table, _why_illegal(table, model, space), found)
    if within.space.trainable != space.trainable:
        beyond = (*beyond, "only what `moemesh train` carries out")
    fitting = within.fitting(within.capacity, 1)
    # Where nothing fits, the layout that needs least is the one to look at.
    candidate = within.candidate(fitting[0] if fitting else within.smallest())
    layout = candidate.layout
    if more := {
        key: value
        for key, value in table.items()
        if (key not in _SEARCHED or value == _SERVER) and value != getattr(layout, key, None)
    }:
        asked_for = {**plan_table(layout.key), **more}
        changed = read_plan(asked_for, model=model).layout
        memory, breakdown = found.pricing.price(found.shape, changed)
        candidate = Candidate(layout=changed, breakdown=breakdown, memory=memory)
        beyond = (*beyond, *(f"{key} = {value}" for key, value in more.items()))
    if candidate.layout.microbatch > space.largest_microbatch:
        beyond = (*beyond, f"microbatch above {space.largest_microbatch}")
    if candidate.layout.cp > space.largest_context:
        beyond = (*beyond, f"cp above {space.largest_context}")
    short = max(candidate.memory.needed - found.capacity, 0.0)
    slower = candidate.seconds - best.seconds
    now, then = candidate.breakdown, best.breakdown
    longer = {name: now.get(name, 0.0) - then.get(name, 0.0) for name in {*now, *then} - {"total"}}
    parts = sorted(longer.items(), key=lambda item: (-item[1], item[0]))
    own, its = candidate.memory, best.memory
    held = [(part, getattr(own, part) - getattr(its, part)) for part in MEMORY_PARTS]
    held.sort(key=lambda item: -item[1])
    verdict: Verdict = "slower" if slower > 0 else "faster"
    if abs(slower) <= _EQUAL * best.seconds:
        verdict = "equal"
    if candidate.layout == best.layout:
        verdict = "chosen"
    nearest = None
    if short:
        verdict = "does not fit"
        nearest = nearest_that_fits(found.shape, found.cluster, candidate.layout)
    return Rival(
        asked=asked,
        verdict=verdict,
        candidate=candidate,
        change=difference(best.layout, candidate.layout),
        short=short,
        slower=slower,
        parts=tuple(parts),
        memory=tuple(held),
        nearest=nearest,
        beyond=beyond,
    )


def _illegal(
    asked: str, table: Mapping[str, Any], problems: Sequence[Problem], found: SearchSpace
) -> Rival:
    """The verdict, each problem with the nearest change to as many devices that is legal."""
    fixes = {problem.key: _nearest_legal(problem, table, found) for problem in problems}
    fixed = (replace(problem, fix=fixes[problem.key]) for problem in problems)
    return Rival(asked=asked, verdict="illegal", problems=tuple(fixed))


def _nearest_legal(problem: Problem, table: Mapping[str, Any], found: SearchSpace) -> str:
    """One key of `table`, the broken one if that helps, with its nearest values of which the space
    has a layout; the problem's own fix where it is about no number that the search varies."""
    broken = problem.key.removeprefix("plan.")
    keys = [key for key in _FIXED if key in table]
    if broken in _FIXED:
        keys.sort(key=lambda key: key != broken)
    elif problem.code != "no-plan":
        return problem.fix
    for key in keys:
        # Values with which the space has a layout that has all else of the table.
        rest = {name: value for name, value in table.items() if name != key}
        space, _ = _space_of(rest, found.space)
        space = replace(space, largest_microbatch=space.global_batch, tensor_inside_node=False)
        legal: set[int] = set()
        for family in families(found.shape, space, Counter()):
            if hasattr(family.columns, key):
                cuts: NDArray[np.bool_] = np.any(family.legal, axis=(0, 1, 2))
                found_there: NDArray[np.int64] = getattr(family.columns.where(cuts), key)
                legal.update(found_there.flatten().tolist())
            else:
                legal.add(int(getattr(family, key)))
        below = max((value for value in legal if value < table[key]), default=0)
        near = below, min((value for value in legal if value > table[key]), default=0)
        if any(near):
            return f"{key} = {' or '.join(str(value) for value in near if value)}"
    return "none by one of these keys alone; name fewer"


def _world_problems(table: Mapping[str, Any], devices: int) -> list[Problem]:
    """Degrees whose product no number of replicas completes to all devices."""
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
    """The rules that break under the completion which breaks fewest."""
    found: list[list[Problem]] = []
    open_keys = [key for key in ("dp", "tp", "cp") if key not in table]
    for pp in [table["pp"]] if "pp" in table else divisors(space.num_devices):
        filled = {"pp": pp, **table}
        if "microbatches" not in table:
            filled.setdefault("microbatch", 1)
        left, rest = divmod(space.num_devices, prod(filled.get(key, 1) for key in _WORLD))
        if rest or (left > 1 and not open_keys):
            continue
        for key in open_keys or ("pp",):
            one = filled if left == 1 else {**filled, key: left}
            found.append(_problems(one, model, space.seq_len, space.global_batch))
    if best := min(found, key=len, default=list[Problem]()):
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
    """The space with what the table says held fixed, and the assumptions that it breaks."""
    fixed, beyond = {key: table[key] for key in _FIXED if key in table}, list[str]()
    changes: dict[str, Any] = {"fixed": fixed}
    if (schedule := table.get("schedule")) in get_args(ScheduleName):
        changes["schedules"] = (schedule,)
        changes["fewest_stages"] = 1 if table.get("pp") == 1 else 2
        if schedule not in SCHEDULES:
            beyond.append(f"schedule = {schedule}")
    zero = table.get("zero")
    if (data := table.get("data")) in (_SERVER, *DATA):
        zero = 0 if data == _SERVER else DATA.index(data)
    if zero is not None:
        changes["zero"] = (zero,)
        if zero >= 2 and table.get("pp", 1) > 1:
            changes["sharded_pipelines"] = True
            beyond.append("ZeRO-2 or 3 with a pipeline")
    if (word := table.get("recompute")) in RECOMPUTED:
        changes["recompute"] = (word,)
    if (leaves := table.get("attention_exit")) is not None:
        changes["exits"] = (leaves,)
        if leaves not in EXITS:
            beyond.append(f"attention_exit = {leaves}")
    if max(table.get("tp", 1), table.get("etp", 1)) > space.node_size:
        changes["tensor_inside_node"] = False
        beyond.append("tensor groups across nodes")
    changes["largest_microbatch"] = max(space.largest_microbatch, table.get("microbatch", 1))
    if count := table.get("microbatches", 0):
        largest = max(space.global_batch // count, 1)
        changes["largest_microbatch"] = max(changes["largest_microbatch"], largest)
    changes["largest_context"] = max(space.largest_context, table.get("cp", 1))
    return replace(space, **changes), tuple(beyond)
