"""Work on chunks of bytes in a thread, beside the reading or writing of chunks."""

from __future__ import annotations

import _thread
import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar, cast

_Chunk = TypeVar("_Chunk")
_Result = TypeVar("_Result")
#: Bytes that are worked on at once: handing them over would take as long.
_SMALL = 256 << 10


def beside(
    work: Callable[[_Chunk], _Result],
    chunks: Iterable[_Chunk],
    size: Callable[[_Chunk], int] = lambda chunk: len(chunk) if isinstance(chunk, Sized) else 0,
) -> Iterator[_Result]:
    """``work(chunk)`` of each chunk, in order; `size` gives its bytes.

    The work on one goes on while `chunks` makes the next one, and does what it does behind a chunk:
    what it writes, for example. Functions that keep Python's lock gain nothing.
    """
    # No pool of the library: it takes no work while a process ends, which waits for its save.
    tasks: SimpleQueue[tuple[_Chunk] | None] = SimpleQueue()
    done: SimpleQueue[tuple[_Result, None] | tuple[None, BaseException]] = SimpleQueue()

    def run() -> None:
        while (task := tasks.get()) is not None:
            try:
                done.put((work(*task), None))
            except BaseException as error:
                done.put((None, error))

    def taken_back() -> tuple[_Chunk] | None:
        """The chunk that was handed over, where the thread has not come to it."""
        with suppress(Empty):
            return tasks.get_nowait()
        return None

    has_thread = waits = False
    try:
        for chunk in itertools.chain(chunks, [None]):
            if waits:
                waits = False
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
            waits = True
            if not has_thread:
                has_thread = True
                # Not waited for: where memory is short it may not begin, and nothing says so.
                with suppress(RuntimeError):
                    _thread.start_new_thread(run, ())
    finally:
        if waits and taken_back() is None:
            done.get()
        tasks.put(None)
