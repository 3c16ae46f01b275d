"""The store's only door to the file system: exclusive files, fsync, renames, bounded reads.

Every step that a crash can fall between is one call of `os` in this module, so that a test can
stop the store at each of them. Files are created exclusively, symbolic links are not followed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from moemesh.config.errors import UserError

#: Bytes read, hashed or written at once.
CHUNK_BYTES = 4 << 20
#: A committed checkpoint, one that is being written, and one that is being deleted.
COMMITTED = re.compile(r"step-(0|[1-9][0-9]{0,17})")
TEMPORARY = re.compile(r"step-(0|[1-9][0-9]{0,17})\.tmp-[0-9a-f]{32}")
TRASH = re.compile(r"\.trash-step-(0|[1-9][0-9]{0,17})-[0-9a-f]{32}")


class CheckpointError(UserError):
    """A checkpoint cannot be written, or is not what was written; names the file and the fault."""


def make_folder(path: Path) -> None:
    """Creates one folder, which must not exist."""
    os.mkdir(path)


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Writes a new file and syncs it; returns its size in bytes and its digest.

    The digest is taken from memory before each chunk is written, so that it also catches what goes
    wrong on the way to the disk.
    """
    digest, size = new_digest(), 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            for start in range(0, len(view), CHUNK_BYTES):
                piece = view[start : start + CHUNK_BYTES]
                digest.update(piece)
                size += len(piece)
                while piece:
                    piece = piece[os.write(handle, piece) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    return size, digest_text(digest)


def replace_file(path: Path, content: bytes) -> None:
    """Writes `path` anew by temporary file and rename: a reader sees the old or the new content."""
    replace_by(path, [content])


def replace_by(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """As :func:`replace_file`, for content that comes in parts."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
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


def hash_file(path: Path) -> str:
    """The digest of a file as the disk holds it: clean pages of the cache are dropped first."""
    digest = new_digest()
    file_size(path)
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(handle, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest_text(digest)


def new_digest() -> hashlib.blake2b:
    """The store's hash function."""
    return hashlib.blake2b(digest_size=16)


def digest_text(digest: hashlib.blake2b) -> str:
    """A digest as the manifest spells it."""
    return f"blake2b-128:{digest.hexdigest()}"


def list_names(path: Path) -> Sequence[str]:
    """The names in a folder, sorted."""
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
