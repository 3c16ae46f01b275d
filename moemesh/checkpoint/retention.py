"""Retention of checkpoints: the newest that were read back, verified, and are finite stay.

``verified.json`` beside them says which have been: a step's name -> digest of its manifest, and
whether its numbers are finite. It is a memory, not a proof: a checkpoint that is not in it, because
the file is gone or an older version wrote it, is read back when the question comes up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from moemesh.checkpoint import files
from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.remote import Place
from moemesh.checkpoint.stored import (
    StoredCheckpoint,
    candidates,
    num_nonfinite,
    open_stored,
    unfinished,
)
from moemesh.config.limits import parse_json

VERIFIED = "verified.json"


class Standing(NamedTuple):
    """A committed checkpoint: whether it verifies, whether all its numbers are finite (None where
    that is not known), and what is wrong with it."""

    step: int
    digest: str | None
    is_verified: bool
    is_finite: bool | None
    problem: str | None = None

    @property
    def counts(self) -> bool:
        """Whether it may take the place of an older one."""
        return self.is_verified and bool(self.is_finite)


class Pruning(NamedTuple):
    """A plan of a pruning: what it keeps, newest first; the steps that it deletes; and the names of
    what dead runs left half written or half deleted."""

    kept: list[Standing]
    doomed: list[int]
    leftovers: list[str]


def nonfinite(stored: StoredCheckpoint) -> Sequence[str]:
    """The names of the tensors that hold numbers that are not finite. A checkpoint of format 1 does
    not say: its tensors are read."""
    if stored.manifest.nonfinite is not None:
        return stored.manifest.nonfinite
    found = set[str]()
    for file, known in stored.manifest.files.items():
        slices = stored.slices(file)
        with files.reading(stored.path / file) as opened:
            opened.seek(known.size - sum(piece.num_bytes for piece in slices))
            for piece in slices:
                for chunk in files.read_chunks(opened, piece.num_bytes):
                    if num_nonfinite(chunk, piece.dtype):
                        found.add(piece.name)
    return sorted(found)


def standing(folder: Place, step: int, *, read_back: bool) -> Standing:
    """The standing of ``folder/step-<step>``. `read_back`: one that is not known to be verified is
    read; else it is not verified, without a problem."""
    known, known_finite = _read_verified(folder).get(f"step-{step}", (None, None))
    try:
        stored = open_stored(folder, step)
        digest, names = stored.manifest.digest, stored.manifest.nonfinite
        is_finite = None if names is None else not names
        if known == digest:
            if (is_finite := is_finite if known_finite is None else known_finite) is None:
                is_finite = not nonfinite(stored) if read_back else None
            return Standing(step, digest, True, is_finite)
        if not read_back:
            return Standing(step, digest, False, is_finite)
        stored.verify()
        return Standing(step, digest, True, not nonfinite(stored))
    except (CheckpointError, OSError) as error:
        return Standing(step, None, False, None, str(error))


def remember(folder: Place, standings: Sequence[Standing], *, only: bool = False) -> None:
    """Write down what is verified; `only`: and forget all others."""
    known = {} if only else _read_verified(folder)
    for one in standings:
        if one.is_verified and one.digest is not None:
            known[f"step-{one.step}"] = (one.digest, one.is_finite)
    content = {name: {"digest": digest, "finite": fine} for name, (digest, fine) in known.items()}
    text = json.dumps(content, indent=1).encode()
    try:
        if files.read_start(folder / VERIFIED, len(text) + 1) == text:
            return
    except (CheckpointError, OSError):
        pass
    files.replace_file(folder / VERIFIED, text)


def plan_pruning(folder: Place, keep: int, *, with_leftovers: bool = True) -> Pruning:
    """Plan :func:`prune`: reads back what is not known to be verified, deletes nothing.

    The newest `keep` that count stay, and of those behind them none. A checkpoint that does not
    verify stays while it is newer than the last of these. Of those with numbers that are not
    finite, the newest stays for whoever wants to look; without any that count, `keep` of them stay.
    One that was put aside stays until one that counts is as new.
    """
    if keep < 1:
        raise ValueError(f"keep ({keep}) must be at least 1")
    kept, doomed, poisoned = list[Standing](), list[int](), list[Standing]()
    num_good = 0
    for step in candidates(folder):
        if num_good == keep:
            doomed.append(step)
            continue
        one = standing(folder, step, read_back=True)
        num_good += one.counts
        kept.append(one)
        if one.is_verified and not one.counts:
            poisoned.append(one)
    spare = poisoned[(1 if num_good else keep) :]
    doomed += [one.step for one in spare]
    leftovers = unfinished(folder) if with_leftovers else []
    newest = max((one.step for one in kept if one.counts), default=-1)
    aside = (files.BROKEN.fullmatch(name) for name in files.list_names(folder))
    leftovers += [match[0] for match in aside if match and int(match[1]) <= newest]
    return Pruning(
        [one for one in kept if one not in spare], sorted(doomed, reverse=True), leftovers
    )


def prune(
    folder: Place,
    keep: int,
    *,
    with_leftovers: bool = True,
    check: Callable[[], None] = lambda: None,
) -> list[int]:
    """Deletes as :func:`plan_pruning` says; returns the deleted steps.

    `with_leftovers`: also removes what dead runs left half written or half deleted, so it must be
    called by one process that holds the run folder's lock, with no save under way. `check` is
    called before each deletion; what it raises ends the pruning.
    """
    plan = plan_pruning(folder, keep, with_leftovers=with_leftovers)
    for name in plan.leftovers:
        if name.endswith(".json"):
            check()
            files.remove_file(folder / name)
        else:
            files.remove_folder(folder / name, check)
    check()
    # Before anything goes: a crash in between must not leave a list that misses what stayed.
    remember(folder, plan.kept, only=True)
    for step in plan.doomed:
        files.delete_checkpoint(folder / f"step-{step}", check)
    return plan.doomed


def _read_verified(folder: Place) -> dict[str, tuple[str, bool | None]]:
    """Step name -> digest and whether its numbers are finite; a damaged list is empty. Older
    versions wrote the digest alone."""
    try:
        content: Any = parse_json(files.read_start(folder / VERIFIED, 1 << 20))
    except (CheckpointError, OSError, ValueError):
        return {}
    found: dict[str, tuple[str, bool | None]] = {}
    for name, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, str):
            found[name] = (value, None)
        elif isinstance(value, dict) and isinstance(value.get("digest"), str):
            is_finite = value.get("finite")
            found[name] = (value["digest"], is_finite if isinstance(is_finite, bool) else None)
    return found
