"""The checkpoints that a path or an address on the command line means."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from moemesh.checkpoint.remote import Place as Folder


class Found(NamedTuple):
    """A folder of checkpoints, and the steps that are meant, newest first."""

    folder: "Folder"
    steps: list[int]

    def path(self, step: int) -> "Folder":
        return self.folder / f"step-{step}"


def find(text: str) -> Found:
    """What a path or address on the command line means. CheckpointError where there is no
    checkpoint."""
    from moemesh.checkpoint.files import COMMITTED, CheckpointError
    from moemesh.checkpoint.remote import place_of
    from moemesh.checkpoint.stored import candidates

    place = place_of(text)
    if match := COMMITTED.fullmatch(place.name):
        for folder in _folders(place.parent):
            if (folder / place.name).is_dir():
                return Found(folder, [int(match[1])])
        raise CheckpointError(f"{place}: there is no such checkpoint{_others(place.parent)}")
    for folder in _folders(place):
        if steps := candidates(folder):
            return Found(folder, steps)
    raise CheckpointError(f"{place}: " + ("holds no checkpoint" if place.is_dir() else "no folder"))


def _folders(place: "Folder") -> "list[Folder]":
    """Where a run in `place`, or `place` itself, would have checkpoints."""
    from moemesh.train.folder import checkpoints_of

    return [checkpoints_of(place), place] if isinstance(place, Path) else [place]


def _others(place: "Folder") -> str:
    from moemesh.checkpoint.stored import candidates

    steps = next(filter(None, map(candidates, _folders(place))), [])
    return f"; there are the steps {', '.join(map(str, reversed(steps)))}" if steps else ""
