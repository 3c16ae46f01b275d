"""Rows of a run's folder: a full disk, torn rows, rows that a resume cuts back."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from moemesh.train.records import rows as row_log
from moemesh.train.records.rows import Cut, RowLog, cut_after
from tests.train import runs


class FullDisk:
    """Takes `room` bytes, then none, as write(2) does it: the last write is cut short."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._write = os.write

    def write(self, handle: int, data: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = self._write(handle, data[: self.room])
        self.room -= taken
        return taken


def rows_of(path: Path) -> list[int]:
    return [row["step"] for row in runs.rows_of(path)]


def test_a_full_disk_is_told_once_and_no_row_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    log = RowLog(tmp_path / "metrics.jsonl", lambda text, kind: said.append(f"{kind}: {text}"))
    disk = FullDisk(room=100_000)
    monkeypatch.setattr(row_log.os, "write", disk.write)
    assert log.append([{"step": 1}])
    disk.room = 5  # half a row
    for step in (2, 3, 4):
        assert not log.append([{"step": step}])
        assert rows_of(log.path) == [1]
        disk.room = 0
    assert len(said) == 1
    assert said[0].startswith(f"disk: {log.path}: No space left on device: ")
    assert said[0].endswith(" free; the run continues, rows wait in memory")
    disk.room = 100_000
    assert log.append([{"step": 5}])
    assert rows_of(log.path) == [1, 2, 3, 4, 5]
    assert said[1:] == [f"disk: writing {log.path} works now"]


def test_rows_that_wait_are_bounded_and_the_lost_ones_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_log, "MOST_WAITING", 3)
    said: list[str] = []
    log = RowLog(tmp_path / "metrics.jsonl", lambda text, kind: said.append(text))
    disk = FullDisk(room=0)
    with monkeypatch.context() as patch:
        patch.setattr(row_log.os, "write", disk.write)
        for step in range(1, 6):
            log.append([{"step": step}])
        assert not log.append([{"step": 6}], waits=False)
    assert log.flush()
    assert rows_of(log.path) == [3, 4, 5]
    assert said[-1] == f"writing {log.path} works now; 2 rows are lost"


def test_a_device_that_is_always_full() -> None:
    said: list[str] = []
    log = RowLog(Path("/dev/full"), lambda text, kind: said.append(text))
    assert not any(log.append([{"step": step}]) for step in (1, 2))
    assert len(said) == 1 and "No space left on device" in said[0]


def test_rows_behind_a_torn_one_stand_alone(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text('{"step": 1}\n{"ste')
    RowLog(file).append([{"step": 2}])
    assert file.read_text() == '{"step": 1}\n{"ste\n{"step": 2}\n'


def row(step: int, steps: int = 1) -> str:
    return json.dumps({"step": step} if steps == 1 else {"step": step, "steps": steps}) + "\n"


ONE_TO_FOUR = "".join(map(row, range(1, 5)))
BINS = "".join(row(step, 4) for step in (4, 8, 12))


@pytest.mark.parametrize(
    ("text", "step", "cut", "left"),
    [
        (None, 3, Cut(missing="rows.jsonl: 3 steps are missing (1 to 3)"), None),
        (ONE_TO_FOUR, 2, Cut(rows=2), row(1) + row(2)),
        (ONE_TO_FOUR, -1, Cut(rows=4), ""),
        (ONE_TO_FOUR + '{"step": 5, "lo', 4, Cut(damaged=1, first_damaged=5), ONE_TO_FOUR),
        (row(1) + row(2)[:-1], 2, Cut(), row(1) + row(2)),
        *(
            (f"{row(1)}{line}\n{row(2)}{row(3)}", 2, Cut(1, 1, 2), row(1) + row(2))
            for line in ("{broken", "3", "{}", '{"step": "1"}', "\xff\xfe", "[" * 9999)
        ),
        (BINS, 6, Cut(2, lost=range(5, 7), missing="rows.jsonl: 2 steps are missing (5 to 6)"),
         row(4, 4)),
        (row(1) + row(2) + row(5) + row(8) + row(9), 10,
         Cut(missing="rows.jsonl: 5 steps are missing (3 to 4, 6 to 7, 10)"), ...),
        (row(4, 4) + row(6, 2), 6, Cut(), ...),
    ],
)  # fmt: skip
def test_rows_are_cut_back(
    tmp_path: Path, text: str | None, step: int, cut: Cut, left: object
) -> None:
    """`left`: the file afterwards; ...: as before."""
    file = tmp_path / "rows.jsonl"
    if text is not None:
        file.write_text(text, encoding="latin-1")
    assert cut_after(file, step) == cut
    assert (file.read_text() if file.exists() else None) == (text if left is ... else left)


def test_rows_keep_full_precision_and_begin_on_a_line_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "loads.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}')
    RowLog(file).append([{"step": 3, "loss": 0.1 + 1 / 3}])
    assert runs.rows_of(file) == [{"step": 1}, {"step": 2}, {"step": 3, "loss": 0.1 + 1 / 3}]


def test_a_cut_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    monkeypatch.setattr(row_log.os, "replace", None)  # no second file
    monkeypatch.setattr(row_log.os, "fsync", None)
    assert cut_after(file, 1) == Cut(rows=1, damaged=1, first_damaged=3)
    assert file.read_text() == '{"step": 1}\n'


@pytest.mark.slow
def test_the_rates_of_an_extended_run_are_named(tmp_path: Path) -> None:
    """By the cosine: 0.1 of the rate at its end; 3 of 8 decay steps are done at step 5."""
    out = tmp_path / "run"
    keys = {"train__steps": 4, "train__lr": 1e-3, "train__warmup_steps": 2}
    keys["train__final_lr_ratio"] = 0.1
    assert "learning rate" not in runs.said(*runs.arguments(out, **keys))
    output = runs.said(*runs.arguments(out, **keys | {"train__steps": 10}))
    after = 1e-4 + 0.5 * 9e-4 * (1 + math.cos(math.pi * 3 / 8))
    note = f"note: the learning rate of step 4 was 1.00e-04, that of step 5 is {after:.2e}: "
    assert note + "its decay ends at step 10 now, not at 4" in output, output
    assert runs.metrics(out)[4]["lr"] == pytest.approx(after)
