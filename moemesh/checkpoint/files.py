"""The store's only door to the file system: exclusive files, fsync, renames, bounded reads.

Every step that a crash can fall between is one call of `os` in this module, so that a test can
stop the store at each of them. Files are created exclusively, symbolic links are not followed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from moemesh.checkpoint.digests import hash_bytes
from moemesh.config.errors import UserError

#: Bytes read, hashed or written at once.
CHUNK_BYTES = 4 << 20
#: A committed checkpoint, one that is being written, and one that is being deleted.
COMMITTED = re.compile(r"step-(0|[1-9][0-9]{0,17})")
TEMPORARY = re.compile(r"step-(0|[1-9][0-9]{0,17})\.tmp-[0-9a-f]{32}")
TRASH = re.compile(r"\.trash-step-(0|[1-9][0-9]{0,17})-[0-9a-f]{32}")


class CheckpointError(UserError):
    """A checkpoint cannot be written, or is not what was written; names the file and the fault."""


def explain(error: OSError, path: Path, needed: int | None = None) -> CheckpointError:
    """The error with its path and, where the disk is full, the bytes needed and free."""
    hint = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        wanted = "" if needed is None else f"{needed:,} bytes needed, "
        hint = f": {wanted}{free_bytes(path):,} free"
    elif error.errno == errno.ENOENT:
        hint = ": is the checkpoint folder on a file system that all ranks share?"
    return CheckpointError(f"{path}: {error.strerror or error}{hint}")


def free_bytes(path: Path) -> int:
    """Bytes that may still be written to the file system of `path`, which need not exist yet."""
    for place in (path, *path.parents):
        try:
            status = os.statvfs(place)
        except OSError:
            continue
        return status.f_bavail * status.f_frsize
    return 0


def make_folder(path: Path) -> None:
    """Creates one folder, which must not exist."""
    os.mkdir(path)


def make_folders(path: Path) -> None:
    """Creates a folder and those above it where they are missing, and makes their names durable."""
    if path.is_dir():
        return
    make_folders(path.parent)
    with suppress(FileExistsError):
        make_folder(path)
        sync_folder(path.parent)


class Written(NamedTuple):
    """A file that was written: its size in bytes, and of each of its parts the digests of every
    CHUNK_BYTES of it."""

    size: int
    digests: list[list[str]]


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> Written:
    """Writes a new file and syncs it.

    The digests are taken from memory before the bytes are written, so that they also catch what
    goes wrong on the way to the disk.
    """
    size, digests = 0, list[list[str]]()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        for part in parts:
            view = memoryview(part).cast("B")
            digests.append([])
            for start in range(0, len(view), CHUNK_BYTES):
                piece = view[start : start + CHUNK_BYTES]
                digests[-1].append(hash_bytes(piece))
                size += len(piece)
                while piece:
                    piece = piece[os.write(handle, piece) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    return Written(size, digests)


def replace_file(path: Path, content: bytes) -> None:
    """Writes `path` anew by temporary file and rename: a reader sees the old or the new content."""
    replace_by(path, [content])


def replace_by(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """As :func:`replace_file`, for content that comes in parts."""
    temporary = path.with_name(f".{path.name}.tmp")
    remove_file(temporary)
    write_file(temporary, chunks)
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename(source: Path, target: Path) -> None:
    """Renames a folder onto a free name; an occupied one is FileExistsError."""
    # rename() alone would replace an empty folder; the run folder's lock keeps other writers away.
    if os.path.lexists(target):
        raise FileExistsError(17, "exists already", str(target))
    os.rename(source, target)


def remove_file(path: Path) -> None:
    """Deletes a file; one that is gone already is no error."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def remove_folder(path: Path) -> None:
    """Deletes a folder with all it holds; one that is gone already is no error."""
    shutil.rmtree(path, ignore_errors=True)


def check_folder(path: Path) -> None:
    """Raises CheckpointError unless `path` is a folder and no symbolic link to one."""
    try:
        mode = os.lstat(path).st_mode
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if not stat.S_ISDIR(mode):
        raise CheckpointError(f"{path}: is not a folder")


def file_size(path: Path) -> int:
    """Size in bytes of a regular file; CheckpointError for anything else."""
    try:
        status = os.lstat(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: is not a regular file")
    return status.st_size


def read_start(path: Path, size: int) -> bytes:
    """The first `size` bytes of a regular file (fewer if it is shorter)."""
    size = min(size, file_size(path))
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(handle, "rb") as file:
        return file.read(size)


@contextmanager
def reading(path: Path, *, from_disk: bool = False) -> Iterator[BinaryIO]:
    """An open regular file; links are not followed. `from_disk`: what the page cache holds of it,
    unless it is yet to be written, is dropped first, so that the disk itself is read."""
    file_size(path)
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(handle, "rb", buffering=0) as file:
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        yield file


def read_chunks(file: BinaryIO, size: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """The next `size` bytes of a file, in chunks of `chunk_bytes`; less where it ends."""
    while size > 0:
        wanted, found = min(chunk_bytes, size), b""
        while len(found) < wanted and (more := file.read(wanted - len(found))):
            found += more
        if found:
            yield found
        if len(found) < wanted:
            return
        size -= wanted


def read_whole(path: Path) -> bytes:
    """The content of a small file as the disk holds it."""
    with reading(path, from_disk=True) as file:
        return b"".join(read_chunks(file, file_size(path)))


def list_names(path: Path) -> Sequence[str]:
    """The names in a folder, sorted."""
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
