"""Rendezvous directory of a node: progress records, exceptions, stack dumps."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moemesh.config.limits import parse_json
from moemesh.monitor.detector import GONE, ReportedError
from moemesh.monitor.peers import ADDRESS, listen
from moemesh.monitor.progress import ProgressFile, ProgressRecord
from moemesh.trace.machine import SHARED_MEMORY, process_namespace, zombie_exit_code
from moemesh.trace.run import is_locked

#: Files of the folder: progress records, store of the process group, lock of the supervisor.
WORDS, STORE, LOCK = "words", "store", "lock"
#: Signal after which a rank writes the stacks of its threads.
STACK_SIGNAL = signal.SIGUSR2
#: First characters of the folders' names.
PREFIX = "moemesh-"
#: Bytes for exceptions, stacks, and the store of the process group.
_ROOM_BYTES = 1 << 20


@contextmanager
def rendezvous_folder(num_bytes: int = 0) -> Iterator[Path]:
    """A private folder in shared memory, or in the temporary folder if shared memory has less than
    `num_bytes` + 1 MiB free or cannot be written; removed at the end.

    A folder left by a killed supervisor is removed at the next call: its lock is free.
    """
    parent = shared_memory()
    _sweep(parent)
    if shutil.disk_usage(parent).free < num_bytes + _ROOM_BYTES:
        parent = Path(tempfile.gettempdir())
        _sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    handle = lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def shared_memory() -> Path:
    """The parent of ranks' folders: shared memory, or the temporary folder."""
    is_writable = os.access(SHARED_MEMORY, os.W_OK)
    return SHARED_MEMORY if is_writable else Path(tempfile.gettempdir())


def lock(folder: Path) -> int:
    """Lock a new folder until the returned handle is closed."""
    handle = os.open(folder / "locking", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.rename(folder / "locking", folder / LOCK)  # visible to others only once it is locked
    return handle


def has_supervisor(folder: Path) -> bool:
    """Whether the supervisor of a folder is alive."""
    return is_locked(folder / LOCK)


def _sweep(parent: Path) -> None:
    """Remove this user's folders whose supervisor was killed."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            if (folder / LOCK).exists() and not has_supervisor(folder):
                shutil.rmtree(folder, ignore_errors=True)


def stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stacks-{rank}"


def torchrun_file(folder: Path, rank: int) -> Path:
    """The file with the path of the error file that torchrun shows for a rank."""
    return folder / f"torchrun-{rank}"


def write_error(folder: Path, rank: int, error: dict[str, Any]) -> None:
    """Report an exception, once; atomic, since the supervisor may read at any time."""
    file = folder / f"told-{rank}.json"
    if file.exists():
        return
    temporary = file.with_suffix(".tmp")
    with suppress(OSError):
        temporary.write_text(json.dumps(error, default=str))
        os.replace(temporary, file)


def read_error(folder: Path, rank: int) -> ReportedError | None:
    """The exception that a rank has reported, or None."""
    try:
        return ReportedError(**parse_json((folder / f"told-{rank}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


# Ranks of a node that torchrun, srun or another launcher has started: the first rank to arrive
# makes a folder and starts the watcher; the others find the folder by its name, a hash that the
# ranks of this node and this start share. Ranks of a node see one another's processes.

#: Variables that identify one start of ranks.
_NAMES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
)
#: File with the process namespace of the rank that made the folder.
_PROCESSES = "processes"
#: Seconds in which the watcher of an earlier start under the same name must end.
_EARLIER_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Node:
    """The ranks `first` to `first + num_ranks - 1` of `world_size`. ``name``: name of their folder;
    ``master``: host of the rendezvous."""

    first: int
    num_ranks: int
    world_size: int
    name: str
    launcher: str
    master: str = ""

    @property
    def has_others(self) -> bool:
        """Whether the run has other nodes."""
        return self.num_ranks < self.world_size

    @property
    def ranks(self) -> range:
        """The consecutive ranks of this node."""
        return range(self.first, self.first + self.num_ranks)

    @staticmethod
    def of(environment: Mapping[str, str]) -> Node:
        """The node of a process with the variables of a rank."""
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        first = rank - int(environment["LOCAL_RANK"])
        identity = [str(first), *(environment.get(name, "") for name in _NAMES)]
        digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:16]
        launcher = "another launcher"
        if "TORCHELASTIC_RUN_ID" in environment:
            launcher = "torchrun"
        elif "SLURM_STEP_ID" in environment:
            launcher = "srun"
        return Node(
            first=first,
            num_ranks=int(environment.get("LOCAL_WORLD_SIZE", size)),
            world_size=size,
            name=f"{PREFIX}node-{os.getuid()}-{digest}",
            launcher=launcher,
            master=environment.get("MASTER_ADDR", ""),
        )


def join_node(node: Node, watcher: Callable[[Path], Sequence[str]]) -> Path | None:
    """The folder of the ranks of `node`. The first rank to call starts ``watcher(folder)``, with a
    listener for the watchers of other nodes as its standard input.

    None if foreign processes cannot be watched: outside of Linux, without pidfd_open, if the folder
    still belongs to an earlier start, another user or another container after ten seconds, or if it
    or the watcher cannot be made.
    """
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return None
    folder, end = shared_memory() / node.name, time.monotonic() + _EARLIER_SECONDS
    listener = listen(node.master) if node.has_others else None
    with suppress(OSError), listener or nullcontext():
        # Another rank made the folder: join it, or wait until an earlier start has left it.
        while not _make(folder, node, listener):
            is_ours = has_lock = False
            with suppress(OSError):
                is_ours = folder.stat().st_uid == os.getuid()
                has_lock = has_supervisor(folder)
                # The watcher of the folder and this process must see the same processes.
                sees_processes = (folder / _PROCESSES).read_text() == process_namespace()
                if is_ours and sees_processes and (has_lock or not (folder / LOCK).exists()):
                    return folder
            if time.monotonic() > end:
                return None
            if is_ours and not has_lock:  # left by a killed watcher
                trash = tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent)
                with suppress(OSError):
                    os.rename(folder, trash)
                shutil.rmtree(trash, ignore_errors=True)
            time.sleep(0.05)
        # A new session, so that killing the process group of a rank spares the watcher.
        stdin = subprocess.DEVNULL if listener is None else listener.fileno()
        try:
            subprocess.Popen(watcher(folder), stdin=stdin, start_new_session=True)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            return None
        return folder
    return None


def _make(folder: Path, node: Node, listener: socket.socket | None) -> bool:
    """Make the folder with all files that ranks need; False if it exists. Raises OSError without
    space for it."""
    if folder.exists():
        return False
    new = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        ProgressFile(new / WORDS, node.world_size, reserved=node.ranks).unmap()
        (new / _PROCESSES).write_text(process_namespace())
        if listener is not None:
            (new / ADDRESS).write_text(json.dumps(listener.getsockname()[:2]))
        # Fails if another rank was first: its folder is not empty.
        with suppress(OSError):
            os.rename(new, folder)
            return True
        return False
    finally:
        shutil.rmtree(new, ignore_errors=True)


class ProcessHandles:
    """Processes of ranks: whether they have ended, and their exit code.

    Only the parent of a process can wait for its exit code. Processes of another parent have a
    handle; their code is read at the moment when they end, or remains unknown
    (:data:`moemesh.monitor.detector.GONE`).
    """

    def __init__(self) -> None:
        #: Processes of this parent, from rank 0; without any, the ranks have another parent.
        self.started: list[subprocess.Popen[bytes]] = []
        self._poll = select.poll()
        #: Handle -> rank; rank -> process id; rank -> exit code.
        self._handles: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}

    def exit_code(self, rank: int, record: ProgressRecord | None) -> int | None:
        """The exit code of a rank as in :class:`moemesh.monitor.detector.RankStatus`; `record`: the
        newest record of the rank."""
        if self.started:
            return self.started[rank].poll()
        if record is not None and rank not in self._pids:
            self._pids[rank] = record.pid
            try:
                handle = os.pidfd_open(record.pid)
            except ProcessLookupError:
                self._codes[rank] = GONE
            else:
                self._handles[handle] = rank
                self._poll.register(handle, select.POLLIN)
        return self._codes.get(rank)

    def pid(self, rank: int) -> int:
        """The process id of a rank; 0 if it is unknown before the first record."""
        return self.started[rank].pid if self.started else self._pids.get(rank, 0)

    def wait(self, seconds: float) -> None:
        """Wait until `seconds` are over or a process has ended."""
        for handle, _ in self._poll.poll(1000 * seconds):
            rank = self._handles.pop(handle)
            code = zombie_exit_code(self._pids[rank])
            self._codes[rank] = GONE if code is None else code
            self._poll.unregister(handle)
            os.close(handle)

    def send(self, rank: int, number: int) -> None:
        """Send a signal to a living rank, never to a later process with the same id."""
        for handle, holder in self._handles.items():
            if holder == rank:
                with suppress(OSError):
                    signal.pidfd_send_signal(handle, number)
