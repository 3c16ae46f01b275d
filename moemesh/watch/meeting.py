"""The folder in which ranks of one machine meet whoever watches them: words, exceptions, stacks."""

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
from moemesh.trace.machine import SHARED_MEMORY, process_namespace, zombie_exit_code
from moemesh.trace.run import is_locked
from moemesh.watch.peers import ADDRESS, listen
from moemesh.watch.progress_words import Word, WordFile
from moemesh.watch.verdict import GONE, Told

WORDS, STORE, LOCK = "words", "store", "lock"
#: A rank writes the stacks of its threads when it gets this signal.
STACK_SIGNAL = signal.SIGUSR2
PREFIX = "moemesh-"
#: For exceptions, stacks, and the store in which ranks find one another.
_ROOM_BYTES = 1 << 20


@contextmanager
def meeting_place(num_bytes: int = 0) -> Iterator[Path]:
    """A private folder in shared memory, or in the folder for temporary files where that has no
    room for `num_bytes`; removed at the end.

    One that a killed supervisor has left is removed by the next: its lock is free.
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
    """The parent of ranks' folders: in memory, or among temporary files."""
    is_there = os.access(SHARED_MEMORY, os.W_OK)
    return SHARED_MEMORY if is_there else Path(tempfile.gettempdir())


def lock(folder: Path) -> int:
    """Lock a new folder; it stays so until the handle that is returned is closed."""
    handle = os.open(folder / "locking", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.rename(folder / "locking", folder / LOCK)  # others see it only when it is locked
    return handle


def has_supervisor(folder: Path) -> bool:
    """Whether the supervisor of a folder lives."""
    return is_locked(folder / LOCK)


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            if (folder / LOCK).exists() and not has_supervisor(folder):
                shutil.rmtree(folder, ignore_errors=True)


def stack_file(folder: Path, rank: int) -> Path:
    """The file into which a rank writes its stacks."""
    return folder / f"stacks-{rank}"


def torchrun_file(folder: Path, rank: int) -> Path:
    """The file in which a rank says which file torchrun shows as its error."""
    return folder / f"torchrun-{rank}"


def write_told(folder: Path, rank: int, told: dict[str, Any]) -> None:
    """Tell of an exception, once; the supervisor may look while this is written."""
    file = folder / f"told-{rank}.json"
    if file.exists():
        return
    temporary = file.with_suffix(".tmp")
    with suppress(OSError):
        temporary.write_text(json.dumps(told, default=str))
        os.replace(temporary, file)


def read_told(folder: Path, rank: int) -> Told | None:
    """The exception that a rank has told of, if it has."""
    try:
        return Told(**parse_json((folder / f"told-{rank}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


# Ranks of a node that torchrun, srun or anything else has started: the first one that comes makes a
# folder, of a name that the ranks of this node and this start have in common, and starts the
# watcher; the others find it there. A node is a part of a machine: ranks that see one another's
# processes.

#: What tells one start of ranks from any other.
_NAMES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
)
_PROCESSES = "processes"
#: A watcher of an earlier start under the same name has so long to be gone.
_EARLIER_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Node:
    """The ranks `first` to `first + num_ranks - 1` of `world_size`. ``name``: of their folder;
    ``master``: the host of the rendezvous."""

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
        """The ranks of this node, which follow each other."""
        return range(self.first, self.first + self.num_ranks)

    @staticmethod
    def of(environment: Mapping[str, str]) -> Node:
        """The node of a process with the variables of a rank."""
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        first = rank - int(environment["LOCAL_RANK"])
        known = [str(first), *(environment.get(name, "") for name in _NAMES)]
        digest = hashlib.sha256("\0".join(known).encode()).hexdigest()[:16]
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


def meet(node: Node, watcher: Callable[[Path], Sequence[str]]) -> Path | None:
    """The folder of the ranks of `node`; the first that comes runs ``watcher(folder)`` beside them,
    with a listener for the watchers of other nodes as its standard input.

    None where processes of others cannot be watched: outside of Linux, where the kernel gives no
    handles of them, or where the folder is not one's own.
    """
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return None
    folder, end = shared_memory() / node.name, time.monotonic() + _EARLIER_SECONDS
    listener = listen(node.master) if node.has_others else None
    with suppress(OSError), listener or nullcontext():
        while not _make(folder, node, listener):
            is_own = has_lock = False
            with suppress(OSError):
                is_own = folder.stat().st_uid == os.getuid()
                has_lock = has_supervisor(folder)
                # Its watcher sees the processes that this one sees.
                is_here = (folder / _PROCESSES).read_text() == process_namespace()
                if is_own and is_here and (has_lock or not (folder / LOCK).exists()):
                    return folder
            if time.monotonic() > end:
                return None
            if is_own and not has_lock:  # remove what a killed watcher has left
                aside = tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent)
                with suppress(OSError):
                    os.rename(folder, aside)
                shutil.rmtree(aside, ignore_errors=True)
            time.sleep(0.05)
        # Of no session of a rank: whoever ends a rank with all that it started spares the watcher.
        stdin = subprocess.DEVNULL if listener is None else listener.fileno()
        try:
            subprocess.Popen(watcher(folder), stdin=stdin, start_new_session=True)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            return None
        return folder
    return None


def _make(folder: Path, node: Node, listener: socket.socket | None) -> bool:
    """Make the folder with all that ranks need; False where it is there. Raises OSError where there
    is no room for it."""
    if folder.exists():
        return False
    made = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        WordFile(made / WORDS, node.world_size, reserved=node.ranks).unmap()
        (made / _PROCESSES).write_text(process_namespace())
        if listener is not None:
            (made / ADDRESS).write_text(json.dumps(listener.getsockname()[:2]))
        # Fails where another rank was first: its folder is not empty.
        with suppress(OSError):
            os.rename(made, folder)
            return True
        return False
    finally:
        shutil.rmtree(made, ignore_errors=True)


class Guests:
    """Processes that another one has started: when they end, and how.

    Whoever started them learns their exit code, and then nobody else can; it is read in the moment
    in which the process ends, or is unknown (:data:`moemesh.watch.verdict.GONE`).
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handles: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}

    def exit_code(self, rank: int, word: Word | None) -> int | None:
        """As of :class:`moemesh.watch.supervisor.Processes`."""
        if word is not None and rank not in self._pids:
            self._pids[rank] = word.pid
            try:
                handle = os.pidfd_open(word.pid)
            except ProcessLookupError:
                self._codes[rank] = GONE
            else:
                self._handles[handle] = rank
                self._poll.register(handle, select.POLLIN)
        return self._codes.get(rank)

    def pid(self, rank: int) -> int:
        """As of :class:`moemesh.watch.supervisor.Processes`; 0, which is no process."""
        return self._pids.get(rank, 0)

    def wait(self, seconds: float) -> None:
        """Until `seconds` are over or a process has ended."""
        for handle, _ in self._poll.poll(1000 * seconds):
            rank = self._handles.pop(handle)
            code = zombie_exit_code(self._pids[rank])
            self._codes[rank] = GONE if code is None else code
            self._poll.unregister(handle)
            os.close(handle)

    def send(self, rank: int, number: int) -> None:
        """Send a signal to a rank that lives; never to a process that has got its number since."""
        for handle, one in self._handles.items():
            if one == rank:
                with suppress(OSError):
                    signal.pidfd_send_signal(handle, number)
