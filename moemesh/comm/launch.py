"""Starting ranks on this machine, joining those that torchrun started, and stopping.

The launcher is torch's elastic agent and a rank is ``python -m moemesh`` with the same arguments,
so that a rank of ours and one of torchrun's run the very same path. This is the only module that
reads the environment.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from moemesh.comm.devices import too_few
from moemesh.comm.interrupts import STOPPING_SOON, InterruptWatch
from moemesh.comm.slurm import ranks_of_slurm

Device = Literal["auto", "cpu", "cuda"]

_RUN_ID = "moemesh-"
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_TAIL_LINES = 30


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Where this process stands among all ranks."""

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: int
    device: torch.device


def joined() -> bool:
    """Whether this process was started as a rank, by torchrun, by srun or by :func:`launch`."""
    if "RANK" not in os.environ:
        os.environ.update(ranks_of_slurm(os.environ))
    return all(name in os.environ for name in _NEEDED)


def num_joined() -> int:
    """How many ranks were started, this one among them; 1 for a process that is none."""
    return _variable("WORLD_SIZE", 1)


def ranks_of_a_node(ranks: Sequence[int]) -> int:
    """How many of these ranks share a node, where each node holds as many; 1 where they differ, 0
    where all are on one node or the launcher did not say."""
    size = _variable("LOCAL_WORLD_SIZE", 0)
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
    """The rank of this process, known before any connection is made."""
    return _variable("RANK", 0)


def check_device(device: Device, num_ranks: int) -> None:
    """Raises DeviceError when `num_ranks` ranks here cannot have the device asked for."""
    if device == "cuda" or (device == "auto" and _num_devices()):
        _count_devices(num_ranks)


def launched() -> bool:
    """Whether this process is a rank that :func:`launch` started."""
    return joined() and os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(_RUN_ID)


def start(device: Device, timeout_seconds: float) -> Ranks:
    """Initialise the process group of this rank: gloo on the CPU, NCCL on CUDA.

    A process that was not started as a rank is a world of one without a process group. Collectives
    that take longer than `timeout_seconds` fail. Each rank computes with its share of the cores.
    Raises ValueError when the device asked for is not there.
    """
    rank, world_size = _variable("RANK", 0), _variable("WORLD_SIZE", 1)
    local_rank = _variable("LOCAL_RANK", 0)
    ranks_per_node = _variable("LOCAL_WORLD_SIZE", world_size)
    chosen = _choose_device(device, local_rank, ranks_per_node)
    torch.set_num_threads(max(1, _num_cores() // ranks_per_node))
    ranks = Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        ranks_per_node=ranks_per_node,
        device=chosen,
    )
    if not joined():
        return ranks
    sys.excepthook = _report_and_print
    if launched():
        _die_with_the_launcher()
        if chosen.type == "cpu":
            keep_freed_memory()
    if ranks_per_node == world_size and "GLOO_SOCKET_IFNAME" not in os.environ:
        loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        if loopback:
            os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]
    timeout = timedelta(seconds=timeout_seconds)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    # After a restart the store still holds the addresses of the dead ranks: one prefix an attempt.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        "nccl" if chosen.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"moemesh/attempt{attempt}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=chosen if chosen.type == "cuda" else None,
    )
    return ranks


def stop() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def report_failure(error: BaseException) -> None:
    """Tell the launcher why this rank is about to fail, so that it can name the first cause.

    Exceptions that end the process are told by themselves; call this before a ``sys.exit`` of your
    own.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or os.path.exists(file):
        return
    now = time.time()
    told = {
        "message": f"{type(error).__name__}: {error}",
        "timestamp": int(now),
        "at": now,
        "trace": "".join(traceback.format_exception(error)),
    }
    # By a rename: the launcher may look while this is written.
    temporary = Path(f"{file}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(told))
    os.replace(temporary, file)


def keep_freed_memory() -> bool:
    """Let glibc keep freed blocks instead of handing them back to the kernel; whether it could.

    Every large tensor would otherwise be faulted in page by page again: an expert MLP takes 1.2
    times as long. The price is a higher peak.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    m_trim_threshold, m_mmap_threshold = -1, -3
    return bool(mallopt(m_mmap_threshold, 1 << 30) and mallopt(m_trim_threshold, 2**31 - 1))


def launch(
    num_ranks: int,
    arguments: Sequence[str],
    *,
    log_folder: Path | None = None,
    grace_seconds: int = 120,
    entry: Sequence[str] = ("-m", "moemesh"),
    on_kill: Callable[[int, str], None] | None = None,
    answer: str = STOPPING_SOON,
) -> int:
    """Run ``python -m moemesh`` with `arguments` as `num_ranks` ranks here; returns the exit code.

    Rank 0 writes to this process's output; rank i to ``rank-i.out`` and ``rank-i.err`` in
    `log_folder` (None: shown only when that rank fails). When a rank fails the others are stopped,
    and one message on stderr names the first that failed and why; the exit code is that rank's own
    (128 + signal if one killed it). The tracebacks of the others stay in the logs. A rank that was
    killed could tell nobody: ``on_kill(rank, message)`` is called for the first one.

    The first SIGINT, SIGTERM, SIGHUP or SIGQUIT to this process is passed on to every rank, once:
    ranks are sessions of their own, so that a terminal's Ctrl-C does not reach them as well. They
    have `grace_seconds` to save and leave before they are killed; the exit code is 128 + signal. A
    second Ctrl-C kills them at once; `answer` is said at the first.
    """
    _silence_the_agent()
    handlers = {number: signal.getsignal(number) for number in _FORWARDED}
    with tempfile.TemporaryDirectory(prefix="moemesh-") as scratch:
        logs = Path(scratch) if log_folder is None else log_folder
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "rank-0.err").unlink(
            missing_ok=True
        )  # of an earlier run: ours is written at the end
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=f"{_RUN_ID}{uuid.uuid4().hex}",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=_Logs(logs, str(Path(scratch) / "agent")),
            shutdown_timeout=grace_seconds,
        )
        try:
            with InterruptWatch(answer):
                elastic_launch(config, sys.executable)(*entry, *arguments)
        except ChildFailedError as error:
            _write_untold(error.failures, logs)
            rank, failure = _first_cause(error.failures)
            message = _describe(rank, failure, logs, log_folder is not None)
            if failure.exitcode < 0 and on_kill is not None:
                on_kill(rank, message.splitlines()[0].removeprefix("moemesh: "))
            print(message, file=sys.stderr)
            return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        except SignalException as error:
            print(f"moemesh: stopped by {error.sigval.name}", file=sys.stderr)
            return 128 + error.sigval.value
        except KeyboardInterrupt:
            print("moemesh: stopped by SIGINT before the ranks were running", file=sys.stderr)
            return 128 + signal.SIGINT
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return 0


_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class _Logs(DefaultLogsSpecs):
    """Rank 0 to the console, every other rank to two files of its own."""

    def __init__(self, folder: Path, scratch: str) -> None:
        super().__init__(log_dir=scratch)
        self._folder = folder

    def reify(self, envs: dict[int, dict[str, str]]) -> Any:
        others = [rank for rank in envs if rank > 0]
        return replace(
            super().reify(envs),
            stdouts={0: "", **{rank: str(self._folder / f"rank-{rank}.out") for rank in others}},
            stderrs={0: "", **{rank: str(self._folder / f"rank-{rank}.err") for rank in others}},
        )


def _first_cause(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The failure that the others followed from.

    A crash or a kill first (it cannot tell, its peers see their connections close), then what ranks
    told in order of time, then silent exits, last the ranks that the agent itself stopped.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, float, int]:
        rank, failure = item
        if failure.exitcode < 0:
            return (3 if failure.exitcode == -signal.SIGTERM else 0), 0.0, rank
        at = failure.error_file_data.get("at")
        return (2, 0.0, rank) if at is None else (1, float(at), rank)

    return min(failures.items(), key=order)


def _write_untold(failures: dict[int, ProcessFailure], logs: Path) -> None:
    """Traces of ranks that have no log of their own: rank 0 leaves it to us to print its own."""
    for rank, failure in failures.items():
        errors = logs / f"rank-{rank}.err"
        if rank == 0 and "trace" in failure.error_file_data:
            errors.write_text(failure.error_file_data["trace"])


def _describe(rank: int, failure: ProcessFailure, logs: Path, logs_stay: bool) -> str:
    if failure.exitcode < 0:
        found = f"moemesh: rank {rank} was killed by {signal.Signals(-failure.exitcode).name}"
    else:
        found = f"moemesh: rank {rank} failed with exit code {failure.exitcode}"
    if "at" in failure.error_file_data:
        found += f": {failure.error_file_data['message']}"
    errors = logs / f"rank-{rank}.err"
    if not errors.exists():
        return found
    lines = errors.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    where = f" (all of it in {errors})" if logs_stay else ""
    return "\n".join([found, *([f"its last words{where}:", *lines] if lines else [])])


def _num_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _count_devices(num_ranks: int) -> None:
    if (found := _num_devices()) < num_ranks:
        raise too_few(num_ranks, found)


def _choose_device(device: Device, local_rank: int, ranks_per_node: int) -> torch.device:
    if device == "auto":
        # Never the CPU on a machine with GPUs: that would be a mistake that trains for days.
        device = "cuda" if _num_devices() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    _count_devices(ranks_per_node)
    chosen = torch.device("cuda", local_rank)
    torch.cuda.set_device(chosen)
    return chosen


def _variable(name: str, default: int) -> int:
    return int(os.environ.get(name, default)) if joined() else default


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _report_and_print(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    report_failure(error)
    # The console shows one failure, the first: the launcher prints rank 0's if that is it.
    if not (launched() and _variable("RANK", 0) == 0):
        sys.__excepthook__(kind, error, trace)


def _die_with_the_launcher() -> None:
    """Ask Linux for a SIGTERM when the launcher dies without having been able to stop us."""
    if not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGTERM))


def _silence_the_agent() -> None:
    """torch's agent logs and draws boxes about failures; we say it once, in one message."""
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.addHandler(logging.NullHandler())
