"""Events of a run: what was said besides steps, one object a line of `events.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: In the text of an event: a loss jumped.
JUMPED = "deviations above the last ones"


@dataclass(frozen=True, kw_only=True)
class Event:
    """`time` (UTC, ISO 8601), `step` (the last one that was finished, None before the first),
    `kind` (a word such as "alarm") and what was said."""

    time: str
    step: int | None
    kind: str
    text: str

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Event:
        """One line; unknown keys are left out. Raises KeyError, TypeError or ValueError."""
        step = data.get("step")
        return cls(
            time=str(data.get("time", "")),
            step=None if step is None else int(step),
            kind=str(data["kind"]),
            text=str(data["text"]),
        )
