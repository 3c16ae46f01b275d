"""The checkpoints that a path or an address on the command line means."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

if TYPE_CHECKING:
    from moemesh.checkpoint.remote import Place as Folder


class CheckpointPlace(NamedTuple):
    """A folder of checkpoints, and the steps that are meant, newest first."""

    folder: "Folder"
    steps: list[int]

    def path(self, step: int) -> "Folder":
        return self.folder / f"step-{step}"


def find(text: str) -> CheckpointPlace:
    """What a path or address on the command line means. CheckpointError where there is no
    checkpoint."""
    from moemesh.checkpoint.files import COMMITTED, CheckpointError
    from moemesh.checkpoint.remote import place_of
    from moemesh.checkpoint.stored import candidates

    place = place_of(text)
    if match := COMMITTED.fullmatch(place.name):
        for folder in _folders(place.parent):
            if (folder / place.name).is_dir():
                return CheckpointPlace(folder, [int(match[1])])
        steps = next(filter(None, map(candidates, _folders(place.parent))), [])
        others = f"; there are the steps {', '.join(map(str, reversed(steps)))}" if steps else ""
        raise CheckpointError(f"{place}: there is no such checkpoint{others}")
    for folder in _folders(place):
        if steps := candidates(folder):
            return CheckpointPlace(folder, steps)
    raise CheckpointError(f"{place}: " + ("holds no checkpoint" if place.is_dir() else "no folder"))


@contextmanager
def held(folder: "Folder", run: Path | None) -> Iterator[Callable[[], None]]:
    """Hold `folder`, the checkpoints of the run in the folder `run` where that is known, so that no
    run writes there; yields what raises CheckpointError where a run has taken it over since.
    CheckpointError where one is at work there."""
    from moemesh.checkpoint.files import CheckpointError
    from moemesh.checkpoint.ownership import Ownership, has_owner
    from moemesh.train.records.run_folder import LEASE, RunFolder
    from moemesh.watch.lease import RunFolderError

    def say(text: str) -> None:
        typer.echo(text, err=True)

    holding: RunFolder | Ownership | None = None
    lost: Callable[[], str | None] | None = None
    try:
        if run is not None and (run / LEASE).exists():
            holding = RunFolder(run, has_run=True, checkpoints=folder)
            holding.lock(say=say)
            lost = holding.lost
        elif has_owner(folder):
            holding = Ownership.take(folder, uuid.uuid4().hex, say=say)
            lost = holding.claim.lost
    except RunFolderError as error:
        if not error.holder:
            raise
        raise CheckpointError(
            f"{folder} is in use by a run ({error.holder}), which deletes old checkpoints by "
            "itself, as train.checkpoints_kept says: prune when it has ended, or stop it first"
        ) from error

    def check() -> None:
        if lost is not None and (why := lost()) is not None:
            raise CheckpointError(f"{why}; nothing more was deleted")

    try:
        yield check
    finally:
        if holding is not None:
            holding.release()


def _folders(place: "Folder") -> "list[Folder]":
    """Where a run in `place`, or `place` itself, would have checkpoints."""
    from moemesh.train.records.run_folder import checkpoints_of

    return [checkpoints_of(place), place] if isinstance(place, Path) else [place]
