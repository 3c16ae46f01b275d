"""The worker thread: tasks run in their order beside the caller; a waiting caller gets errors."""

import threading

import pytest
import torch

from moemesh.parallel.expert.hierarchical import WorkerThread

CPU = torch.device("cpu")


def test_tasks_run_in_order_while_the_caller_goes_on() -> None:
    worker, gate, done = WorkerThread(), threading.Event(), list[int]()

    def first() -> int:
        gate.wait(10)
        done.append(1)
        return 1

    pending = [worker.submit(first, CPU), worker.submit(lambda: done.append(2), CPU)]
    assert not done and not worker.is_idle  # a caller that ran the tasks itself would hang here
    gate.set()
    assert pending[0].wait() == 1
    pending[1].wait()
    assert done == [1, 2]


def test_an_error_reaches_who_waits_and_the_next_task_runs() -> None:
    worker = WorkerThread()

    def fails() -> None:
        raise RuntimeError("lost a peer")

    failed, fine = worker.submit(fails, CPU), worker.submit(lambda: 3, CPU)
    with pytest.raises(RuntimeError, match="lost a peer"):
        failed.wait()
    assert fine.wait() == 3


def test_tags_differ() -> None:
    worker = WorkerThread()
    assert len({worker.tag() for _ in range(1000)}) == 1000
