"""The checkpoint store: sharded, hashed, committed by one rename, keyed by logical names.

    checkpoints/
      step-1000/                    committed: the name itself says so
        manifest.json               names, slices, files with sizes and digests, state, own digest
        rank-00007.safetensors      the slices that rank 7 held
      step-2000.tmp-<id>/           being written: never loaded
      .trash-step-500-<id>/         being deleted: never loaded
      verified.json                 steps that were read back and found right

Two phases: every rank writes and syncs its own file; when all have and the slices are complete,
rank 0 writes the manifest and renames. Ranks talk in JSON through the `gather` given by the
caller, or through an axis of a mesh; the store knows no layouts. A training run saves by
:mod:`moemesh.checkpoint.saver`, whose ranks talk through files.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from moemesh.checkpoint.files import CheckpointError, make_folder, make_folders, remove_folder
from moemesh.checkpoint.load import Checkpoint, Shard, latest, open_checkpoint
from moemesh.checkpoint.remote import Place
from moemesh.checkpoint.retention import prune
from moemesh.checkpoint.stored import candidates
from moemesh.checkpoint.writing import check_shards, check_step, commit, part_name, write_part
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

#: JSON of this rank -> the JSON of all ranks, in rank order.
Gather = Callable[[object], list[Any]]


def save(
    folder: Path,
    step: int,
    shards: Sequence[Shard],
    state: dict[str, Any],
    *,
    rank: int = 0,
    world_size: int = 1,
    gather: Gather = lambda reply: [reply],
) -> Path:
    """Saves all ranks' shards and rank 0's `state` as ``folder/step-<step>``; all ranks call it,
    one where nothing is said of ranks.

    Raises CheckpointError on every rank when any of them fails (disk full, a hole or an overlap in
    a tensor, the step exists); then nothing new is left and older checkpoints are untouched. A
    process that dies instead leaves a ``.tmp`` folder, which the next :func:`prune` removes.
    """
    final = folder / f"step-{step}"
    identity = uuid.uuid4().hex if rank == 0 else ""
    temporary = None
    try:
        plans, begun = _attempt(lambda: _begin(final, identity, shards, state, rank))
        replies = _agree(gather, world_size, begun, {"step": step, "identity": identity})
        if {reply["step"] for reply in replies} != {step}:
            raise CheckpointError(f"ranks save different steps: {[r['step'] for r in replies]}")
        temporary = folder / f"{final.name}.tmp-{replies[0]['identity']}"
        written, problem = _attempt(lambda: write_part(temporary, part_name(rank), plans))
        reports = _agree(gather, world_size, problem, written)
        problem = None
        if rank == 0:
            _, problem = _attempt(lambda: commit(temporary, final, step, reports, state))
        _agree(gather, world_size, problem, None)
    except CheckpointError:
        # The verdict was exchanged: all ranks are here, and none returns before the folder is gone.
        if rank == 0:
            remove_folder(folder / f"{final.name}.tmp-{identity}")
        gather(None)
        raise
    return final


def _attempt(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """(result, None) or (None, what went wrong): other ranks must hear of an error, not wait."""
    try:
        return work(), None
    except CheckpointError as error:
        return None, str(error)
    except Exception as error:  # whatever it is, the other ranks wait for this one's verdict
        return None, f"{type(error).__name__}: {error}"


def _agree(gather: Gather, world_size: int, problem: str | None, content: object) -> list[Any]:
    """The contents of all ranks; CheckpointError on all of them when one has a problem."""
    replies = gather({"problem": problem, "content": content})
    assert len(replies) == world_size, f"gather gave {len(replies)} replies of {world_size} ranks"
    problems = [f"rank {i}: {r['problem']}" for i, r in enumerate(replies) if r["problem"]]
    if problems:
        more = f" (and {len(problems) - 3} more ranks)" if len(problems) > 3 else ""
        raise CheckpointError("checkpoint not saved: " + "; ".join(problems[:3]) + more)
    return [reply["content"] for reply in replies]


def _begin(
    final: Path, identity: str, shards: Sequence[Shard], state: dict[str, Any], rank: int
) -> dict[str, Shard]:
    """Checks this rank's shards, and on rank 0 makes the temporary folder. Returns key -> shard."""
    keyed = check_shards(shards)
    check_step(final, state if rank == 0 else {})
    if rank == 0:
        make_folders(final.parent)
        make_folder(final.parent / f"{final.name}.tmp-{identity}")
    return keyed


# Checkpoints of several ranks: saved, found and opened by all ranks of an axis at once.


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
