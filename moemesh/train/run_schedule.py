"""The schedule of a run on its ranks: one for all, whatever each could read by itself."""

from __future__ import annotations

from moemesh.comm.collectives import gather_json
from moemesh.comm.mesh import Mesh
from moemesh.config.run import RunConfig
from moemesh.schedule.action import Schedule
from moemesh.schedule.plan_schedule import build_step
from moemesh.schedule.text import from_text, to_text
from moemesh.train.kept_schedule import SCHEDULE, has_name
from moemesh.train.run_folder import RunFolder


def schedule_of_run(config: RunConfig, folder: RunFolder, mesh: Mesh) -> Schedule:
    """The schedule of a step, the same on every rank; all ranks call, after
    :func:`moemesh.train.kept_schedule.settle`."""
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
