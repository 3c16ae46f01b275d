"""The schedule of a run whose plan names a file or a search: kept in the run folder.

It is settled once, by the process that opens the folder, and written to ``schedule.txt``; every
rank gets that text. So a resumed run needs neither the file nor the costs of the search any more,
and all ranks run one schedule whatever they could compute or read by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moemesh.comm.collectives import gather_json
from moemesh.comm.mesh import Mesh
from moemesh.config.pipeline import is_schedule_file
from moemesh.config.plan import Plan
from moemesh.config.run import RunConfig
from moemesh.schedule.action import Schedule
from moemesh.schedule.build import build_step, fitting
from moemesh.schedule.files import load
from moemesh.schedule.text import digest, from_text, to_text
from moemesh.train.folder import Change, RunFolder

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


def schedule_of_run(config: RunConfig, folder: RunFolder, mesh: Mesh) -> Schedule:
    """The schedule of a step, the same on every rank; all ranks call, after :func:`settle`."""
    if has_name(config.plan):
        return build_step(config.plan)
    text = (folder.path / SCHEDULE).read_text(encoding="utf-8") if mesh.rank == 0 else ""
    return _of_rank_0(text, mesh)


def schedule_of_step(config: RunConfig, mesh: Mesh) -> Schedule:
    """The schedule of a step without a run folder, the same on every rank; all ranks call."""
    schedule = build_step(config.plan, config.model, config.data.seq_len)
    return schedule if has_name(config.plan) else _of_rank_0(to_text(schedule), mesh)


def _of_rank_0(text: str, mesh: Mesh) -> Schedule:
    """What rank 0 read or searched: files may differ between nodes."""
    return from_text(gather_json(text if mesh.rank == 0 else None, mesh.control)[0])
