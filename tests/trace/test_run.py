"""Run folders: complete, partial, torn, and no run at all."""

import json
import math

import pytest

from moemesh.trace.ledger import Ledger
from moemesh.trace.run import FILES, MetricsRow, Run, RunError, ledgers_from_json, ledgers_to_json
from tests.report.fake_run import entry, write_fake_run


def row(step: int, loss: float = 2.5, **details: object) -> MetricsRow:
    known = {"grad_norm": 1.0, "aux_loss": 0.5, "tokens": 64, "tokens_per_second": 1e3}
    return MetricsRow(
        **(known | {"step": step, "loss": loss, "lr": 1e-3, "seconds": 0.1} | details)
    )


def test_a_complete_run(tmp_path):
    run = Run.load(write_fake_run(tmp_path / "run", num_steps=40))
    assert run.warnings == ()
    assert run.config["plan"]["pp"] == 2
    assert run.plan["ep"] == 2
    assert [r.step for r in run.metrics] == list(range(1, 41))
    assert sorted(run.ledgers) == [0, 1, 2, 3]
    assert run.timeline is not None and run.timeline.ranks == (0, 1, 2, 3)
    assert run.memory is not None and len(run.memory.ranks) == 4
    assert [(item.step, item.layer) for item in run.loads[:3]] == [(10, 0), (10, 1), (10, 2)]
    assert run.failure is None


def test_metrics_keep_full_precision():
    before = row(3, loss=0.1 + 0.2, validation_loss=1 / 3)
    line = before.to_line()
    assert "0.30000000000000004" in line
    assert MetricsRow.from_json(json.loads(line)) == before
    assert "validation_loss" not in json.loads(row(1).to_line())


def test_a_loss_that_is_not_finite_is_strict_json():
    line = row(3, loss=math.nan, grad_norm=math.inf).to_line()
    assert json.loads(line, parse_constant=pytest.fail)["loss"] is None
    assert math.isnan(MetricsRow.from_json(json.loads(line)).loss)


@pytest.mark.parametrize("missing", FILES)
def test_any_file_may_be_missing(tmp_path, missing):
    folder = write_fake_run(tmp_path / "run", num_steps=20)
    (folder / missing).unlink(missing_ok=True)
    gone = "metrics.jsonl: 20 steps are missing (1 to 20)"
    assert Run.load(folder).warnings == ((gone,) if missing == "metrics.jsonl" else ())


@pytest.mark.parametrize("only", FILES)
def test_any_file_alone_may_be_torn(tmp_path, only):
    (tmp_path / only).write_text('{"half": [1, 2, {"written"')
    run = Run.load(tmp_path)
    assert len(run.warnings) == 1
    assert only in run.warnings[0]


@pytest.mark.parametrize(
    ("text", "rows", "words"),
    [
        ((row(1).to_line() + row(2).to_line())[:-15], {1: 2.5}, ("line 2", "half-written")),
        (row(1).to_line() + '{"step": 2}\n[3]\n\n\xff\n' + row(4).to_line(), {1: 2.5, 4: 2.5},
         ("3 lines", "'tokens' is missing")),
        # A step that a resume repeats counts once.
        ("".join(r.to_line() for r in (row(1), row(2, loss=9.0), row(3), row(2, loss=2.0))),
         {1: 2.5, 2: 2.0, 3: 2.5}, ()),
    ],
    ids=["half-written", "damaged", "repeated"],
)  # fmt: skip
def test_a_bad_line_does_not_hide_the_others(tmp_path, text, rows, words):
    (tmp_path / "metrics.jsonl").write_bytes(text.encode("latin-1"))
    run = Run.load(tmp_path)
    assert {r.step: r.loss for r in run.metrics} == rows
    assert bool(run.warnings) == bool(words)
    assert all(word in run.warnings[0] for word in words)


def test_no_run(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(RunError, match="holds no run"):
        Run.load(tmp_path)
    with pytest.raises(RunError, match="a path, not 3"):
        Run.load(3)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="is not a folder"):
        Run.load(tmp_path / "absent")
    assert issubclass(RunError, ValueError)


def test_ledgers_round_trip():
    book = Ledger()
    book.record(**entry("tp", "all_gather", "forward", "attention", 1, 80, 40, 40))
    data = json.loads(json.dumps(ledgers_to_json({1: book, 0: Ledger()}, steps=3)))
    assert [part["rank"] for part in data["ranks"]] == [0, 1]
    assert data["ranks"][1]["entries"][0]["axis"] == "tp"
    assert ledgers_from_json(data) == ({0: Ledger(), 1: book}, 3)
    del data["steps"]
    assert ledgers_from_json(data)[1] == 1
    with pytest.raises(ValueError, match="twice"):
        ledgers_from_json({"ranks": data["ranks"] * 2})


def test_blocks_of_lines_are_read_as_single_ones(tmp_path):
    """Lines are read in blocks; damage in one of them loses no other and no number of a line."""
    lines = [row(step).to_line() for step in range(1, 1001)]
    # As many objects too many as the next line has too few.
    lines[700] = f"{lines[700].strip()}, {lines[701]}"
    lines[701] = "\n"
    lines[999] = lines[999][:-9]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    run = Run.load(tmp_path)
    assert [r.step for r in run.metrics] == [*range(1, 701), *range(703, 1000)]
    assert "2 lines are left out, first line 701:" in run.warnings[0]
    assert run.metrics[5] == row(6)


def test_numbers_of_a_row_may_be_whole_or_null(tmp_path):
    data = row(1).to_json() | {"loss": None, "lr": 1, "memory_bytes": 7, "mfu": None, "step": 3.0}
    parsed = MetricsRow.from_json(data)
    assert parsed.loss != parsed.loss and (parsed.lr, parsed.memory_bytes) == (1.0, 7.0)
    assert (parsed.step, type(parsed.step), type(parsed.lr)) == (3, int, float)
    assert parsed.mfu != parsed.mfu and parsed.epoch is None
    with pytest.raises((TypeError, ValueError)):
        MetricsRow.from_json(data | {"step": None})
    with pytest.raises((TypeError, ValueError)):
        MetricsRow.from_json(data | {"seconds": "slow"})
