"""Ranks of the tests: processes are reused, failures are reported, and nothing leaks."""

from __future__ import annotations

import importlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moemesh.config.layout import Layout
from moemesh.model.dispatcher import LocalDispatcher
from moemesh.ops import weight_gradient
from tests import ranks
from tests.ranks import RankFailed, mesh_on_ranks, run_on_ranks
from tests.waiting import until

_NOTES: list[int] = []


def process(rank: int) -> int:
    return os.getpid()


def look(rank: int) -> tuple[int, dict[str, object]]:
    """The process, and all that the functions below change."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return os.getpid(), {
        "sum": total.item(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "random": (torch.rand(1).item(), float(np.random.rand()), random.random()),
        "environment": os.environ.get("LEFT_BEHIND"),
        "folder": os.getcwd(),
        "name": type(weight_gradient.deferral.queue),
        "attribute": LocalDispatcher.plan.__qualname__,
        "container": list(_NOTES),
        "gradients": torch.is_grad_enabled(),
        "running": [thread.name for thread in threading.enumerate()],
        "handler": signal.getsignal(signal.SIGTERM),
        "sleep": time.sleep.__name__,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


#: Changes of a process that may remain after a function, by name.
CHANGES = {
    "dtype": "torch.set_default_dtype(torch.float64)",
    "environment": "os.environ['LEFT_BEHIND'] = 'yes'",
    "folder": "os.chdir('/tmp')",
    "name": "weight_gradient.deferral.queue = weight_gradient.WeightGradientQueue()",
    "attribute": "LocalDispatcher.plan = LocalDispatcher.combine",
    "container": "_NOTES.append(1)",
    "gradients": "torch.set_grad_enabled(False)",
    "thread": "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "handler": "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "sleep": "time.sleep = print",
    "deterministic": "torch.use_deterministic_algorithms(True)",
}


def change(rank: int, what: str) -> None:
    exec(CHANGES[what])


def change_seeds(rank: int) -> None:
    torch.set_num_threads(2)
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)


def raise_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("gone wrong")
    dist.all_reduce(torch.ones(1))  # never completed


def die_on_rank_1(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def hang_on_rank_1(rank: int) -> None:
    if rank == 1:
        time.sleep(60)


def wait_for_nobody(rank: int) -> None:
    dist.irecv(torch.ones(1), src=1 - rank)  # the other rank does not send


def leave_the_group(rank: int) -> None:
    dist.barrier()  # who leaves closes the connections that the other may still be opening
    dist.destroy_process_group()


def clean() -> list[tuple[int, dict[str, object]]]:
    states = run_on_ranks(2, look)
    assert [state["sum"] for _, state in states] == [2.0, 2.0]
    return states


def assert_replaced(before: list[tuple[int, dict[str, object]]]) -> None:
    """The next call has processes of the same state that were not there `before`."""
    after = clean()
    assert [state for _, state in after] == [state for _, state in before]
    assert not {pid for pid, _ in after} & {pid for pid, _ in before}


def assert_kept(function: Callable[[int], None]) -> None:
    """The call of `function` changes nothing, and no process is replaced for a reason but threads
    of gloo that end late."""
    before, count = clean(), len(ranks.replaced)
    run_on_ranks(2, function)
    assert [state for _, state in clean()] == [state for _, state in before]
    assert {*ranks.replaced[count:]} <= {"threads"}


def is_preloaded(rank: int) -> bool:
    return "tests.preload" in sys.modules


def test_the_fork_server_has_loaded_what_ranks_need() -> None:
    """Multiprocessing hides an ImportError of a preloaded module: every rank would only be slow."""
    if run_on_ranks(1, is_preloaded, fresh=True) != [True]:
        importlib.import_module("tests.preload")  # raises the cause
        pytest.fail("tests.preload imports here, but the fork server has not loaded it")


def test_processes_are_used_again() -> None:
    """A process in which threads of gloo end late is replaced: not every call has the same."""
    calls = [run_on_ranks(size, process) for size in (2, 2, 4, 2, 1, 1)]
    assert [len(set(processes)) for processes in calls] == [2, 2, 4, 2, 1, 1]
    assert len({number for processes in calls for number in processes}) <= 6


def test_no_more_processes_are_kept_than_may_be() -> None:
    assert len(set(run_on_ranks(10, process))) == 10
    assert len(ranks._idle) <= 8


def test_fresh_processes_serve_one_call() -> None:
    kept = run_on_ranks(2, process)
    fresh = run_on_ranks(2, process, fresh=True)
    assert not {*fresh} & {*kept, *run_on_ranks(2, process)}
    assert {*mesh_on_ranks(Layout(dp=2), _process_of_mesh, fresh=True)}.isdisjoint(fresh)


def _process_of_mesh(mesh: object) -> int:
    return os.getpid()


@pytest.mark.representative("attribute", "environment", "thread")
@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_process_is_replaced(what: str) -> None:
    before = clean()
    run_on_ranks(2, change, what)
    assert_replaced(before)


def test_seeds_and_threads_are_set_again() -> None:
    assert_kept(change_seeds)


def test_a_function_may_leave_the_process_group() -> None:
    assert_kept(leave_the_group)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raise_on_rank_1, "rank 1 failed:\nTraceback(.|\n)*raise ValueError(.|\n)*gone wrong"),
        (die_on_rank_1, "rank 1 died without a word, exit code -9"),
    ],
)
def test_a_failure_names_its_rank_and_reaches_no_other_call(
    function: Callable[[int], None], message: str
) -> None:
    before = clean()
    with pytest.raises(RankFailed, match=message) as caught:
        run_on_ranks(2, function)
    assert caught.value.rank == 1
    assert_replaced(before)


def test_a_rank_that_hangs_is_named_with_its_stack() -> None:
    before = clean()
    for seconds in (1, 10, 50):  # on a busy machine rank 0 may need longer, too
        with pytest.raises(RankFailed, match="did not return") as caught:
            run_on_ranks(2, hang_on_rank_1, timeout=seconds)
        if caught.value.rank == 1 and "in hang_on_rank_1" in str(caught.value):
            break
    assert "rank(s) [1] did not return" in str(caught.value)
    assert "in hang_on_rank_1" in str(caught.value)
    assert not {pid for pid, _ in clean()} & {pid for pid, _ in before}


def test_an_exchange_that_nobody_finished_reaches_no_other_call() -> None:
    before = clean()
    run_on_ranks(2, wait_for_nobody)
    assert [state for _, state in clean()] == [state for _, state in before]


def test_a_kept_process_that_died_is_replaced() -> None:
    victim = run_on_ranks(2, process)[1]
    os.kill(victim, signal.SIGKILL)
    until(
        lambda: not any(one.process.pid == victim and one.process.is_alive() for one in ranks._idle)
    )
    assert victim not in run_on_ranks(2, process)
