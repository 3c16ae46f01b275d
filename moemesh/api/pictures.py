"""Pictures of the library's results in notebooks, drawn by the report."""

from __future__ import annotations

from typing import Any

from moemesh.config.shown import PICTURES


def _curve(run: Any) -> str:
    # Late: `import moemesh` stays fast.
    from moemesh.report.curves import loss_curve

    return loss_curve(run.metrics, unit=run.loss_unit)[0] if run.metrics else ""


def _timeline(timeline: Any) -> str:
    from moemesh.report.timeline_picture import timeline_rows

    return timeline_rows(timeline)


def _schedule(schedule: Any) -> str:
    from moemesh.schedule.costs import Costs
    from moemesh.schedule.simulate import simulate

    return _timeline(simulate(schedule, Costs()).timeline)


def _meshes(plan: Any) -> str:
    """Picture of the meshes of a Plan, a PlannedLayout or a Layout."""
    from moemesh.config.layout import Layout
    from moemesh.config.plan import DEGREES
    from moemesh.report.rank_pictures import draw_meshes

    names = (*DEGREES, "ranks_per_node")
    return draw_meshes(Layout(**{name: getattr(plan, name) or 0 for name in names}))


def _loads(placed: Any) -> str:
    from moemesh.report.heat_maps import balance_heat_maps

    return balance_heat_maps(*placed.gpu_loads)


PICTURES.update(
    Run=_curve,
    Timeline=_timeline,
    Simulation=lambda simulation: _timeline(simulation.timeline),
    Schedule=_schedule,
    SearchResult=lambda result: _schedule(result.schedule),
    **dict.fromkeys(("Layout", "Plan", "PlannedLayout"), _meshes),
    Mesh=lambda mesh: _meshes(mesh.layout),
    **dict.fromkeys(("Answer", "RunConfig"), lambda answer: _meshes(answer.plan)),
    Answers=lambda answers: _meshes(answers[0].plan) if answers else "",
    Partition=lambda result: _meshes(result.implied.plan) if result.implied else "",
    ExpertPlacement=_loads,
)
