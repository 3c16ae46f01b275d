"""Pipeline schedules: `moemesh.schedules`.

Each named schedule is a function of the number of ranks and of microbatches, such as
``schedules.zb_h1(4, 8)``. It raises a ValueError with the nearest legal numbers if the schedule is
not defined for these.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from moemesh.schedule.action import Schedule
from moemesh.schedule.build import RECIPES, build
from moemesh.schedule.check import check
from moemesh.schedule.costs import Costs
from moemesh.schedule.text import load, save, to_text

if TYPE_CHECKING:
    from moemesh.schedule.search import search as search

gpipe = partial(build, "gpipe")
one_f_one_b = partial(build, "1f1b")
interleaved_1f1b = partial(build, "interleaved_1f1b")
terapipe = partial(build, "terapipe")
chimera = partial(build, "chimera")
zb_h1 = partial(build, "zb_h1")
zb_h2 = partial(build, "zb_h2")
zb_v = partial(build, "zb_v")
dualpipe = partial(build, "dualpipe")
dualpipe_v = partial(build, "dualpipe_v")
pipedream = partial(build, "pipedream")
pipedream_2bw = partial(build, "pipedream_2bw")
ampnet = partial(build, "ampnet")

#: Names for `build` and ``plan.schedule``.
NAMES = tuple(RECIPES)

__all__ = [
    "NAMES", "Costs", "Schedule", "ampnet", "build", "check", "chimera", "dualpipe", "dualpipe_v",
    "gpipe", "interleaved_1f1b", "load", "one_f_one_b", "pipedream", "pipedream_2bw", "save",
    "search", "terapipe", "to_text", "zb_h1", "zb_h2", "zb_v",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "search":  # late: it imports numpy
        from moemesh.schedule.search import search

        return search
    raise AttributeError(f"moemesh.schedules has no {name!r}: it has {', '.join(__all__)}")
