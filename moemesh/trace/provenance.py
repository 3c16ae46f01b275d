"""Reader of ``provenance.json``: the starts of a run, and their differences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from moemesh.config.limits import parse_json
from moemesh.config.sources import RUN_STARTS

#: Version of the file's format, its key "schema".
SCHEMA = 1

#: Compared sections of two starts -> their display names.
_SECTIONS = {
    "python": "Python",
    "packages": "package",
    "library": "moemesh",
    "git": "git",
    "hardware": "hardware",
    "devices": "devices",
    "environment": "environment",
    "data": "data",
    "weights": "weights",
    "threads": "threads of a rank",
}
#: Entries that record names and locations, and do not affect results.
_LOCATIONS = (
    "library.folder", "git.root", "git.branch", "git.untracked", "git.diff",
    "environment.VIRTUAL_ENV",
)  # fmt: skip
_LOCATION_PREFIXES = ("environment.SLURM_", "environment.TORCHELASTIC_", "environment.MOEMESH__")


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's starts, oldest first; empty if the file is missing or damaged."""
    try:
        content: Any = parse_json((folder / RUN_STARTS).read_text(encoding="utf-8"))
        return [cast("dict[str, Any]", dict(start)) for start in content["starts"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


class ProvenancePart(NamedTuple):
    """Steps `first` to `last` of a run. `record` is that of the start that ran them, or, in
    `Run.plans`, their plan."""

    record: Mapping[str, Any]
    first: int
    last: int

    @property
    def words(self) -> str:
        """Range as text, such as "steps 21 to 30"."""
        ended = f"to {self.last:,}" if self.last >= self.first else "on, none of which has ended"
        return f"steps {self.first:,} {ended}"


def parts_of(starts: Sequence[Mapping[str, Any]], last: int) -> list[ProvenancePart]:
    """Steps 1 to `last`, a part for each start; a repeated step belongs to its newest start, and a
    start whose steps were all repeated has no part.

    Raises KeyError, TypeError, ValueError or OverflowError for a record without a valid first step.
    """
    parts: list[ProvenancePart] = []
    for start in starts:
        first = int(start["first_step"])
        earlier = [part for part in parts if part.first < first]
        parts = [part._replace(last=min(part.last, first - 1)) for part in earlier]
        parts.append(ProvenancePart(start, first, last))
    return parts


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Differences of two starts that may affect results: one line each, the older value first."""
    lines: list[str] = []
    for section, name in _SECTIONS.items():
        for key, old, new in _differing(before.get(section), after.get(section)):
            entry = ".".join([section, *key])
            if entry in _LOCATIONS or entry.startswith(_LOCATION_PREFIXES):
                continue
            what = " ".join([name, ".".join(key)]).strip()
            lines.append(f"{what}: {_shown(old)} then, {_shown(new)} now")
    return lines


def _differing(old: Any, new: Any) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """(path of keys, old value, new value) of each difference of two nested dictionaries."""
    if isinstance(old, dict) and isinstance(new, dict):
        before, after = cast("dict[str, Any]", old), cast("dict[str, Any]", new)
        for key in sorted(before.keys() | after.keys()):
            for rest, a, b in _differing(before.get(key), after.get(key)):
                yield (key, *rest), a, b
    elif old != new:
        yield (), old, new


def _shown(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
