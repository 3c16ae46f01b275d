"""`partition`: stages, operator strategies and the plan of a model on a cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np

from moemesh.config.cluster import Cluster, load_cluster
from moemesh.config.errors import ConfigError, Problem, public
from moemesh.config.model import ModelConfig
from moemesh.config.plan import LARGEST_DEGREE, Plan, Recompute
from moemesh.config.suggest import nearest_choice, nearest_divisors
from moemesh.planner.layout_sources import from_plan, untrained
from moemesh.planner.operators.graph import FloatArray, IntegerProgram, solve
from moemesh.planner.operators.strategies import RECOMPUTE, WHOLE, cost_model
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.requests import PartitionRequest
from moemesh.planner.search.command import not_trained, train_command
from moemesh.planner.shapes.load_shape import Model, load_model
from moemesh.planner.stages.answer import (
    METHODS,
    ImpliedPlan,
    LayoutChange,
    Method,
    OperatorAssignment,
    OperatorChoice,
    Partition,
    Stage,
)
from moemesh.planner.stages.division import (
    BestDraw,
    Division,
    StageError,
    baseline_division,
    best_division,
    division_of,
)
from moemesh.planner.stages.placement import (
    baseline_placement,
    best_placement,
    branching_network,
    placement_problem,
    solve_placement,
)
from moemesh.planner.stages.two_level import StageMesh, TwoLevelSearch
from moemesh.planner.timing.price import pricing
from moemesh.trace.memory_profile import format_bytes

# The plan that a partition implies: degrees of `moemesh train` nearest to the operator
# strategies.
#
# An operator program chooses a layout for every operator; a plan has one use for each axis. An
# axis of a stage's mesh carries data or tensor parallelism in dense operators and expert, expert
# tensor or expert data parallelism in experts. The implied plan agrees with the most operator
# time, among the plans that pass `Plan.check` and fit in the planner's predicted memory.


#: Plan key -> the dim that its axis cuts, in dense operators and in experts. The key "" is expert
#: data parallelism; tp cuts the dims of `_TENSOR`.
_DENSE = {"dp": "batch", "cp": "sequence", "tp": ""}
_EXPERTS = {"": "", "ep": "experts", "etp": "expert_width"}
#: Operator -> the dim that tensor parallelism cuts; other operators are cut along the sequence.
_TENSOR = {
    **dict.fromkeys(("qkv", "attention core", "output"), "heads"),
    **dict.fromkeys(("up", "activation", "down"), "width"),
    **dict.fromkeys(("shared up", "shared activation", "shared down"), "shared_width"),
    **dict.fromkeys(("embedding", "logits", "loss"), "vocabulary"),
}
#: Operators that `recompute = "selective"` recomputes.
_SELECTIVE = (
    "attention core", "activation", "shared activation", "expert up", "expert activation",
)  # fmt: skip
_problem = partial(Problem.of, "partition")


def _ranked(
    mesh: Mapping[str, int], operators: Sequence[OperatorChoice], is_moe: bool
) -> list[tuple[float, tuple[str, ...], dict[str, object]]]:
    """(share of operator time that agrees, operators that differ, keys of the plan), best first.

    Ties are ordered by the operator time whose recomputation agrees.
    """
    timed = [operator for operator in operators if operator.seconds > 0]
    total = sum(operator.count * operator.seconds for operator in timed)
    #: (seconds of operators whose recomputation agrees, entry of the result)
    ranked: list[tuple[float, tuple[float, tuple[str, ...], dict[str, object]]]] = []
    # `dense` and `experts` have the plan key of each mesh axis in dense operators and in experts.
    for dense in product(_DENSE, repeat=len(mesh)):
        for experts in product(_EXPERTS if is_moe else ("",), repeat=len(mesh)):
            for recompute in get_args(Recompute):
                keys: dict[str, object] = {"recompute": recompute}
                for names, legal in ((dense, _DENSE), (experts, _EXPERTS)):
                    for key in filter(None, legal):
                        sizes = zip(names, mesh.values(), strict=True)
                        keys[key] = prod(size for name, size in sizes if name == key)
                agreed = recompute_agreed = 0.0
                differing: dict[str, None] = {}
                for operator in timed:
                    seconds = operator.count * operator.seconds
                    cuts = operator.strategy.removesuffix(RECOMPUTE).split(",")
                    dim_of_axis = dict(cut.split("=") for cut in cuts if cut != WHOLE)
                    # Whether the plan cuts the operator along the same dims.
                    agrees = True
                    for (axis, size), role, expert_role in zip(
                        mesh.items(), dense, experts, strict=True
                    ):
                        wanted = (_DENSE[role] or _TENSOR.get(operator.operator, "sequence"),)
                        if operator.operator.startswith("expert "):
                            # Expert data parallelism cuts tokens, in either of their two dims.
                            tokens = ("batch", "sequence")
                            wanted = (_EXPERTS[expert_role],) if expert_role else tokens
                        agrees = agrees and (size == 1 or dim_of_axis.get(axis) in wanted)
                    if agrees:
                        agreed += seconds
                    else:
                        differing[f"{operator.group}: {operator.operator}"] = None
                    is_selected = recompute == "selective" and operator.operator in _SELECTIVE
                    recomputed = recompute == "full" or is_selected
                    recompute_agreed += seconds * (
                        recomputed == operator.strategy.endswith(RECOMPUTE)
                    )
                ranked.append((recompute_agreed, (agreed / (total or 1.0), tuple(differing), keys)))
    # Sorting is stable: equals stay in the order of `_DENSE`, `_EXPERTS` and `Recompute`.
    ranked.sort(key=lambda item: (-item[1][0], -item[0]))
    return [item for _, item in ranked]


# Division into stages as a 0/1 integer program; its optimum must equal the dynamic program's.
#
# x[j, a, b] = 1 when stage j holds layers a .. b - 1, for runs that fit only. Least sum of t_j +
# (m - 1) C, subject to
#
#     t_j = sum of w_jab x[j, a, b] <= C                               every stage j
#     sum over a, b of x[j, a, b] = 1                                  one run a stage
#     sum over a of x[j, a, b] = sum over c of x[j + 1, b, c]          the next begins where it ends
#
# A run is left out if a step with its stage alone would be longer than that of equal stages.


def solve_division(
    table: FloatArray, num_microbatches: int, *, time_limit: float | None = None
) -> Division | None:
    """The division of least `pipeline_seconds` by branch and bound; None when nothing fits, or
    nothing was found in `time_limit` seconds.

    `table` as for `best_division`. `evaluations` are the nodes of the search tree.
    """
    num_stages, num_layers = len(table), table.shape[1] - 1
    ends = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    even = division_of(table, [b - a for a, b in pairwise(ends)], num_microbatches)
    # HiGHS has absolute tolerances, so times are scaled to about 1000.
    scale = 1e3 / max(float(table[np.isfinite(table)].max(initial=0.0)), 1e-300)
    program = IntegerProgram()
    largest = program.variable(num_microbatches - 1.0, high=np.inf, integral=False)
    runs: list[dict[tuple[int, int], int]] = []
    for stage, seconds in enumerate(table):
        variables: dict[tuple[int, int], int] = {}
        for first, end in np.argwhere(seconds * num_microbatches <= even.seconds).tolist():
            is_last = stage == num_stages - 1
            at_ends = (first == 0) == (stage == 0) and (end == num_layers) == is_last
            if first < end and at_ends and np.isfinite(seconds[first, end]):
                variables[first, end] = program.variable(float(seconds[first, end]) * scale)
        runs.append(variables)
        program.row([(x, 1.0) for x in variables.values()], low=1.0, high=1.0)
        times = [(x, float(seconds[run]) * scale) for run, x in variables.items()]
        program.row([*times, (largest, -1.0)], high=0.0)
    for before, after in pairwise(runs):
        for border in range(1, num_layers):
            terms = [(x, 1.0) for (_, end), x in before.items() if end == border]
            terms += [(x, -1.0) for (first, _), x in after.items() if first == border]
            program.row(terms, low=0.0, high=0.0)
    values, num_nodes = program.solve(time_limit=time_limit)
    if values is None:
        return None
    sizes: list[int] = []
    for variables in runs:
        chosen = int(np.argmax(values[list(variables.values())]))
        first, end = list(variables)[chosen]
        sizes.append(end - first)
    division = division_of(table, sizes, num_microbatches)
    return replace(division, evaluations=max(num_nodes, 1))


#: The branching network, by its name among the models.
BRANCHING = "branching-alexnet"
#: Schedules whose step takes sum of t_i + (m - 1) * max of t_i.
PipelineSchedule = Literal["1f1b", "gpipe"]
SCHEDULES: tuple[str, ...] = get_args(PipelineSchedule)
#: Time limit of HiGHS in seconds.
_TIME_LIMIT = 60.0


@public
def partition(
    *,
    model: str | Path | ModelConfig | Model,
    cluster: str | Path | Cluster,
    method: Method = "dp",
    seq_len: int = 4096,
    global_batch: int,
    nodes: int | None = None,
    stages: int | None = None,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    evaluations: int = 10_000,
    seed: int = 0,
) -> Partition:
    """Divide `model` into pipeline stages on `cluster` and lay out the operators of each stage.

    `method` is "dp" (dynamic program), "ilp" (integer program, the same optimum), "random" or
    "learned" (policy gradient); the last two try `evaluations` divisions on the optimum's mesh and
    operator strategies. `stages` and `microbatches` are chosen when left out. The model
    "branching-alexnet" has branches instead of a pipeline: its operators are placed on `stages`
    devices (2 by default), for a batch of `global_batch` images. Raises ConfigError with every
    problem, StageError when nothing fits.
    """
    # A loop over methods passes one set of values: those that a method does not read are accepted.
    return compare(PartitionRequest(**locals()), accepts_unread=True)[0]


def compare(request: PartitionRequest, *, accepts_unread: bool = False) -> list[Partition]:
    """`partition` by the method of `request`, or by "all" methods, which share one search.
    `accepts_unread`: values that no method reads are accepted."""
    methods = METHODS if request.method == "all" else (request.method,)
    problems: list[Problem] = []
    for method in methods:
        if method not in METHODS:
            fix = nearest_choice(method, (*METHODS, "all"))
            message = f"method is one of {', '.join(METHODS)}, or all"
            problems.append(_problem("method", method, message, fix))
    if (schedule := request.schedule) not in SCHEDULES:
        message = f"stages are divided for {' and '.join(SCHEDULES)}"
        fix = nearest_choice(schedule, SCHEDULES)
        problems.append(_problem("schedule", schedule, message, fix))
    sizes = ("seq_len", "global_batch", "evaluations", "nodes", "stages", "microbatches")
    for name, least in (*((size, 1) for size in sizes), ("seed", 0)):
        value: int | None = getattr(request, name)
        if value is not None and value < least:
            message = f"{name} must be at least {least}, not {value}"
            problems.append(_problem(name, value, message, f"{name} = {least}"))
    if not accepts_unread:
        problems += _without_effect(request, methods)
    loaded = None
    try:
        if request.model != BRANCHING:
            loaded = load_model(request.model)
    except ConfigError as error:
        problems += error.problems
    try:
        machine = load_cluster(request.cluster)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if request.nodes is not None and request.nodes >= 1:
        machine = machine.model_copy(update={"nodes": request.nodes})
    if not problems:
        problems += _clashes(loaded, machine, request)
    if problems:
        raise ConfigError(problems)
    started = time.perf_counter()
    problem = _Network(machine, request) if loaded is None else _Pipeline(loaded, machine, request)
    # The search that all methods share counts for dp.
    shared_seconds = time.perf_counter() - started
    partitions: list[Partition] = []
    for method in methods:
        started = time.perf_counter()
        solution: Any = problem.exact if method == "dp" else problem.solve(method)
        wall_seconds = time.perf_counter() - started
        wall_seconds += shared_seconds if method == "dp" else 0.0
        if solution is None:
            raise StageError(
                f"{method}: none of {request.evaluations} {problem.tried} fits in "
                f"{format_bytes(round(problem.cap_bytes))} a device; {problem.counterexample} does"
                "\nfix: --method dp"
            )
        partitions.append(
            Partition(
                cluster=machine.name,
                method=method,
                global_batch=request.global_batch,
                wall_seconds=wall_seconds,
                **problem.described(solution),
            )
        )
    return partitions


class _Pipeline:
    """A model in stages: the exact division, divisions by other methods, and their description."""

    def __init__(self, model: Model, cluster: Cluster, request: PartitionRequest) -> None:
        self.model, self.cluster, self.request = model, cluster, request
        self.search = TwoLevelSearch(model.shape, cluster, request)
        self.cap_bytes = self.search.cap_bytes
        self.exact = self.search.best(best_division)
        # Words of the message that no tried division fits.
        mesh, division = self.exact
        self.tried = f"divisions into {mesh.num_stages} stages"
        self.counterexample = f"the exact one ({division.layers_per_stage} layers)"

    def solve(self, method: str) -> tuple[StageMesh, Division] | None:
        """The mesh and the division by `method`; None if no division that it tried fits."""
        if method == "ilp":
            return self.search.best(partial(solve_division, time_limit=_TIME_LIMIT))
        mesh, request = self.exact[0], self.request
        draws = request.evaluations, request.seed
        division = baseline_division(method, mesh.refined.table(), mesh.microbatches, *draws)
        return division and (mesh, division)

    def described(self, solution: tuple[StageMesh, Division]) -> dict[str, Any]:
        """Fields of the answer."""
        mesh, division = solution
        stages, sizes = mesh.stages(division), division.layers_per_stage
        assignments = mesh.describe(stages)
        plan = Plan(
            pp=mesh.num_stages,
            microbatches=mesh.microbatches,
            schedule=cast("PipelineSchedule", self.request.schedule),
            layers_per_stage=sizes if len(sizes) > 1 else None,
        )
        operators = [operator for assignment in assignments for operator in assignment.operators]
        return {
            "model": self.model.shape.name,
            "num_devices": self.cluster.num_devices,
            "microbatches": mesh.microbatches,
            "mesh": mesh.axes,
            "seconds": division.seconds,
            "optimum_seconds": self.exact[1].seconds,
            "evaluations": division.evaluations,
            "stages": stages,
            "assignments": assignments,
            "implied": self._implied(plan, mesh.axes, operators),
        }

    def _implied(
        self, base: Plan, mesh: Mapping[str, int], operators: Sequence[OperatorChoice]
    ) -> ImpliedPlan | None:
        """`base` with the degrees nearest to `operators` that fit; None if no degrees are legal.

        If none fit, the result has the degrees that need the least memory and ``fits = False``. For
        a model that `moemesh train` trains, only plans that it supports are considered.
        """
        model, request = self.model, self.request
        seq_len, global_batch = request.seq_len, request.global_batch
        is_trainable = not untrained(PlannedLayout(seq_len=seq_len, global_batch=1), model)
        best: ImpliedPlan | None = None
        for agreement, differing, keys in _ranked(mesh, operators, model.shape.is_moe):
            plan = base.model_copy(update=keys)
            if plan.check(seq_len=seq_len, global_batch=global_batch):
                continue
            layout = from_plan(plan, model.config, seq_len=seq_len, global_batch=global_batch)
            if layout.check(model.shape.sizes) or (is_trainable and untrained(layout, model)):
                continue
            prices = pricing(self.cluster)
            memory, seconds = prices.price(model.shape, layout)
            refused = tuple(not_trained(layout, model))
            fits = memory.fits(self.cluster.memory_bytes, prices.usable_share)
            implied = ImpliedPlan(
                plan=plan,
                agreement=agreement,
                differing=differing,
                seconds=seconds["total"],
                memory_bytes=memory.needed,
                fits=fits,
                command=train_command(layout, model) if fits and not refused else "",
                not_trained=refused,
            )
            if fits:
                return implied
            if best is None or implied.memory_bytes < best.memory_bytes:
                best = implied
        return best


class _Network:
    """The branching network, with the methods of :class:`_Pipeline` for placements of its
    operators on devices."""

    tried, counterexample = "placements", "the exact one"

    def __init__(self, cluster: Cluster, request: PartitionRequest) -> None:
        self.request, self.num_devices = request, request.stages or 2
        self.cap_bytes = cluster.memory_bytes * pricing(cluster).usable_share
        # The graph on one device, and with operators cut over all devices.
        whole, cut = (
            branching_network(request.global_batch, cost_model(cluster, {"devices": count}))
            for count in (1, self.num_devices)
        )
        self.cut_seconds = solve(cut).cost.seconds
        placed = placement_problem(whole, cluster, self.num_devices, self.cap_bytes)
        self.names, self.problem = placed
        self.exact = best_placement(self.problem)

    def solve(self, method: str) -> BestDraw | None:
        """The placement by `method`; None if no placement that it tried fits."""
        if method == "ilp":
            return solve_placement(self.problem, time_limit=_TIME_LIMIT)
        draws = self.request.evaluations, self.request.seed
        placed = baseline_placement(method, self.problem, *draws)
        return placed if placed.choices else None

    def described(self, solution: BestDraw) -> dict[str, Any]:
        """Fields of the answer."""
        names, problem, devices = self.names, self.problem, solution.choices
        operators = [
            OperatorChoice(
                group="",
                operator=name,
                strategy=f"device {device}",
                count=1,
                seconds=float(seconds),
                state_bytes=float(num_bytes),
                saved_bytes=0.0,
            )
            for name, device, seconds, num_bytes in zip(
                names, devices, problem.seconds.sum(axis=0), problem.num_bytes, strict=True
            )
        ]
        edges = [
            LayoutChange(
                group="",
                source=names[source],
                target=names[target],
                before=f"device {devices[source]}",
                after=f"device {devices[target]}",
                seconds=2 * problem.transfer(edge, devices[source], devices[target]),
            )
            for edge, (source, target) in enumerate(problem.edges)
        ]
        stages: list[Stage] = []
        for device in range(self.num_devices):
            placed = np.flatnonzero(np.array(devices) == device)
            stages.append(
                Stage(
                    operators=tuple(names[number] for number in placed),
                    ranks=range(device, device + 1),
                    seconds=float(problem.seconds[:, placed].sum()),
                    memory_bytes=float(problem.num_bytes[placed].sum()),
                    in_flight=1.0,
                )
            )
        return {
            "model": BRANCHING,
            "num_devices": self.num_devices,
            "microbatches": 1,
            "mesh": {"devices": self.num_devices},
            "seconds": solution.seconds,
            "optimum_seconds": self.exact.seconds,
            "evaluations": solution.evaluations,
            "stages": tuple(stages),
            "assignments": (OperatorAssignment(operators=tuple(operators), edges=tuple(edges)),),
            "cut_seconds": self.cut_seconds,
        }


def _without_effect(request: PartitionRequest, methods: Sequence[str]) -> Iterator[Problem]:
    """Problems of values that differ from the defaults and would have no effect."""
    reasons: dict[str, tuple[tuple[str, ...], str]] = {}
    if {*methods} <= {"dp", "ilp"}:
        reason = f"method = {request.method} draws no divisions"
        reasons[reason] = ("evaluations", "seed"), ", or method = random"
    if request.model == BRANCHING:
        reasons[f"{BRANCHING} has neither sequences nor a pipeline"] = ("seq_len", "schedule"), ""
    for reason, (names, alternative) in reasons.items():
        for name in names:
            value = getattr(request, name)
            if value != getattr(PartitionRequest, name):
                message = f"{name} has no effect: {reason}"
                yield _problem(name, value, message, f"leave {name} out{alternative}")


def _clashes(model: Model | None, cluster: Cluster, request: PartitionRequest) -> Iterator[Problem]:
    """Problems of numbers of devices, stages, microbatches and sequences that conflict."""
    devices, stages = cluster.num_devices, request.stages
    global_batch, microbatches = request.global_batch, request.microbatches
    if devices > LARGEST_DEGREE:
        message = f"{devices} devices: a plan has at most {LARGEST_DEGREE}"
        fix = f"nodes = {max(LARGEST_DEGREE // cluster.gpus_per_node, 1)}"
        yield _problem("nodes", cluster.nodes, message, fix)
    if model is None:
        if (stages or 2) > devices:
            message = f"{stages or 2} devices are requested; {cluster.name} has {devices}"
            yield _problem("stages", stages, message, f"stages = {devices}")
        if microbatches not in (None, 1):
            message = f"operators of {BRANCHING} are placed for one batch, not for microbatches"
            yield _problem("microbatches", microbatches, message, "microbatches = 1")
        return
    layers = model.shape.num_layers
    if stages is not None and stages > layers:
        message = f"{stages} stages cannot each hold one of {layers} layers"
        near = max(d for d in range(1, layers + 1) if devices % d == 0)
        yield _problem("stages", stages, message, f"stages = {near}")
    elif stages is not None and stages > devices:
        message = f"{stages} stages need {stages} devices or more; {cluster.name} has {devices}"
        yield _problem("stages", stages, message, f"stages = {devices}")
    elif stages is not None and devices % stages:
        message = f"{stages} stages must divide the {devices} devices"
        fix = f"stages = {nearest_divisors(devices, stages)}"
        yield _problem("stages", stages, message, fix)
    if microbatches is not None and global_batch % microbatches:
        message = f"{microbatches} microbatches must divide global_batch ({global_batch})"
        fix = f"microbatches = {nearest_divisors(global_batch, microbatches)}"
        yield _problem("microbatches", microbatches, message, fix)
