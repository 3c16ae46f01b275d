"""Manifest of a checkpoint: names, slices, files, state, and a check of their completeness.

The manifest is canonical JSON (sorted keys, no spaces) with a digest of itself, so that any change
of the file is detected. Its slices cover every logical tensor exactly: no hole, no overlap.

Format 3 has digests of every chunk of every slice and of each file's header (together all bytes),
the name of their hash function, and the names of the tensors with infinities or NaN. Older formats
are still read: format 2 has BLAKE2b for all, format 1 one digest a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import ceil, prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moemesh.checkpoint.digests import BLAKE2B, blake2b, digest_text
from moemesh.checkpoint.files import MANIFEST, CheckpointError
from moemesh.config.limits import parse_json

#: Format of new manifests, and all readable formats.
FORMAT = 3
READABLE = (1, 2, 3)
#: Largest manifest that is parsed, in bytes (about a million slices).
MANIFEST_LIMIT = 256 << 20
#: Most elements of a tensor: the byte offset of every element then fits int64.
MAX_ELEMENTS = 1 << 60

Size = Annotated[int, Field(strict=True, ge=0, le=MAX_ELEMENTS)]
#: File names of ranks. In an object store every attempt has its own names, since the store cannot
#: distinguish late requests of a writer presumed dead from those of another.
PART = r"^rank-[0-9]{5,7}(-[0-9a-f]{32})?\.safetensors$"
FileName = Annotated[str, Field(pattern=PART)]
Digest = Annotated[str, Field(pattern=r"^(blake2b|xxh3)-128:[0-9a-f]{32}$")]
#: A digest without the name of its function.
ChunkDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
#: torch's names of the dtypes that a checkpoint may hold -> safetensors' names.
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
#: Bytes of one element, by torch's name of the dtype.
ITEM_BYTES = {
    name: 1 if name.startswith("float8") or name == "bool" else int(re.sub(r"\D", "", name)) // 8
    for name in DTYPES
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Slice(_Strict):
    """Rectangle ``offset .. offset + shape`` of a logical tensor, stored under `key` in `file`.
    `chunks`: digests of its bytes, in chunks of the manifest's `chunk_bytes`; empty in format 1."""

    file: FileName
    key: str
    offset: tuple[Size, ...]
    shape: tuple[Size, ...]
    chunks: tuple[ChunkDigest, ...] = ()


class ManifestEntry(_Strict):
    """One logical tensor."""

    shape: tuple[Size, ...]
    dtype: Literal[tuple(DTYPES)]  # type: ignore[valid-type]
    slices: tuple[Slice, ...]


class File(_Strict):
    """One file of the checkpoint: size in bytes, and digest of the bytes before its tensors."""

    size: Size
    header: Digest


class WholeFile(_Strict):
    """One file of a checkpoint of format 1: size in bytes, and digest of its content."""

    size: Size
    digest: Digest


class Manifest(_Strict):
    """Content of manifest.json: all of a checkpoint but the tensors' bytes; `state` is given by the
    caller.

    `hash`: name of the hash function of chunks and headers; None before format 3. `nonfinite`:
    sorted names of the tensors with infinities or NaN; None (unknown) in format 1. `digest`: digest
    of the manifest itself, set when it is read.
    """

    format: Literal[1, 2, 3]
    step: Size
    world_size: Annotated[int, Field(strict=True, ge=1)]
    chunk_bytes: Annotated[int, Field(strict=True, ge=1, le=1 << 30)] | None = None
    hash: Literal["blake2b-128", "xxh3-128"] | None = None
    nonfinite: tuple[str, ...] | None = None
    tensors: dict[str, ManifestEntry]
    files: dict[FileName, File | WholeFile]
    state: dict[str, Any]
    digest: Annotated[str, Field(exclude=True)] = ""

    def check(self) -> None:
        """Raises CheckpointError unless slices cover all tensors and fields fit the format."""
        is_new = self.format > 1
        if (
            (self.chunk_bytes is not None) != is_new
            or (self.nonfinite is not None) != is_new
            or (self.hash is not None) != (self.format > 2)
            or any(isinstance(file, File) != is_new for file in self.files.values())
        ):
            raise CheckpointError(f"{MANIFEST}: these are not the fields of format {self.format}")
        if unknown := sorted({*(self.nonfinite or ())} - {*self.tensors}):
            raise CheckpointError(f"{MANIFEST}: nonfinite names {unknown[0]}, not a tensor here")
        used: set[tuple[str, str]] = set()
        for name, entry in self.tensors.items():
            check_cover(name, entry.shape, entry.slices)
            for piece in entry.slices:
                if piece.file not in self.files:
                    raise CheckpointError(f"{MANIFEST}: {name} is in {piece.file}, not a file here")
                expected = 0
                if self.chunk_bytes is not None:
                    num_bytes = prod(piece.shape) * ITEM_BYTES[entry.dtype]
                    expected = ceil(num_bytes / self.chunk_bytes)
                if len(piece.chunks) != expected:
                    raise CheckpointError(
                        f"{MANIFEST}: {name} has {len(piece.chunks)} digests in {piece.file}, not "
                        f"{expected}"
                    )
                if (piece.file, piece.key) in used:
                    raise CheckpointError(f"{MANIFEST}: {piece.file} {piece.key} is used twice")
                used.add((piece.file, piece.key))


def encode_json(value: object) -> bytes:
    """Canonical JSON bytes. Raises CheckpointError for a value that JSON cannot hold."""
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the state is not plain JSON: {error}") from error
    return text.encode()


def encode(manifest: Manifest) -> bytes:
    """The bytes of manifest.json: canonical JSON with the digest of all other fields."""
    content = manifest.model_dump(mode="json")
    return encode_json({**content, "digest": _digest(content)})


def decode(raw: bytes) -> Manifest:
    """Reads and checks manifest.json: size, own digest, schema, completeness. Raises
    CheckpointError (without the folder's name; the caller adds it)."""
    if len(raw) > MANIFEST_LIMIT:
        raise CheckpointError(f"{MANIFEST}: larger than the limit of {MANIFEST_LIMIT} bytes")
    try:
        content = parse_json(raw)
    except ValueError as error:
        raise CheckpointError(f"{MANIFEST}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{MANIFEST}: not a JSON object")
    stored = content.pop("digest", None)
    actual = _digest(content)
    if stored != actual:
        raise CheckpointError(
            f"{MANIFEST}: its digest is {actual}, expected {ascii(stored)[:80]}: it was changed"
        )
    # Compare the bytes too: an edit may parse to the same content.
    if raw != encode_json({**content, "digest": actual}):
        raise CheckpointError(
            f"{MANIFEST}: it was rewritten with the same content (other spaces or order, or a "
            "doubled key): it was changed"
        )
    if content.get("format") not in READABLE:
        raise CheckpointError(
            f"{MANIFEST}: format {content.get('format')}; this version reads the formats "
            f"{', '.join(map(str, READABLE))}"
        )
    try:
        manifest = Manifest.model_validate({**content, "digest": actual})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{MANIFEST}: {place}: {first['msg']}") from error
    manifest.check()
    return manifest


def check_cover(name: str, shape: tuple[int, ...], slices: Sequence[Slice]) -> None:
    """Raises CheckpointError unless `slices` cover the logical tensor exactly."""
    if prod(shape) > MAX_ELEMENTS:
        raise CheckpointError(f"{name} {list(shape)}: more than {MAX_ELEMENTS} elements")
    for piece in slices:
        if len(piece.offset) != len(shape) or len(piece.shape) != len(shape):
            raise CheckpointError(f"{name}: slice {_slice_text(piece)} of a tensor {list(shape)}")
        ends = [start + size for start, size in zip(piece.offset, piece.shape, strict=True)]
        if 0 in piece.shape or any(e > s for e, s in zip(ends, shape, strict=True)):
            raise CheckpointError(f"{name}: slice {_slice_text(piece)} lies outside {list(shape)}")
    ordered = sorted(slices, key=lambda piece: piece.offset)
    for index, first in enumerate(ordered):
        for second in ordered[index + 1 :]:
            if shape and second.offset[0] >= first.offset[0] + first.shape[0]:
                break  # sorted by row: no later slice overlaps `first`
            both = zip(first.offset, first.shape, second.offset, second.shape, strict=True)
            # 0-dimensional slices always share an element.
            if all(a < b + size_b and b < a + size_a for a, size_a, b, size_b in both):
                raise CheckpointError(
                    f"{name} {list(shape)}: {_slice_text(first)} and {_slice_text(second)} overlap"
                )
    # Slices that are inside, disjoint and of the full volume cover the tensor.
    covered = sum(prod(piece.shape) for piece in slices)
    if covered != prod(shape):
        # First missing row: an index of dim 0, in a stack an expert.
        reached, where = 0, ""
        for piece in ordered:
            if not shape or piece.offset[0] > reached:
                break
            reached = max(reached, piece.offset[0] + piece.shape[0])
        if shape and reached < shape[0]:
            where = f": row {reached} is the first missing one"
        raise CheckpointError(
            f"{name} {list(shape)}: no rank holds {prod(shape) - covered} of its {prod(shape)} "
            f"elements{where}"
        )


def _slice_text(piece: Slice) -> str:
    if len(piece.offset) != len(piece.shape):
        return f"{list(piece.shape)} at {list(piece.offset)} in {piece.file}"
    ends = [start + size for start, size in zip(piece.offset, piece.shape, strict=True)]
    ranges = ", ".join(f"{a}:{b}" for a, b in zip(piece.offset, ends, strict=True))
    return f"[{ranges}] in {piece.file}"


def _digest(content: dict[str, Any]) -> str:
    return digest_text(blake2b(encode_json(content)), BLAKE2B)
