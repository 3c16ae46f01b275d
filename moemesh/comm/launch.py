"""Starting ranks on this machine, joining those that torchrun started, and stopping.

A rank of :func:`launch` is ``python -P -m moemesh`` with the launcher's arguments, so that it takes
the same code path as a rank of torchrun or srun; `moemesh.monitor.supervisor` starts and watches
it. Such ranks connect through a file, not a port. This module reads the environment of a rank, by
the rules of :mod:`moemesh.comm.slurm`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from moemesh.comm import cuda
from moemesh.comm.cuda import Device
from moemesh.comm.slurm import RankError, ranks_of
from moemesh.config.errors import is_user_error
from moemesh.config.limits import few
from moemesh.config.python import python_command
from moemesh.monitor import progress
from moemesh.monitor.devices import FOLDER_VARIABLE, settings_for_gpus
from moemesh.monitor.peers import introduce
from moemesh.monitor.progress import RANK_BYTES
from moemesh.monitor.rendezvous import (
    LOCK,
    STACK_SIGNAL,
    STORE,
    WORDS,
    Node,
    has_supervisor,
    join_node,
    stack_file,
    torchrun_file,
    write_error,
)
from moemesh.monitor.supervisor import (
    Supervisor,
    SupervisorResult,
    describe,
)
from moemesh.trace.machine import die_with_parent, keep_freed_memory, usable_cores

#: The default module that Python runs as a rank, and its first arguments.
MODULE = ("moemesh",)
#: Seconds after which a rank that waits for others prints that, and between two such lines.
_FIRST_NOTE_SECONDS, _NOTE_SECONDS = 3.0, 30.0
#: Seconds by which the timeout of ranks on GPUs exceeds `timeout_seconds`.
_WATCHDOG_SECONDS = 60.0
#: Longest wait in seconds for a watcher's verdict; the watcher needs less to find the cause.
_VERDICT_SECONDS = 6.0
#: Longest wait in seconds until a watcher has locked its folder; after that time it counts as not
#: started.
_START_SECONDS = 5.0
#: Set by :func:`watch` in a rank of another launcher: its node, and the watcher's folder.
_node: Node | None = None
_watched: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The place of this process among all ranks."""

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: int
    device: torch.device


def joined() -> bool:
    """Whether this process was started as a rank, by torchrun, by srun, by an operator or by
    :func:`launch`; sets those of torchrun's variables in ``os.environ`` that a rank of srun or of
    an operator lacks. Raises RankError or SlurmError for variables that are incomplete or wrong."""
    ranks = ranks_of(os.environ)
    os.environ.update(ranks)
    return bool(ranks)


def num_joined() -> int:
    """Number of ranks that were started, including this one; 1 without a launcher."""
    return _variable("WORLD_SIZE", 1)


def ranks_of_a_node(ranks: Sequence[int]) -> int:
    """Number of `ranks` on each node: 1 if nodes have different numbers of them or ranks of a node
    do not follow one another, 0 if all share one node or no valid LOCAL_WORLD_SIZE is set."""
    try:
        size = _variable("LOCAL_WORLD_SIZE", 0)
    except RankError:  # a program may create its process group without these variables
        size = 0
    if not size:
        return 0
    nodes = [rank // size for rank in ranks]
    counts = {nodes.count(node) for node in nodes}
    if nodes != sorted(nodes) or len(counts) > 1:
        return 1
    return 0 if nodes[0] == nodes[-1] else counts.pop()


def environment() -> dict[str, str]:
    """A copy of the environment of this process."""
    return dict(os.environ)


def own_rank() -> int:
    """The rank of this process by its environment, before any connection; 0 without a launcher."""
    return _variable("RANK", 0)


def launched() -> bool:
    """Whether this process is a rank that :func:`launch` started."""
    return joined() and FOLDER_VARIABLE in os.environ


def attach() -> None:
    """Make the progress, exceptions and stacks of this rank visible to the launcher, and end this
    process with it. :func:`start` calls it if needed. A rank of another launcher only gets a
    progress record of its own."""
    if progress.is_attached():
        return
    if not launched():
        if joined():  # no other process reads this memory: the rank reports its waits itself
            progress.attach_memory(bytearray(RANK_BYTES), 0)
        return
    # This rank ends when the launcher is killed: else it would write into a folder that the next
    # run takes to be its own. The kernel ends it, or a thread that polls each second.
    kernel_kills, parent = die_with_parent(), os.getppid()
    # If the launcher has died before this line, its lock is free.
    if not has_supervisor(_launcher()):
        os._exit(128 + signal.SIGKILL)

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(128 + signal.SIGKILL)

    if not kernel_kills:
        threading.Thread(target=poll, daemon=True).start()
    _show(_launcher(), own_rank())


def _show(folder: Path, rank: int) -> None:
    """Write exceptions, stacks and progress of this rank to `folder`, for the supervisor."""
    sys.excepthook = _report_and_print
    # The file stays open: the signal handler writes into it.
    faulthandler.register(STACK_SIGNAL, stack_file(folder, rank).open("w"), all_threads=True)
    progress.attach(folder / WORDS, rank)


def watch(command: Callable[[Path, Node], Sequence[str]]) -> None:
    """Let a watcher observe this rank, which another launcher started. The first rank of a node
    starts the watcher of all its ranks, the command ``command(folder, node)``. No-op for a world of
    one, and where the folder or the watcher cannot be created."""
    global _watched, _node
    node, rank = Node.of(os.environ), own_rank()
    if node.world_size == 1:
        return
    _node = node
    with suppress(OSError):
        folder = join_node(node, lambda folder: command(folder, node))
        if folder is None:
            return
        report = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        torchrun_file(folder, rank).write_text(report)
        _show(folder, rank)
        _watched = folder


def watched() -> bool:
    """Whether a watcher reports the failure of this rank of another launcher."""
    if _watched is None:
        return False
    # A watcher locks the folder when it has started and deletes it after its verdict. The folder of
    # a watcher that could not start, or was killed, stays and is not locked.
    end = time.monotonic() + _START_SECONDS
    while _watched.exists() and not (_watched / LOCK).exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return has_supervisor(_watched) or not _watched.exists()


def await_verdict() -> None:
    """Wait for the watcher's verdict if this rank failed inside a collective: another rank may be
    the cause, and the launcher blames the first rank that exits."""
    end = time.monotonic() + _VERDICT_SECONDS
    record = progress.own_record()
    while record is not None and record.inside and watched() and time.monotonic() < end:
        time.sleep(0.05)


def refuse_interfaces() -> None:
    """Raises RankError where GLOO_SOCKET_IFNAME names an interface that this machine lacks."""
    interfaces = [name for _, name in socket.if_nameindex()]
    names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    if absent := [name for name in filter(None, names) if name not in interfaces]:
        raise RankError(
            f"GLOO_SOCKET_IFNAME names {', '.join(absent)}, but {socket.gethostname()} has only "
            f"the interfaces {', '.join(interfaces)}"
        )


def shares_devices() -> bool:
    """Whether ranks may share a GPU. Raises RankError for a backend other than gloo."""
    backend = os.environ.get(cuda.SHARED_VARIABLE, "")
    if backend not in ("", "gloo"):
        raise RankError(f'{cuda.SHARED_VARIABLE} is "{backend}": it must be "gloo", or not be set')
    return bool(backend)


def start(
    device: Device,
    timeout_seconds: float,
    dtype: str = "float32",
    stopping: Callable[[], int | None] = lambda: None,
) -> Ranks:
    """Initialise the process group of this rank: gloo on the CPU, NCCL on CUDA, and gloo where
    ranks share devices (:func:`shares_devices`).

    A process that was not started as a rank is a world of one without a process group. Collectives
    that take longer than `timeout_seconds` fail, on GPUs a minute later. Each rank computes with
    its share of the cores. While it waits for the others, `stopping` returns the code with which it
    must exit, or None (ranks of :func:`launch` do not call it).
    Raises DeviceError if the requested device does not exist, cannot compute in `dtype`, or does
    not fit those of the other ranks; RankError if the ranks cannot connect.
    """
    os.environ.update(settings_for_gpus(os.environ))
    rank, world_size = own_rank(), num_joined()
    local_rank = _variable("LOCAL_RANK", 0)
    ranks_per_node = _variable("LOCAL_WORLD_SIZE", world_size)
    shares = shares_devices()
    chosen = cuda.choose(device, local_rank, ranks_per_node, dtype, shares=shares)
    torch.set_num_threads(max(1, usable_cores() // ranks_per_node))
    ranks = Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        ranks_per_node=ranks_per_node,
        device=chosen,
    )
    if not joined():
        return ranks
    attach()
    if launched() and chosen.type == "cpu":
        keep_freed_memory()
    # Ranks of one machine connect through loopback, whatever the host's name resolves to.
    if ranks_per_node == world_size and "GLOO_SOCKET_IFNAME" not in os.environ:
        loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        if loopback:
            os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]
    timeout = timedelta(seconds=timeout_seconds)
    ticket = progress.entered("rendezvous", "world", "start", range(world_size), 0)
    progress.waiting(ticket)
    if launched():
        store: dist.Store = dist.FileStore(str(_launcher() / STORE), world_size)
        store.set_timeout(timeout)
    else:
        store = _connect(rank, world_size, timeout, stopping)
    if _node is not None and rank == _node.first:
        introduce(store, _watched, _node.ranks, world_size)
    cuda.agree(store, rank, chosen, timeout, shares=shares)
    uses_nccl = chosen.type == "cuda" and not shares
    if chosen.type == "cuda":
        # NCCL aborts a rank whose operation takes longer; the supervisor must report it before.
        timeout += timedelta(seconds=_WATCHDOG_SECONDS)
    dist.init_process_group(
        "nccl" if uses_nccl else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=chosen if uses_nccl else None,
    )
    progress.left()
    return ranks


def _connect(
    rank: int, world_size: int, timeout: timedelta, stopping: Callable[[], int | None]
) -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT, after all ranks have joined it. Waits in Python, so
    that signals end it. Prints the missing ranks after :data:`_FIRST_NOTE_SECONDS`, then every
    :data:`_NOTE_SECONDS`."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    since = time.monotonic()
    next_note = since + _FIRST_NOTE_SECONDS

    def wait(missing: Callable[[], str]) -> None:
        """Sleep until the next check. Exits when stopped; raises RankError after the timeout."""
        nonlocal next_note
        if (code := stopping()) is not None:
            stop(code)
            raise SystemExit(code)
        now = time.monotonic()
        if now - since > timeout.total_seconds():
            raise RankError(
                f"rank {rank} has waited {now - since:.0f} s (train.timeout_seconds) at {host}:"
                f"{port} (MASTER_ADDR, MASTER_PORT) for {missing()}"
            )
        if now > next_note:
            next_note = now + _NOTE_SECONDS
            text = f"moemesh: rank {rank} waits at {host}:{port} for {missing()}"
            print(text, file=sys.stderr, flush=True)
        time.sleep(0.1)

    # The store is in the process of torchrun (its agent), or in that of rank 0.
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = rank == 0 and not agent_hosts
    while not is_master:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            break
        except (OSError, UnicodeError) as error:
            reason = f"rank 0 of {world_size} ranks, which does not answer ({error})"
            wait(lambda reason=reason: reason)
    try:
        store: dist.Store = dist.TCPStore(
            host,
            port,
            world_size,
            is_master,
            timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise RankError(
            f"port {port} of {host} (MASTER_PORT) is in use: set MASTER_PORT to a free one, the "
            "same for all ranks"
        ) from None
    # After a restart the store still holds the addresses of the dead ranks: each attempt has its
    # own prefix.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"moemesh/attempt{attempt}", store)
    store.set_timeout(timeout)
    store.set(f"come/{rank}", "")

    def missing() -> str:
        absent = [other for other in range(world_size) if not store.check([f"come/{other}"])]
        return f"{len(absent)} of {world_size} ranks ({few(absent, 8)})"

    try:
        while not store.check([f"come/{other}" for other in range(world_size)]):
            wait(missing)
    except dist.DistNetworkError:
        raise RankError(f"rank 0 at {host}:{port} left while rank {rank} waited there") from None
    return store


def stop(code: int = 0) -> None:
    """Leave the process group, if any, and record that this rank is done and will exit with `code`.
    A rank that exits without this call has failed."""
    progress.finished(code)
    if dist.is_initialized():
        dist.destroy_process_group()


def report_failure(error: BaseException, *, is_final: bool = False) -> None:
    """Report to the launcher why this rank is about to fail, so that it can name the first cause.

    Exceptions that end the process are reported automatically; call this before an explicit
    ``sys.exit``. `is_final`: a resumed run would fail the same way. An attribute ``facts`` of the
    exception, a mapping, goes into the report.
    """
    folder = _launcher() if launched() else _watched
    if folder is None:
        return
    facts: Mapping[str, Any] = getattr(error, "facts", None) or {}
    report = {
        "kind": type(error).__name__,
        "message": str(error),
        "at": time.monotonic(),
        "trace": "".join(traceback.format_exception(error)),
        "facts": dict(facts),
        "is_final": is_final or is_user_error(error),
    }
    write_error(folder, own_rank(), report)
    progress.failed()


def launch(
    num_ranks: int,
    arguments: Sequence[str],
    *,
    log_folder: Path | None = None,
    entry: Sequence[str] | None = None,
    **watching: Any,
) -> int:
    """Run ``python -m moemesh`` with `arguments` as `num_ranks` ranks on this machine; returns the
    exit code. Calls :func:`run_ranks` and prints the failure to stderr. `log_folder` None: the
    output of a rank other than 0 is shown only if that rank fails."""
    with tempfile.TemporaryDirectory(prefix="moemesh-logs-") as scratch:
        logs = Path(scratch) if log_folder is None else log_folder
        ended = run_ranks(num_ranks, arguments, logs=logs, entry=entry, **watching)
        if ended.verdict is not None:
            print(describe(ended, logs, kept=log_folder), file=sys.stderr)
        return ended.code


def run_ranks(
    num_ranks: int,
    arguments: Sequence[str],
    *,
    logs: Path,
    entry: Sequence[str] | None = None,
    **watching: Any,
) -> SupervisorResult:
    """Run ``python -m moemesh`` with `arguments` as `num_ranks` ranks on this machine, until all
    have ended. `entry`: Python's arguments in place of ``-m moemesh``. `watching`: keywords of
    :class:`~moemesh.monitor.supervisor.Supervisor`.

    Rank 0 writes to this process's output; rank i to ``rank-i.out`` and ``rank-i.err`` in `logs`.
    When a rank fails the others are ended, and the verdict names the first that failed and why. The
    exit code is that of this rank: 128 + signal if a signal killed it, 1 if its own code is 0
    or unknown. Tracebacks stay in `logs`.

    The first SIGINT, SIGTERM, SIGHUP, SIGQUIT or SIGUSR1 to this process is passed on to every
    rank, once: ranks are sessions of their own, so that a terminal's Ctrl-C does not reach them as
    well. They have `grace_seconds` to save and leave before they are killed; if training has not
    begun, they are killed at once. The exit code is 128 + signal (SIGUSR1: that of SIGTERM). A
    second Ctrl-C kills the ranks at once.
    """
    # Delete files of an earlier run that this run would not always overwrite. If the folder cannot
    # be written, the ranks run all the same.
    with suppress(OSError):
        logs.mkdir(parents=True, exist_ok=True)
        for file in (logs / "rank-0.err", *logs.glob("rank-*.stacks")):
            file.unlink(missing_ok=True)
    ended = Supervisor(
        [sys.executable, *entry, *arguments] if entry else python_command(*MODULE, *arguments),
        num_ranks,
        logs=logs,
        **watching,
    ).run()
    if 0 in ended.traces:  # rank 0 has no log of its own
        with suppress(OSError):
            (logs / "rank-0.err").write_text(ended.traces[0])
    if ended.stopped_by is not None:
        before = " before training began" if ended.is_cut and not ended.was_training else ""
        print(f"moemesh: stopped by {ended.stopped_by.name}{before}", file=sys.stderr)
    return ended


def _variable(name: str, default: int) -> int:
    return int(os.environ.get(name, default)) if joined() else default


def _report_and_print(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """``sys.excepthook`` of a rank. Ctrl-C in a rank of torchrun is not a failure of the rank."""
    if launched() or not isinstance(error, KeyboardInterrupt):
        report_failure(error)
    # The console shows only the first failure, and the launcher prints it. So rank 0, whose stderr
    # is the console, prints none.
    if not (launched() and own_rank() == 0):
        sys.__excepthook__(kind, error, trace)


def _launcher() -> Path:
    """The launcher's folder, with the store, the lock and the reports of its ranks."""
    return Path(os.environ[FOLDER_VARIABLE])
