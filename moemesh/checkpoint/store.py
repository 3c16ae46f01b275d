"""The checkpoint store: sharded, hashed, committed by one rename, keyed by logical names.

    checkpoints/
      step-1000/                    committed: the name itself says so
        manifest.json               names, slices, files with sizes and digests, state, own digest
        rank-00007.safetensors      the slices that rank 7 held
      step-2000.tmp-<id>/           being written: never loaded
      .trash-step-500-<id>/         being deleted: never loaded
      verified.json                 steps whose digests were checked after the write

Two phases: every rank writes and syncs its own file; when all have and the slices are complete,
rank 0 writes the manifest and renames. Ranks talk in JSON through the `gather` and `barrier` given
by the caller; the store knows neither torch.distributed nor layouts.
"""

from __future__ import annotations

import errno
import json
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moemesh.checkpoint.files import (
    COMMITTED,
    TEMPORARY,
    TRASH,
    CheckpointError,
    list_names,
    make_folder,
    read_start,
    remove_folder,
    rename,
    replace_file,
    sync_folder,
    write_file,
)
from moemesh.checkpoint.header import safetensors_bytes
from moemesh.checkpoint.load import (
    Checkpoint,
    Shard,
    candidates,
    latest,
    open_checkpoint,
)
from moemesh.checkpoint.manifest import (
    DTYPES,
    FORMAT,
    MANIFEST,
    Entry,
    File,
    Manifest,
    Slice,
    check_state,
    encode,
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Shard",
    "candidates",
    "latest",
    "open_checkpoint",
    "prune",
    "save",
]

VERIFIED = "verified.json"
#: JSON of this rank -> the JSON of all ranks, in rank order.
Gather = Callable[[object], list[Any]]


def save(
    folder: Path,
    step: int,
    shards: Sequence[Shard],
    state: dict[str, Any],
    *,
    rank: int,
    world_size: int,
    gather: Gather,
    barrier: Callable[[], None],
) -> Path:
    """Saves all ranks' shards and rank 0's `state` as ``folder/step-<step>``; all ranks call it.

    Raises CheckpointError on every rank when any of them fails (disk full, a hole or an overlap in
    a tensor, the step exists); then nothing new is left and older checkpoints are untouched. A
    process that dies instead leaves a ``.tmp`` folder, which the next :func:`prune` removes.
    """
    final = folder / f"step-{step}"
    identity = uuid.uuid4().hex if rank == 0 else ""
    temporary = None
    try:
        plans, begun = _attempt(lambda: _begin(folder, final, identity, shards, state, rank))
        replies = _agree(gather, world_size, begun, {"step": step, "identity": identity})
        if {reply["step"] for reply in replies} != {step}:
            raise CheckpointError(f"ranks save different steps: {[r['step'] for r in replies]}")
        temporary = folder / f"{final.name}.tmp-{replies[0]['identity']}"
        written, problem = _attempt(lambda: _write(temporary, rank, plans))
        reports = _agree(gather, world_size, problem, written)
        problem = None
        if rank == 0:
            _, problem = _attempt(lambda: _commit(temporary, final, step, reports, state))
        _agree(gather, world_size, problem, None)
    except CheckpointError:
        # The verdict was exchanged: all ranks are here, and none returns before the folder is gone.
        if rank == 0:
            remove_folder(folder / f"{final.name}.tmp-{identity}")
        barrier()
        raise
    return final


def prune(folder: Path, keep: int) -> list[int]:
    """Deletes checkpoints older than the newest `keep` verified ones; returns the deleted steps.

    Checkpoints not yet verified are read back first, and one that fails does not count: the newest
    verified one always stays. Also removes what dead runs left half written or half deleted, so it
    must be called by one process that holds the run folder's lock, with no save under way.
    """
    if keep < 1:
        raise ValueError(f"keep ({keep}) must be at least 1")
    for name in list_names(folder):
        if TEMPORARY.fullmatch(name) or TRASH.fullmatch(name):
            remove_folder(folder / name)
    verified = _read_verified(folder)
    good: dict[str, str] = {}
    doomed: list[int] = []
    for step in candidates(folder):
        if len(good) == keep:
            doomed.append(step)
            continue
        try:
            known = verified.get(f"step-{step}")
            checkpoint = open_checkpoint(folder, step, verify="sizes")
            digest = json.loads(encode(checkpoint.manifest))["digest"]
            if digest != known:
                checkpoint.verify()
            good[f"step-{step}"] = digest
        except (CheckpointError, OSError):
            continue
    if good != verified:
        replace_file(folder / VERIFIED, json.dumps(good, indent=1).encode())
    for step in doomed:
        trash = folder / f".trash-step-{step}-{uuid.uuid4().hex}"
        rename(folder / f"step-{step}", trash)
        remove_folder(trash)
    return doomed


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
    folder: Path,
    final: Path,
    identity: str,
    shards: Sequence[Shard],
    state: dict[str, Any],
    rank: int,
) -> dict[str, Shard]:
    """Checks this rank's shards, and on rank 0 makes the temporary folder. Returns key -> shard."""
    if not COMMITTED.fullmatch(final.name):
        raise CheckpointError(f"{final.name}: the step must be an integer from 0 on")
    keyed: dict[str, Shard] = {}
    for shard in shards:
        dims = (len(shard.shape), len(shard.offset), shard.tensor.ndim)
        if len(set(dims)) != 1:
            raise CheckpointError(f"{shard.name}: shape, offset and tensor have {dims} dimensions")
        if _dtype(shard) not in DTYPES:
            raise CheckpointError(f"{shard.name}: dtype {_dtype(shard)} cannot be saved")
        key = f"{shard.name}@{','.join(map(str, shard.offset))}"
        if shard.tensor.numel() and key in keyed:
            raise CheckpointError(f"{shard.name}: given twice at offset {list(shard.offset)}")
        # An empty slice holds nothing, but its rank's word on shape and dtype is checked as well.
        keyed[key if shard.tensor.numel() else f"{key} (empty)"] = shard
    if rank == 0:
        check_state(state)
        folder.mkdir(parents=True, exist_ok=True)
        if final.exists() or final.is_symlink():
            raise CheckpointError(f"{final} exists; a checkpoint is never overwritten")
        make_folder(folder / f"{final.name}.tmp-{identity}")
    return keyed


def _write(temporary: Path, rank: int, keyed: dict[str, Shard]) -> dict[str, Any]:
    """Writes this rank's file, if it holds anything, and says what is in it."""
    filled = {key: shard for key, shard in keyed.items() if shard.tensor.numel()}
    name = f"rank-{rank:05d}.safetensors"
    report: dict[str, Any] = {
        "slices": [
            [s.name, list(s.shape), _dtype(s), key, list(s.offset), list(s.tensor.shape)]
            for key, s in keyed.items()
        ],
        "name": name,
        "file": None,
    }
    if not filled:
        return report
    tensors = {key: shard.deferred() for key, shard in filled.items()}
    try:
        size, digest = write_file(temporary / name, safetensors_bytes(tensors))
        sync_folder(temporary)
    except OSError as error:
        needed = sum(shard.tensor.nbytes for shard in filled.values())
        hint = ""
        if error.errno == errno.ENOSPC:
            free = shutil.disk_usage(temporary.parent).free
            hint = f": {needed} bytes needed by this rank, {free} free"
        elif error.errno == errno.ENOENT:
            hint = ": is the checkpoint folder on a file system that all ranks share?"
        raise CheckpointError(f"{temporary / name}: {error.strerror}{hint}") from error
    return {**report, "file": {"size": size, "digest": digest}}


def _commit(
    temporary: Path, final: Path, step: int, reports: list[dict[str, Any]], state: dict[str, Any]
) -> None:
    """Rank 0: checks that every logical tensor is complete, writes the manifest, renames."""
    tensors: dict[str, dict[str, Any]] = {}
    for rank, report in enumerate(reports):
        for name, shape, dtype, key, offset, size in report["slices"]:
            entry = tensors.setdefault(name, {"shape": shape, "dtype": dtype, "slices": []})
            if (entry["shape"], entry["dtype"]) != (shape, dtype):
                raise CheckpointError(
                    f"{name}: rank {rank} says {dtype} {shape}, another {entry['dtype']} "
                    f"{entry['shape']}"
                )
            if 0 not in size:
                entry["slices"].append(
                    Slice(file=report["name"], key=key, offset=tuple(offset), shape=tuple(size))
                )
    manifest = Manifest(
        format=FORMAT,
        step=step,
        world_size=len(reports),
        tensors={
            name: Entry(**{**entry, "shape": tuple(entry["shape"]), "slices": entry["slices"]})
            for name, entry in tensors.items()
        },
        files={report["name"]: File(**report["file"]) for report in reports if report["file"]},
        state=state,
    )
    manifest.check()
    write_file(temporary / MANIFEST, [encode(manifest)])
    sync_folder(temporary)
    rename(temporary, final)
    try:
        sync_folder(final.parent)
    except OSError:
        rename(final, temporary)  # not durable, so not committed; the caller removes it
        raise


def _read_verified(folder: Path) -> dict[str, str]:
    """Step name -> manifest digest of the checkpoints verified before; a damaged list is empty."""
    try:
        content = json.loads(read_start(folder / VERIFIED, 1 << 20))
    except (CheckpointError, OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _dtype(shard: Shard) -> str:
    return str(shard.tensor.dtype).removeprefix("torch.")
