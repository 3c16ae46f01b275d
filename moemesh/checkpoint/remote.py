"""Addresses of object stores, through fsspec, with the part of pathlib that checkpoints use.

An object store has no folders, no renames and no syncs: an object exists, complete, once its write
has ended, and a folder is a common prefix of names. A checkpoint is therefore written under its
final name, and its last object, the manifest, commits it.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, TypeVar, cast

from moemesh.config.errors import UserError

#: ``s3://bucket/prefix``; also with one slash, because pathlib joins two.
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):(/{1,2}.*)", re.ASCII)
#: Schemes of file systems: a file is visible while it is written, and a rename is atomic.
_DISKS = frozenset(("file", "local", "sftp", "ssh"))
_T = TypeVar("_T")


class RemoteError(UserError):
    """An address cannot be used; the message names the missing package or the scheme."""


class RemotePath:
    """A name in an object store. Every operation raises OSError for a refusal of the store."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem, self._path = filesystem, path.rstrip("/")

    @staticmethod
    def of(address: str) -> RemotePath:
        """The name ``scheme://bucket/prefix``. Raises RemoteError if its package is missing."""
        try:
            from fsspec.core import url_to_fs  # an extra: [remote]
        except ImportError as error:
            raise RemoteError(f"{address} needs the package fsspec: pip install fsspec") from error
        # Listings must be current; folders on a disk are created on demand.
        options: dict[str, Any] = {"use_listings_cache": False}
        if address.partition(":")[0] in ("file", "local"):
            options["auto_mkdir"] = True
        try:
            filesystem, path = url_to_fs(address, **options)
        except (ImportError, ValueError, OSError) as error:
            raise RemoteError(f"{address}: {error}") from error
        return RemotePath(filesystem, path)

    def __str__(self) -> str:
        return str(self._filesystem.unstrip_protocol(self._path))

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is an address in an object store, not a path of this machine")

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self._filesystem, f"{self._path}/{name}")

    @property
    def name(self) -> str:
        """Last part of the name."""
        return self._path.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """All but the last part of the name."""
        return RemotePath(self._filesystem, self._path.rpartition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        """Another name in the same folder."""
        return self.parent / name

    def exists(self) -> bool:
        """Whether an object of this name exists."""
        return bool(self._call(self._filesystem.isfile, self._path))

    def is_dir(self) -> bool:
        """Whether any object exists below this name."""
        return bool(self.names())

    def names(self) -> list[str]:
        """Current names directly below this one, sorted."""
        # Some clients cache listings in spite of the option.
        self._call(self._filesystem.invalidate_cache)
        try:
            paths = self._call(self._filesystem.ls, self._path, detail=False)
        except FileNotFoundError:
            return []
        prefix = self._filesystem._strip_protocol(self._path)  # as ls spells it
        names = (str(path).rstrip("/").removeprefix(prefix).lstrip("/") for path in paths)
        return sorted(name for name in names if name and "/" not in name)

    def num_bytes(self) -> int:
        """Size of the object in bytes."""
        info = self._call(self._filesystem.info, self._path)
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return int(info["size"])

    def written_at(self) -> float:
        """Time of the write in seconds since the epoch, by the store's clock."""
        return float(self._call(self._filesystem.modified, self._path).timestamp())

    def read(self, start: int, end: int) -> bytes:
        """The bytes ``start .. end`` of the object; fewer at its end."""
        return bytes(self._call(self._filesystem.cat_file, self._path, start=start, end=end))

    def put(self, content: bytes) -> None:
        """Write the object atomically: a reader sees the old or the new content."""
        schemes: Any = self._filesystem.protocol
        # In an object store one write is atomic; on a disk a rename is.
        if _DISKS.isdisjoint((schemes,) if isinstance(schemes, str) else schemes):
            self._call(self._filesystem.pipe_file, self._path, content)
            return
        temporary = self.with_name(f".{self.name}.tmp")
        self._call(self._filesystem.pipe_file, temporary._path, content)
        self._call(self._filesystem.mv, temporary._path, self._path)

    def create(self, content: bytes) -> None:
        """Create the object; FileExistsError if the name exists with other content. The same
        content means that the reply of an earlier request was lost.

        Most stores create exclusively; in others two writers may both succeed, and the object is
        that of the last.
        """

        def create() -> None:
            try:
                self._filesystem.pipe_file(self._path, content, mode="create")
            except TypeError:  # a client without this argument
                self._filesystem.pipe_file(self._path, content)

        try:
            if self.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self))
            self._call(create)
        except FileExistsError:
            if self.read(0, len(content) + 1) != content:
                raise

    def remove(self) -> None:
        """Delete the object, if it exists."""
        with suppress(FileNotFoundError):
            self._call(self._filesystem.rm_file, self._path)

    def remove_all(self, first: str, check: Callable[[], None] = lambda: None) -> None:
        """Delete all objects directly below this name, `first` before the others. `check` is called
        between the listing and the deletion; an exception from it cancels the deletion."""
        names = self.names()
        check()
        for name in sorted(names, key=lambda name: name != first):
            (self / name).remove()
        with suppress(OSError):  # the empty folder, in file systems that have folders
            self._call(self._filesystem.rmdir, self._path)

    @contextmanager
    def reading(self) -> Iterator[BinaryIO]:
        """The object, opened for reading."""
        with closing(self._call(self._filesystem.open, self._path, "rb")) as file:
            # Only `read` and `seek`, whose errors become OSError.
            calls = {name: partial(self._call, getattr(file, name)) for name in ("read", "seek")}
            yield cast("BinaryIO", SimpleNamespace(**calls))

    @contextmanager
    def writing(self) -> Iterator[Callable[[bytes | memoryview], object]]:
        """A function that writes bytes of the object, which exists after the block."""
        file = self._call(self._filesystem.open, self._path, "wb")
        try:
            yield lambda content: self._call(file.write, content)
        except BaseException:
            with suppress(Exception):
                file.discard()
            with suppress(Exception):
                file.close()
            raise
        self._call(file.close)

    def _call(self, work: Callable[..., _T], *args: Any, **keys: Any) -> _T:
        """Calls the client; its own exceptions become OSError, which a save treats as a disk's."""
        try:
            return work(*args, **keys)
        except Exception as error:
            # The timeout of fsspec is an OSError without a text.
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                raise
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise OSError(errno.EIO, reason, str(self)) from error


#: Location of a checkpoint or of a part of one: on a disk, or in an object store.
Place = Path | RemotePath


def place_of(text: str | Path) -> Place:
    """Location for a user's text: ``scheme://...`` is in an object store, all else is a path."""
    match = _ADDRESS.fullmatch(str(text))
    if match is None:
        if "::" in str(text):
            raise RemoteError(f"{text}: name one store; addresses in a chain are not understood")
        return Path(text).expanduser()
    scheme, rest = match.groups()
    if not rest.startswith("//"):  # pathlib has joined the slashes
        rest = f"/{rest}" if scheme not in ("file", "local") else f"//{rest}"
    return RemotePath.of(f"{scheme}:{rest}")
