"""The copy of a schedule that a run folder keeps, of a plan that names a file or a search.

It is settled once, by the process that opens the folder, and written to ``schedule.txt``: a resumed
run needs neither the file nor the costs of the search any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moemesh.config.changes import Change
from moemesh.config.plan import Plan
from moemesh.config.run import RunConfig
from moemesh.config.schedule_rules import is_schedule_file
from moemesh.schedule.plan_schedule import build_step, fitting
from moemesh.schedule.text import digest, load, to_text
from moemesh.train.run_folder import RunFolder

SCHEDULE = "schedule.txt"


def has_name(plan: Plan) -> bool:
    """Whether the plan's schedule follows from its name."""
    return plan.schedule != "search" and not is_schedule_file(plan.schedule)


def readable(plan: Plan, folder: Path) -> Plan:
    """`plan` with the copy in the run folder in place of a file, or of measured costs, that are
    gone."""
    kept = folder / SCHEDULE
    source = _source(plan)
    if source is None or Path(source).expanduser().exists() or not kept.is_file():
        return plan
    own = {"schedule": str(kept), "schedule_costs": "estimated", "schedule_memory_cap": None}
    return plan.model_copy(update=own)


def _source(plan: Plan) -> str | None:
    """The path that the schedule is read or measured from."""
    if is_schedule_file(plan.schedule):
        return plan.schedule
    costs = plan.schedule_costs
    return None if plan.schedule != "search" or costs == "estimated" else costs


def settle(config: RunConfig, folder: RunFolder, changes: Sequence[Change]) -> list[str]:
    """Write ``schedule.txt``, or remove it where the plan names a schedule; what to tell the user.

    A file that can be read counts as it is now; a file that is gone, and a search whose plan, model
    and data are those of the run so far (`changes` has none of them), count as they were. Raises
    UserError when the schedule does not fit the plan.
    """
    kept = folder.path / SCHEDULE
    if has_name(config.plan):
        kept.unlink(missing_ok=True)
        return []
    plan = readable(config.plan, folder.path)
    before = load(kept) if kept.is_file() else None
    searched = plan.schedule == "search" and before is not None
    if searched and not any(change.key.split(".")[0] != "train" for change in changes):
        assert before is not None
        fitting(before, plan, str(kept))
        return []
    schedule = build_step(plan, config.model, config.data.seq_len)
    folder.write_text(SCHEDULE, to_text(schedule))
    notes: list[str] = []
    if plan is not config.plan:
        notes.append(f"{_source(config.plan)} is gone: the run goes on with its copy, {kept}")
    elif before is not None and digest(before) != digest(schedule):
        notes.append(
            f"changed since the last call: the schedule {plan.schedule}: digest {digest(before)} "
            f"-> {digest(schedule)} (layout)"
        )
    return notes
