"""Orders that AMPNet took, kept in the run folder by the steps that they belong to."""

from __future__ import annotations

import re
from pathlib import Path

from moemesh.config.errors import UserError
from moemesh.config.run import RunConfig
from moemesh.schedule.action import Schedule
from moemesh.schedule.check import check
from moemesh.schedule.text import from_text, to_text
from moemesh.train.run_folder import RunFolder

#: A file of the run folder: from which step to which.
_RECORDED = re.compile(r"schedule-(\d+)-(\d+)\.txt")


def write_recorded(folder: RunFolder, schedule: Schedule, first: int, last: int) -> None:
    """Keep the order of steps `first` to `last`; what an earlier run recorded behind goes."""
    for other, path in _recorded(folder.path).items():
        if other[1] >= first:
            path.unlink()
    folder.write_text(f"schedule-{first}-{last}.txt", to_text(schedule))


def recorded_segment(folder: Path, first: int) -> tuple[Schedule, int]:
    """The order that an AMPNet run took from step `first` on, and the last step before it drained.

    Raises UserError when the folder has none.
    """
    found = _recorded(folder)
    for (start, last), path in found.items():
        if start == first:
            return from_text(path.read_text(encoding="utf-8")), last
    known = ", ".join(f"{start} to {last}" for start, last in sorted(found)) or "none"
    raise UserError(
        f"plan.replay: {folder} has no recorded order that starts at step {first}: it has steps "
        f"{known}"
    )


def refuse_unrecorded(config: RunConfig, done: int | None) -> None:
    """Raise UserError where a run that goes on from step `done` (None: a step not known yet) has
    nothing to replay though ``plan.replay`` is set."""
    if config.plan.replay is None:
        return
    folder = Path(config.plan.replay)
    if done is None and _recorded(folder):
        return
    schedule, last = recorded_segment(folder, 1 + (done or 0))
    check_recorded(schedule, config, 1 + (done or 0), last)


def _recorded(folder: Path) -> dict[tuple[int, int], Path]:
    """(first step, last step) -> file."""
    found: dict[tuple[int, int], Path] = {}
    for path in folder.glob("schedule-*.txt"):
        if match := _RECORDED.fullmatch(path.name):
            found[int(match[1]), int(match[2])] = path
    return found


def check_recorded(schedule: Schedule, config: RunConfig, first: int, last: int) -> None:
    """Raise UserError when a recorded order is none of this plan, or cannot run."""
    plan = config.plan
    wanted = (plan.pp, (last - first + 1) * plan.microbatches, plan.num_update_microbatches)
    window = schedule.update.window if schedule.update else 0
    found = (schedule.num_ranks, schedule.total_microbatches, window)
    if wanted != found or last > config.train.steps:
        raise UserError(
            f"the recorded order of steps {first} to {last} has {found[0]} ranks, {found[1]} "
            f"microbatches and update windows of {found[2]}; this run has {wanted[0]}, {wanted[1]} "
            f"and {wanted[2]}, and {config.train.steps} steps"
        )
    check(schedule)
