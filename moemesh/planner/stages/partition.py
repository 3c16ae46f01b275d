"""`partition`: stages, operator strategies and the plan of a model on a cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, cast, get_args

from moemesh.config.cluster import Cluster, load_cluster
from moemesh.config.divisors import nearest_divisors
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.model import ModelConfig
from moemesh.config.plan import LARGEST_DEGREE, Plan
from moemesh.config.suggest import nearest_choice
from moemesh.planner.operators.convolution import two_branch_network
from moemesh.planner.operators.solve import solve
from moemesh.planner.operators.strategies import cost_model
from moemesh.planner.shapes.load import Model, load_model
from moemesh.planner.stages.answer import METHODS, Method, Partition, Stage, describe_placement
from moemesh.planner.stages.baselines import learned_division, random_division
from moemesh.planner.stages.division import Division, StageError, best_division
from moemesh.planner.stages.division_program import solve_division
from moemesh.planner.stages.implied_plan import imply
from moemesh.planner.stages.placement import (
    best_placement,
    learned_placement,
    placement_problem,
    random_placement,
    solve_placement,
)
from moemesh.planner.stages.two_level import StageMesh, TwoLevelSearch, Workload, usable_bytes
from moemesh.trace.memory import format_bytes

#: The branching network, by its name among the models.
BRANCHING = "branching-alexnet"
#: Schedules whose step takes sum of t_i + (m - 1) * max of t_i.
PipelineSchedule = Literal["1f1b", "gpipe"]
SCHEDULES: tuple[str, ...] = get_args(PipelineSchedule)
#: HiGHS is stopped after so many seconds.
_TIME_LIMIT = 60.0


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
    "branching-alexnet" is no pipeline: its operators are placed on `stages` devices (2 by default),
    for a batch of `global_batch` images. Raises ConfigError with every problem found, StageError
    when nothing fits.
    """
    return compare(
        (method,), model=model, cluster=cluster, seq_len=seq_len, global_batch=global_batch,
        nodes=nodes, stages=stages, microbatches=microbatches, schedule=schedule,
        evaluations=evaluations, seed=seed,
    )[0]  # fmt: skip


def compare(
    methods: Sequence[str],
    *,
    model: str | Path | ModelConfig | Model,
    cluster: str | Path | Cluster,
    seq_len: int = 4096,
    global_batch: int,
    nodes: int | None = None,
    stages: int | None = None,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    evaluations: int = 10_000,
    seed: int = 0,
) -> list[Partition]:
    """`partition` by several methods; what they share is computed once."""
    problems: list[Problem] = []
    for method in methods:
        if method not in METHODS:
            fix = nearest_choice(method, (*METHODS, "all"))
            message = f"method is one of {', '.join(METHODS)}, or all"
            problems.append(_problem("method", method, message, fix))
    if schedule not in SCHEDULES:
        message = f"stages are divided for {' and '.join(SCHEDULES)}"
        problems.append(
            _problem("schedule", schedule, message, nearest_choice(schedule, SCHEDULES))
        )
    numbers = {
        "seq_len": seq_len, "global_batch": global_batch, "evaluations": evaluations,
        "nodes": nodes, "stages": stages, "microbatches": microbatches,
    }  # fmt: skip
    for name, value in numbers.items():
        if value is not None and value < 1:
            message = f"{name} must be at least 1, not {value}"
            problems.append(_problem(name, value, message, f"{name} = 1"))
    known = None
    try:
        if model != BRANCHING:
            known = load_model(model)
    except ConfigError as error:
        problems += error.problems
    try:
        machine = load_cluster(cluster)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if nodes is not None and nodes >= 1:
        machine = machine.model_copy(update={"nodes": nodes})
    if not problems:
        problems = _counts(known, machine, global_batch, stages, microbatches)
    if problems:
        raise ConfigError(problems)
    if known is None:
        return _placements(methods, machine, global_batch, stages or 2, evaluations, seed)
    workload = Workload(
        shape=known.shape,
        cluster=machine,
        seq_len=seq_len,
        global_batch=global_batch,
        stages=stages or 0,
        microbatches=microbatches or 0,
        schedule=schedule,
    )
    return _divisions(methods, known, workload, evaluations, seed)


def _divisions(
    methods: Sequence[str], model: Model, workload: Workload, evaluations: int, seed: int
) -> list[Partition]:
    started = time.perf_counter()
    search = TwoLevelSearch(workload)
    exact = search.best(best_division)
    shared = time.perf_counter() - started
    found: list[Partition] = []
    for method in methods:
        started = time.perf_counter()
        mesh, division = exact
        if method == "ilp":
            mesh, division = search.best(partial(solve_division, time_limit=_TIME_LIMIT))
        elif method != "dp":
            baseline = random_division if method == "random" else learned_division
            tried = baseline(mesh.refined.table(), mesh.microbatches, evaluations, seed)
            if tried is None:
                raise StageError(
                    f"{method}: none of {evaluations} divisions into {mesh.num_stages} stages fits "
                    f"in {format_bytes(round(workload.cap_bytes))} a device; the exact one "
                    f"({division.layers_per_stage} layers) does\nfix: --method dp"
                )
            division = tried
        wall = time.perf_counter() - started + (shared if method == "dp" else 0.0)
        found.append(_division_answer(model, workload, method, mesh, division, exact[1], wall))
    return found


def _division_answer(
    model: Model,
    workload: Workload,
    method: str,
    mesh: StageMesh,
    division: Division,
    exact: Division,
    wall: float,
) -> Partition:
    stages = mesh.stages(division)
    assignments = mesh.describe(stages)
    sizes = division.layers_per_stage
    plan = Plan(
        pp=mesh.num_stages,
        microbatches=mesh.microbatches,
        schedule=cast("PipelineSchedule", workload.schedule),
        layers_per_stage=sizes if len(sizes) > 1 else None,
    )
    implied = imply(
        model,
        workload.cluster,
        plan,
        seq_len=workload.seq_len,
        global_batch=workload.global_batch,
        mesh=mesh.axes,
        operators=[one for assignment in assignments for one in assignment.operators],
    )
    return Partition(
        model=model.shape.name,
        cluster=workload.cluster.name,
        num_devices=workload.cluster.num_devices,
        method=method,
        global_batch=workload.global_batch,
        microbatches=mesh.microbatches,
        mesh=mesh.axes,
        seconds=division.seconds,
        optimum_seconds=exact.seconds,
        evaluations=division.evaluations,
        wall_seconds=wall,
        stages=stages,
        assignments=assignments,
        implied=implied,
    )


def _placements(
    methods: Sequence[str],
    cluster: Cluster,
    batch: int,
    num_devices: int,
    evaluations: int,
    seed: int,
) -> list[Partition]:
    graph = two_branch_network(batch, cost_model(cluster, {"devices": 1}))
    cut = two_branch_network(batch, cost_model(cluster, {"devices": num_devices}))
    cap = usable_bytes(cluster)
    names, problem = placement_problem(graph, cluster, num_devices, cap)
    exact = best_placement(problem)
    found: list[Partition] = []
    for method in methods:
        started = time.perf_counter()
        if method == "dp":
            placed = best_placement(problem)
        elif method == "ilp":
            placed = solve_placement(problem, time_limit=_TIME_LIMIT)
        elif method == "random":
            placed = random_placement(problem, evaluations, seed)
        else:
            placed = learned_placement(problem, evaluations, seed)
        if not placed.choices:
            raise StageError(
                f"{method}: none of {evaluations} placements fits in "
                f"{format_bytes(round(cap))} a device; the exact one does\nfix: --method dp"
            )
        wall = time.perf_counter() - started
        stages = tuple(
            Stage(
                operators=tuple(
                    name for name, place in zip(names, placed.choices, strict=True) if place == d
                ),
                ranks=range(d, d + 1),
                seconds=problem.busy_seconds(placed.choices, d),
                memory_bytes=problem.held_bytes(placed.choices, d),
                in_flight=1.0,
            )
            for d in range(num_devices)
        )
        found.append(
            Partition(
                model=BRANCHING,
                cluster=cluster.name,
                num_devices=num_devices,
                method=method,
                global_batch=batch,
                microbatches=1,
                mesh={"devices": num_devices},
                seconds=placed.seconds,
                optimum_seconds=exact.seconds,
                evaluations=placed.evaluations,
                wall_seconds=wall,
                stages=stages,
                assignments=(describe_placement(names, problem, placed.choices),),
                cut_seconds=solve(cut).cost.seconds,
            )
        )
    return found


def _counts(
    model: Model | None,
    cluster: Cluster,
    global_batch: int,
    stages: int | None,
    microbatches: int | None,
) -> list[Problem]:
    """Numbers that do not go together."""
    devices = cluster.num_devices
    problems: list[Problem] = []
    if devices > LARGEST_DEGREE:
        message = f"{devices} devices: a plan has at most {LARGEST_DEGREE}"
        fix = f"nodes = {max(LARGEST_DEGREE // cluster.gpus_per_node, 1)}"
        problems.append(_problem("nodes", cluster.nodes, message, fix))
    if model is None:
        if (stages or 2) > devices:
            message = f"{stages or 2} devices are asked for; {cluster.name} has {devices}"
            problems.append(_problem("stages", stages, message, f"stages = {devices}"))
        if microbatches not in (None, 1):
            message = f"operators of {BRANCHING} are placed for one batch, not for microbatches"
            problems.append(_problem("microbatches", microbatches, message, "microbatches = 1"))
        return problems
    layers = model.shape.num_layers
    if stages is not None and stages > layers:
        message = f"{stages} stages cannot each hold one of {layers} layers"
        near = max(d for d in range(1, layers + 1) if devices % d == 0)
        problems.append(_problem("stages", stages, message, f"stages = {near}"))
    elif stages is not None and stages > devices:
        message = f"{stages} stages need as many devices; {cluster.name} has {devices}"
        problems.append(_problem("stages", stages, message, f"stages = {devices}"))
    elif stages is not None and devices % stages:
        message = f"{stages} stages must divide the {devices} devices"
        fix = f"stages = {nearest_divisors(devices, stages)}"
        problems.append(_problem("stages", stages, message, fix))
    if microbatches is not None and global_batch % microbatches:
        message = f"{microbatches} microbatches must divide global_batch ({global_batch})"
        fix = f"microbatches = {nearest_divisors(global_batch, microbatches)}"
        problems.append(_problem("microbatches", microbatches, message, fix))
    return problems


def _problem(key: str, value: object, message: str, fix: str) -> Problem:
    return Problem(code="partition", key=key, value=value, message=message, fix=fix)
