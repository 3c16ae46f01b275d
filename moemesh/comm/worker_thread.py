"""A worker thread that continues chains of exchanges while the main thread computes.

A chain of exchanges (receive, sum, send on) blocks at each wait; in the main thread it would block
the computation as well. Tasks run one after the other, in the order in which they were submitted.
If that order is the same on all ranks, and a task waits only for messages that no task sends, or
that an earlier task sends, there is no deadlock. Accelerators need no such thread: their waits do
not block the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from moemesh.ops.pending import Pending
from moemesh.watch.progress_words import in_background

T = TypeVar("T")


class WorkerThread:
    """One thread, started at the first task; it ends with the process."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Callable[[], Any], Future[Any], bool]] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._num_tags = self._num_long = 0

    @property
    def is_idle(self) -> bool:
        """Whether no task of any length is waiting or under way."""
        return not self._num_long

    def tag(self) -> int:
        """A tag that no exchange under way has; all ranks must call this in the same order."""
        self._num_tags = (self._num_tags + 1) % (1 << 20)
        return self._num_tags

    def submit(
        self, task: Callable[[], T], device: torch.device, *, is_long: bool = True
    ) -> Pending[T]:
        """Run ``task()`` in the thread, without gradient; an exception is raised by the wait.

        `is_long`: exchanges that start meanwhile would slow it down (:attr:`is_idle`).
        """
        if device.type != "cpu":
            return Pending.ready(task())
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="moemesh-worker", daemon=True)
            self._thread.start()
        with self._lock:
            self._num_long += is_long
        future: Future[T] = Future()
        self._tasks.put((task, future, is_long))
        return Pending(future.result)

    @torch.no_grad()
    def _run(self) -> None:
        in_background()
        while True:
            task, future, is_long = self._tasks.get()
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
            with self._lock:
                self._num_long -= is_long
            del task, future  # nor the rows that they hold, while nothing is to do
