"""Work on chunks beside their writing: in order, at the same time, ended by errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from moemesh.checkpoint.files import beside


@pytest.mark.parametrize("sizes", [[], [1], [1 << 20], [1 << 20, 3, 1 << 20, 1 << 20, 5, 7]])
def test_results_are_those_of_the_chunks_in_order(sizes: list[int]) -> None:
    chunks = [bytes([n]) * size for n, size in enumerate(sizes)]
    assert [*beside(lambda chunk: (chunk[0], len(chunk)), chunks)] == [*enumerate(sizes)]
    assert "beside" not in {thread.name for thread in threading.enumerate()}


def test_the_next_chunk_is_made_while_one_is_worked_on() -> None:
    made, chunk = threading.Event(), bytes(1 << 20)

    def chunks() -> Iterator[bytes]:
        yield chunk
        made.set()
        yield chunk

    assert [*beside(lambda _: made.wait(20), chunks())] == [True, True]


def test_errors_end_it() -> None:
    def work(chunk: bytes) -> None:
        raise ValueError("of the work")

    def broken() -> Iterator[bytes]:
        yield bytes(1 << 20)
        raise OSError("of the disk")

    with pytest.raises(ValueError, match="of the work"):
        [*beside(work, [bytes(1 << 20)] * 3)]
    with pytest.raises(OSError, match="of the disk"):
        [*beside(len, broken())]
    assert "beside" not in {thread.name for thread in threading.enumerate()}
