"""Run a function on n gloo ranks: fresh processes for every call, results and tracebacks come back.

Ranks are forked from a fork server that has torch and moemesh loaded, so that a call costs tens of
milliseconds, and nothing that a test does to a rank outlives the test.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout

_PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed",
    "torch._dynamo",  # torch loads it at an optimizer's first step: a second in every rank
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "hypothesis",
    "numpy",
    "pydantic",
    "safetensors.torch",
    "moemesh.comm.collectives",
    "moemesh.comm.mesh",
    "moemesh.ops.swiglu_kernels",  # numba: a second in every rank that runs experts
    "tests.ranks",
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOAD)


class RankFailed(AssertionError):
    """A rank raised, died or did not return; `rank` is the first one that did."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def run_on_ranks(
    num_ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 120
) -> list[Any]:
    """``[function(rank, *args) for rank in range(num_ranks)]``, one process a rank.

    A gloo process group is running in each; `function` must be importable (of a module). Raises
    RankFailed, with the rank's traceback, as soon as one rank fails or when `timeout` seconds are
    over; the other ranks are killed.
    """
    __tracebackhide__ = True
    work = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[tuple[BaseProcess, Connection]] = []
        try:
            for rank in range(num_ranks):
                ours, theirs = _context.Pipe()
                process = _context.Process(
                    target=_rank_main,
                    args=(rank, num_ranks, work, theirs, folder, timeout),
                    daemon=True,
                )
                process.start()
                theirs.close()
                ranks.append((process, ours))
            return _collect(ranks, time.monotonic() + timeout, timeout, Path(folder))
        finally:
            for process, connection in ranks:
                process.kill()
                process.join()
                connection.close()


def mesh_on_ranks(
    layout: Layout, function: Callable[..., Any], *args: Any, timeout: float = 120
) -> list[Any]:
    """``function(mesh, *args)`` on every rank of `layout`, with a ready `Mesh`; else as above."""
    __tracebackhide__ = True
    return run_on_ranks(layout.world_size, _with_mesh, layout, function, *args, timeout=timeout)


def _with_mesh(rank: int, layout: Layout, function: Callable[..., Any], *args: Any) -> Any:
    return function(Mesh.create(layout, "cpu"), *args)


def _collect(
    ranks: list[tuple[BaseProcess, Connection]], deadline: float, timeout: float, stacks: Path
) -> list[Any]:
    __tracebackhide__ = True
    results: dict[int, Any] = {}
    waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = sorted(waiting.values())
            message = f"rank(s) {missing} did not return within {timeout} s"
            for rank in missing:
                message += f"\n\n--- rank {rank} is at ---\n{_stack(ranks[rank][0], rank, stacks)}"
            raise RankFailed(missing[0], message)
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                succeeded, data = connection.recv_bytes(), connection.recv_bytes()
            except (EOFError, ConnectionResetError):
                process = ranks[rank][0]
                process.join(5)
                raise RankFailed(
                    rank, f"rank {rank} died without a word, exit code {process.exitcode}"
                ) from None
            if succeeded != b"yes":
                raise RankFailed(rank, f"rank {rank} failed:\n{data.decode()}")
            results[rank] = pickle.loads(data)
    return [results[rank] for rank in range(len(ranks))]


def _stack(process: BaseProcess, rank: int, stacks: Path) -> str:
    """Where a rank that hangs is, from its own signal handler."""
    file = stacks / str(rank)
    if process.pid is None or not file.exists():
        return "its start"
    os.kill(process.pid, signal.SIGUSR1)
    end = time.monotonic() + 2
    while time.monotonic() < end and not file.read_text():
        time.sleep(0.02)
    return file.read_text()


def _rank_main(
    rank: int,
    num_ranks: int,
    work: bytes,
    connection: Connection,
    folder: str,
    timeout: float,
) -> None:
    with open(Path(folder) / str(rank), "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
        try:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            torch.set_num_threads(1)
            # Not a TCPStore: with eight clients at once, one connection in thirty takes 5 s.
            store = dist.FileStore(f"{folder}/store", num_ranks)
            dist.init_process_group(
                "gloo",
                store=store,
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=timeout + 30),
            )
            function, args = pickle.loads(work)
            succeeded, data = b"yes", pickle.dumps(function(rank, *args))
        except BaseException:
            succeeded, data = b"no", traceback.format_exc().encode()
        try:
            connection.send_bytes(succeeded)
            connection.send_bytes(data)
            # Stay until everybody is done: a rank that leaves closes its connections, and the
            # others would see that instead of what really happened. The parent kills us.
            connection.recv_bytes()
        except (EOFError, OSError):
            pass
        os._exit(0)


# The fork server imports this module before it forks: warm up what a first call would load.
if multiprocessing.current_process().name != "MainProcess":
    importlib.import_module("torch.distributed.device_mesh")
