"""loads.jsonl: bounded whatever the number of steps, exact sums, borders at checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from moemesh.balance.load_files import load_table
from moemesh.trace.loads import LayerLoads, read_loads
from moemesh.train.records import row_log
from moemesh.train.records.expert_loads import LoadLog
from moemesh.train.records.row_log import RowLog, cut_after
from tests.trace.test_load_bins import step_loads


def write(
    folder: Path, steps: range, bins: int, *, save_every: int = 0, saved: set[int] | None = None
) -> LoadLog:
    checkpoints = set[int]() if saved is None else saved
    log = LoadLog(RowLog(folder / "loads.jsonl"), bins, lambda: checkpoints)
    log.resume()
    for step in steps:
        log.add([step_loads(step, layer) for layer in (1, 2)])
        if save_every and step % save_every == 0:
            log.flush()
            checkpoints.add(step)
    log.flush()
    return log


def read(folder: Path) -> list[LayerLoads]:
    with (folder / "loads.jsonl").open() as file:
        return [loads for loads in read_loads(file) if loads.layer == 1]


def expected(num_steps: int) -> list[list[int]]:
    every = range(1, num_steps + 1)
    return [
        [sum(step_loads(s, layer).tokens_per_expert[expert] for s in every) for expert in range(4)]
        for layer in (1, 2)
    ]


@pytest.mark.parametrize("save_every", [0, 7, 100])
@pytest.mark.parametrize("num_steps", [5, 16, 300, 3000])
def test_any_number_of_steps_is_few_rows_with_exact_sums(
    tmp_path: Path, num_steps: int, save_every: int
) -> None:
    saved: set[int] = set()
    write(tmp_path, range(1, num_steps + 1), bins=8, save_every=save_every, saved=saved)
    rows = read(tmp_path)
    assert min(num_steps, 8) <= len(rows) <= 16 + min(len(saved), 8)
    assert [one.first_step for one in rows] == [1, *(one.step + 1 for one in rows[:-1])]
    assert rows[-1].step == num_steps
    assert load_table(tmp_path).tolist() == expected(num_steps)


def test_bins_of_all_steps_are_about_equally_wide(tmp_path: Path) -> None:
    saved: set[int] = set()
    log = LoadLog(RowLog(tmp_path / "loads.jsonl"), 16, lambda: set(sorted(saved)[-2:]))
    for step in range(1, 4001):
        log.add([step_loads(step)])
        if step % 7 == 0:  # a checkpoint: its bin ends early
            log.flush()
            saved.add(step)
    log.flush()
    with (tmp_path / "loads.jsonl").open() as file:
        widths = [loads.steps for loads in read_loads(file)]
    assert len(widths) <= 2 * 16 + 2 and sum(widths) == 4000
    assert max(widths) <= 4 * 4000 / 16


def test_without_bins_every_step_is_a_row(tmp_path: Path) -> None:
    write(tmp_path, range(1, 101), bins=0)
    assert [one.step for one in read(tmp_path)] == list(range(1, 101))


def test_a_run_goes_on_from_any_checkpoint_with_exact_sums(tmp_path: Path) -> None:
    saved: set[int] = set()
    for end, back in ((250, 240), (700, 690), (1000, 980)):
        first = max((one.step for one in read(tmp_path)), default=0) + 1 if saved else 1
        write(tmp_path, range(first, end + 1), bins=8, save_every=10, saved=saved)
        saved = {step for step in saved if end - 30 <= step <= end}  # the others were removed
        cut = cut_after(tmp_path / "loads.jsonl", back)
        assert not cut.lost, cut
        saved = {step for step in saved if step <= back}
        assert load_table(tmp_path).tolist() == expected(back)
        assert len(read(tmp_path)) <= 16 + 100


def test_a_full_disk_loses_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = write(tmp_path, range(1, 4), bins=8)

    def refuse(handle: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(row_log.os, "write", refuse)
        for step in range(4, 10):
            log.add([step_loads(step, layer) for layer in (1, 2)])
    log.add([step_loads(10, layer) for layer in (1, 2)])
    assert [(one.step, one.steps) for one in read(tmp_path)] == [(1, 1), (2, 1), (3, 1), (10, 7)]
    assert load_table(tmp_path).tolist() == expected(10)


def test_damaged_rows_are_left_out_when_bins_are_summed(tmp_path: Path) -> None:
    write(tmp_path, range(1, 10), bins=8)
    file = tmp_path / "loads.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:4], '{"step": 3, "lay\n', *lines[4:]]))
    write(tmp_path, range(10, 40), bins=8)
    assert load_table(tmp_path).tolist() == expected(39)
