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

METRICS = {"loss": 1.0, "grad_norm": 1.0, "aux_loss": 0.0, "tokens": 1, "tokens_per_second": 1.0,
           "lr": 0.1, "seconds": 1.0}  # fmt: skip


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


def test_rows_keep_full_precision_and_are_cut_back(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert cut_after(file, 3) == Cut(missing="metrics.jsonl: 3 steps are missing (1 to 3)")
    log = RowLog(file)
    for step in range(1, 6):
        log.append([{"step": step, "loss": 0.1 + step / 3}])
    whole = file.read_bytes()
    with file.open("a") as handle:
        handle.write('{"step": 6, "lo')  # a crash in the middle of a row
    assert cut_after(file, 9)._replace(missing="") == Cut(damaged=1, first_damaged=6)
    assert file.read_bytes() == whole
    assert cut_after(file, 3)._replace(missing="") == Cut(rows=2)
    rows = runs.rows_of(file)
    assert rows == [{"step": step, "loss": 0.1 + step / 3} for step in (1, 2, 3)]
    assert cut_after(file, -1) == Cut(rows=3)
    assert file.read_bytes() == b""


def test_a_whole_last_row_without_its_newline_stays(tmp_path: Path) -> None:
    file = tmp_path / "loads.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}')
    assert cut_after(file, 2)._replace(missing="") == Cut()
    RowLog(file).append([{"step": 3}])
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


@pytest.mark.parametrize("line", ["{broken", "3", "{}", '{"step": "1"}', "\xff\xfe", "[" * 9999])
def test_a_damaged_row_blocks_no_resume(tmp_path: Path, line: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n' + line + '\n{"step": 2}\n{"step": 3}\n', encoding="latin-1")
    assert cut_after(file, 2)._replace(missing="") == Cut(rows=1, damaged=1, first_damaged=2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_cut_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    monkeypatch.setattr(row_log.os, "replace", None)  # no second file
    monkeypatch.setattr(row_log.os, "fsync", None)
    assert cut_after(file, 1)._replace(missing="") == Cut(rows=1, damaged=1, first_damaged=3)
    assert file.read_text() == '{"step": 1}\n'


def test_a_sum_across_the_cut_goes(tmp_path: Path) -> None:
    file = tmp_path / "loads.jsonl"
    rows = [{"step": 4, "steps": 4}, {"step": 8, "steps": 4}, {"step": 12, "steps": 4}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cut_after(file, 6) == Cut(
        rows=2, lost=range(5, 7), missing="loads.jsonl: 2 steps are missing (5 to 6)"
    )
    assert rows_of(file) == [4]


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


def test_rows_that_are_missing_at_a_resume_are_named(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert cut_after(file, 3).missing == "metrics.jsonl: 3 steps are missing (1 to 3)"
    file.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 5, 8, 9)))
    assert cut_after(file, 10).missing == "metrics.jsonl: 5 steps are missing (3 to 4, 6 to 7, 10)"
    file.write_text('{"step": 4, "steps": 4}\n{"step": 6, "steps": 2}\n')
    assert cut_after(file, 6).missing == ""
