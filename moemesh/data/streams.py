"""Bytes of a file, decompressed as they are read."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from moemesh.data.tokenizer import DataError

Compression = Literal["none", "gzip", "zstd"]

#: Compressed bytes that are taken at once: few, since a hostile file makes 30,000 times as many.
CHUNK = 1 << 13
_MAGIC: dict[str, bytes] = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd"}


@contextmanager
def open_stream(path: Path, compression: Compression = "none") -> Iterator[BinaryIO]:
    """The bytes of `path`, decompressed. DataError for what cannot be read: a missing file, another
    content than its name says, a stream that is cut short or damaged."""
    stream: BinaryIO | None = None
    try:
        with path.open("rb") as plain:
            if compression == "none":
                stream = plain
            else:
                start = plain.read(4)
                plain.seek(0)
                if not start.startswith(_MAGIC[compression]):
                    raise DataError(
                        f"{path} is named as {compression} data, but does not begin as such: "
                        "rename it"
                    )
                if compression == "gzip":
                    stream = cast("BinaryIO", gzip.GzipFile(fileobj=plain))
                else:
                    stream = io.BufferedReader(_Zstd(path, plain), 1 << 17)  # pyright: ignore
            yield stream
    except (OSError, EOFError, zlib.error, _BrokenZstd) as error:
        if isinstance(error, OSError) and error.strerror:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        place = "" if stream is None else f" after {stream.tell():,} decompressed bytes"
        raise DataError(f"{path}: the {compression} data are damaged{place} ({error})") from error


class _BrokenZstd(Exception):
    """The frames of a file end too early or cannot be read."""


class _Zstd(io.RawIOBase):
    """The frames of a zstd file, one behind the other. `zstandard`'s own reader takes a file that
    is cut short for a whole one."""

    def __init__(self, path: Path, plain: BinaryIO) -> None:
        try:
            import zstandard  # optional
        except ImportError as error:
            raise DataError(f"{path} needs the package zstandard: pip install zstandard") from error
        self._package: Any = zstandard
        self._plain, self._frame = plain, self._package.ZstdDecompressor().decompressobj()
        self._inside, self._input, self._ready, self._position = False, b"", b"", 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._input = self._input or self._plain.read(CHUNK)
            if not self._input:
                if self._inside:
                    raise _BrokenZstd("the file ends inside a frame")
                return 0
            try:
                self._ready = self._frame.decompress(self._input)
            except self._package.ZstdError as error:
                raise _BrokenZstd(str(error)) from error
            self._inside, self._input = True, b""
            if self._frame.eof:
                self._input = self._frame.unused_data
                self._frame = self._package.ZstdDecompressor().decompressobj()
                self._inside = False
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        self._position += count
        return count
