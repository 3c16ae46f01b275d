"""Statistics of predictions: content of the JSON, labels of memory, regret of the pick."""

from __future__ import annotations

import json

import pytest

from moemesh.cli.accuracy import report
from moemesh.config.devices import GIB
from moemesh.planner.accuracy.published import parse_run
from moemesh.planner.accuracy.validate import error_statistics, predict, summarize
from moemesh.planner.timing.calibration import shipped_calibration
from tests.planner.published_rows import ARCHS, ROWS, llama, row, write_table
from tests.test_cli import Invoke


@pytest.fixture(scope="module")
def validation():
    return summarize(predict([parse_run(one, ARCHS) for one in ROWS], shipped_calibration()))


def test_shipped_constants_predict_published_runs(validation):
    assert validation.dense.median < 0.05
    assert validation.dense.worst < 0.10


def test_memory_within_one_percent_of_the_allocator(validation):
    assert validation.memory.count == 4
    assert validation.memory.worst < 0.01


def test_labels_of_memory(validation):
    assert validation.fit.right == 1.0
    assert validation.fit.wrongly_fits == 0.0


def test_picks_the_measured_best_and_never_what_ran_out(validation):
    assert validation.selection.groups == 2
    assert validation.selection.mean_regret == validation.selection.out_of_memory == 0


def test_a_pick_is_among_the_layouts_of_one_release_and_number_type():
    """A plan chooses neither: two releases, or two types, of one layout are not compared."""
    timed = [llama(1, 2, 1, 1, 31.3), llama(2, 2, 1, 2, 30.0)]
    others = [
        dict(one, step_time_s="60", **change)
        for one in timed
        for change in ({"notes": f"26.02; {one['notes']}"}, {"precision": "fp32"})
    ]
    for number, one in enumerate(others):
        one["id"] = str(90 + number)
    runs = [parse_run(one, ARCHS) for one in (*timed, *others)]
    selection = summarize(predict(runs, shipped_calibration())).selection
    assert selection.groups == 3
    assert selection.worst_regret < 0.05


def test_a_finished_run_without_a_time_is_not_a_pick_that_ran_out():
    """Rows that print memory alone, and are predicted to be faster than all timed ones."""
    timed = [llama(1, 2, 1, 1, 31.3), llama(2, 2, 1, 2, 30.0), llama(3, 4, 1, 1, 40.0)]
    without = [dict(one, id=str(10 + n), step_time_s="") for n, one in enumerate(timed)]
    runs = [parse_run(one, ARCHS) for one in (*without, *timed)]
    selection = summarize(predict(runs, shipped_calibration())).selection
    assert selection.groups == 1
    assert selection.out_of_memory == 0


def test_sharding_that_a_table_leaves_out_is_what_the_run_needs():
    """13B: 18 bytes of states a weight, 6 with the optimizer spread over many ranks. Rows that
    print the stage, and tables with an empty `sp`, are priced as they are."""
    plain = {"arch": "llama-13B", "hardware": "A100-80G", "gpus": "8", "gbs": "64", "seq": "2048"}
    rows = [
        plain | {"id": "1", "tp": "2", "step_time_s": "60"},
        plain | {"id": "2", "tp": "2", "zero": "0", "step_time_s": "60"},
        plain | {"id": "5", "dp": "8", "step_time_s": "60"},
        plain | {"id": "3", "tp": "8", "mbs": "16", "recompute": "none", "step_time_s": "60"},
        plain | {"id": "4", "tp": "8", "mbs": "16", "recompute": "none", "step_time_s": "60"}
        | {"sp": ""},
        plain | {"id": "6", "gpus": "4", "tp": "2", "step_time_s": "60"},
        plain | {"id": "7", "hardware": "H100-80G", "tp": "8", "mbs": "1", "step_time_s": "60"},
    ]  # fmt: skip
    validation = summarize(predict([parse_run(one, ARCHS) for one in rows], shipped_calibration()))
    first, printed, gathered, cut, whole, needy, modern = validation.predictions
    assert first.fits and first.run.layout.zero == 1
    assert gathered.fits and gathered.run.layout.zero == 3 and gathered.run.software.fsdp
    assert printed.fits is False and printed.run.layout.zero == 0
    assert cut.run.layout.sequence_parallel and not whole.run.layout.sequence_parallel
    assert cut.memory.needed < whole.memory.needed
    # One that needs recomputation, too, is sharded as far as possible; FSDP is not beside TP.
    layout = needy.run.layout
    assert (layout.zero, layout.sequence_parallel, needy.run.software.fsdp) == (1, True, False)
    # Software for newer devices cuts sequences beside TP, whether they fit or not.
    assert modern.run.layout.sequence_parallel and not modern.run.is_sharded_by_choice
    # The report names those that fit, and they are left out of the labels.
    chosen = [one.fits and one.run.is_sharded_by_choice for one in validation.predictions]
    assert chosen == [True, False, True, True, False, False, False]
    assert "3 rows priced with ZeRO or sequence parallelism" in report(validation)


def test_unpriced_rows_say_why_and_stay():
    rows = [row(5, src="x", arch="unknown", hardware="H100", gpus=8, gbs=8, seq=128), ROWS[0]]
    summary = summarize(predict([parse_run(one, ARCHS) for one in rows], shipped_calibration()))
    first, second = json.loads(summary.json_text())["rows"]
    assert first["seconds"] is None
    assert "no entry" in first["reason"]
    assert second["seconds"] > 0
    assert "reason" not in second
    assert "1 row not priced" in report(summary)


def test_a_row_made_to_fit_has_one_memory():
    """40 layers of 13B with 16 x 2,048 tokens need recomputation that the table leaves out."""
    whole = {"src": "x", "arch": "llama-13B", "hardware": "H100", "gpus": 8, "dp": 8, "mbs": 16,
             "gbs": 128, "seq": 2048, "step_time_s": 9, "recompute": ""}  # fmt: skip
    rows = [row(1, **whole), row(2, **whole | {"zero": 3}), row(3, **whole | {"recompute": "none"})]
    rows += [row(4, **whole | {"zero": 3, "recompute": "selective(blocks; share not stated)"})]
    rows += [row(5, **whole | {"mbs": 512, "gbs": 4096})]
    summary = summarize(predict([parse_run(one, ARCHS) for one in rows], shipped_calibration()))
    layers, switch, none, blocks, never = summary.predictions
    assert not none.fits and none.memory.needed > 80 * GIB
    # Without a pipeline states of 13B do not fit at all; sharded, they do.
    assert switch.fits and switch.run.software.recomputed_share == 1
    assert 0.5 < blocks.run.software.recomputed_share < 1 and blocks.fits
    for one in (layers, switch, none, blocks, never):
        assert one.fits == (one.memory.needed <= 80 * GIB * 0.985)
    # A choice that makes a row fit is left out of the labels.
    assert summary.fit.count == sum(
        not (one.fits and one.run.software.recomputed_share) for one in summary.predictions
    )
    assert not never.fits


def test_gradients_are_kept_as_they_are_sent():
    """NVIDIA's recipes sum in 16 bit: 2 bytes a weight less than in 32 bit, without ZeRO."""
    whole = {"arch": "llama-13B", "hardware": "B200", "gpus": 4, "tp": 4, "sp": 1, "mbs": 1,
            "gbs": 4, "seq": 2048, "zero": 0, "recompute": "none"}  # fmt: skip
    names = enumerate(("x", "nemo_tests"))
    runs = [parse_run(row(n, src=name, **whole), ARCHS) for n, name in names]
    other, nemo = (one.memory for one in predict(runs, shipped_calibration()))
    weights = runs[0].priced[0]
    least = 2 * (weights.num_layers * 12 * weights.hidden_size**2) / 4
    assert least < other.allocated - nemo.allocated < 1.2 * least


def test_milliseconds_are_named_by_row():
    rows = [ROWS[0], ROWS[1] | {"step_time_s": str(float(ROWS[1]["step_time_s"]) * 1000)}]
    summary = summarize(predict([parse_run(one, ARCHS) for one in rows], shipped_calibration()))
    assert f"in another unit, or of another batch: {ROWS[1]['id']}" in report(summary)


def test_error_statistics():
    statistics = error_statistics([-0.1, 0.02, 0.03, 0.2])
    assert statistics.count == 4
    assert statistics.median == pytest.approx(0.065)
    assert statistics.bias == pytest.approx(0.025)
    assert statistics.worst == 0.2
    assert statistics.p95 == pytest.approx(0.1 + 0.85 * 0.1)
    assert error_statistics([]) is None


@pytest.mark.parametrize("text", ["1e-320", "0", "-3", "inf", "nan", "1e300"])
@pytest.mark.parametrize("column", ["step_time_s", "mem_gib"])
def test_a_time_that_no_run_shows_is_named(tmp_path, invoke: Invoke, column, text):
    rows = [{**ROWS[0], "id": "7", column: text, "mem_kind": "peak"}, *ROWS[1:]]
    table, out = write_table(tmp_path, rows), tmp_path / "answer.json"
    code, said, _ = invoke("validate", str(table), "--json", str(out))
    assert code == 0 and f"{column} is `{text}`: a run shows" in said
    row = next(row for row in json.loads(out.read_text())["rows"] if row["id"] == 7)
    assert row["seconds"] is None and column in row["reason"]


def test_a_table_without_a_priced_row_is_refused(tmp_path, invoke: Invoke):
    rows = [{**ROWS[0], "id": "7", "hardware": "abacus"}, {**ROWS[1], "id": "8", "gpus": "some"}]
    code, _, message = invoke("validate", str(write_table(tmp_path, rows)))
    assert code == 2
    assert "hardware is `abacus`: no known device (7 in line 2)" in message
    assert "gpus is `some`: not a whole number (8 in line 3)" in message


def test_rows_without_a_measurement_are_named(tmp_path, invoke: Invoke):
    rows = [ROWS[0], {**ROWS[1], "id": "77", "step_time_s": ""}]
    _, said, _ = invoke("validate", str(write_table(tmp_path, rows)))
    assert "1 row without a measured time or memory: 77" in said


def test_command_tells_mistakes_without_a_traceback(tmp_path, invoke: Invoke):
    code, _, message = invoke("validate", str(tmp_path / "none.csv"))
    assert code == 2 and "cannot read the table" in message
