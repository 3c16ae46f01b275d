"""All access to files of checkpoints: exclusive creation, fsync, renames, bounded reads.

Every step of a save that a crash can interrupt is one call of `os` from this module, so that a test
can stop the store at each. Files are created exclusively, symbolic links are not followed. In an
object store, which has neither folders nor renames nor syncs, a file is one object.
"""

from __future__ import annotations

import _thread
import errno
import itertools
import os
import re
import resource
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import BinaryIO, TypeVar, cast

from moemesh.checkpoint.digests import hash_bytes
from moemesh.checkpoint.remote import Place, RemotePath
from moemesh.config.errors import UserError
from moemesh.trace.machine import drop_from_cache

#: Name of the object by which a folder exists in an object store.
MARK = "begun.json"
#: Bytes read, hashed or written at once.
CHUNK_BYTES = 4 << 20
MANIFEST = "manifest.json"
#: Names of checkpoints: committed, being written, in quarantine, being deleted.
COMMITTED = re.compile(r"step-(0|[1-9][0-9]{0,17})")
TEMPORARY = re.compile(r"step-(0|[1-9][0-9]{0,17})\.tmp-[0-9a-f]{32}")
BROKEN = re.compile(r"broken-step-(0|[1-9][0-9]{0,17})-[0-9]+(\.json)?")
TRASH = re.compile(r"\.trash-step-(0|[1-9][0-9]{0,17})-[0-9a-f]{32}")


class CheckpointError(UserError):
    """A checkpoint cannot be written, or is damaged; the message names the file and the fault.
    `facts`: keys of failure.json."""

    def __init__(self, message: str, facts: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.facts = dict(facts or {})


def explain(error: OSError, path: Place, needed: int | None = None) -> CheckpointError:
    """The error with its path and, if space is short, the bytes needed and the limit."""
    need, hint = "" if needed is None else f"{needed:,} bytes needed, ", ""
    if error.errno == errno.ENOSPC:
        hint = f": {need}{free_bytes(path):,} free"
    elif error.errno == errno.EDQUOT:
        hint = f": {need}the quota of this user, group or project is used up"
    elif error.errno == errno.EFBIG and (limit := file_limit()) is not None:
        hint = f": {need}this process may write {limit:,} into a file (ulimit -f)"
    elif error.errno == errno.EFBIG:
        hint = f": {need}more than this file system takes in one file"
    elif error.errno == errno.ENOENT:
        hint = ": is its folder on a file system that all ranks share?"
    return CheckpointError(f"{path}: {error.strerror or error}{hint}")


def file_limit() -> int | None:
    """Bytes that this process may write into one file; None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def free_bytes(path: Place) -> int:
    """Free bytes of the file system of `path`, which need not exist yet."""
    if isinstance(path, RemotePath):
        return 1 << 62
    for folder in (path, *path.parents):
        with suppress(OSError):
            return shutil.disk_usage(folder).free
    return 0


def make_folder(path: Place) -> None:
    """Creates one folder, which must not exist; in an object store, an object that marks it."""
    if isinstance(path, RemotePath):
        (path / MARK).put(b"{}")
        return
    os.mkdir(path)


def make_folders(path: Place) -> None:
    """Creates a folder and its missing parents, and makes their names durable."""
    if isinstance(path, RemotePath) or path.is_dir():
        return
    make_folders(path.parent)
    with suppress(FileExistsError):
        make_folder(path)
        sync_folder(path.parent)


def write_file(
    path: Place,
    parts: Iterable[bytes | memoryview],
    look: Callable[[int, memoryview], object] = lambda part, piece: None,
) -> tuple[int, list[list[str]]]:
    """Writes a new file and syncs it; returns its size in bytes, and for each part the digests of
    its chunks of CHUNK_BYTES.

    Digests are computed from memory in a thread, so they also catch corruption between memory and
    disk. The thread calls `look(part, chunk)` with the index of a part and at most CHUNK_BYTES
    of it.
    """
    size, num_pieces = 0, list[int]()

    def pieces(write: Callable[[memoryview], object]) -> Iterator[tuple[int, memoryview]]:
        nonlocal size
        for number, part in enumerate(parts):
            view = memoryview(part).cast("B")
            starts = range(0, len(view), CHUNK_BYTES)
            num_pieces.append(len(starts))
            for start in starts:
                piece = view[start : start + CHUNK_BYTES]
                yield number, piece  # the thread works on it during the write
                write(piece)
            size += len(view)

    def work(item: tuple[int, memoryview]) -> str:
        look(*item)
        return hash_bytes(item[1])

    if isinstance(path, RemotePath):
        with path.writing() as write:
            digests = [*map_in_thread(work, pieces(write), lambda item: len(item[1]))]
    else:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)

        def write_all(piece: memoryview) -> None:
            while piece:
                piece = piece[os.write(handle, piece) :]

        try:
            digests = [*map_in_thread(work, pieces(write_all), lambda item: len(item[1]))]
            os.fsync(handle)
        finally:
            os.close(handle)
    remaining = iter(digests)
    return size, [[*islice(remaining, number)] for number in num_pieces]


def replace_file(path: Place, content: bytes) -> None:
    """Replaces `path` by a rename: a reader sees the old or the new content."""
    if isinstance(path, RemotePath):
        path.put(content)
        return
    replace_by(path, [content])


def replace_by(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Same as :func:`replace_file`, for content in parts. After an OSError no temporary file is
    left."""
    temporary = path.with_name(f".{path.name}.tmp")
    remove_file(temporary)
    try:
        write_file(temporary, chunks)
        os.replace(temporary, path)
    except OSError as error:  # add the path: that of a full disk has none
        with suppress(OSError):
            remove_file(temporary)
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync_folder(path.parent)


def create_file(path: Place, content: bytes) -> None:
    """Writes a small file under a new name; FileExistsError if the name exists (in an object store
    with other content)."""
    if isinstance(path, RemotePath):
        path.create(content)
        return
    write_file(path, [content])
    sync_folder(path.parent)


def sync_folder(path: Place) -> None:
    """Makes the names in a folder durable."""
    if isinstance(path, RemotePath):
        return
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename(source: Path, target: Path) -> None:
    """Renames a folder; FileExistsError if the target exists."""
    # rename() alone would replace an empty folder; the run folder's lock keeps other writers away.
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "exists already", str(target))
    os.rename(source, target)


def remove_file(path: Place) -> None:
    """Deletes a file, if it exists."""
    if isinstance(path, RemotePath):
        path.remove()
        return
    with suppress(FileNotFoundError):
        os.unlink(path)


def remove_folder(path: Place, check: Callable[[], None] = lambda: None) -> None:
    """Deletes a folder with its content (in an object store a manifest first), if the folder
    exists. `check` is called before the deletion; an exception from it cancels the deletion."""
    if isinstance(path, RemotePath):
        with suppress(OSError):
            path.remove_all(MANIFEST, check)
        return
    check()
    shutil.rmtree(path, ignore_errors=True)


def is_committed(path: Place) -> bool:
    """Whether a checkpoint is committed: on a disk `path` exists, by a rename of the complete
    folder; in an object store it has a manifest."""
    if isinstance(path, RemotePath):
        return (path / MANIFEST).exists()
    return path.exists() or path.is_symlink()


def delete_checkpoint(path: Place, check: Callable[[], None] = lambda: None) -> None:
    """Deletes a committed checkpoint, its commit first: the name of the folder, or the manifest.
    `check` as in :func:`remove_folder`."""
    if isinstance(path, RemotePath):
        path.remove_all(MANIFEST, check)
        return
    check()
    trash = path.with_name(f".trash-{path.name}-{uuid.uuid4().hex}")
    rename(path, trash)
    remove_folder(trash)


def quarantine(path: Place) -> None:
    """Renames a damaged checkpoint, so that its step can be saved. Its content (in an object store
    only its manifest) is kept until a good checkpoint of this or a later step exists
    (:func:`moemesh.checkpoint.retention.plan_pruning`)."""
    name = f"broken-{path.name}-{time.time_ns()}"
    if isinstance(path, RemotePath):
        with suppress(FileNotFoundError):
            content = (path / MANIFEST).read(0, (path / MANIFEST).num_bytes())
            path.with_name(f"{name}.json").put(content)
        (path / MANIFEST).remove()
        return
    path.rename(path.with_name(name))


def check_folder(path: Place) -> None:
    """Raises CheckpointError unless `path` is a folder; a symbolic link is refused."""
    if isinstance(path, RemotePath):
        if not path.is_dir():
            raise CheckpointError(f"{path}: {os.strerror(errno.ENOENT)}")
        return
    try:
        mode = os.lstat(path).st_mode
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if not stat.S_ISDIR(mode):
        raise CheckpointError(f"{path}: is not a folder")


def file_size(path: Place) -> int:
    """Size in bytes of a regular file; CheckpointError for anything else."""
    if isinstance(path, RemotePath):
        try:
            return path.num_bytes()
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: {os.strerror(errno.ENOENT)}") from error
    try:
        status = os.lstat(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: is not a regular file")
    return status.st_size


def read_start(path: Place, size: int) -> bytes:
    """The first `size` bytes of a regular file (fewer if it is shorter)."""
    if isinstance(path, RemotePath):
        return path.read(0, min(size, file_size(path)))
    with reading(path) as file:
        return b"".join(read_chunks(file, size))


@contextmanager
def reading(path: Place, *, from_disk: bool = False) -> Iterator[BinaryIO]:
    """An open regular file; links are not followed. `from_disk`: its clean pages are dropped from
    the page cache first, so that the disk itself is read."""
    if isinstance(path, RemotePath):
        with path.reading() as file:
            yield file
        return
    file_size(path)
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(handle, "rb", buffering=0) as file:
        if from_disk:
            drop_from_cache(handle)
        yield file


def read_chunks(file: BinaryIO, size: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """The next `size` bytes of a file, in chunks of `chunk_bytes`; fewer at its end."""
    while size > 0:
        wanted, content = min(chunk_bytes, size), b""
        while len(content) < wanted and (more := file.read(wanted - len(content))):
            content += more
        if content:
            yield content
        if len(content) < wanted:
            return
        size -= wanted


def read_whole(path: Place) -> bytes:
    """The content of a small file, read from the disk."""
    with reading(path, from_disk=True) as file:
        return b"".join(read_chunks(file, file_size(path)))


def list_names(path: Place) -> Sequence[str]:
    """The names in a folder, sorted."""
    if isinstance(path, RemotePath):
        return path.names()
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def written_at(path: Place) -> float:
    """Seconds since the epoch at which a file was written, for display."""
    return path.written_at() if isinstance(path, RemotePath) else path.stat().st_mtime


# Work on chunks of bytes in a thread, while the caller reads or writes chunks.


_Chunk = TypeVar("_Chunk")
_Result = TypeVar("_Result")
#: Chunks below this size in bytes are processed inline: a hand-over would cost the same time.
_SMALL = 256 << 10


def map_in_thread(
    work: Callable[[_Chunk], _Result],
    chunks: Iterable[_Chunk],
    size: Callable[[_Chunk], int] = lambda chunk: len(chunk) if isinstance(chunk, Sized) else 0,
) -> Iterator[_Result]:
    """Yields ``work(chunk)`` of each chunk, in order; `size` returns the bytes of a chunk. A thread
    works on one chunk while the iterator `chunks` advances to the next, and so runs the code after
    its ``yield``, for example a write. Functions that hold the GIL gain nothing."""
    # Executors of the standard library take no work while a process exits, and an exiting process
    # waits for its save.
    tasks: SimpleQueue[tuple[_Chunk] | None] = SimpleQueue()
    done: SimpleQueue[tuple[_Result, None] | tuple[None, BaseException]] = SimpleQueue()

    def run() -> None:
        while (task := tasks.get()) is not None:
            try:
                done.put((work(*task), None))
            except BaseException as error:
                done.put((None, error))

    def taken_back() -> tuple[_Chunk] | None:
        """The queued chunk, if the thread has not started on it."""
        with suppress(Empty):
            return tasks.get_nowait()
        return None

    has_thread = is_pending = False
    try:
        for chunk in itertools.chain(chunks, [None]):
            if is_pending:
                is_pending = False
                task = taken_back()
                if task is not None:
                    yield work(*task)
                else:
                    result, error = done.get()
                    if error is not None:
                        raise error
                    yield cast("_Result", result)
            if chunk is None:
                break
            if size(chunk) < _SMALL:
                yield work(chunk)
                continue
            tasks.put((chunk,))
            is_pending = True
            if not has_thread:
                has_thread = True
                # Do not wait for its start: with little memory a thread may silently never begin.
                with suppress(RuntimeError):
                    _thread.start_new_thread(run, ())
    finally:
        if is_pending and taken_back() is None:
            done.get()
        tasks.put(None)
