"""Schedules in a run folder: the copy of a file or of a search, and recorded orders of AMPNet.

The process that opens the folder writes the copy to ``schedule.txt``, at each start that reads the
file or searches: a resumed run needs neither the file nor the costs of the search.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from moemesh.config.changes import Change
from moemesh.config.errors import UserError
from moemesh.config.plan import Plan, is_schedule_file
from moemesh.config.run import RunConfig
from moemesh.schedule.action import Schedule
from moemesh.schedule.check import check
from moemesh.schedule.plan_schedule import build_step, fitting
from moemesh.schedule.text import digest, from_text, load, to_text
from moemesh.train.records.run_folder import RunFolder

SCHEDULE = "schedule.txt"


def has_name(plan: Plan) -> bool:
    """Whether the plan's schedule is defined by its name."""
    return plan.schedule != "search" and not is_schedule_file(plan.schedule)


def readable(plan: Plan, folder: Path) -> Plan:
    """`plan`; if its schedule file or the run with its measured costs is gone, a plan whose
    schedule file is the copy in the run folder."""
    copy, source = folder / SCHEDULE, _source(plan)
    if source is None or Path(source).expanduser().exists() or not copy.is_file():
        return plan
    changed = {"schedule": str(copy), "schedule_costs": "estimated", "schedule_memory_cap": None}
    return plan.model_copy(update=changed)


def _source(plan: Plan) -> str | None:
    """The path of the schedule file or of the measured costs; None without either."""
    if is_schedule_file(plan.schedule):
        return plan.schedule
    costs = plan.schedule_costs
    return None if plan.schedule != "search" or costs == "estimated" else costs


def update_schedule(config: RunConfig, folder: RunFolder, changes: Sequence[Change]) -> list[str]:
    """Write ``schedule.txt``, or remove it if the plan names a schedule; returns notes for users.

    An existing ``schedule.txt`` is used if the schedule file, or the run with the measured costs,
    is gone, or if the schedule is searched and `changes` has only keys of [train]; else the
    schedule is read or searched now. Raises UserError if the schedule does not fit the plan.
    """
    copy = folder.path / SCHEDULE
    if has_name(config.plan):
        copy.unlink(missing_ok=True)
        return []
    plan = readable(config.plan, folder.path)
    before = load(copy) if copy.is_file() else None
    is_same = all(change.key.split(".")[0] == "train" for change in changes)
    if plan.schedule == "search" and before is not None and is_same:
        fitting(before, plan, str(copy))
        return []
    schedule = build_step(plan, config.model, config.data.seq_len)
    folder.write_text(SCHEDULE, to_text(schedule))
    notes: list[str] = []
    if plan is not config.plan:
        notes.append(f"{_source(config.plan)} is gone: the run continues with its copy, {copy}")
    elif before is not None and digest(before) != digest(schedule):
        notes.append(
            f"changed since the last call: the schedule {plan.schedule}: digest {digest(before)} "
            f"-> {digest(schedule)} (layout)"
        )
    return notes


# Recorded orders of AMPNet in the run folder: a file for each range of steps.


#: Name of a file with the order of a range of steps.
_RECORDED = re.compile(r"schedule-(\d+)-(\d+)\.txt")


def write_recorded(folder: RunFolder, schedule: Schedule, first: int, last: int) -> None:
    """Write the order of steps `first` to `last`; later orders of an earlier run are removed."""
    for other, path in _recorded(folder.path).items():
        if other[1] >= first:
            path.unlink()
    folder.write_text(f"schedule-{first}-{last}.txt", to_text(schedule))


def recorded_segment(folder: Path, first: int) -> tuple[Schedule, int]:
    """The order that an AMPNet run took from step `first` on, and the last step before it drained.

    Raises UserError if the folder has none.
    """
    segments = _recorded(folder)
    for (start, last), path in segments.items():
        if start == first:
            return from_text(path.read_text(encoding="utf-8")), last
    known = ", ".join(f"{start} to {last}" for start, last in sorted(segments)) or "none"
    raise UserError(
        f"plan.replay: {folder} has no recorded order that starts at step {first}: it has steps "
        f"{known}"
    )


def refuse_unrecorded(config: RunConfig, done: int | None) -> None:
    """Raise UserError if a run with ``plan.replay`` that resumes from step `done` (None: unknown)
    has no order to replay."""
    if config.plan.replay is None:
        return
    folder = Path(config.plan.replay)
    if done is None and _recorded(folder):
        return
    schedule, last = recorded_segment(folder, 1 + (done or 0))
    check_recorded(schedule, config, 1 + (done or 0), last)


def _recorded(folder: Path) -> dict[tuple[int, int], Path]:
    """(first step, last step) -> file."""
    segments: dict[tuple[int, int], Path] = {}
    for path in folder.glob("schedule-*.txt"):
        if match := _RECORDED.fullmatch(path.name):
            segments[int(match[1]), int(match[2])] = path
    return segments


def check_recorded(schedule: Schedule, config: RunConfig, first: int, last: int) -> None:
    """Raise UserError if a recorded order is that of another plan, or cannot run."""
    plan = config.plan
    wanted = (plan.pp, (last - first + 1) * plan.microbatches, plan.num_update_microbatches)
    window = schedule.update.window if schedule.update else 0
    sizes = (schedule.num_ranks, schedule.total_microbatches, window)
    if wanted != sizes or last > config.train.steps:
        raise UserError(
            f"the recorded order of steps {first} to {last} has {sizes[0]} ranks, {sizes[1]} "
            f"microbatches and update windows of {sizes[2]}; this run has {wanted[0]}, {wanted[1]} "
            f"and {wanted[2]}, and {config.train.steps} steps"
        )
    check(schedule)
