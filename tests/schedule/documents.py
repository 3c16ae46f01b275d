"""The part of docs/schedules.md that is written from the code, and its pictures."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from pkgutil import resolve_name

from moemesh.config.schedule_table import SCHEDULES
from moemesh.report.timeline_picture import timeline_rows
from moemesh.schedule.action import Schedule
from moemesh.schedule.build import build
from moemesh.schedule.simulate import simulate
from moemesh.trace.pipeline import activations

#: Arguments of a drawn schedule by name: four ranks, enough microbatches to see the steady state.
SHOWN: dict[str, dict[str, int]] = {
    "interleaved_1f1b": {"stages_per_rank": 2},
    "terapipe": {"num_slices": 4},
    "pipedream_2bw": {"window": 4},
}


def shown(name: str) -> Schedule:
    microbatches = 2 if name == "terapipe" else 8
    return build(name, 4, microbatches, **SHOWN.get(name, {}))


def picture(name: str) -> str:
    """The timeline of the small case, every half of an operation one tick."""
    timeline = simulate(shown(name)).timeline
    title = f"{name}, 4 ranks, {shown(name).total_microbatches} microbatches"
    memory = activations(timeline)
    return timeline_rows(timeline, memory=memory, title=title, identity=name.replace("_", "-"))


#: File -> what draws it.
PICTURES: dict[str, Callable[[], str]] = {
    f"docs/schedules/{name}.svg": lambda name=name: picture(name) for name in SCHEDULES
}


def description(generator: Callable[..., Schedule]) -> str:
    """The sentence on a schedule and its paper: the comment above its generator, or the docstring
    of a module that has only one."""
    module = inspect.getmodule(generator)
    assert module is not None and module.__doc__ is not None
    above = inspect.getsource(module).partition(f"\ndef {generator.__name__}(")[0]
    comments = re.findall(r"(?m)(?:^#(?: .*)?\n)+", above)
    if not comments:
        return inspect.cleandoc(module.__doc__)
    return re.sub(r"(?m)^# ?", "", comments[-1]).strip()


def schedules(old: str) -> str:
    """Section of every schedule: its one sentence, source, conditions, formulas, and picture."""
    lines: list[str] = []
    for name, row in SCHEDULES.items():
        generator = resolve_name(row.make)
        module = inspect.getmodule(generator)
        assert module is not None
        head, _, source = description(generator).partition("\n\n")
        rules = ", ".join(f"`{rule.text}`" for rule in row.conditions)
        metric = "span bubble" if row.metric == "span" else "rank idle"
        simulation = simulate(shown(name))
        peaks = ", ".join(f"{peak:g}" for peak in simulation.peak_activation)
        file = module.__name__.rpartition(".")[2]
        lines += [
            f"### {name}",
            "",
            *textwrap.wrap(f"{head} {' '.join(source.split())}", 110, break_long_words=False),
            "",
            f"- generator: `moemesh/schedule/{file}.py`; needs {rules}",
            f"- {metric}: {row.bubble}; exact when: {row.bubble_where}",
            f"- peak activation of rank r, in M_a: {row.peak}",
            f"- copies of the weights: {row.copies}",
            f"- drawn: bubble rate {simulation.bubble_rate:.4f}, makespan {simulation.makespan:g}, "
            f"peaks {peaks}",
            "",
            f"![{name}](schedules/{name}.svg)",
            "",
        ]
    return "\n".join(lines)
