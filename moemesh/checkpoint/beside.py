"""Work on chunks of bytes in a thread, beside the reading or writing of chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from queue import SimpleQueue
from typing import TypeVar

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
    done: SimpleQueue[_Result | _Error] = SimpleQueue()

    def run() -> None:
        while (task := tasks.get()) is not None:
            try:
                done.put(work(*task))
            except BaseException as error:
                done.put(_Error(error))

    thread = threading.Thread(target=run, name="beside", daemon=True)
    waits = False
    try:
        for chunk in chunks:
            if waits:
                yield _result(done.get())
            waits = size(chunk) >= _SMALL
            if not waits:
                yield work(chunk)
                continue
            if thread.ident is None:
                thread.start()
            tasks.put((chunk,))
        if waits:
            yield _result(done.get())
    finally:
        if thread.ident is not None:
            tasks.put(None)
            thread.join()


class _Error:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def _result(found: _Result | _Error) -> _Result:
    if isinstance(found, _Error):
        raise found.error
    return found
