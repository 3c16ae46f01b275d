"""Retention of checkpoints: which are kept and which are deleted; the space that they take.

``verified.json`` in their folder lists those that were read back and verified: a step's name ->
digest of its manifest, and whether its numbers are finite. The file is a cache: a checkpoint that
it lacks, since the file was lost or an older version wrote it, is read back when needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from moemesh.checkpoint import files
from moemesh.checkpoint.files import CheckpointError, file_limit, free_bytes
from moemesh.checkpoint.manifest import ITEM_BYTES
from moemesh.checkpoint.remote import Place
from moemesh.checkpoint.stored import (
    StoredCheckpoint,
    candidates,
    num_nonfinite,
    open_stored,
    read_manifest,
    unfinished,
)
from moemesh.config.errors import UserError
from moemesh.config.limits import parse_json
from moemesh.config.run import RunConfig
from moemesh.sharding.parameters import tuned_tensors
from moemesh.trace.memory_profile import format_bytes

VERIFIED = "verified.json"
#: Key of a checkpoint's state for the validation loss of its step, if it was measured.
VALIDATION_LOSS = "validation_loss"


class VerifiedState(NamedTuple):
    """State of a committed checkpoint: whether it verifies, whether all its numbers are finite
    (None: unknown), and its fault."""

    step: int
    digest: str | None
    is_verified: bool
    is_finite: bool | None
    problem: str | None = None

    @property
    def counts(self) -> bool:
        """Whether it is one of the checkpoints to keep, for which an older one may be deleted."""
        return self.is_verified and bool(self.is_finite)


class Pruning(NamedTuple):
    """Plan of a pruning: checkpoints to keep, newest first; steps to delete; and names of partial
    writes and deletions that dead runs left, and of quarantined checkpoints that are not needed."""

    kept: list[VerifiedState]
    doomed: list[int]
    leftovers: list[str]


def nonfinite(stored: StoredCheckpoint) -> Sequence[str]:
    """Names of the tensors with infinities or NaN. The manifest of format 1 does not have them, so
    all its tensors are read."""
    if stored.manifest.nonfinite is not None:
        return stored.manifest.nonfinite
    names = set[str]()
    for file, record in stored.manifest.files.items():
        slices = stored.slices(file)
        with files.reading(stored.path / file) as opened:
            opened.seek(record.size - sum(piece.num_bytes for piece in slices))
            for piece in slices:
                for chunk in files.read_chunks(opened, piece.num_bytes):
                    if num_nonfinite(chunk, piece.dtype):
                        names.add(piece.name)
    return sorted(names)


def verified_state(folder: Place, step: int, *, read_back: bool) -> VerifiedState:
    """State of ``folder/step-<step>``. `read_back`: a checkpoint that is not listed as verified is
    read; otherwise it counts as not verified, without a problem."""
    verified, was_finite = _read_verified(folder).get(f"step-{step}", (None, None))
    try:
        stored = open_stored(folder, step)
        digest, names = stored.manifest.digest, stored.manifest.nonfinite
        is_finite = None if names is None else not names
        if verified == digest:
            is_finite = is_finite if was_finite is None else was_finite
            if is_finite is None and read_back:
                is_finite = not nonfinite(stored)
            return VerifiedState(step, digest, True, is_finite)
        if not read_back:
            return VerifiedState(step, digest, False, is_finite)
        stored.verify()
        return VerifiedState(step, digest, True, not nonfinite(stored))
    except (CheckpointError, OSError) as error:
        return VerifiedState(step, None, False, None, str(error))


def validated(folder: Place) -> list[tuple[float, int]]:
    """(validation loss, step) of the checkpoints in `folder` that have one, the lowest first."""
    losses: list[tuple[float, int]] = []
    for step in candidates(folder):
        with suppress(CheckpointError, OSError):
            loss = read_manifest(folder / f"step-{step}").state.get(VALIDATION_LOSS)
            if isinstance(loss, float) and math.isfinite(loss):
                losses.append((loss, step))
    return sorted(losses)


def best_step(folder: Place) -> int:
    """The step with the lowest validation loss. Raises CheckpointError if none has one."""
    if not (losses := validated(folder)):
        raise CheckpointError(
            f"{folder}: no checkpoint has a validation loss: it is recorded for a step with both a "
            "validation and a checkpoint (train.validate_every, train.checkpoint_every); fix: "
            "leave --best out, for the newest"
        )
    return losses[0][1]


def remember(folder: Place, states: Sequence[VerifiedState], *, only: bool = False) -> None:
    """Record the verified ones of `states`; `only`: and remove all others from the record."""
    verified = {} if only else _read_verified(folder)
    for state in states:
        if state.is_verified and state.digest is not None:
            verified[f"step-{state.step}"] = (state.digest, state.is_finite)
    content = {
        name: {"digest": digest, "finite": is_finite}
        for name, (digest, is_finite) in verified.items()
    }
    text = json.dumps(content, indent=1).encode()
    with suppress(CheckpointError, OSError):
        if files.read_start(folder / VERIFIED, len(text) + 1) == text:
            return
    files.replace_file(folder / VERIFIED, text)


def plan_pruning(folder: Place, keep: int, *, with_leftovers: bool = True) -> Pruning:
    """Plan of :func:`prune`: reads back checkpoints that are not listed as verified, deletes
    nothing.

    A checkpoint counts if it verifies and is finite. These are kept:

    - of those that count, the newest `keep`, and the one with the lowest validation loss;
    - of those that do not verify, all that are newer than the oldest of the newest `keep`, or all
      if fewer than `keep` count;
    - of those with infinities or NaN that are newer than that one, too, the newest, for inspection;
      `keep` of them if none counts;
    - in quarantine, those that are newer than the newest one that counts.
    """
    if keep < 1:
        raise ValueError(f"keep ({keep}) must be at least 1")
    kept, doomed, poisoned = list[VerifiedState](), list[int](), list[VerifiedState]()
    num_good = 0
    for step in candidates(folder):
        if num_good == keep:
            doomed.append(step)
            continue
        state = verified_state(folder, step, read_back=True)
        num_good += state.counts
        kept.append(state)
        if state.is_verified and not state.counts:
            poisoned.append(state)
    surplus = poisoned[(1 if num_good else keep) :]
    doomed += [state.step for state in surplus]
    for _, step in validated(folder) if doomed else ():  # the best one that counts
        state = next((state for state in kept if state.step == step), None)
        state = state or verified_state(folder, step, read_back=True)
        if state.counts:
            if step in doomed:
                doomed.remove(step)
                kept.append(state)
            break
    leftovers = unfinished(folder) if with_leftovers else []
    newest = max((state.step for state in kept if state.counts), default=-1)
    broken = (files.BROKEN.fullmatch(name) for name in files.list_names(folder))
    leftovers += [match[0] for match in broken if match and int(match[1]) <= newest]
    return Pruning(
        [state for state in kept if state not in surplus], sorted(doomed, reverse=True), leftovers
    )


def prune(
    folder: Place,
    keep: int,
    *,
    with_leftovers: bool = True,
    check: Callable[[], None] = lambda: None,
) -> list[int]:
    """Deletes the checkpoints of :func:`plan_pruning` and quarantined ones that are not needed;
    returns the deleted steps.

    `with_leftovers`: also removes partial writes and deletions of dead runs, so the caller must be
    the one process that holds the run folder's lock, with no save in progress. `check` is called
    before each deletion; an exception from it ends the pruning.
    """
    plan = plan_pruning(folder, keep, with_leftovers=with_leftovers)
    for name in plan.leftovers:
        if name.endswith(".json"):
            check()
            files.remove_file(folder / name)
        else:
            files.remove_folder(folder / name, check)
    check()
    # Before the deletions: after a crash the list must not lack a checkpoint that was kept.
    remember(folder, plan.kept, only=True)
    for step in plan.doomed:
        files.delete_checkpoint(folder / f"step-{step}", check)
    return plan.doomed


def _read_verified(folder: Place) -> dict[str, tuple[str, bool | None]]:
    """Step name -> digest, and whether finite (None in older versions); empty if damaged."""
    try:
        content: Any = parse_json(files.read_start(folder / VERIFIED, 1 << 20))
    except (CheckpointError, OSError, ValueError):
        return {}
    verified: dict[str, tuple[str, bool | None]] = {}
    for name, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, str):
            verified[name] = (value, None)
        elif isinstance(value, dict) and isinstance(value.get("digest"), str):
            is_finite = value.get("finite")
            verified[name] = (value["digest"], is_finite if isinstance(is_finite, bool) else None)
    return verified


class DiskError(UserError):
    """The disk has no room for a checkpoint; the message names the bytes needed and free."""


class DiskNeed(NamedTuple):
    """Sizes in bytes. `checkpoint`: one checkpoint; `most`: the largest number that a run has at a
    time (kept ones, the best one and one being written); `present`: those that exist now; `free`:
    free space."""

    checkpoint: int
    most: int
    present: int
    free: int


def checkpoint_bytes(config: RunConfig) -> int:
    """Size of a checkpoint in bytes: main weights and optimizer states of parameters that train,
    and the other weights unless the base is packed. Headers, the manifest and the routers' biases,
    which are thousandths of the size, are left out."""
    train = config.train
    frozen = ITEM_BYTES[train.dtype]
    master = max(frozen, ITEM_BYTES["float32"])
    return sum(
        prod(tensor.shape)
        * (
            master * (1 + train.num_states(tensor.name))
            if tensor.trains
            else tensor.weight_bytes(frozen) * (not config.lora.is_packed)
        )
        for tensor in tuned_tensors(config.model, config.plan, config.tuning)
    )


def disk_need(config: RunConfig, checkpoints: Place) -> DiskNeed:
    """Space that the run needs in the folder `checkpoints`, which need not exist yet."""
    size = checkpoint_bytes(config)
    present = 0  # for a store without limits
    if isinstance(checkpoints, Path):
        paths = (path for path in checkpoints.glob("step-*/*") if path.is_file())
        present = sum(path.stat().st_size for path in paths)
    most = size * (config.train.checkpoints_kept + 2)  # the best one, and one being written
    return DiskNeed(size, most, present, free_bytes(checkpoints))


def refuse_full_disk(config: RunConfig, checkpoints: Place) -> DiskNeed:
    """Raise DiskError if no further checkpoint fits on the disk, or if its files exceed the limit
    of this process (ulimit -f); returns the need."""
    need = disk_need(config, checkpoints)
    limit, part = file_limit(), need.checkpoint // config.plan.world_size
    if isinstance(checkpoints, Path) and limit is not None and part > limit:
        raise DiskError(
            f"{checkpoints}: a checkpoint has files of {format_bytes(part)} ({part:,} bytes) and "
            f"more, this process may write files of {limit:,} bytes: raise the limit (ulimit -f)"
        )
    if need.checkpoint > need.free:
        raise DiskError(
            f"{checkpoints}: a checkpoint takes {format_bytes(need.checkpoint)} "
            f"({need.checkpoint:,} bytes), {format_bytes(need.free)} ({need.free:,} bytes) are "
            "free: make room, choose a folder on another disk (--out), or train fewer weights "
            "(train.train_only, lora)"
        )
    return need


def disk_warning(config: RunConfig, checkpoints: Place) -> str | None:
    """A sentence if the first checkpoint fits and a later one will not."""
    need = disk_need(config, checkpoints)
    if need.most <= need.present + need.free:
        return None
    kept, available = config.train.checkpoints_kept, format_bytes(need.free + need.present)
    return (
        f"{kept} kept checkpoint(s), the best one and one being written take "
        f"{format_bytes(need.most)}, and {available} are available: a later one will find the disk "
        "full; train.checkpoints_kept is the number of kept ones"
    )
