"""Document of a report: chapters of figures, tables and sentences, as one HTML page.

A page is self-contained (no network, no script) and has the same bytes for the same document.
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

#: Most rows of a table, which bounds the size of the page.
MAX_TABLE_ROWS = 64
#: A label, and the names and values under it.
Cards = tuple[str, Sequence[tuple[str, str]]]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts. The first `num_names` columns are names, the others numbers; a column of
    numbers without any value is left out. A `folded` table is closed until the reader opens it."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_names: int = 1
    folded: bool = False

    def __post_init__(self) -> None:
        columns = [
            column
            for column in range(len(self.header))
            if column < self.num_names or not self.rows or any(row[column] for row in self.rows)
        ]
        if len(columns) < len(self.header):
            object.__setattr__(self, "header", [self.header[column] for column in columns])
            rows = [[row[column] for column in columns] for row in self.rows]
            object.__setattr__(self, "rows", rows)


class Figure(NamedTuple):
    """A picture, its caption, and a narrow variant for phones, if any."""

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
    """A chapter of a document; `missing` is the reason if it is empty. `lists` are headings ("" for
    none) with their sentences; `code` is (summary, text), folded if the summary is not ""."""

    identity: str = ""
    title: str = ""
    note: str = ""
    missing: str = ""
    cards: Sequence[Cards] = ()
    code: tuple[str, str] = ("", "")
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    lists: Sequence[tuple[str, Sequence[str]]] = ()


#: Words of pages with their meaning; a page explains those that it uses (:func:`glossary`).
GLOSSARY: dict[str, str] = {
    "rank": "one process with one device (on a CPU, with its share of the cores)",
    "tp": "tensor parallelism: ranks that share every matrix of a layer",
    "cp": "context parallelism: ranks that share a sequence inside attention",
    "dp": "data parallelism: groups of ranks that train on different sequences",
    "pp": "pipeline parallelism: ranks that hold different layers",
    "ep": "expert parallelism: ranks that hold different experts",
    "etp": "expert-tensor parallelism: ranks that share every matrix of an expert",
    "edp": "ranks that hold the same experts; their gradients are summed",
    "dp_cp": "ranks that hold the same dense weights (dp and cp together); gradients are summed",
    "stage": "all ranks that hold the same layers (dp, cp and tp together)",
    "world": "all ranks",
    "control": "agreements of all ranks, such as on a stop request",
    "evaluate": "forward passes of validation",
    "reduce": "the sums of gradients, losses and loads at the end of a step",
    "microbatch": "the part of a batch that one forward pass reads",
    "stream": "the residual stream: the tensor that each layer reads and adds to",
    "dispatch": "rows of tokens in the order of their experts, with the data of their exchange",
    "router": "the scores and choices of experts of each token",
    "exposed": "not hidden by computation: ranks wait for it",
    "bubble": "time in which a rank of a pipeline has no work",
    "entropy": "how evenly tokens are spread over experts: 1 is uniform, 0 is one expert",
    "MFU": "share of the peak FLOP/s of the device that the model's own FLOPs reach",
    "unigram": "the model that has only the frequency of each token: learning is a lower loss",
}


class NoticeBox(NamedTuple):
    """Box in front of all chapters: lines, each with a key, or "" without one, then commands with
    their names."""

    identity: str
    title: str
    lines: Sequence[tuple[str, str]]
    is_failure: bool = False
    commands: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, kw_only=True)
class PageDocument:
    """A page: `kind` above the title, `lines` and `cards` below it; `boxes` without a line are left
    out. `source` is the verb that writes the page."""

    kind: str
    title: str
    lines: Sequence[str]
    chapters: Sequence[Chapter]
    cards: Sequence[Cards] = ()
    boxes: Sequence[NoticeBox] = ()
    source: str = "report"

    def to_html(self) -> str:
        """The page, in both colour schemes."""
        # Late: the import takes a tenth of a second.
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
    """A value for the page; texts other than markup have their control characters replaced."""
    return visible(value) if type(value) is str else value


def glossary(chapters: Sequence[Chapter], *more: str) -> Chapter:
    """The words of :data:`GLOSSARY` in `chapters`, and in `more` texts, with their meaning."""
    texts = list(more)
    for chapter in chapters:
        texts += [chapter.note, *(f"{figure.caption} {figure.svg}" for figure in chapter.figures)]
        texts += [text for _, pairs in chapter.cards for pair in pairs for text in pair]
        texts += [sentence for _, sentences in chapter.lists for sentence in sentences]
        for table in chapter.tables:
            texts += [table.caption, *table.header, *(cell for row in table.rows for cell in row)]
    used = set(re.findall(r"\w+", " ".join(texts)))
    words = [f"{word}: {meaning}" for word, meaning in GLOSSARY.items() if word in used]
    missing = "" if words else "The page has no word that needs an explanation."
    return Chapter("words", "Words of this page", missing=missing, lists=[("", words)])


def figures(*drawn: tuple[str, str] | tuple[str, str, str]) -> list[Figure]:
    """The figures of (caption, picture, narrow picture) that are not empty. Pictures become trusted
    markup: the functions that draw them escape texts."""
    return [Figure(caption, *map(Markup, pictures)) for caption, *pictures in drawn if pictures[0]]


def left_out(number: int, what: str) -> str:
    """Sentence on the rows that a cut table leaves out; "" if it is complete."""
    if number <= MAX_TABLE_ROWS:
        return ""
    return f" The table shows the first {MAX_TABLE_ROWS} of {number:,} {what}."


def spread(number: int, most: int) -> list[int]:
    """At most `most` indices below `number`, evenly spread, first and last included."""
    if number <= most:
        return list(range(number))
    return [index * (number - 1) // (most - 1) for index in range(most)]


def plural(number: int, noun: str) -> str:
    """The number with its noun.

    >>> plural(1, "layer"), plural(2, "layer")
    ('1 layer', '2 layers')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def missing(run: Run, name: str) -> str:
    """Reason for an empty chapter: the file `name` is not written yet, damaged or missing."""
    if (run.folder / name).is_file():
        return f"{name} could not be read."
    if state_of(run) == "running":
        return f"{name} is written at the end of the run, which is still running."
    return f"No {name}."
