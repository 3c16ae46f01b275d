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

from moemesh.monitor import progress as records
from moemesh.monitor.progress import (
    RANK_BYTES,
    SETUP,
    ProgressFile,
    members_of,
    members_text,
    read_record,
)
from moemesh.ops.host_copy import HostCopy
from tests.waiting import PATIENCE


@pytest.fixture
def memory() -> Iterator[bytearray]:
    """Progress memory of two ranks; this process is rank 1."""
    memory = bytearray(2 * RANK_BYTES)
    records.attach_memory(memory, 1)
    yield memory
    records.detach()


def test_a_rank_says_where_it_is(memory: bytearray) -> None:
    assert read_record(memory, 0) is None  # it has not come yet
    records.phase(SETUP)
    records.at_step(7, stage=2)
    records.at_microbatch(3)
    records.at_layer(5)
    group = (0, 1, 2, 3)
    records.entered("all_reduce", "dp", "gradients", group, 4096)
    ticket = records.entered("all_reduce", "dp", "gradients", group, 8192)
    records.waiting(ticket)
    record = read_record(memory, 1)
    assert record is not None and record.inside and record.collective is not None
    assert (record.step, record.phase, record.microbatch, record.layer, record.stage) == (
        7,
        "step",
        3,
        5,
        2,
    )
    assert str(record.collective) == "all_reduce #2 of dp (gradients)"
    assert record.collective.members == group and record.collective.num_bytes == 8192
    assert record.counts == {"0-3": 2} and record.number == 2
    assert record.place().startswith("step 7, microbatch 3, layer 5, inside all_reduce #2")
    records.left()
    after = read_record(memory, 1)
    assert after is not None and not after.inside and after.waited >= 0
    assert after.changes == record.changes + 1 and after.moved >= record.moved
    records.finished(130)
    done = read_record(memory, 1)
    assert done is not None and done.done and done.code == 130 and not done.failed


def test_messages_count_by_pair(memory: bytearray) -> None:
    """Sender and receiver count the same pair, whatever else they do."""
    records.entered("send_receive", "pp", "pipeline", (0, 1), 8, separator=">")
    records.entered("all_reduce", "pp", "norm", (0, 1, 2), 8)
    ticket = records.entered("send_receive", "pp", "pipeline", (1, 0), 8, separator=">")
    records.waiting(ticket)
    record = read_record(memory, 1)
    assert record is not None and record.counts == {"0>1": 1, "0-2": 1, "1>0": 1}
    assert record.collective is not None and record.collective.members == (1, 0)


def test_more_groups_than_there_is_room_for(memory: bytearray) -> None:
    groups = [(0, other) for other in range(1, 100)]
    tickets = [records.entered("barrier", "x", "test", group, 0) for group in groups]
    records.waiting(tickets[-1])
    record = read_record(memory, 1)
    assert record is not None and len(record.counts) == 64 and record.number == 99
    assert record.collective is not None and record.collective.members == ()


def test_an_exception_leaves_the_rank_inside(memory: bytearray) -> None:
    records.waiting(records.entered("broadcast", "tp", "weights", (0, 1), 1))
    records.failed()
    record = read_record(memory, 1)
    assert record is not None and record.failed and record.inside and not record.done


def test_a_thread_beside_the_main_one_only_counts(memory: bytearray) -> None:
    def work() -> None:
        records.in_background()
        records.waiting(records.entered("all_to_all", "ep", "moe", (0, 1), 1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    record = read_record(memory, 1)
    assert record is not None and not record.inside and record.counts == {"0-1": 1}


def test_who_is_not_attached_writes_nothing() -> None:
    assert records.entered("all_reduce", "dp", "x", (0, 1), 1) is None
    records.waiting(None)
    records.left()
    records.at_step(3)
    assert records.own_record() is None and not records.is_attached()


WRITER = """
import sys
from pathlib import Path
from moemesh.monitor import progress as words
words.attach(Path(sys.argv[1]), 0)
step = 0
while True:
    step += 1
    words.at_step(step, stage=step)
"""


def test_a_record_is_never_torn(tmp_path: Path) -> None:
    """A reader beside a writing process: step and stage always belong together."""
    path = tmp_path / "words"
    file = ProgressFile(path, 1)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    try:
        end, steps = time.monotonic() + PATIENCE, set[int]()
        while len(steps) < 2000 and time.monotonic() < end:
            if (record := file.read(0)) is not None and record.step:
                assert record.step == record.stage
                steps.add(record.step)
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
    members = members_of(members_text(ranks))
    assert len(members) > 10 and members == ranks[: len(members)]


def test_a_host_that_waits_for_its_device_says_so(memory: bytearray) -> None:
    records.at_step(3)
    records.waiting_for_device()
    alone = read_record(memory, 1)
    assert alone is not None and alone.on_device and alone.inside and alone.collective is None
    records.left()
    records.waiting(records.entered("all_reduce", "dp", "gradients", (0, 1), 8))
    records.left()
    records.entered("all_to_all", "ep", "moe", (0, 1), 8)
    before = records.waited_in_steps()
    records.waiting_for_device()
    record = read_record(memory, 1)
    assert record is not None and record.on_device
    assert record.place() == "step 3, waiting for its device behind all_to_all #2 of ep (moe)"
    records.left()
    after = read_record(memory, 1)
    assert after is not None and not after.inside and not after.on_device
    # Time after the rank's own computation does not count as communication.
    assert records.waited_in_steps() == before


def test_a_copy_to_the_host_waits_in_the_open(memory: bytearray) -> None:
    at: list[bool] = []

    class Event:
        def synchronize(self) -> None:
            record = read_record(memory, 1)
            at.append(record is not None and record.on_device)

    copied = HostCopy(torch.ones(2))
    copied.tolist()
    assert records.own_record().changes == 1  # nothing to wait for on a CPU
    copied._event = Event()
    assert copied.tolist() == [1.0, 1.0] and at == [True]
    assert not records.own_record().inside


def test_a_full_file_system_is_told_before_anything_is_written_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by SIGBUS, which a write to a record without room would bring."""
    reserved: list[tuple[int, int]] = []
    monkeypatch.setattr("os.posix_fallocate", lambda _, *place: reserved.append(place))
    ProgressFile(tmp_path / "all", 4).close()
    ProgressFile(tmp_path / "some", 4, reserved=range(1, 3)).close()
    assert reserved == [(0, 4 * RANK_BYTES), (RANK_BYTES, 2 * RANK_BYTES)]

    def fails(number: int) -> Callable[..., None]:
        def fail(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        return fail

    monkeypatch.setattr("os.posix_fallocate", fails(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        ProgressFile(tmp_path / "full", 1)
    monkeypatch.setattr("os.posix_fallocate", fails(errno.EOPNOTSUPP))  # a system without it
    ProgressFile(tmp_path / "other", 1).close()


def test_only_waits_inside_of_steps_are_waits_of_steps(memory: bytearray) -> None:
    """After a step ranks agree on whether to stop; the step's seconds are over."""
    ticket = records.entered("all_reduce", "dp", "gradients", (0, 1), 8)

    def wait() -> float:
        before = records.waited_in_steps()
        assert before is not None
        records.waiting(ticket)
        time.sleep(0.002)
        records.left()
        after = records.waited_in_steps()
        assert after is not None
        return after - before

    records.at_step(1)
    assert wait() >= 0.002
    records.stepped()
    assert wait() == 0
    records.at_step(2)
    records.phase("validate")
    assert wait() == 0
