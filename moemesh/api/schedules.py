"""Pipeline schedules: `moemesh.schedules`.

Each named schedule is a function of the number of ranks and of microbatches, such as
``schedules.zb_h1(4, 8)``. It raises a ValueError with the nearest legal numbers if the schedule is
not defined for these.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from moemesh.config.schedule_table import SCHEDULES
from moemesh.schedule.action import Schedule
from moemesh.schedule.build import build
from moemesh.schedule.check import check
from moemesh.schedule.costs import Costs
from moemesh.schedule.text import load, save, to_text

if TYPE_CHECKING:
    from moemesh.schedule.search import search as search

#: Names for `build` and ``plan.schedule``.
NAMES = tuple(SCHEDULES)

__all__ = ["NAMES", "Costs", "Schedule", "build", "check", "load", "save", "search", "to_text"]


def __getattr__(name: str) -> Any:
    if name == "search":  # late: it imports numpy
        from moemesh.schedule.search import search

        return search
    # A schedule is called like its generator: one_f_one_b, zb_h1, ...
    named = {row.make.rpartition(":")[2]: schedule for schedule, row in SCHEDULES.items()}
    if name in named:
        return partial(build, named[name])
    raise AttributeError(f"moemesh.schedules has no {name!r}: it has {', '.join(__dir__())}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(row.make.rpartition(":")[2] for row in SCHEDULES.values())])
