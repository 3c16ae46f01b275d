"""The answer to ``moemesh schedule``: a schedule simulated, or all of them in one table."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moemesh.config.errors import UserError
from moemesh.config.schedule_table import SCHEDULES, MicrobatchTimes
from moemesh.config.suggest import nearest_divisors
from moemesh.schedule import text
from moemesh.schedule.action import Schedule, messages
from moemesh.schedule.build import ClosedForm, build, closed_form
from moemesh.schedule.costs import Costs
from moemesh.schedule.generators import one_f_one_b
from moemesh.schedule.request import ScheduleRequest
from moemesh.schedule.simulate import Simulation, simulate
from moemesh.schedule.stage_times import costs_of_run
from moemesh.schedule.text import load
from moemesh.schedule.versions import versions

#: A cost on the command line: one number for all stages, or one for each with commas.
Cost = float | tuple[float, ...]
#: Default number of chunks of a rank for schedules with several, in a comparison of all schedules.
CHUNKS = 2


@dataclass(frozen=True, kw_only=True)
class ScheduleAnswer:
    """A simulated schedule. `closed` is None without formulas, `copies` are the copies of weights
    on each rank, `held` is M_w / M_a, `costs` and `notes` are sentences to print, `bound` is a
    lower bound of the span of a searched schedule."""

    schedule: Schedule
    simulation: Simulation
    closed: ClosedForm | None
    copies: tuple[int, ...]
    held: float
    costs: str
    notes: tuple[str, ...] = ()
    bound: float | None = None

    @property
    def title(self) -> str:
        """One line for a picture."""
        schedule = self.schedule
        return (
            f"{schedule.name}: {schedule.num_ranks} ranks, "
            f"{schedule.total_microbatches} microbatches"
        )

    def to_json(self) -> dict[str, Any]:
        """The object of ``--json``. Times in the unit of the costs, activation in microbatches on a
        rank's share of layers; each action a string, the operations of a block joined with "+"."""
        simulation = self.simulation
        content: dict[str, Any] = {
            "makespan": simulation.makespan,
            "bubble_rate": simulation.bubble_rate,
            "peak_activation": list(simulation.peak_activation),
            "weight_copies": max(self.copies),
            "actions": [
                ["+".join(map(str, entry)) for entry in order] for order in self.schedule.orders
            ],
            "span": simulation.span,
            "span_bubble": simulation.span_bubble,
            "rank_idle": simulation.rank_idle,
            "weight_copies_per_rank": list(self.copies),
            "digest": text.digest(self.schedule),
        }
        if self.closed is not None:
            content["closed_form"] = {
                "bubble": self.closed.bubble,
                "metric": self.closed.row.metric,
                "formula": self.closed.row.bubble,
                "exact_when": self.closed.row.bubble_where,
                "peak_activation": self.closed.peak_activation,
            }
        if self.bound is not None:
            content["lower_bound"] = self.bound
        if simulation.relaxed:
            content["relaxed"] = True
        return content


def answer(request: ScheduleRequest) -> ScheduleAnswer:
    """Build or read a schedule and simulate it. Raises UserError with every problem of the
    request."""
    problems: list[str] = []
    costs, held = _costs(request, problems)
    try:
        schedule, notes, bound = _schedule(request, costs, held, problems)
        problems += _without_effect(request, schedule)
        if problems:
            raise UserError("\n".join(problems))
        simulation = simulate(
            schedule,
            costs,
            relax_wrap=request.relaxed,
            weight_memory=held,
            unit="ticks" if request.run is None else "seconds",
        )
    except ValueError as error:
        # For example costs for another number of stages: reported after the other problems.
        others = [] if str(error) == "\n".join(problems) else problems
        raise UserError("\n".join([*others, _as_typed(str(error), request)])) from error
    if request.relaxed:
        notes = (*notes, "relaxed: some wrap-around waits are left out; cannot run as drawn")
    # Closed formulas exist for equal stages without latency and without relaxed waits.
    closed = None
    parts = (costs.forward, costs.input_gradient, costs.weight_gradient)
    numbers = [part for part in parts if isinstance(part, (int, float))]
    is_plain = len(numbers) == len(parts) and not costs.message and not request.relaxed
    if request.name in SCHEDULES and is_plain:
        block = costs.overlapped
        assert block is None or isinstance(block, (int, float))
        times = MicrobatchTimes(forward=numbers[0], dgrad=numbers[1], wgrad=numbers[2], block=block)
        closed = closed_form(schedule, times, held=held)
    block_text = "" if request.block is None else f", block {request.block}"
    cost_text = f"forward {request.forward}, input gradient {request.dgrad}, "
    cost_text += f"weight gradient {request.wgrad}{block_text}, message {request.comm}"
    if request.run is not None:
        cost_text = f"seconds of each stage measured by {request.run}, message {request.comm}"
    return ScheduleAnswer(
        schedule=schedule,
        simulation=simulation,
        closed=closed,
        copies=weight_copies(schedule),
        held=held,
        costs=cost_text,
        notes=notes,
        bound=bound,
    )


def _without_effect(request: ScheduleRequest, schedule: Schedule) -> list[str]:
    """A sentence for each option that changes nothing about `schedule`."""
    problems: list[str] = []
    entries = {tuple(sorted(op.kind for op in e)) for order in schedule.orders for e in order}
    if request.block is not None and ("B", "F") not in entries:
        problems.append(f"--block has no effect: {schedule.name} overlaps no forward and backward")
    is_split = request.name == "search" or ("W",) in entries
    if request.weight_memory != "1" and not is_split:
        problems.append(
            f"--weight-memory has no effect: {schedule.name} has no separate weight gradients"
        )
    if request.relaxed and schedule.num_stages == schedule.num_ranks:
        problems.append(
            f"--relaxed has no effect: {schedule.name} has one stage per rank, and no wrap-around"
        )
    return problems


def _as_typed(message: str, request: ScheduleRequest) -> str:
    """`message` of a generator, the simulator or the search with options in place of its names."""
    names = {"num_slices": "--slices", "max_in_flight": "--in-flight", "memory_cap": "--memory-cap"}
    names |= {"stages_per_rank": "--stages-per-rank", "relax_wrap": "--relaxed"}
    names["window"] = "--window"
    parts = {"forward": "forward", "input_gradient": "dgrad", "weight_gradient": "wgrad"}
    for name, part in parts.items():
        names[f"{name} has"] = f"--{part if request.run is None else 'costs'} has"
    message = message.replace(", cost, latency", "")  # of ampnet: the other options set them
    names_in_text = re.compile(rf"(?<!\S)({'|'.join(names)})(?![\w./-])")
    return names_in_text.sub(lambda match: names[match[0]], message)


def saved(schedule: Schedule, path: Path) -> str:
    """A line about a schedule that was written to `path`: how to train with it."""
    if schedule.update is not None:
        return f"saved to {path}"
    #: Key of [plan] -> its value for this schedule, and its default.
    keys = {
        "pp": (schedule.num_ranks, 1),
        "stages_per_rank": (schedule.stages_per_rank, 1),
        "microbatches": (schedule.total_microbatches, 1),
        "slices": (schedule.num_slices, 1),
        "schedule": (path, None),
    }
    given = [
        f"--set {shlex.quote(f'plan.{key}={value}')}"
        for key, (value, default) in keys.items()
        if value != default
    ]
    return f"saved; train with it: moemesh train {' '.join(given)}"


def weight_copies(schedule: Schedule) -> tuple[int, ...]:
    """Copies of the weights on each rank: one for each pipe, or the most versions in use at
    once."""
    if schedule.update is None:
        return (schedule.num_pipes,) * schedule.num_ranks
    by_stage, _ = versions(schedule)
    return tuple(
        max(by_stage[key].copies for key in schedule.stages_of(rank))
        for rank in range(schedule.num_ranks)
    )


#: A schedule, notes on it for the user, and a lower bound of its span if it was searched.
_Noted = tuple[Schedule, tuple[str, ...], float | None]


def _schedule(request: ScheduleRequest, costs: Costs, held: float, problems: list[str]) -> _Noted:
    """The schedule of a file, of a search or by name. Options that do not belong to it are added to
    `problems`, other problems raise ValueError."""
    path = Path(request.name)
    is_known = request.name in SCHEDULES or request.name == "search"
    looks_like_a_file = path.suffix in (".txt", ".csv") or "/" in request.name
    if not is_known and (looks_like_a_file or path.is_file()):
        return read(path, request), ("read from a file and checked",), None
    given = {"ranks": request.ranks, "microbatches": request.microbatches}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if missing and is_known:
        problems.append(f"{request.name} needs {' and '.join(missing)}")
    ranks = 1 if request.ranks is None else request.ranks
    # For a missing number, one that most schedules are defined for: it finds the other problems.
    microbatches = request.microbatches
    if microbatches is None:
        microbatches = 4 * max(ranks, 1)
    if request.name != "search":
        if request.memory_cap is not None:
            problems.append("--memory-cap belongs to search")
        ampnet = request.name == "ampnet" and ranks >= 1 and not problems
        schedule = build(
            request.name,
            ranks,
            microbatches,
            stages_per_rank=1 if request.stages_per_rank is None else request.stages_per_rank,
            num_slices=request.num_slices,
            window=request.window,
            max_in_flight=request.max_in_flight,
            cost=costs.bind(one_f_one_b(ranks, 1)).op if ampnet else None,
            latency=_number("--comm", request.comm, []) if ampnet else None,
        )
        return schedule, (), None
    others = (
        ("--block", request.block),
        ("--slices", request.num_slices),
        ("--window", request.window),
        ("--in-flight", request.max_in_flight),
        ("--relaxed", request.relaxed or None),
    )
    problems += [f"search has no {name}" for name, value in others if value is not None]
    cap = request.memory_cap
    memory_cap = None if cap is None else _number("--memory-cap", cap, problems)
    if problems:
        raise UserError("\n".join(problems))
    # Imported late: only a search needs it.
    from moemesh.schedule.search import search

    searched = search(
        ranks,
        microbatches,
        costs,
        memory_cap=memory_cap,
        weight_memory=held,
        stages_per_rank=(1, 2) if request.stages_per_rank is None else request.stages_per_rank,
    )
    hand_made = ", ".join(f"{name} {short(cost)}" for name, cost in searched.hand_made.items())
    notes = (
        f"searched: span {short(searched.cost)} ({searched.origin}), "
        + ("the optimum" if searched.proven else f"at most {searched.gap:.2%} above the optimum"),
        f"hand-made schedules that fit: {hand_made or 'none'}",
    )
    return searched.schedule, notes, searched.lower_bound


def read(path: Path, request: ScheduleRequest) -> Schedule:
    """The schedule of a text or CSV file. Raises UserError if it cannot be read, cannot run
    (:func:`~moemesh.schedule.check.check`), or differs from the numbers in the request."""
    from moemesh.schedule.check import check

    schedule = load(path)
    numbers = {
        "ranks": (request.ranks, schedule.num_ranks),
        "microbatches": (request.microbatches, schedule.total_microbatches),
        "stages-per-rank": (request.stages_per_rank, schedule.stages_per_rank),
        "slices": (request.num_slices, schedule.num_slices),
    }
    clashes = [
        f"--{name} {given}, but {path} has {number}"
        for name, (given, number) in numbers.items()
        if given is not None and given != number
    ]
    rules = {"window": request.window, "in-flight": request.max_in_flight}
    clashes += [f"--{name} belongs to a name, not a file" for name, size in rules.items() if size]
    if request.memory_cap is not None:
        clashes.append("--memory-cap belongs to search")
    if clashes:
        raise UserError("\n".join(clashes))
    check(schedule)
    return schedule


def _costs(request: ScheduleRequest, problems: list[str]) -> tuple[Costs, float]:
    """The costs and M_w / M_a; an unreadable value is added to `problems` and becomes 1."""
    block = None if request.block is None else _number("--block", request.block, problems)
    held = _number("--weight-memory", request.weight_memory, problems)
    if held > 1:
        problems.append(f"--weight-memory {held} is a share of the activations: at most 1")
        held = 1
    if request.run is not None:
        is_given = {
            "--forward": request.forward != "1",
            "--dgrad": request.dgrad != "1",
            "--wgrad": request.wgrad != "1",
            "--block": block is not None,
        }
        clashes = (name for name in is_given if is_given[name])
        problems += [f"{name} and --costs are both costs: keep one" for name in clashes]
        message = _number("--comm", request.comm, problems)
        costs, measured = costs_of_run(request.run)
        if request.ranks and measured % request.ranks:
            problems.append(
                f"{request.run} measured {measured} stages: --ranks {request.ranks} must divide "
                f"them (nearest: {nearest_divisors(measured, request.ranks)})"
            )
        return replace(costs, message=message), held
    costs = Costs(
        forward=_numbers("--forward", request.forward, problems),
        input_gradient=_numbers("--dgrad", request.dgrad, problems),
        weight_gradient=_numbers("--wgrad", request.wgrad, problems),
        overlapped=block,
        message=_number("--comm", request.comm, problems),
    )
    return costs, held


def _numbers(option: str, given: str, problems: list[str]) -> Cost:
    """The number in an option, or the numbers of all stages, with commas between them."""
    costs = [_number(option, part, problems) for part in given.split(",")]
    return tuple(costs) if len(costs) > 1 else costs[0]


def _number(option: str, given: str, problems: list[str]) -> float:
    """The number in an option, int if written as one. Anything but a number from 0 to 1e15 is added
    to `problems`; it becomes 1."""
    try:
        number = int(given)
    except ValueError:
        try:
            number = float(given)
        except ValueError:
            number = math.nan
    if not (0 <= number <= 1e15):
        problems.append(f"{option} {given!r} must be a number from 0 to 1e15")
        return 1
    return number


def short(value: float) -> str:
    """A number with at most six digits, without needless zeros."""
    return f"{value:.6g}"


def compare(request: ScheduleRequest) -> list[dict[str, Any]]:
    """The figures of every named schedule for the numbers of `request` (whose name is not read),
    with a reason in `refused` for one that has none.

    `peak_activation`: the most of any rank, in microbatches on a rank's share of layers; `sent`:
    the most that a rank sends, in activations of a microbatch; `synchronous`: whether the gradients
    of a step are all of one version of the weights. Raises UserError when no schedule can be made
    of the request.
    """
    compared: list[dict[str, Any]] = []
    for name in SCHEDULES:
        # Leave out the options that this schedule does not have.
        options = SCHEDULES[name].options
        chunks = request.stages_per_rank
        if "stages_per_rank" not in options:
            chunks = None
        elif chunks is None and (request.ranks or 0) > 1:
            chunks = CHUNKS
        others = {"num_slices", "window", "max_in_flight"} - {*options}
        others |= set() if SCHEDULES[name].has_blocks else {"block"}
        single = replace(request, name=name, stages_per_rank=chunks, **dict.fromkeys(others))
        if not SCHEDULES[name].undeferred:
            single = replace(single, weight_memory="1")
        try:
            result = answer(single)
        except UserError as error:
            compared.append({"name": name, "refused": str(error).replace("\n", "; ")})
            continue
        simulation, schedule = result.simulation, result.schedule
        count = Counter(message.source for message in messages(schedule).values())
        figures = {
            "makespan": simulation.makespan,
            "bubble_rate": simulation.bubble_rate,
            "peak_activation": max(simulation.peak_activation),
            "weight_copies": max(result.copies),
            "sent": max(count.values(), default=0) / schedule.num_slices,
            "synchronous": schedule.update is None,
        }
        compared.append({"name": name, **figures})
    if all("refused" in row for row in compared):
        raise UserError(compared[0]["refused"])
    return compared


def comparison_rows(compared: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Cells of each schedule that could be simulated: name, makespan, bubble rate, peak activation,
    weight copies, sent, gradients."""
    return [
        (
            row["name"],
            short(row["makespan"]),
            f"{row['bubble_rate']:.4f}",
            short(row["peak_activation"]),
            str(row["weight_copies"]),
            short(row["sent"]),
            "one version" if row["synchronous"] else "of older weights",
        )
        for row in compared
        if "refused" not in row
    ]
