"""Headers of safetensors files, read with a limit on their size and checked against the file.

Format: little-endian uint64 length, JSON header padded to 8 bytes by spaces, row-major tensors.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from moemesh.checkpoint.files import CheckpointError, file_size, read_start
from moemesh.checkpoint.remote import Place
from moemesh.config.limits import one_line, parse_json

#: Upper bound of one safetensors header in bytes; the format itself would allow 100 MB.
HEADER_LIMIT = 32 << 20
#: Advice for a file that is too short.
_INTERRUPTED = "a download or a copy was probably interrupted: fetch the whole file"
#: First bytes of a git-lfs pointer, the text in place of a large file that was not fetched.
_POINTER = b"version "


class HeaderEntry(NamedTuple):
    """A tensor of a file: safetensors' name of the dtype, shape, bytes, and offset of the first
    byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    start: int


def read_header(path: Place) -> dict[str, HeaderEntry]:
    """The tensors of a file, stored one after the other without a gap. Raises CheckpointError
    naming the file if its header is too long, damaged, or does not describe the file."""
    size, start = file_size(path), read_start(path, 8)
    if start == _POINTER:
        raise CheckpointError(
            f"{path}: is a pointer of git-lfs and not the tensors: fetch them with `git lfs pull`"
        )
    if len(start) < 8:
        raise CheckpointError(
            f"{path}: ends at byte {size}, within the 8 bytes of its header's length; "
            f"{_INTERRUPTED}"
        )
    length = int(struct.unpack("<Q", start)[0])
    if not 2 <= length <= HEADER_LIMIT:
        raise CheckpointError(
            f"{path}: is not a safetensors file: by its first 8 bytes the header has {length} "
            f"bytes, and at most {HEADER_LIMIT} are read"
        )
    if length > size - 8:
        raise CheckpointError(
            f"{path}: ends at byte {size}, within its header of {length} bytes; {_INTERRUPTED}"
        )
    try:
        header = parse_json(read_start(path, 8 + length)[8:])
        notes = header.pop("__metadata__", {})
        if not isinstance(notes, dict) or any(type(note) is not str for note in notes.values()):
            raise ValueError("__metadata__ is not an object of texts")
        if unprintable := [name for name in header if one_line(name) != name]:
            raise ValueError(f"a name has control characters: {one_line(unprintable[0])[:80]}")
        # Entries: offsets in the header count from its end.
        entries = {
            key: HeaderEntry(
                str(value["dtype"]),
                tuple(_size(number) for number in value["shape"]),
                _size(value["data_offsets"][1]) - _size(value["data_offsets"][0]),
                8 + length + _size(value["data_offsets"][0]),
            )
            for key, value in header.items()
        }
        ranges = sorted((begin, end) for begin, end in (v["data_offsets"] for v in header.values()))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{path}: the header is damaged ({error})") from error
    # The tensors follow one another and fill the file.
    ends = [0, *(end for _, end in ranges)]
    if [begin for begin, _ in ranges] != ends[:-1]:
        raise CheckpointError(f"{path}: the header is damaged (its tensors overlap or leave gaps)")
    described = 8 + length + ends[-1]
    if size < described:
        ends_of = {name: x.start + x.num_bytes for name, x in entries.items() if x.num_bytes}
        beyond = [name for name, end in ends_of.items() if end > size]
        cut = min(beyond, key=ends_of.__getitem__)
        more = f", {len(beyond) - 1} after it missing" if len(beyond) > 1 else ""
        raise CheckpointError(
            f"{path}: ends at byte {size}, its header describes {described} bytes: the tensor "
            f"{cut} is cut{more}; {_INTERRUPTED}"
        )
    if size > described:
        raise CheckpointError(
            f"{path}: has {size} bytes, its header describes {described}: it is damaged"
        )
    return entries


def _size(number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"{number!r} is not a size")
    return number
