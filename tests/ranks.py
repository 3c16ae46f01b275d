"""Run a function on n gloo ranks: results and tracebacks come back.

The processes are forked from a fork server, itself a fork of the process of the tests, which has
torch and moemesh loaded (:func:`fork_the_server`). They serve as ranks in one call after another,
each time with a new process group, in the directory and with the environment of the caller. A
process is reused only if its call succeeded and left it as it was (`_Watch`): changes of a test to
a rank do not outlive the test.
"""

from __future__ import annotations

import atexit
import contextvars
import faulthandler
import gc
import itertools
import logging
import multiprocessing
import multiprocessing.util
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout
from tests.waiting import PATIENCE

#: The fork server of all tests; a child of it starts in milliseconds.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.preload"])

_MOST_KEPT = 8


class RankFailed(AssertionError):
    """A rank raised, died or did not return; `rank` is the first one that did."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def run_on_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = PATIENCE,
    fresh: bool = False,
) -> list[Any]:
    """``[function(rank, *args) for rank in range(num_ranks)]``, one process a rank.

    A gloo process group is running in each; `function` must be importable (of a module). Raises
    RankFailed, with the rank's traceback, as soon as one rank fails or when `timeout` seconds are
    over; the other ranks are killed. `fresh` takes processes that no other call sees, before or
    after: for functions that change a process in ways that `_Watch` does not see.
    """
    __tracebackhide__ = True
    work = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_Rank() for _ in range(num_ranks)] if fresh else _take(num_ranks)
        unchanged: list[_Rank] = []
        try:
            for number, rank in enumerate(ranks):
                call = _Call(
                    number, num_ranks, work, Path(folder), timeout, os.getcwd(), dict(os.environ)
                )
                rank.connection.send(call)
            results = _collect(ranks, time.monotonic() + timeout, timeout, Path(folder))
            if not fresh:
                unchanged = _release(ranks)
            return results
        finally:
            for rank in ranks:
                if rank not in unchanged:
                    rank.kill()
            _idle[:0] = unchanged
            while len(_idle) > _MOST_KEPT:
                _idle.pop().kill()


def mesh_on_ranks(
    layout: Layout,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = PATIENCE,
    fresh: bool = False,
) -> list[Any]:
    """``function(mesh, *args)`` on every rank of `layout`, with a ready `Mesh`; else as above."""
    __tracebackhide__ = True
    return run_on_ranks(
        layout.world_size, _with_mesh, layout, function, *args, timeout=timeout, fresh=fresh
    )


def end_meshes() -> None:
    """Close the groups of all meshes of a call, which continues with others; all ranks call.

    A group of gloo costs a rank three threads, of which one wakes a hundred times a second: those
    of ten meshes take more of a core than the call itself.
    """
    dist.barrier()  # no rank waits for a message of them any more
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _with_mesh(rank: int, layout: Layout, function: Callable[..., Any], *args: Any) -> Any:
    return function(Mesh.create(layout, "cpu"), *args)


# The fork server.


def fork_the_server() -> None:
    """Start the fork server as a fork of this process instead of a new interpreter, which would
    import torch, transformers and moemesh: four processor seconds in every worker.

    Only native libraries may have started threads: after collection, before the first test.
    """
    resource_tracker.ensure_running()  # else started below, by the same function
    with patch.object(multiprocessing.util, "spawnv_passfds", _fork):
        forkserver.ensure_running()


def _fork(path: str, arguments: list[bytes | str], descriptors: list[int]) -> int:
    """Fork in place of starting Python (`path`) with ``-c`` and a program; the child's number."""
    if process := os.fork():
        return process
    try:
        _serve_forks(os.fsdecode(arguments[-1]), descriptors)
    except BaseException as error:
        os._exit(0 if isinstance(error, SystemExit) else 1)


def _serve_forks(program: str, descriptors: list[int]) -> NoReturn:
    """Drop what belongs to pytest, and run the program of the fork server at the first request."""
    faulthandler.disable()
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    logging.getLogger().handlers.clear()
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    for name in logging.root.manager.loggerDict:  # of packages, with the streams of pytest
        for handler in logging.getLogger(name).handlers:
            if type(handler) is logging.StreamHandler:
                handler.stream, handler.flush = sys.stderr, sys.stderr.flush
    limits = [2, *sorted(descriptors), os.sysconf("SC_OPEN_MAX")]
    for low, high in itertools.pairwise(limits):
        os.closerange(low + 1, high)
    forkserver._forkserver.__init__()  # pyright: ignore: a lock of the parent is held
    wait(descriptors)
    exec(program, {})
    raise SystemExit


# The processes, as their owner sees them.


@dataclass(frozen=True)
class _Call:
    """One call of one rank."""

    rank: int
    num_ranks: int
    work: bytes
    folder: Path
    timeout: float
    directory: str
    environment: dict[str, str]


class _Rank:
    """A process that waits for calls, and the connection to it."""

    def __init__(self) -> None:
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


#: Processes without a call; the last one used is the next one used.
_idle: list[_Rank] = []

#: Reasons why processes were not reused, for a developer who measures the time of tests.
replaced: list[str] = []


def _take(num_ranks: int) -> list[_Rank]:
    ranks: list[_Rank] = []
    while _idle and len(ranks) < num_ranks:
        rank = _idle.pop(0)
        if rank.process.is_alive():
            ranks.append(rank)
        else:
            rank.kill()
    return ranks + [_Rank() for _ in range(num_ranks - len(ranks))]


def _release(ranks: list[_Rank], seconds: float = 60) -> list[_Rank]:
    """Let `ranks` leave the process group of a call that succeeded; those that are as before."""
    for rank in ranks:
        rank.connection.send_bytes(b"leave")
    deadline = time.monotonic() + seconds
    unchanged: list[_Rank] = []
    for rank in ranks:
        try:
            reason = "it does not leave"
            if rank.connection.poll(max(0.0, deadline - time.monotonic())):
                reason = rank.connection.recv_bytes().decode()
        except (EOFError, OSError):
            reason = "it died"
        if reason:
            replaced.append(reason)
        else:
            unchanged.append(rank)
    return unchanged


@atexit.register
def _kill_idle() -> None:
    while _idle:
        _idle.pop().kill()


def _collect(ranks: list[_Rank], deadline: float, timeout: float, stacks: Path) -> list[Any]:
    __tracebackhide__ = True
    results: dict[int, Any] = {}
    waiting = {rank.connection: number for number, rank in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = sorted(waiting.values())
            message = f"rank(s) {missing} did not return within {timeout} s"
            for number in missing:
                stack = _stack(ranks[number].process, number, stacks)
                message += f"\n\n--- rank {number} is at ---\n{stack}"
            raise RankFailed(missing[0], message)
        for connection in ready:
            assert isinstance(connection, Connection)
            number = waiting.pop(connection)
            try:
                succeeded, data = connection.recv_bytes(), connection.recv_bytes()
            except (EOFError, ConnectionResetError):
                raise _death(number, ranks[number].process) from None
            if succeeded != b"yes":
                # It may have failed because another one died.
                others = {ranks[other].process.sentinel: other for other in waiting.values()}
                for sentinel in wait(list(others), 0.2):
                    raise _death(others[sentinel], ranks[others[sentinel]].process)  # type: ignore[index]
                raise RankFailed(number, f"rank {number} failed:\n{data.decode()}")
            results[number] = pickle.loads(data)
    return [results[number] for number in range(len(ranks))]


def _death(rank: int, process: BaseProcess) -> RankFailed:
    process.join(5)
    return RankFailed(rank, f"rank {rank} died without a word, exit code {process.exitcode}")


def _stack(process: BaseProcess, rank: int, stacks: Path) -> str:
    """Stack of a rank that hangs, from its own signal handler."""
    file = stacks / str(rank)
    if process.pid is None or not file.exists():
        return "its start"
    os.kill(process.pid, signal.SIGUSR1)
    end = time.monotonic() + 10
    while time.monotonic() < end and not file.read_text():
        time.sleep(0.02)
    return file.read_text()


# The processes, from inside.


def _serve(connection: Connection) -> None:
    """Be a rank of one call after another, until the owner closes the connection or kills us."""
    watch, hook = _Watch(), sys.excepthook
    try:
        while True:
            call = connection.recv()
            assert isinstance(call, _Call)
            with open(call.folder / str(call.rank), "w") as stack_file:
                faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
                succeeded, data = _answer(call, watch)
                connection.send_bytes(b"yes" if succeeded else b"no")
                connection.send_bytes(data)
                # Stay until everybody is done: a rank that leaves closes its connections, and the
                # others would see that instead of what really happened.
                connection.recv_bytes()
                if dist.is_initialized():
                    dist.destroy_process_group()
                sys.excepthook = hook  # every process group wraps it
                gc.collect()
                faulthandler.unregister(signal.SIGUSR1)
            connection.send_bytes(", ".join(watch.changes()).encode())
    except (EOFError, OSError, KeyboardInterrupt):
        pass
    os._exit(0)


def _answer(call: _Call, watch: _Watch) -> tuple[bool, bytes]:
    """Whether the function returned, and its pickled result or its traceback."""
    try:
        os.chdir(call.directory)
        os.environ.clear()
        os.environ.update(call.environment, GLOO_SOCKET_IFNAME="lo")
        function, args = pickle.loads(call.work)
        watch.remember()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        # Not a TCPStore: with eight clients at once, one connection in thirty takes 5 s.
        store = dist.FileStore(str(call.folder / "store"), call.num_ranks)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=call.rank,
            world_size=call.num_ranks,
            timeout=timedelta(seconds=call.timeout + 30),
        )
        result = contextvars.copy_context().run(function, call.rank, *args)
        return True, pickle.dumps(result)
    except BaseException:
        return False, traceback.format_exc().encode()


class _Watch:
    """Sees whether a call left its process as it was.

    It compares settings of Python and torch, threads, and what the modules, classes and containers
    of moemesh, of the tests and of parts of torch hold, one level deep.
    """

    _OURS = ("moemesh", "tests")
    _OTHERS = (
        "os",
        "time",
        "torch",
        "torch.cuda",
        "torch.distributed",
        "torch.distributed.distributed_c10d",
        "torch.nn.functional",
        "torch.nn.modules.module",
    )
    _CLASSES = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
    #: Caches, which may fill.
    _CACHES = ("moemesh.balance.compiled",)
    #: Python fills in the first three by itself; torch keeps the name of the last backend;
    #: transformers adds a method to modules with its first model.
    _EXEMPT = (
        "__annotations__",
        "__slotnames__",
        "__warningregistry__",
        "_backend",
        "smart_apply",
    )

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}
        #: Name and contents of everything watched, and the contents that it should have.
        self._parts = [(kind.__qualname__, vars(kind)) for kind in self._CLASSES]
        self._known: list[Any] = []
        self._settings: dict[str, object] = {}

    def remember(self) -> None:
        """Take the present state for how it should be, on top of what was found unchanged."""
        for name, module in self._new_modules():
            if self._is_watched(name):
                self._parts.extend(_parts(name, module, self._OURS))
        self._modules = dict(sys.modules)
        self._known += [_copied(part) for _, part in self._parts[len(self._known) :]]
        self._settings = _settings()

    def changes(self) -> list[str]:
        """Names of settings and values that differ from the remembered ones."""
        names = []
        for (name, part), before in zip(self._parts, self._known, strict=True):
            if _is_same(part, before):
                continue
            old, new = _entries(before), _entries(part)
            names += [
                f"{name}.{key}"
                for key in {**old, **new}
                if old.get(key) is not new.get(key) and key not in self._EXEMPT
            ]
        names += [
            f"module {name}"
            for name, module in self._new_modules()
            if getattr(module, "__spec__", 1) is None  # made by a test, without a file
        ]
        now = _settings()
        return names + [name for name, value in self._settings.items() if value != now[name]]

    def _new_modules(self) -> list[tuple[str, ModuleType]]:
        """Modules that were not there, or others of their names, when the state was taken."""
        known = self._modules
        return [pair for pair in list(sys.modules.items()) if known.get(pair[0]) is not pair[1]]

    def _is_watched(self, name: str) -> bool:
        return name in self._OTHERS or (
            name.partition(".")[0] in self._OURS and name not in self._CACHES
        )


def _parts(name: str, module: ModuleType, ours: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Everything of a module whose contents can change: itself, its classes, its containers."""
    yield name, vars(module)
    for key, value in list(vars(module).items()):
        if key.startswith("__"):
            continue
        # Not isinstance: torch warns when the class of a deprecated name is read.
        kind = type(value)
        if kind in (dict, list, set):
            yield f"{name}.{key}", value
            continue
        own_class = name.startswith(ours) and issubclass(kind, type) and value.__module__ == name
        own_instance = kind.__module__.startswith(ours) and hasattr(value, "__dict__")
        if own_class or own_instance:
            yield f"{name}.{key}", vars(value)


def _copied(part: Any) -> Any:
    return part.copy() if isinstance(part, (dict, list, set)) else dict(part)


def _is_same(part: Any, before: Any) -> bool:
    """Whether the values are the same or equal ones; False where they cannot be compared."""
    try:
        return bool(part == before)
    except Exception:
        return False


def _entries(part: Any) -> dict[Any, object]:
    if isinstance(part, set):
        return {id(value): value for value in part}
    return dict(enumerate(part)) if isinstance(part, list) else dict(part)


def _settings() -> dict[str, object]:
    return {
        "environment": dict(os.environ),
        "working directory": os.getcwd(),
        "sys.path": list(sys.path),
        "threads": {thread.ident for thread in threading.enumerate()},
        "signal handlers": [signal.getsignal(number) for number in signal.valid_signals()],
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # pyright: ignore
        ),
        "streams": (sys.stdout, sys.stderr),
    }
