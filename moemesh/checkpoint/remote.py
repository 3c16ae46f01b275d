"""Addresses of object stores, through fsspec, with the part of pathlib that checkpoints use.

An object store has no folders, no renames and no syncs: an object is there, whole, once its write
has ended, and a folder is where names begin alike. A checkpoint is therefore written under its own
name, and the manifest, its last object, makes it one.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, TypeVar, cast

from moemesh.config.errors import UserError

#: ``s3://bucket/prefix``; pathlib makes one slash of two.
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):(/{1,2}.*)", re.ASCII)
#: Schemes behind which a file is seen while it is written, and a rename replaces another at once.
_DISKS = frozenset(("file", "local", "sftp", "ssh"))
_T = TypeVar("_T")


class RemoteError(UserError):
    """An address that cannot be used here; names the package or the scheme."""


class RemotePath:
    """A name in an object store. Every operation raises OSError for what the store refuses."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem, self._path = filesystem, path.rstrip("/")

    @staticmethod
    def of(address: str) -> RemotePath:
        """The name ``scheme://bucket/prefix``. Raises RemoteError where a package is missing or the
        scheme is unknown."""
        try:
            from fsspec.core import url_to_fs  # an extra: pip install "moemesh[remote]"
        except ImportError as error:
            raise RemoteError(
                f'{address} needs the package fsspec: pip install "moemesh[remote]"'
            ) from error
        # Lists of names must be those of now; folders of a disk are made as they are needed.
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
        raise TypeError(f"{self} is no path of this machine")

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self._filesystem, f"{self._path}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self._path.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """All but the last part."""
        return RemotePath(self._filesystem, self._path.rpartition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        """Another name beside it."""
        return self.parent / name

    def exists(self) -> bool:
        """Whether there is an object of this name."""
        return bool(self._call(self._filesystem.isfile, self._path))

    def is_dir(self) -> bool:
        """Whether there are names below this one."""
        return bool(self.names())

    def names(self) -> list[str]:
        """The names below this one, sorted, as the store has them now."""
        # Some clients keep lists of names whatever the option says.
        self._call(self._filesystem.invalidate_cache)
        try:
            found = self._call(self._filesystem.ls, self._path, detail=False)
        except FileNotFoundError:
            return []
        own = self._filesystem._strip_protocol(self._path)  # the only spelling that ls has
        names = (str(one).rstrip("/").removeprefix(own).lstrip("/") for one in found)
        return sorted(name for name in names if name and "/" not in name)

    def num_bytes(self) -> int:
        """Size of the object in bytes."""
        known = self._call(self._filesystem.info, self._path)
        if known["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return int(known["size"])

    def written_at(self) -> float:
        """Seconds since the epoch at which the object was written, by the store's clock."""
        return float(self._call(self._filesystem.modified, self._path).timestamp())

    def read(self, start: int, end: int) -> bytes:
        """The bytes ``start .. end`` of the object, fewer where it ends."""
        return bytes(self._call(self._filesystem.cat_file, self._path, start=start, end=end))

    def put(self, content: bytes) -> None:
        """Write the object at once: a reader sees the old or the new content, or none."""
        names: Any = self._filesystem.protocol
        if _DISKS.isdisjoint((names,) if isinstance(names, str) else names):
            self._call(self._filesystem.pipe_file, self._path, content)
            return
        beside = self.with_name(f".{self.name}.tmp")
        self._call(self._filesystem.pipe_file, beside._path, content)
        self._call(self._filesystem.mv, beside._path, self._path)

    def create(self, content: bytes) -> None:
        """Write the object at once where there is none of this name, else FileExistsError. One that
        is there with this very content is that of a request whose reply was lost.

        Most stores decide that themselves; where one does not, two writers may both succeed, and
        the object is that of the last.
        """
        try:
            if self.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self))
            self._call(self._create, content)
        except FileExistsError:
            if self.read(0, len(content) + 1) != content:
                raise

    def _create(self, content: bytes) -> None:
        try:
            self._filesystem.pipe_file(self._path, content, mode="create")
        except TypeError:  # a client that does not know the argument
            self._filesystem.pipe_file(self._path, content)

    def remove(self) -> None:
        """Delete the object; one that is gone already is no error."""
        with suppress(FileNotFoundError):
            self._call(self._filesystem.rm_file, self._path)

    def remove_all(self, first: str, check: Callable[[], None] = lambda: None) -> None:
        """Delete all that is below this name now: the object `first` before all others. `check` is
        called between the look and the deletion; what it raises ends it."""
        names = self.names()
        check()
        for name in sorted(names, key=lambda name: name != first):
            (self / name).remove()
        with suppress(OSError):  # of file systems that have folders, the empty one
            self._call(self._filesystem.rmdir, self._path)

    @contextmanager
    def reading(self) -> Iterator[BinaryIO]:
        """The object, open to be read from start to end."""
        file = self._call(self._filesystem.open, self._path, "rb")
        calls = {name: partial(self._call, getattr(file, name)) for name in ("read", "seek")}
        try:
            yield cast("BinaryIO", SimpleNamespace(**calls))
        finally:
            file.close()

    @contextmanager
    def writing(self) -> Iterator[Callable[[bytes | memoryview], object]]:
        """A function that takes the object's bytes, which is there when the block has ended
        well."""
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
        """Clients have errors of their own; to a save they are those of a disk."""
        try:
            return work(*args, **keys)
        except OSError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise OSError(errno.EIO, reason, str(self)) from error


#: Where checkpoints are, and their parts: on a disk, or in an object store.
Place = Path | RemotePath


def place_of(text: str | Path) -> Place:
    """The place that a user's text means: ``scheme://...`` an object store, all else a path."""
    match = _ADDRESS.fullmatch(str(text))
    if match is None:
        if "::" in str(text):
            raise RemoteError(f"{text}: name one store; addresses in a chain are not understood")
        return Path(text).expanduser()
    scheme, rest = match.groups()
    if not rest.startswith("//"):  # pathlib was there before us
        rest = f"/{rest}" if scheme not in ("file", "local") else f"//{rest}"
    return RemotePath.of(f"{scheme}:{rest}")
