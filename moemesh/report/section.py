"""A section of a page: figures and tables under one noun."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup

from moemesh.trace.run import Run, state_of

#: Longer tables are cut, so that the page keeps its size whatever the run.
MAX_TABLE_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts; the first `num_names` columns are names, the others numbers. A `folded` one
    is opened by its reader."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_names: int = 1
    folded: bool = False


class Figure(NamedTuple):
    """A picture, the line of text above it, and the same picture for a phone if there is one."""

    caption: str
    svg: Markup
    narrow: Markup = Markup()

    @property
    def keys(self) -> list[tuple[str, Markup]]:
        """(colour, name) of the picture's legend (:func:`moemesh.report.svg.legend`)."""
        key = r'width="12" height="12" fill="(#\w+)"[^>]*/><text[^>]*>([^<]*)'
        return [(colour, Markup(name)) for colour, name in re.findall(key, self.svg)]


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """A chapter of the page; `missing` says why it is empty."""

    identity: str
    title: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    note: str = ""
    missing: str = ""


def figures(*drawn: tuple[str, str] | tuple[str, str, str]) -> list[Figure]:
    """Figures that show something, as trusted markup: their makers escape what comes from files."""
    return [Figure(caption, *map(Markup, pictures)) for caption, *pictures in drawn if pictures[0]]


def left_out(number: int, what: str, most: int = MAX_TABLE_ROWS) -> str:
    """The sentence that a table which was cut needs."""
    return "" if number <= most else f" The table shows the first {most} of {number:,} {what}."


def spread(number: int, most: int) -> list[int]:
    """At most `most` indices below `number`, evenly spread, first and last included."""
    if number <= most:
        return list(range(number))
    return [index * (number - 1) // (most - 1) for index in range(most)]


def plural(number: int, noun: str) -> str:
    """
    >>> plural(1, "layer"), plural(2, "layer")
    ('1 layer', '2 layers')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def missing(run: Run, name: str) -> str:
    """The reason for an empty section: the file `name` comes with the end of a run, or is lost."""
    if (run.folder / name).is_file():
        return f"{name} could not be read."
    if state_of(run) == "running":
        return f"{name} is written at the end of the run, which is at work."
    return f"No {name}."
