"""Checkpoints of several ranks: saved, found and opened by all ranks of an axis at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from moemesh.checkpoint import store
from moemesh.checkpoint.remote import Place
from moemesh.checkpoint.store import Checkpoint, CheckpointError, Shard
from moemesh.comm.collectives import barrier, gather_json
from moemesh.comm.mesh import Axis


class Opened(NamedTuple):
    """The checkpoint (None: there is none that verifies), and the newer ones that do not, as
    (step, reason); the same on every rank."""

    checkpoint: Checkpoint | None
    skipped: list[tuple[int, str]]


def save(
    folder: Place, step: int, shards: Sequence[Shard], state: dict[str, Any], axis: Axis
) -> Place:
    """Write ``folder/step-<step>``: the shards of all ranks of `axis`, the state of the lowest.

    Raises CheckpointError on every rank when one fails; older checkpoints stay as they are.
    """
    return store.save(
        folder,
        step,
        shards,
        state,
        rank=axis.index,
        world_size=axis.size,
        gather=lambda value: gather_json(value, axis),
        barrier=lambda: barrier(axis),
    )


def open_together(
    folder: Place, axis: Axis, step: int | None = None, *, prefer_finite: bool = False
) -> Opened:
    """Open that step, its digests checked by the ranks in parts, or (None) the newest that
    verifies; `prefer_finite` as of :func:`moemesh.checkpoint.load.latest`. Raises CheckpointError
    on every rank when one cannot open it."""
    chosen, skipped = step, list[tuple[int, str]]()
    if step is None:
        if axis.index == 0:
            found = store.latest(
                folder, lambda *why: skipped.append(why), prefer_finite=prefer_finite
            )
            chosen = found.step if found else None
        chosen, bad = gather_json([chosen, skipped], axis)[0]
        skipped = [(number, why) for number, why in bad]
        if chosen is None:
            return Opened(None, skipped)
    checkpoint, problem = None, None
    assert chosen is not None
    try:
        checkpoint = store.open_checkpoint(folder, chosen, verify="sizes")
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
