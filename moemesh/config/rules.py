"""The rule book of degrees: what the two meshes, the model and the stages ask of each other.

One function a rule group, for anything that has the degrees: a :class:`moemesh.config.plan.Plan`,
which `moemesh train` runs, and a layout of the planner, which other trainers run, too. They read a
model through its :class:`CutSizes`. The predicates among them also enumerate the planner's search.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple, Protocol

from moemesh.config.errors import Problem
from moemesh.config.layout import shard_sizes
from moemesh.config.suggest import divisors, nearest, nearest_divisors

#: Schedules whose ranks hold two stages each, at both arms of a V.
V_SCHEDULES = ("zb_v", "dualpipe_v")

#: Keys of [model] that the width of the shared experts follows from.
_SHARED_KEYS = ("num_shared_experts", "shared_intermediate_size", "expert_intermediate_size")


class CutSizes(NamedTuple):
    """The sizes of a model that degrees cut; 0 for what it does not have.

    `num_kv_heads` is 0 with latent attention, `intermediate_size` the width of dense MLPs,
    `shared_width` that of all shared experts of a layer.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    shared_width: int
    num_moe_layers: int
    num_experts: int
    expert_intermediate_size: int


class Degrees(Protocol):
    """Values of a plan or layout that the rules read."""

    @property
    def pp(self) -> int: ...
    @property
    def dp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def ep(self) -> int: ...
    @property
    def etp(self) -> int: ...
    @property
    def context(self) -> str: ...
    @property
    def schedule(self) -> str: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def layers_per_stage(self) -> tuple[int, ...] | None: ...
    @property
    def ranks_per_node(self) -> int | None: ...
    @property
    def servers(self) -> int: ...


def degree_problems(
    plan: Degrees, sizes: CutSizes | None, *, copied_kv_heads: bool = False
) -> list[Problem]:
    """Every rule between the degrees and, with `sizes`, between them and a model.

    `copied_kv_heads`: where there are fewer key/value heads than tp ranks, each rank holds a copy
    of one, as other trainers do; ours shards them and never copies. Degrees must be at least 1.
    """
    problems = mesh_problems(plan, 0 if sizes is None else sizes.num_experts)
    if sizes is None:
        return problems
    problems += _stage_problems(plan, sizes.num_layers)
    problems += _tensor_problems(plan, sizes, copied_kv_heads)
    return problems + _expert_problems(plan, sizes)


def uncut_by_tensor(sizes: CutSizes, tp: int, *, copied_kv_heads: bool = False) -> dict[str, int]:
    """The sizes that `tp` ranks cannot share evenly: name -> its number. Empty where all are."""
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
    """Whether `ranks` of a stage hold the experts cut ep ways, each cut etp ways."""
    if not sizes.num_moe_layers:
        return ep * etp == 1
    cut = sizes.num_experts % ep or sizes.expert_intermediate_size % etp
    return not cut and ranks % (ep * etp) == 0


def mesh_problems(plan: Degrees, num_experts: int = 0) -> list[Problem]:
    """The two meshes must cover the same ranks."""
    ranks, experts = plan.dp * plan.cp * plan.tp, plan.ep * plan.etp
    if ranks % experts == 0:
        return []
    key = "ep" if plan.ep > 1 else "etp"
    message = f"ep*etp ({experts}) must divide dp*cp*tp ({ranks})"
    keys = (f"plan.{name}" for name in ("ep", "etp", "dp", "cp", "tp"))
    # The nearest degrees with which the two meshes cover the same ranks.
    num_experts = max(num_experts, 0)
    if ranks % plan.etp == 0:
        legal = gcd(ranks // plan.etp, num_experts)  # 0 experts divide by any ep
        fix = f"ep = {nearest_divisors(legal, plan.ep)}"
    elif ranks % plan.ep == 0:
        fix = f"etp = {nearest_divisors(ranks // plan.ep, plan.etp)}"
    else:
        fix = f"ep*etp = {nearest_divisors(ranks, experts)}"
    if num_experts % plan.ep == 0:
        # Then more replicas help, too.
        step = experts // gcd(experts, plan.cp * plan.tp)
        fix += f", or dp = {-(-plan.dp // step) * step}"
    return [plan_problem(plan, "not-divisible", key, message, fix, *keys)]


def node_problems(plan: Degrees) -> list[Problem]:
    """Nodes must cut the ranks evenly."""
    node, world = plan.ranks_per_node, plan.pp * plan.dp * plan.cp * plan.tp
    if node is None or node < 1 or world % node == 0:
        return []
    message = f"ranks_per_node ({node}) must divide the number of ranks pp*dp*cp*tp ({world})"
    fix = f"ranks_per_node = {nearest_divisors(world, node)}"
    keys = (f"plan.{name}" for name in ("pp", "dp", "cp", "tp"))
    return [plan_problem(plan, "not-divisible", "ranks_per_node", message, fix, *keys)]


def server_problems(plan: Degrees) -> list[Problem]:
    """Of the ranks that share dense weights, some serve and at least one only works."""
    ranks, keys = plan.dp * plan.cp, ("plan.data", "plan.dp", "plan.cp")
    if plan.servers < 1 or plan.servers < ranks:
        return []
    if ranks == 1:
        message = "data = parameter_server needs a worker beside its server: dp*cp is 1"
        return [
            plan_problem(plan, "too-small", "dp", message, "dp = 2, or data = replicate", *keys)
        ]
    message = (
        f"servers ({plan.servers}) must be fewer than the data-parallel ranks dp*cp ({ranks}): "
        "where all of them serve, that is data = zero1"
    )
    fix = f"servers = {ranks - 1}, or data = zero1"
    return [plan_problem(plan, "too-large", "servers", message, fix, *keys)]


def _tensor_problems(plan: Degrees, sizes: CutSizes, copied_kv_heads: bool) -> list[Problem]:
    """Tensor parallelism cuts heads, dense widths, shared experts; context may cut heads, too."""
    tp, heads = plan.tp, sizes.num_heads
    problems: list[Problem] = []
    for name, size in uncut_by_tensor(sizes, tp, copied_kv_heads=copied_kv_heads).items():
        keys = _SHARED_KEYS if name == "shared width" else (name,)
        message = f"tp ({tp}) must divide {name} ({size})"
        if copied_kv_heads and name == "num_kv_heads":
            message = f"tp ({tp}) and num_kv_heads ({size}): one must divide the other"
        common = abs(gcd(heads, sizes.intermediate_size, sizes.shared_width))
        legal = [
            degree
            for degree in divisors(common)
            if not uncut_by_tensor(sizes, degree, copied_kv_heads=copied_kv_heads)
        ]
        fix = f"tp = {nearest(legal, tp)}"
        related = (f"model.{key}" for key in keys)
        problems.append(plan_problem(plan, "not-divisible", "tp", message, fix, *related))
    if plan.context == "all_to_all" and heads % tp == 0 and heads % (plan.cp * tp):
        message = (
            f'context = "all_to_all" moves heads: cp*tp ({plan.cp * tp}) must divide '
            f"num_heads ({heads})"
        )
        fix = f'cp = {nearest_divisors(heads // tp, plan.cp)}, or context = "ring"'
        problems.append(
            plan_problem(
                plan,
                "not-divisible",
                "cp",
                message,
                fix,
                "plan.context",
                "plan.tp",
                "model.num_heads",
            )
        )
    return problems


def _expert_problems(plan: Degrees, sizes: CutSizes) -> list[Problem]:
    """Expert parallelism cuts experts over ep, the width of each over etp."""
    problems: list[Problem] = []
    if sizes.num_moe_layers <= 0:
        why = "num_experts is 0" if sizes.num_experts == 0 else "all layers are dense"
        keys = ("model.num_experts", "model.first_dense_layers", "model.num_layers")
        for name, degree in (("ep", plan.ep), ("etp", plan.etp)):
            if degree > 1:
                message = f"{name} ({degree}) spreads experts, but the model has none: {why}"
                problems.append(plan_problem(plan, "conflict", name, message, f"{name} = 1", *keys))
        return problems
    ranks = plan.dp * plan.cp * plan.tp
    for name, size_name in (("ep", "num_experts"), ("etp", "expert_intermediate_size")):
        degree, size = int(getattr(plan, name)), int(getattr(sizes, size_name))
        if size % degree:
            message = f"{name} ({degree}) must divide {size_name} ({size})"
            fix = f"{name} = {nearest_divisors(gcd(abs(size), ranks), degree)}"
            key = f"model.{size_name}"
            problems.append(plan_problem(plan, "not-divisible", name, message, fix, key))
    return problems


def _stage_problems(plan: Degrees, layers: int) -> list[Problem]:
    """Every stage needs a layer."""
    stages = plan.num_stages
    if layers < 1:
        return []
    if plan.layers_per_stage is not None:
        return _layers_per_stage_problems(plan, plan.layers_per_stage, layers)
    if stages <= layers:
        return []
    chunks = stages // plan.pp
    product = f"pp*stages_per_rank ({plan.pp}*{chunks} = {stages})"
    if plan.schedule in V_SCHEDULES:
        product = f"{plan.schedule} puts two stages on a rank: pp*2 ({plan.pp}*2 = {stages})"
    if plan.pp <= layers and plan.schedule not in V_SCHEDULES:
        key, fix = "stages_per_rank", f"stages_per_rank = {layers // plan.pp}"
    else:
        key, fix = "pp", f"pp = {max(layers // chunks, 1)}"
        if chunks > layers and plan.schedule not in V_SCHEDULES:
            fix += ", stages_per_rank = 1"
    message = f"{product} stages need at least as many layers; num_layers is {layers}"
    keys = ("plan.pp", "plan.stages_per_rank", "plan.schedule", "model.num_layers")
    return [plan_problem(plan, "too-large", key, message, fix, *keys)]


def _layers_per_stage_problems(plan: Degrees, sizes: tuple[int, ...], layers: int) -> list[Problem]:
    """Explicit cuts: one positive number a stage, all layers used."""
    stages = plan.num_stages
    if len(sizes) == stages and sum(sizes) == layers and min(sizes) >= 1:
        return []
    equal = shard_sizes(layers, stages)
    fix = f"layers_per_stage = {list(equal)}" if min(equal) else f"pp = {layers}"
    message = (
        f"layers_per_stage ({len(sizes)} numbers, sum {sum(sizes)}) must be {stages} "
        f"positive numbers that add up to num_layers ({layers})"
    )
    keys = ("plan.pp", "plan.stages_per_rank", "model.num_layers")
    return [plan_problem(plan, "stages", "layers_per_stage", message, fix, *keys)]


def plan_problem(
    plan: object, code: str, name: str, message: str, fix: str, *related: str
) -> Problem:
    """A problem of the key `name` of [plan], with the value that `plan` has there."""
    return Problem(
        code=code,
        key=f"plan.{name}",
        value=getattr(plan, name),
        message=message,
        fix=fix,
        related=related,
    )
