"""Rules of degrees: constraints between the two meshes, the model and the stages.

Each function has one group of rules. The rules hold for every object with degrees: a
:class:`moemesh.config.plan.Plan`, which `moemesh train` runs, and layouts of the planner, which may
be for other trainers. From a model they read :class:`CutSizes`. The planner's search calls the
predicates, :func:`uncut_by_tensor` and :func:`experts_fit`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import gcd
from typing import NamedTuple

from moemesh.config.errors import Problem
from moemesh.config.layout import shard_sizes
from moemesh.config.names import Names
from moemesh.config.schedule_table import SCHEDULES
from moemesh.config.section import problem_of
from moemesh.config.suggest import divisors, nearest, nearest_divisors

#: A problem of a key of [plan], with the value that a plan or layout has there:
#: ``plan_problem(plan, code, name, message, fix, *related)``.
plan_problem = partial(problem_of, "plan")

#: Schedules whose ranks hold two stages each, at both arms of a V.
V_SCHEDULES = Names(SCHEDULES, where=lambda row: row.stages == "v")
#: Schedules of two pipes: two ranks hold every stage, and sum its gradients.
MIRRORED_SCHEDULES = Names(SCHEDULES, where=lambda row: row.stages == "mirrored")
#: Schedules that update weights while microbatches are in flight.
ASYNCHRONOUS_SCHEDULES = Names(SCHEDULES, where=lambda row: row.is_asynchronous)
#: Schedules with separate operations for weight gradients.
DEFERRING_SCHEDULES = Names(SCHEDULES, where=lambda row: bool(row.undeferred))
#: Schedules that cut a sequence into slices, and those with a window of microbatches.
SLICED_SCHEDULES = Names(SCHEDULES, where=lambda row: "num_slices" in row.options)
WINDOWED_SCHEDULES = Names(SCHEDULES, where=lambda row: "window" in row.options)

#: Keys of [model] that the width of the shared experts follows from.
_SHARED_KEYS = ("num_shared_experts", "shared_intermediate_size", "expert_intermediate_size")


class CutSizes(NamedTuple):
    """The sizes of a model that degrees divide; 0 for parts that it lacks. `num_kv_heads` is 0 with
    latent attention, `intermediate_size` the width of dense MLPs, `shared_width` that of all shared
    experts of a layer."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    shared_width: int
    num_moe_layers: int
    num_experts: int
    expert_intermediate_size: int


class Degrees(NamedTuple):
    """Values of a plan or layout that the rules read."""

    pp: int
    dp: int
    cp: int
    tp: int
    ep: int
    etp: int
    context: str
    schedule: str
    num_stages: int
    stages_per_rank: int
    layers_per_stage: tuple[int, ...] | None
    servers: int

    @classmethod
    def of(cls, plan: object) -> Degrees:
        """The degrees of anything that has attributes of these names."""
        return cls(*(getattr(plan, name) for name in cls._fields))


def degree_problems(
    values: object, sizes: CutSizes | None, *, copied_kv_heads: bool = False
) -> Iterator[Problem]:
    """Problems of rules between the degrees in `values`, all at least 1, and, with `sizes`, between
    them and a model. `copied_kv_heads`: ranks may hold copies of a key/value head if there are
    fewer heads than tp, as in other trainers; ours never copies."""
    plan = Degrees.of(values)
    ranks, experts = plan.dp * plan.cp * plan.tp, plan.ep * plan.etp
    if ranks % experts:
        # The nearest degrees with which the two meshes cover the same ranks.
        num_experts = 0 if sizes is None else max(sizes.num_experts, 0)
        if ranks % plan.etp == 0:
            # Without experts this is the first number, gcd(n, 0) = n.
            dividend = gcd(ranks // plan.etp, num_experts)
            fix = f"ep = {nearest_divisors(dividend, plan.ep)}"
        elif ranks % plan.ep == 0:
            fix = f"etp = {nearest_divisors(ranks // plan.ep, plan.etp)}"
        else:
            fix = f"ep*etp = {nearest_divisors(ranks, experts)}"
        if num_experts % plan.ep == 0:
            # More replicas are another remedy.
            step = experts // gcd(experts, plan.cp * plan.tp)
            fix += f", or dp = {-(-plan.dp // step) * step}"
        key, keys = "ep" if plan.ep > 1 else "etp", ("ep", "etp", "dp", "cp", "tp")
        message = f"ep*etp ({experts}) must divide dp*cp*tp ({ranks})"
        yield plan_problem(plan, "not-divisible", key, message, fix, *keys)
    if sizes is None:
        return
    # Every stage needs a layer; explicit cuts are one positive number a stage, all layers used.
    stages, layers, cuts = plan.num_stages, sizes.num_layers, plan.layers_per_stage
    if layers >= 1 and cuts is not None:
        if len(cuts) != stages or sum(cuts) != layers or min(cuts) < 1:
            equal = shard_sizes(layers, stages)
            fix = f"layers_per_stage = {list(equal)}" if min(equal) else f"pp = {layers}"
            message = (
                f"layers_per_stage ({len(cuts)} numbers, sum {sum(cuts)}) must be {stages} "
                f"positive numbers that add up to num_layers ({layers})"
            )
            keys = ("pp", "stages_per_rank", "model.num_layers")
            yield plan_problem(plan, "stages", "layers_per_stage", message, fix, *keys)
    elif 1 <= layers < stages:
        chunks, is_v = stages // plan.pp, plan.schedule in V_SCHEDULES
        product = f"pp*stages_per_rank ({plan.pp}*{chunks} = {stages})"
        if is_v:
            product = f"{plan.schedule} puts two stages on a rank: pp*2 ({plan.pp}*2 = {stages})"
        key, fix = "pp", f"pp = {max(layers // chunks, 1)}"
        if plan.pp <= layers and not is_v:
            key, fix = "stages_per_rank", f"stages_per_rank = {layers // plan.pp}"
        elif chunks > layers and not is_v:
            fix += ", stages_per_rank = 1"
        message = f"{product} stages need at least as many layers; num_layers is {layers}"
        keys = ("pp", "stages_per_rank", "schedule", "model.num_layers")
        yield plan_problem(plan, "too-large", key, message, fix, *keys)
    yield from _cut_rules(plan, sizes, copied_kv_heads)


def uncut_by_tensor(sizes: CutSizes, tp: int, *, copied_kv_heads: bool = False) -> dict[str, int]:
    """Name -> size, for the sizes that `tp` does not divide."""
    cut = {
        "num_heads": sizes.num_heads,
        "num_kv_heads": sizes.num_kv_heads,
        "intermediate_size": sizes.intermediate_size,
        "shared width": sizes.shared_width,
    }
    if copied_kv_heads and sizes.num_kv_heads and tp % sizes.num_kv_heads == 0:
        del cut["num_kv_heads"]
    return {name: size for name, size in cut.items() if size % tp}


def experts_fit(sizes: CutSizes, ranks: int, ep: int, etp: int) -> bool:
    """Whether the `ranks` ranks of a stage can hold the experts: ep divides their number, etp the
    width of each."""
    if not sizes.num_moe_layers:
        return ep * etp == 1
    remainder = sizes.num_experts % ep or sizes.expert_intermediate_size % etp
    return not remainder and ranks % (ep * etp) == 0


def server_problems(values: object) -> Iterator[Problem]:
    """Problem unless fewer ranks are servers than share dense weights: at least one works."""
    plan = Degrees.of(values)
    ranks, keys = plan.dp * plan.cp, ("data", "dp", "cp")
    if plan.servers < 1 or plan.servers < ranks:
        return
    if ranks == 1:
        message = "data = parameter_server needs a worker beside its server: dp*cp is 1"
        fix = "dp = 2, or data = replicate"
        yield plan_problem(plan, "too-small", "dp", message, fix, *keys)
        return
    message = (
        f"servers ({plan.servers}) must be fewer than the data-parallel ranks dp*cp ({ranks}): "
        "where all of them serve, that is data = zero1"
    )
    fix = f"servers = {ranks - 1}, or data = zero1"
    yield plan_problem(plan, "too-large", "servers", message, fix, *keys)


def _cut_rules(plan: Degrees, sizes: CutSizes, copied_kv_heads: bool) -> Iterator[Problem]:
    """Problems of sizes that a degree does not divide: heads, dense widths and shared experts by
    tp, heads by cp, too, if `context` moves them, experts by ep, the width of each by etp."""
    tp, heads = plan.tp, sizes.num_heads
    for name, size in uncut_by_tensor(sizes, tp, copied_kv_heads=copied_kv_heads).items():
        message = f"tp ({tp}) must divide {name} ({size})"
        if copied_kv_heads and name == "num_kv_heads":
            message = f"tp ({tp}) and num_kv_heads ({size}): one must divide the other"
        common = divisors(abs(gcd(heads, sizes.intermediate_size, sizes.shared_width)))
        legal = [
            n for n in common if not uncut_by_tensor(sizes, n, copied_kv_heads=copied_kv_heads)
        ]
        keys = (f"model.{key}" for key in (_SHARED_KEYS if name == "shared width" else (name,)))
        fix = f"tp = {nearest(legal, tp)}"
        yield plan_problem(plan, "not-divisible", "tp", message, fix, *keys)
    if plan.context == "all_to_all" and heads % tp == 0 and heads % (plan.cp * tp):
        message = (
            f'context = "all_to_all" moves heads: cp*tp ({plan.cp * tp}) must divide '
            f"num_heads ({heads})"
        )
        fix = f'cp = {nearest_divisors(heads // tp, plan.cp)}, or context = "ring"'
        keys = ("context", "tp", "model.num_heads")
        yield plan_problem(plan, "not-divisible", "cp", message, fix, *keys)
    ranks = plan.dp * plan.cp * plan.tp
    for name, size_name in (("ep", "num_experts"), ("etp", "expert_intermediate_size")):
        degree, size = int(getattr(plan, name)), int(getattr(sizes, size_name))
        if sizes.num_moe_layers <= 0 and degree > 1:
            why = "num_experts is 0" if sizes.num_experts == 0 else "all layers are dense"
            message = f"{name} ({degree}) spreads experts, but the model has none: {why}"
            keys = ("model.num_experts", "model.first_dense_layers", "model.num_layers")
            yield plan_problem(plan, "conflict", name, message, f"{name} = 1", *keys)
        elif sizes.num_moe_layers > 0 and size % degree:
            message = f"{name} ({degree}) must divide {size_name} ({size})"
            fix = f"{name} = {nearest_divisors(gcd(abs(size), ranks), degree)}"
            yield plan_problem(plan, "not-divisible", name, message, fix, f"model.{size_name}")
