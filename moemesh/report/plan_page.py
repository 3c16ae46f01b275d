"""The page of a plan: one offline HTML file, for a telephone and a dark room, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moemesh.report.page import from_template
from moemesh.report.section import Table
from moemesh.report.svg import COLOURS, DARK


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a bar: its size and the text that says it."""

    name: str
    size: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Parts one behind the other, and what stands beside them."""

    name: str
    parts: Sequence[Part]
    text: str


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Bars of one scale; `limit` is a line across them (0: none)."""

    title: str
    note: str
    bars: Sequence[Bar]
    limit: float = 0.0
    limit_text: str = ""

    @property
    def highest(self) -> float:
        """The end of the scale."""
        sums = (sum(part.size for part in bar.parts) for bar in self.bars)
        return max([self.limit, *sums]) or 1.0

    @property
    def colours(self) -> dict[str, int]:
        """The number of each part's colour, in the order in which they appear."""
        names = dict.fromkeys(part.name for bar in self.bars for part in bar.parts)
        return {name: index % len(COLOURS) for index, name in enumerate(names)}


@dataclass(frozen=True, kw_only=True)
class WhyNot:
    """A rival and the sentences against it."""

    name: str
    sentences: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class PlanPage:
    """Everything on the page, as texts and sizes."""

    title: str
    subtitle: str
    facts: Sequence[tuple[str, str]]
    choice: Sequence[tuple[str, str]]
    tables: Sequence[Table]
    legend: Sequence[str]
    charts: Sequence[Bars]
    why_not: Sequence[WhyNot]
    traffic: Table | None
    notes: Sequence[str]
    command: str


def render(page: PlanPage) -> str:
    """The page as a text, the same bytes for the same plan."""
    parts = [(colour, DARK.get(colour, colour)) for colour in COLOURS]
    return from_template("plan.html", page=page, parts=parts)
