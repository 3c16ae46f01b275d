"""Finding, verifying and reading checkpoints, under whatever layout they were saved.

Order of an open: manifest size and own digest, schema, completeness, exact list of files, their
sizes and headers, digests; only then is anything read, and nothing is ever unpickled or cast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open

from moemesh.checkpoint.files import (
    COMMITTED,
    CheckpointError,
    check_folder,
    file_size,
    hash_file,
    list_names,
    read_start,
)
from moemesh.checkpoint.header import Deferred, HeaderEntry, read_header
from moemesh.checkpoint.manifest import (
    DTYPES,
    MANIFEST,
    MANIFEST_LIMIT,
    Entry,
    Manifest,
    decode,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """The rectangle ``offset .. offset + tensor.shape`` of the logical tensor `name` of `shape`.

    Exactly one rank holds each element; replicas are saved by one of their holders only. To be
    saved, the tensor may be one of the meta device that `make` gives numbers when it is written.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor
    make: Callable[[], torch.Tensor] | None = None

    def deferred(self) -> Deferred:
        """The numbers, for a file."""
        make = self.make or (lambda: self.tensor)
        return Deferred(self.tensor.dtype, tuple(self.tensor.shape), make)


class Checkpoint:
    """One opened checkpoint: the caller's state, and tensors read by logical name."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.step, self.manifest = path, manifest.step, manifest
        self._open: dict[str, Any] = {}

    @property
    def state(self) -> dict[str, Any]:
        """The JSON object given to save."""
        return self.manifest.state

    def names(self) -> list[str]:
        """Logical names, sorted."""
        return sorted(self.manifest.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape of a tensor."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype it was saved with."""
        return getattr(torch, self._entry(name).dtype)

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Checks the digests of every `parts`-th file from `part` on: ranks can share the work.

        Raises CheckpointError naming the first file whose bytes are not those that were written.
        """
        for name in sorted(self.manifest.files)[part::parts]:
            actual, expected = hash_file(self.path / name), self.manifest.files[name].digest
            if actual != expected:
                raise CheckpointError(f"{self.path / name}: digest {actual}, expected {expected}")

    def read(
        self,
        name: str,
        offset: Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The rectangle ``offset .. offset + shape`` (default: all) of a tensor, on the CPU.

        Reads the needed parts of however many files hold them. Raises CheckpointError for an
        unknown name, a rectangle outside the tensor, or a `dtype` other than the saved one.
        """
        entry = self._entry(name)
        offset = tuple(offset) if offset is not None else (0,) * len(entry.shape)
        shape = tuple(shape) if shape is not None else entry.shape
        self._check_rectangle(name, offset, shape, dtype)
        result = torch.empty(shape, dtype=self.dtype(name))
        for piece in entry.slices:
            starts = [max(a, b) for a, b in zip(offset, piece.offset, strict=True)]
            ends = [
                min(a + size_a, b + size_b)
                for a, size_a, b, size_b in zip(
                    offset, shape, piece.offset, piece.shape, strict=True
                )
            ]
            if any(start >= end for start, end in zip(starts, ends, strict=True)):
                continue
            source, target = (
                tuple(slice(s - o, e - o) for s, e, o in zip(starts, ends, origin, strict=True))
                for origin in (piece.offset, offset)
            )
            stored = self._file(piece.file).get_slice(piece.key)
            # An empty index means "all" for a scalar tensor, in both libraries.
            result[target or ...] = stored[source or ...]
        return result

    def load_into(self, shards: Sequence[Shard]) -> None:
        """Copies the saved values into every shard's tensor, in place, whatever its device.

        All names, shapes and dtypes are checked before the first byte is copied.
        """
        for shard in shards:
            saved = self.shape(shard.name)
            if saved != tuple(shard.shape):
                raise CheckpointError(
                    f"{self.path}: {shard.name} has shape {list(saved)}, the model has "
                    f"{list(shard.shape)}"
                )
            self._check_rectangle(
                shard.name, tuple(shard.offset), tuple(shard.tensor.shape), shard.tensor.dtype
            )
        with torch.no_grad():
            for shard in shards:
                shard.tensor.copy_(self.read(shard.name, shard.offset, shard.tensor.shape))

    def close(self) -> None:
        """Lets go of the files; a later read opens them again."""
        self._open.clear()

    def _entry(self, name: str) -> Entry:
        try:
            return self.manifest.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: holds no tensor named {name}") from None

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.path / name, framework="pt", device="cpu")
        return self._open[name]

    def _check_rectangle(
        self,
        name: str,
        offset: tuple[int, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype | None,
    ) -> None:
        entry = self._entry(name)
        if dtype is not None and dtype != self.dtype(name):
            raise CheckpointError(
                f"{self.path}: {name} is {entry.dtype}, asked for as "
                f"{str(dtype).removeprefix('torch.')}; dtypes are not cast on loading"
            )
        if not len(offset) == len(shape) == len(entry.shape) or any(
            start < 0 or size < 0 or start + size > whole
            for start, size, whole in zip(offset, shape, entry.shape, strict=True)
        ):
            raise CheckpointError(
                f"{self.path}: {name} {list(entry.shape)} has no part of shape {list(shape)} at "
                f"{list(offset)}"
            )


def candidates(folder: Path) -> list[int]:
    """The steps of the committed checkpoints, newest first; none when there is no folder."""
    if not folder.is_dir():
        return []
    matches = (COMMITTED.fullmatch(name) for name in list_names(folder))
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def open_checkpoint(
    folder: Path, step: int, *, verify: Literal["full", "sizes"] = "full"
) -> Checkpoint:
    """Opens and verifies ``folder/step-<step>``.

    "sizes" checks all but the digests of the tensor files, which are the part that reads every
    byte: one rank checks in full, the others then open by sizes. Raises CheckpointError naming the
    file and what is wrong with it.
    """
    path = folder / f"step-{step}"
    check_folder(path)
    try:
        manifest = decode(read_start(path / MANIFEST, MANIFEST_LIMIT + 1))
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(str(path)) else f"{path}/{text}") from error
    if manifest.step != step:
        raise CheckpointError(f"{path / MANIFEST}: is of step {manifest.step}: a renamed folder?")
    _check_files(path, manifest)
    checkpoint = Checkpoint(path, manifest)
    if verify == "full":
        checkpoint.verify()
    return checkpoint


def latest(
    folder: Path,
    on_skip: Callable[[int, str], None],
    *,
    verify: Literal["full", "sizes"] = "full",
) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None.

    Each newer one that does not is passed to ``on_skip(step, reason)``, which must say so loudly.
    """
    for step in candidates(folder):
        try:
            return open_checkpoint(folder, step, verify=verify)
        except (CheckpointError, OSError) as error:
            on_skip(step, str(error))
    return None


def _check_files(path: Path, manifest: Manifest) -> None:
    """Exact list of files, their sizes, and headers that hold the slices the manifest names."""
    present, expected = set(list_names(path)), {*manifest.files, MANIFEST}
    if missing := sorted(expected - present):
        raise CheckpointError(f"{path / missing[0]}: missing ({len(missing)} files are)")
    if extra := sorted(present - expected):
        raise CheckpointError(f"{path / extra[0]}: does not belong to this checkpoint")
    slices: dict[str, dict[str, HeaderEntry]] = {name: {} for name in manifest.files}
    for entry in manifest.tensors.values():
        for piece in entry.slices:
            size = prod(piece.shape) * getattr(torch, entry.dtype).itemsize
            slices[piece.file][piece.key] = HeaderEntry(DTYPES[entry.dtype], piece.shape, size)
    for name, file in manifest.files.items():
        size = file_size(path / name)
        if size != file.size:
            word = "truncated" if size < file.size else "too long"
            raise CheckpointError(f"{path / name}: {word}: size {size}, expected {file.size}")
        _check_header(path / name, size, slices[name])


def _check_header(path: Path, size: int, slices: dict[str, HeaderEntry]) -> None:
    """A header that names exactly `slices`."""
    found = read_header(path, size)
    if found != slices:
        wrong = sorted(key for key in {*found, *slices} if found.get(key) != slices.get(key))
        raise CheckpointError(f"{path}: the header disagrees with the manifest about {wrong[0]}")
