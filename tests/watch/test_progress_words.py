"""Progress words: written by one process, read by another; groups counted; nothing torn."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from moemesh.ops.host_copy import HostCopy
from moemesh.watch import progress_words as words
from moemesh.watch.progress_words import (
    RANK_BYTES,
    SETUP,
    WordFile,
    members_of,
    members_text,
    read_word,
)
from tests.waiting import PATIENCE


@pytest.fixture
def memory() -> Iterator[bytearray]:
    """Of two ranks; this process is rank 1."""
    memory = bytearray(2 * RANK_BYTES)
    words.attach_memory(memory, 1)
    yield memory
    words.detach()


def test_a_rank_says_where_it_is(memory: bytearray) -> None:
    assert read_word(memory, 0) is None  # it has not come yet
    words.phase(SETUP)
    words.at_step(7, stage=2)
    words.at_microbatch(3)
    words.at_layer(5)
    group = (0, 1, 2, 3)
    words.entered("all_reduce", "dp", "gradients", group, 4096)
    ticket = words.entered("all_reduce", "dp", "gradients", group, 8192)
    words.waiting(ticket)
    word = read_word(memory, 1)
    assert word is not None and word.inside and word.collective is not None
    assert (word.step, word.phase, word.microbatch, word.layer, word.stage) == (7, "step", 3, 5, 2)
    assert str(word.collective) == "all_reduce #2 of dp (gradients)"
    assert word.collective.members == group and word.collective.num_bytes == 8192
    assert word.counts == {"0-3": 2} and word.number == 2
    assert word.place().startswith("step 7, microbatch 3, layer 5, inside all_reduce #2")
    words.left()
    after = read_word(memory, 1)
    assert after is not None and not after.inside and after.waited >= 0
    assert after.changes == word.changes + 1 and after.moved >= word.moved
    words.finished(130)
    done = read_word(memory, 1)
    assert done is not None and done.done and done.code == 130 and not done.failed


def test_messages_count_by_pair(memory: bytearray) -> None:
    """Sender and receiver count the same pair, whatever else they do."""
    words.entered("send_receive", "pp", "pipeline", (0, 1), 8, separator=">")
    words.entered("all_reduce", "pp", "norm", (0, 1, 2), 8)
    ticket = words.entered("send_receive", "pp", "pipeline", (1, 0), 8, separator=">")
    words.waiting(ticket)
    word = read_word(memory, 1)
    assert word is not None and word.counts == {"0>1": 1, "0-2": 1, "1>0": 1}
    assert word.collective is not None and word.collective.members == (1, 0)


def test_more_groups_than_there_is_room_for(memory: bytearray) -> None:
    groups = [(0, other) for other in range(1, 100)]
    tickets = [words.entered("barrier", "x", "test", group, 0) for group in groups]
    words.waiting(tickets[-1])
    word = read_word(memory, 1)
    assert word is not None and len(word.counts) == 64 and word.number == 99
    assert word.collective is not None and word.collective.members == ()


def test_an_exception_leaves_the_rank_inside(memory: bytearray) -> None:
    words.waiting(words.entered("broadcast", "tp", "weights", (0, 1), 1))
    words.failed()
    word = read_word(memory, 1)
    assert word is not None and word.failed and word.inside and not word.done


def test_a_thread_beside_the_main_one_only_counts(memory: bytearray) -> None:
    def work() -> None:
        words.in_background()
        words.waiting(words.entered("all_to_all", "ep", "moe", (0, 1), 1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    word = read_word(memory, 1)
    assert word is not None and not word.inside and word.counts == {"0-1": 1}


def test_who_is_not_attached_writes_nothing() -> None:
    assert words.entered("all_reduce", "dp", "x", (0, 1), 1) is None
    words.waiting(None)
    words.left()
    words.at_step(3)
    assert words.own_word() is None and not words.is_attached()


WRITER = """
import sys
from pathlib import Path
from moemesh.watch import progress_words as words
words.attach(Path(sys.argv[1]), 0)
step = 0
while True:
    step += 1
    words.at_step(step, stage=step)
"""


def test_a_record_is_never_torn(tmp_path: Path) -> None:
    """A reader beside a writing process: step and stage always belong together."""
    path = tmp_path / "words"
    file = WordFile(path, 1)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    try:
        end, steps = time.monotonic() + PATIENCE, set[int]()
        while len(steps) < 2000 and time.monotonic() < end:
            if (word := file.read(0)) is not None and word.step:
                assert word.step == word.stage
                steps.add(word.step)
        assert len(steps) == 2000
    finally:
        writer.kill()
        writer.wait()
        file.close()
    assert not path.exists()


@pytest.mark.parametrize(
    "ranks", [(0,), (5, 6), (0, 2, 4), (0, 1, 4, 5), (3, 11), tuple(range(99))]
)
def test_groups_in_short_form(ranks: tuple[int, ...]) -> None:
    assert members_of(members_text(ranks)) == ranks


def test_a_long_group_is_cut_at_a_whole_rank() -> None:
    ranks = tuple(n * n for n in range(100))
    found = members_of(members_text(ranks))
    assert len(found) > 10 and found == ranks[: len(found)]


def test_a_host_that_waits_for_its_device_says_so(memory: bytearray) -> None:
    words.at_step(3)
    words.waiting_for_device()
    alone = read_word(memory, 1)
    assert alone is not None and alone.on_device and alone.inside and alone.collective is None
    words.left()
    words.waiting(words.entered("all_reduce", "dp", "gradients", (0, 1), 8))
    words.left()
    words.entered("all_to_all", "ep", "moe", (0, 1), 8)
    before = words.waited_in_steps()
    words.waiting_for_device()
    word = read_word(memory, 1)
    assert word is not None and word.on_device
    assert word.place() == "step 3, waiting for its device behind all_to_all #2 of ep (moe)"
    words.left()
    after = read_word(memory, 1)
    assert after is not None and not after.inside and not after.on_device
    # Time behind the own computation is not time of communication.
    assert words.waited_in_steps() == before


def test_a_copy_to_the_host_waits_in_the_open(memory: bytearray) -> None:
    at: list[bool] = []

    class Event:
        def synchronize(self) -> None:
            word = read_word(memory, 1)
            at.append(word is not None and word.on_device)

    copied = HostCopy(torch.ones(2))
    copied.tolist()
    assert words.own_word().changes == 1  # nothing to wait for on a CPU
    copied._event = Event()
    assert copied.tolist() == [1.0, 1.0] and at == [True]
    assert not words.own_word().inside


def test_a_full_file_system_is_told_before_anything_is_written_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by SIGBUS, which a write to a record without room would bring."""
    reserved: list[tuple[int, int]] = []
    monkeypatch.setattr("os.posix_fallocate", lambda _, *place: reserved.append(place))
    WordFile(tmp_path / "all", 4).close()
    WordFile(tmp_path / "some", 4, reserved=range(1, 3)).close()
    assert reserved == [(0, 4 * RANK_BYTES), (RANK_BYTES, 2 * RANK_BYTES)]

    def fails(number: int) -> Callable[..., None]:
        def fail(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        return fail

    monkeypatch.setattr("os.posix_fallocate", fails(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        WordFile(tmp_path / "full", 1)
    monkeypatch.setattr("os.posix_fallocate", fails(errno.EOPNOTSUPP))  # a system without it
    WordFile(tmp_path / "other", 1).close()


def test_only_waits_inside_of_steps_are_waits_of_steps(memory: bytearray) -> None:
    """Behind a step ranks ask each other whether to stop; the step's seconds are over."""
    ticket = words.entered("all_reduce", "dp", "gradients", (0, 1), 8)

    def wait() -> float:
        before = words.waited_in_steps()
        assert before is not None
        words.waiting(ticket)
        time.sleep(0.002)
        words.left()
        after = words.waited_in_steps()
        assert after is not None
        return after - before

    words.at_step(1)
    assert wait() >= 0.002
    words.stepped()
    assert wait() == 0
    words.at_step(2)
    words.phase("validate")
    assert wait() == 0
