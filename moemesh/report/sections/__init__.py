"""The sections of a run's page, each made from one part of the run."""

from __future__ import annotations

from collections.abc import Callable

from moemesh.report.configuration import changes
from moemesh.report.section import Chapter
from moemesh.report.sections.loads import loads
from moemesh.report.sections.memory import memory
from moemesh.report.sections.timeline import timeline
from moemesh.report.sections.traffic import traffic
from moemesh.report.sections.training import events, training
from moemesh.trace.run import Run

SECTIONS: tuple[Callable[[Run], Chapter], ...] = (
    changes,
    training,
    timeline,
    traffic,
    memory,
    loads,
    events,
)
