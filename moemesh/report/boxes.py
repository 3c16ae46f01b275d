"""Records as boxes of a rank's row: lanes, blocks, colours and labels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from moemesh.report.svg import COLOURS, tint
from moemesh.trace.pipeline import places
from moemesh.trace.timeline import WorkRecord

#: Colours of well-known kinds, apart in hue and in lightness.
KINDS: dict[str, str] = {"F": "#1d4f91", "B": "#f0a030", "I": "#b84f16", "W": "#a3d495"}
#: How much white the tint of a second chunk or pipe holds.
_TINT = 0.5
#: Colours on a dark ground, as :data:`moemesh.report.svg.DARK`: those that carry white text, and
#: their tints, which stay apart from them.
DARK: dict[str, str] = {
    KINDS["F"]: "#7fb4f0",
    KINDS["I"]: "#ff9f6b",
    tint(KINDS["F"], _TINT): "#c9defa",
    tint(KINDS["I"], _TINT): "#ffd3b8",
}
#: Names and kinds that mean the same as a pipeline kind, for its colour.
SAME: dict[str, str] = {"forward": "F", "backward": "B"}
LONG_NAMES: dict[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
}
_MAX_LANES = 4


@dataclass(frozen=True, kw_only=True)
class Rectangle:
    """A record's place in its rank's row: `lane` downwards, and which `part` of `parts` of it.

    `place` counts the rank's chunks and pipes from 0; every other one is tinted. `sliced` says that
    its microbatch runs in slices.
    """

    record: WorkRecord
    lane: int
    part: int = 0
    parts: int = 1
    place: int = 0
    sliced: bool = False

    @property
    def tinted(self) -> bool:
        return self.place % 2 == 1

    @property
    def label(self) -> str:
        """The microbatch with its slice, or the name of other work."""
        record = self.record
        if record.microbatch is None:
            return record.name
        return f"{record.microbatch}.{record.slice}" if self.sliced else str(record.microbatch)

    def colour(self, colours: dict[str, str]) -> str:
        """The kind's colour or its tint."""
        colour = colours[key_of(self.record)]
        return tint(colour, _TINT) if self.tinted else colour


def boxes_of(records: Sequence[WorkRecord]) -> list[Rectangle]:
    """Lay out one rank's records: overlapping ones in lanes, equal intervals as one block.

    `records` in the timeline's order (start, longest first).
    """
    blocks: defaultdict[tuple[float, float], list[WorkRecord]] = defaultdict(list)
    for record in records:
        blocks[record.start, record.end].append(record)
    place_of = places(records)
    sliced = any(record.slice for record in records)
    ends: list[float] = []
    placed: list[Rectangle] = []
    for (start, end), block in blocks.items():
        free = (lane for lane, busy_until in enumerate(ends) if busy_until <= start)
        lane = next(free, len(ends))
        if lane == len(ends):
            ends.append(end)
        ends[lane] = end
        lane = min(lane, _MAX_LANES - 1)
        # The forward on top, whatever its stage.
        for part, record in enumerate(sorted(block, key=lambda r: r.kind != "F")):
            place = record.pipe
            if record.stage is not None:
                place = place_of[record.pipe, record.stage]
            share = {"lane": lane, "part": part, "parts": len(block)}
            placed.append(Rectangle(record=record, place=place, sliced=sliced, **share))
    return placed


def key_of(record: WorkRecord) -> str:
    """The key of a record's colour: its kind, or its name when it has none."""
    word = record.kind or record.name
    return SAME.get(word, word)


def colours_of(boxes: Sequence[Rectangle]) -> dict[str, str]:
    """Key -> colour, the pipeline kinds first, then the others by their busy time."""
    keys = sorted({key_of(box.record) for box in boxes} - KINDS.keys())
    # The most busy time first, so that the eleventh kind of helper does not take a colour away.
    busy: defaultdict[str, float] = defaultdict(float)
    for box in boxes:
        busy[key_of(box.record)] += box.record.duration
    keys.sort(key=lambda key: (-busy[key], key))
    palette = (*COLOURS[1:], *(tint(colour) for colour in COLOURS))
    others = {key: palette[index % len(palette)] for index, key in enumerate(keys)}
    return KINDS | others


def legend_entries(boxes: Sequence[Rectangle], colours: dict[str, str]) -> list[tuple[str, str]]:
    """(name, colour) of every kind present, then of the tinted ones."""
    present = {key_of(box.record) for box in boxes}
    entries = [(LONG_NAMES.get(key, key), colours[key]) for key in colours if key in present]
    second = "pipe 1" if any(box.record.pipe for box in boxes) else "odd chunk"
    tints = {key_of(box.record): box.colour(colours) for box in boxes if box.tinted}
    return entries + [
        (f"{LONG_NAMES.get(key, key)}, {second}", tints[key]) for key in colours if key in tints
    ]
