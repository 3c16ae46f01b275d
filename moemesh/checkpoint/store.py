"""The checkpoint store: sharded, hashed, committed by one rename, keyed by logical names.

    checkpoints/
      step-1000/                    committed: the name itself says so
        manifest.json               names, slices, files with sizes and digests, state, own digest
        rank-00007.safetensors      the slices that rank 7 held
      step-2000.tmp-<id>/           being written: never loaded
      .trash-step-500-<id>/         being deleted: never loaded
      verified.json                 steps that were read back and found right

:mod:`moemesh.checkpoint.saver` writes them; here all ranks of an axis save and open them at once.
The store knows no layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.load import Checkpoint, Shard, latest, open_checkpoint
from moemesh.checkpoint.remote import Place
from moemesh.checkpoint.retention import prune
from moemesh.checkpoint.saver import save
from moemesh.checkpoint.stored import candidates
from moemesh.comm.collectives import gather_json
from moemesh.comm.mesh import Axis

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Opened",
    "Shard",
    "agree",
    "candidates",
    "latest",
    "open_checkpoint",
    "open_together",
    "prune",
    "save",
    "save_together",
]


class Opened(NamedTuple):
    """The checkpoint (None: there is none that verifies), and the newer ones that do not, as
    (step, reason); the same on every rank."""

    checkpoint: Checkpoint | None
    skipped: list[tuple[int, str]]


def save_together(
    folder: Place, step: int, shards: Sequence[Shard], state: dict[str, Any], axis: Axis
) -> Place:
    """Write ``folder/step-<step>``: the shards of all ranks of `axis`, the state of the lowest.

    Raises CheckpointError on every rank when one fails; older checkpoints stay as they are.
    """
    gather = partial(gather_json, axis=axis)
    return save(folder, step, shards, state, rank=axis.index, world_size=axis.size, gather=gather)


def open_together(
    folder: Place, axis: Axis, step: int | None = None, *, prefer_finite: bool = False
) -> Opened:
    """Open that step, its digests checked by the ranks in parts, or (None) the newest that
    verifies; `prefer_finite` as of :func:`moemesh.checkpoint.load.latest`. Raises CheckpointError
    on every rank when one cannot open it."""
    chosen, skipped = step, list[tuple[int, str]]()
    if step is None:
        if axis.index == 0:
            found = latest(folder, lambda *why: skipped.append(why), prefer_finite=prefer_finite)
            chosen = found.step if found else None
        chosen, bad = gather_json([chosen, skipped], axis)[0]
        skipped = [(number, why) for number, why in bad]
        if chosen is None:
            return Opened(None, skipped)
    checkpoint, problem = None, None
    assert chosen is not None
    try:
        checkpoint = open_checkpoint(folder, chosen, verify="sizes")
        if step is not None:  # of the newest, the lowest rank has checked all digests
            checkpoint.verify(axis.index, axis.size)
    except (CheckpointError, OSError) as error:
        problem = str(error)
    agree(problem, axis)
    return Opened(checkpoint, skipped)


def agree(problem: str | None, axis: Axis) -> None:
    """Raise CheckpointError on all ranks when one of them has a problem."""
    for rank, found in enumerate(gather_json(problem, axis)):
        if found:
            raise CheckpointError(f"rank {rank}: {found}" if axis.size > 1 else found)
