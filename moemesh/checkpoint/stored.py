"""Listing and verification of stored checkpoints, without torch.

Order of an open: manifest size and own digest, schema, completeness, exact list of files, their
sizes and headers, digests. Nothing is ever unpickled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from moemesh.checkpoint import files
from moemesh.checkpoint.digests import BLAKE2B, blake2b_of, digest_text, hash_by
from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.header import HeaderEntry, read_header
from moemesh.checkpoint.manifest import (
    DTYPES,
    ITEM_BYTES,
    MANIFEST,
    MANIFEST_LIMIT,
    PART,
    Manifest,
    ManifestEntry,
    Slice,
    WholeFile,
    decode,
)
from moemesh.checkpoint.remote import Place, RemotePath

Bits = np.ndarray[Any, np.dtype[Any]]


class Damage(NamedTuple):
    """Damaged part of a file: its bytes differ from those written. `tensor` and `chunk` (counted
    from 0 in the slice at `offset`) are None if the damage is not in a tensor, and for checkpoints
    of format 1, which do not locate it."""

    file: str
    reason: str
    tensor: str | None = None
    offset: tuple[int, ...] | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        where = ""
        if self.tensor is not None and self.offset is not None:
            where = f"{self.tensor}, slice at {list(self.offset)}, chunk {self.chunk}: "
        return f"{self.file}: {where}{self.reason}"


class StoredCheckpoint:
    """A checkpoint whose manifest, files and headers agree if :func:`open_stored` opened it."""

    def __init__(self, path: Place, manifest: Manifest) -> None:
        self.path, self.step, self.manifest = path, manifest.step, manifest
        #: The JSON object that was given to save; the size of the tensor files in bytes.
        self.state = manifest.state
        self.num_bytes = sum(file.size for file in manifest.files.values())
        self._headers: dict[str, dict[str, HeaderEntry]] = {}

    def names(self) -> list[str]:
        """Logical names, sorted."""
        return sorted(self.manifest.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape of a tensor."""
        return self.entry(name).shape

    def entry(self, name: str) -> ManifestEntry:
        """Shape, dtype and slices of a tensor; CheckpointError for an unknown name."""
        try:
            return self.manifest.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: holds no tensor named {name}") from None

    def check_rectangle(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> None:
        """Raises CheckpointError for a rectangle outside the tensor."""
        whole = self.shape(name)
        if not len(offset) == len(shape) == len(whole) or any(
            start < 0 or size < 0 or start + size > extent
            for start, size, extent in zip(offset, shape, whole, strict=True)
        ):
            raise CheckpointError(
                f"{self.path}: {name} {list(whole)} has no part of shape {list(shape)} at "
                f"{list(offset)}"
            )

    def read_bits(
        self, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> Bits:
        """The rectangle ``offset .. offset + shape`` (default: all) of a tensor, assembled from its
        slices, as unsigned integers with the bits of its numbers. Raises CheckpointError for an
        unknown name, or a rectangle outside the tensor."""
        entry = self.entry(name)
        offset = (0,) * len(entry.shape) if offset is None else offset
        shape = entry.shape if shape is None else shape
        self.check_rectangle(name, offset, shape)
        ends = [start + size for start, size in zip(offset, shape, strict=True)]
        result = np.empty(tuple(shape), f"<u{ITEM_BYTES[entry.dtype]}")
        for piece in entry.slices:
            piece_ends = zip(piece.offset, piece.shape, strict=True)
            starts = [max(pair) for pair in zip(offset, piece.offset, strict=True)]
            stops = [min(a, b + size) for a, (b, size) in zip(ends, piece_ends, strict=True)]
            common = list(zip(starts, stops, strict=True))  # of the slice and the rectangle
            if any(start >= stop for start, stop in common):
                continue
            source, target = (
                tuple(
                    slice(start - first, stop - first)
                    for (start, stop), first in zip(common, origin, strict=True)
                )
                for origin in (piece.offset, offset)
            )
            path = self.path / piece.file
            if piece.file not in self._headers:
                self._headers[piece.file] = read_header(path)
            start = self._headers[piece.file][piece.key].start
            if isinstance(path, RemotePath):
                size = prod(piece.shape) * result.itemsize
                content = path.read(start, start + size)
                if len(content) != size:
                    end = start + len(content)
                    raise CheckpointError(f"{path}: ends at byte {end}, within a tensor")
                stored = np.frombuffer(content, result.dtype).reshape(piece.shape)
            else:
                # A memory map: only the used pages are read.
                with files.reading(path) as file:
                    try:
                        stored = np.memmap(file, result.dtype, "r", start, piece.shape)
                    except ValueError as error:
                        why = f"{path}: ends within a tensor at byte {start}"
                        raise CheckpointError(why) from error
            result[target] = stored[source]
        return result

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Checks the digests of every `parts`-th file, starting at file `part`: ranks share the
        work. Raises CheckpointError for the first damage."""
        for file in sorted(self.manifest.files)[part::parts]:
            for damage in self.damages(file):
                raise CheckpointError(f"{self.path}/{damage}")

    def damages(self, file: str) -> Iterator[Damage]:
        """Damaged parts of a file, which is read from the disk."""
        record = self.manifest.files[file]
        if isinstance(record, WholeFile):
            with files.reading(self.path / file, from_disk=True) as opened:
                actual = digest_text(blake2b_of(files.read_chunks(opened, record.size)), BLAKE2B)
            if actual != record.digest:
                yield Damage(file, f"digest {actual}, expected {record.digest}")
            return
        assert self.manifest.chunk_bytes is not None
        name = self.manifest.hash or BLAKE2B
        digest_of = hash_by(name)
        slices = self.slices(file)
        start = record.size - sum(piece.num_bytes for piece in slices)  # end of the header
        with files.reading(self.path / file, from_disk=True) as opened:
            header = b"".join(files.read_chunks(opened, start))
            if (actual := digest_text(digest_of(header), name)) != record.header:
                yield Damage(file, f"the header has digest {actual}, expected {record.header}")
            for piece in slices:
                chunks = files.read_chunks(opened, piece.num_bytes, self.manifest.chunk_bytes)
                digests = [*files.map_in_thread(digest_of, chunks)]
                digests += [""] * (len(piece.stored.chunks) - len(digests))  # a shortened file
                for chunk, expected in enumerate(piece.stored.chunks):
                    if digests[chunk] != expected:
                        reason = f"digest {digests[chunk] or 'of nothing'}, expected {expected}"
                        yield Damage(file, reason, piece.name, piece.stored.offset, chunk)

    def slices(self, file: str) -> list[SliceInFile]:
        """The slices in a file, in file order."""
        pieces = [
            SliceInFile(name, entry.dtype, piece)
            for name, entry in self.manifest.tensors.items()
            for piece in entry.slices
            if piece.file == file
        ]
        return sorted(pieces, key=lambda piece: (-ITEM_BYTES[piece.dtype], piece.stored.key))


class SliceInFile(NamedTuple):
    """A slice of the tensor `name`."""

    name: str
    dtype: str
    stored: Slice

    @property
    def num_bytes(self) -> int:
        return prod(self.stored.shape) * ITEM_BYTES[self.dtype]


def candidates(folder: Place) -> list[int]:
    """The steps of the committed checkpoints, newest first; empty without the folder."""
    if not folder.is_dir():
        return []
    matches = (files.COMMITTED.fullmatch(name) for name in files.list_names(folder))
    committed = (match for match in matches if match and files.is_committed(folder / match[0]))
    return sorted((int(match[1]) for match in committed), reverse=True)


def unfinished(folder: Place) -> list[str]:
    """Names of folders that are being written or deleted, or that a run left when it died."""
    names = files.list_names(folder)
    leftovers = [x for x in names if files.TEMPORARY.fullmatch(x) or files.TRASH.fullmatch(x)]
    steps = (name for name in names if files.COMMITTED.fullmatch(name))
    return leftovers + [name for name in steps if not files.is_committed(folder / name)]


def open_stored(folder: Place, step: int) -> StoredCheckpoint:
    """Opens ``folder/step-<step>`` and checks all but the digests of tensors, which would read
    every byte. Raises CheckpointError naming the file and its fault."""
    path = folder / f"step-{step}"
    manifest = read_manifest(path)
    if manifest.step != step:
        raise CheckpointError(f"{path / MANIFEST}: is of step {manifest.step}: a renamed folder?")
    for damage in mismatches(path, manifest):
        raise CheckpointError(f"{path}/{damage}")
    return StoredCheckpoint(path, manifest)


def read_manifest(path: Place) -> Manifest:
    """The manifest of the checkpoint folder `path`. Raises CheckpointError like :func:`decode`."""
    files.check_folder(path)
    try:
        return decode(files.read_start(path / MANIFEST, MANIFEST_LIMIT + 1))
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(str(path)) else f"{path}/{text}") from error


def mismatches(path: Place, manifest: Manifest) -> Iterator[Damage]:
    """Differences between the manifest and the files: names, sizes and headers."""
    present, expected = set(files.list_names(path)), {*manifest.files, MANIFEST}
    for name in sorted(expected - present):
        yield Damage(name, "missing")
    for name in sorted(present - expected):
        if isinstance(path, RemotePath) and re.search(PART, name):
            continue  # left by another attempt; readers ignore it
        yield Damage(name, "does not belong to this checkpoint")
    # The facts that manifest and header share: dtype, shape and size.
    slices: dict[str, dict[str, tuple[Any, ...]]] = {name: {} for name in manifest.files}
    for entry in manifest.tensors.values():
        for piece in entry.slices:
            size = prod(piece.shape) * ITEM_BYTES[entry.dtype]
            slices[piece.file][piece.key] = DTYPES[entry.dtype], piece.shape, size
    for name in (name for name in manifest.files if name in present):
        try:
            size, expected_size = files.file_size(path / name), manifest.files[name].size
            if size != expected_size:
                word = "truncated" if size < expected_size else "too long"
                yield Damage(name, f"{word}: size {size}, expected {expected_size}")
                continue
            recorded = slices[name]
            header = {key: entry[:3] for key, entry in read_header(path / name).items()}
            if header != recorded:
                keys = {*header, *recorded}
                wrong = sorted(key for key in keys if header.get(key) != recorded.get(key))
                yield Damage(name, f"the header disagrees with the manifest about {wrong[0]}")
        except CheckpointError as error:
            yield Damage(name, str(error).removeprefix(f"{path / name}: "))


def examine(folder: Place, step: int) -> list[Damage]:
    """All damages of ``folder/step-<step>``; reads every byte of it."""
    path = folder / f"step-{step}"
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [Damage(MANIFEST, str(error).removeprefix(f"{path / MANIFEST}: "))]
    damages = list(mismatches(path, manifest))
    if manifest.step != step:
        damages.insert(0, Damage(MANIFEST, f"is of step {manifest.step}: a renamed folder?"))
    stored = StoredCheckpoint(path, manifest)
    bad = {damage.file: damage.reason for damage in damages}
    for file in sorted(manifest.files):
        if bad.get(file) == "missing":
            continue
        try:
            # A header that is already reported as damaged needs no digest.
            damages += [d for d in stored.damages(file) if d.tensor or file not in bad]
        except (CheckpointError, OSError) as error:
            if file not in bad:
                damages.append(Damage(file, str(error)))
    return damages


# Numbers of stored tensors as numpy arrays: finiteness, and differences of two checkpoints.
#
# numpy has no bfloat16 and no 8-bit floats; they are decoded from their bits.

#: Numbers that are checked at once.
_BLOCK = 1 << 16
#: Exponent mask of each float dtype. A number whose exponent has all bits set is infinite or NaN;
#: float8_e4m3fn has one NaN, all bits but the sign.
_EXPONENTS = {
    "float64": 0x7FF0_0000_0000_0000,
    "float32": 0x7F80_0000,
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
    "float8_e5m2": 0x7C,
    "float8_e4m3fn": 0x7F,
}


def num_nonfinite(content: bytes | memoryview, dtype: str) -> int:
    """The number of infinities and NaN in `content`, of torch's `dtype`."""
    if dtype not in _EXPONENTS:
        return 0
    bits = np.frombuffer(content, f"<u{ITEM_BYTES[dtype]}")
    mask = bits.dtype.type(_EXPONENTS[dtype])
    # Blocks fit the cache: larger intermediate results cost four times as much.
    blocks = (bits[start : start + _BLOCK] for start in range(0, len(bits), _BLOCK))
    return sum(int(np.count_nonzero((block & mask) == mask)) for block in blocks)


class NumberDifference(NamedTuple):
    """Difference of two tensors of one name, shape and dtype. `num_different`: numbers whose bits
    differ. Over the numbers finite in both: `largest` absolute difference, and `relative` to the
    largest magnitude of the first tensor. `num_nonfinite` of the first and the second tensor."""

    num_different: int
    num_elements: int
    largest: float
    relative: float
    num_nonfinite: tuple[int, int]


def difference(first: StoredCheckpoint, second: StoredCheckpoint, name: str) -> NumberDifference:
    """Compare the tensor `name` of two checkpoints, in which it has one shape and dtype."""
    entry = first.entry(name)
    a_bits, b_bits = first.read_bits(name), second.read_bits(name)
    num_bad = tuple(num_nonfinite(x.tobytes(), entry.dtype) for x in (a_bits, b_bits))
    numbers: list[Bits] = []  # as float64, to which large integers are rounded
    for bits in (a_bits, b_bits):
        match entry.dtype:
            case "bfloat16":
                values = (bits.astype("<u4") << np.uint32(16)).view("<f4")
            case "float8_e4m3fn":
                # float16 has one more exponent bit, and a bias larger by 8.
                wide = bits.astype("<u2")
                sign, unsigned = wide & np.uint16(0x80), wide & np.uint16(0x7F)
                half = (sign << np.uint16(8) | unsigned << np.uint16(7)).view("<f2")
                values = np.where(unsigned == 0x7F, np.nan, half.astype(np.float64) * 256)
            case "float8_e5m2":
                values = (bits.astype("<u2") << np.uint16(8)).view("<f2")
            case "bool" | "uint8":
                values = bits
            case dtype:
                kind = "f" if dtype.startswith("float") else "i"
                values = bits.view(f"<{kind}{ITEM_BYTES[dtype]}")
        numbers.append(values.astype(np.float64))
    a, b = numbers
    usable = np.isfinite(a) & np.isfinite(b)
    a, b = a[usable], b[usable]
    largest = float(np.max(np.abs(a - b), initial=0.0))
    magnitude = float(np.max(np.abs(a), initial=0.0))
    return NumberDifference(
        num_different=int(np.count_nonzero(a_bits != b_bits)),
        num_elements=prod(entry.shape),
        largest=largest,
        relative=largest / magnitude if magnitude else (0.0 if largest == 0 else float("inf")),
        num_nonfinite=(num_bad[0], num_bad[1]),
    )
