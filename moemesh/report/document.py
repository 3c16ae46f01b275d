"""The document of an answer: chapters of figures, tables and sentences, as one HTML page.

A page needs nothing else, no network and no script, and is the same bytes for the same document.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from moemesh.config.limits import visible
from moemesh.report import svg, timeline_picture
from moemesh.trace.run import Run, state_of

#: Longer tables are cut, so that the page keeps its size whatever the run.
MAX_TABLE_ROWS = 64
#: A label, and the names and values under it.
Cards = tuple[str, Sequence[tuple[str, str]]]


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


@dataclass(frozen=True)
class Chapter:
    """A chapter of a document; `missing` says why it is empty. `lists` are headings, "" for none,
    with their sentences; `code` is a text with its summary, folded where that is not ""."""

    identity: str = ""
    title: str = ""
    note: str = ""
    missing: str = ""
    cards: Sequence[Cards] = ()
    code: tuple[str, str] = ("", "")
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    lists: Sequence[tuple[str, Sequence[str]]] = ()


class NoticeBox(NamedTuple):
    """What a reader should see before all chapters: lines, each with a key or "" before it."""

    identity: str
    title: str
    lines: Sequence[tuple[str, str]]
    is_failure: bool = False


@dataclass(frozen=True, kw_only=True)
class PageDocument:
    """A page: its `kind` stands above the title, `lines` and `cards` below; `boxes` without a line
    are left out. `source` is the verb that writes it."""

    kind: str
    title: str
    lines: Sequence[str]
    chapters: Sequence[Chapter]
    cards: Sequence[Cards] = ()
    boxes: Sequence[NoticeBox] = ()
    source: str = "report"

    def to_html(self) -> str:
        """The page, in both colour schemes."""
        # Its import takes a tenth of a second, which only a page waits for.
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent),
            autoescape=True,
            finalize=_visible,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        colours = {**svg.DARK, **timeline_picture.DARK}
        return environment.get_template("page.html").render(
            document=self, ground=svg.DARK_GROUND, colours=colours.items()
        )


def _visible(value: object) -> object:
    """A value of the page; texts that are no markup without characters that steer a reader."""
    return visible(value) if type(value) is str else value


def figures(*drawn: tuple[str, str] | tuple[str, str, str]) -> list[Figure]:
    """Figures that show something, as trusted markup: their makers escape what comes from files."""
    return [Figure(caption, *map(Markup, pictures)) for caption, *pictures in drawn if pictures[0]]


def left_out(number: int, what: str) -> str:
    """The sentence that a table which was cut needs."""
    if number <= MAX_TABLE_ROWS:
        return ""
    return f" The table shows the first {MAX_TABLE_ROWS} of {number:,} {what}."


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
    """The reason for an empty chapter: the file `name` comes with the end of a run, or is lost."""
    if (run.folder / name).is_file():
        return f"{name} could not be read."
    if state_of(run) == "running":
        return f"{name} is written at the end of the run, which is at work."
    return f"No {name}."
