"""Losses and events of a run in the report of `explain`; a healthy run gives no remark."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from moemesh.report import page
from moemesh.report.explain import Losses, explain, losses_of, lower_rate, troubles_of
from moemesh.report.watch import Watched
from moemesh.trace.run import JUMPED, MetricsRow, Run, state_of


def run_of(folder, losses, validated=None, unigram=None, steps=None, events=(), **fields):
    """A run with these training losses, validation losses by step, and events (kind, text)."""
    folder.mkdir()
    steps = len(losses) if steps is None else steps
    (folder / "config.toml").write_text(f"[train]\nsteps = {steps}\nlr = 0.03\n")
    rows = [
        MetricsRow(step=step, loss=loss, grad_norm=1.0, aux_loss=0.0, tokens=10, lr=1e-3,
                   tokens_per_second=10.0, seconds=1.0,
                   validation_loss=(validated or {}).get(step), **fields)
        for step, loss in enumerate(losses, start=1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(row.to_line() for row in rows))
    if unigram is not None:
        (folder / "summary.json").write_text(json.dumps({"steps": steps, "unigram_loss": unigram}))
    lines = [json.dumps({"time": "", "step": 1, "kind": k, "text": t}) for k, t in events]
    (folder / "events.jsonl").write_text("\n".join(lines))
    return Run.load(folder)


def scattered(first, slope, noise=0.002, steps=100):
    chance = random.Random(3)
    return [first + slope * step + chance.gauss(0, noise) for step in range(steps)]


FALLING = [5.0 - 3.0 * step / 100 for step in range(100)]
#: Losses, validation losses, unigram entropy; a word of the verdict ("": none) and the change.
CASES = {
    "healthy": (FALLING, {50: 3.5, 100: 2.05}, 3.2, "", ""),
    "a small wobble": (FALLING, {50: 2.05, 100: 2.09}, 3.2, "", ""),
    # Too high a rate moves the loss at once; the direction gives no hint of the right one.
    "nothing learned": ([5.0] * 60, {60: 3.3}, 3.2, "too low", "train.lr=0.06"),
    "flat noise": (scattered(5.0, 0.0), {}, 3.2, "too low", "train.lr=0.06"),
    "flat elsewhere": ([5.0, *[4.0] * 60], {}, 3.2, "do not show why", ""),
    "a straight line": (scattered(6.04, -0.0003), {}, 3.2, "higher train.lr", "train.lr=0.06"),
    "a line in noise": (scattered(6.04, -0.0003, 0.01), {}, 3.2, "higher", "train.lr=0.06"),
    "climbs": (scattered(5.0, 0.01, 0.05), {}, 3.2, "too high", "train.lr=0.003"),
    "still falling": (FALLING, {100: 2.05}, 2.0, "the run needs more steps", "train.steps=400"),
    "short and finished": ([5.0] * 5, {5: 3.3}, 3.2, "not below", "train.steps=40"),
    "a start": (
        [5.0, 5.03, 5.01, 5.04],
        {4: 5.1},
        3.2,
        "the run needs more steps",
        "train.steps=40",
    ),
    "a slow start": (
        scattered(6.0, -0.01, steps=12),
        {},
        3.2,
        "the run needs more steps",
        "train.steps=48",
    ),
    "no validation": ([3.3] * 60, {}, 3.2, "training loss (3.30) is not below", "train.lr=0.06"),
    "overfits": (FALLING, {50: 2.4, 100: 2.6}, 3.2, "at step 50 (2.4000)", "train.steps=50"),
    "rises again": (
        FALLING + [3.0] * 20,
        {120: 3.0},
        9.0,
        "rose after its minimum",
        "train.lr=0.003",
    ),
    "noisy": ([2.8 - x / 100 + 0.1 * (x % 3) for x in range(40)] + [2.6] * 3, {}, 9.0, "", ""),
    "gap": (FALLING, {50: 3.7, 100: 2.6}, 3.2, "above the training loss", ""),
    "a first step": ([5.0], {}, None, "", ""),
}


#: Losses and gradient norms of runs of 60 steps that differ in train.lr alone: preset "tiny" with 2
#: layers of width 64, 8 sequences of 64 bytes a step, one rank.
RATES = json.loads((Path(__file__).parent / "data" / "rates.json").read_text())


@pytest.mark.parametrize("rate", RATES)
def test_advice_on_the_learning_rate_leads_to_a_lower_loss(tmp_path, rate):
    curve = RATES[rate]
    validated = {60: curve["validation"]}
    run = run_of(tmp_path / "run", curve["losses"], validated, curve["unigram"])
    rows = zip(run.metrics, curve["grad_norms"], strict=True)
    lines = [replace(row, grad_norm=norm).to_line() for row, norm in rows]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    (tmp_path / "run" / "config.toml").write_text(f"[train]\nsteps = 60\nlr = {float(rate)}\n")
    change = losses_of(Run.load(tmp_path / "run")).change
    # Losses below the unigram model get no advice.
    assert bool(change) == (curve["validation"] >= curve["unigram"])
    if change:
        key, value = change.split("=")
        assert key == "train.lr"
        advised = min(RATES, key=lambda other: abs(math.log(float(other) / float(value))))
        assert RATES[advised]["validation"] < curve["validation"]


@pytest.mark.parametrize("name", CASES)
def test_losses(tmp_path, name):
    losses, validated, unigram, word, change = CASES[name]
    run = run_of(tmp_path / "run", losses, validated, unigram)
    course = losses_of(run)
    assert (word in course.verdict) if word else course.verdict == ""
    assert course.change == change and f"training {losses[-1]:.4f}" in course.line
    explanation = explain(run)
    assert course.verdict in explanation.text and course.line in explanation.text
    assert (
        f"--set {change} " in explanation.command
        if change
        else "--set train" not in explanation.command
    )


def test_a_run_at_work_is_not_blamed_early(tmp_path):
    assert losses_of(run_of(tmp_path / "a", [5.0] * 39, {39: 3.3}, 3.2, steps=100)).verdict == ""
    assert losses_of(run_of(tmp_path / "b", [5.0] * 40, {40: 3.3}, 3.2, steps=100)).verdict


def test_losses_that_are_no_numbers(tmp_path):
    run = run_of(tmp_path / "run", [float("nan")] * 50)
    verdict = "No step had a finite loss: lower train.lr."
    assert losses_of(run) == Losses("", verdict, lower_rate(run))
    assert "a training loss that is not finite" in explain(run).text


def test_troubles_are_counted_and_the_worst_stands_first(tmp_path):
    events = [
        ("alarm", f"step 3: loss 9.0 is 8.1 {JUMPED}"),
        ("alarm", "alarm: step 4, layer 1: 1 expert (8) received no token"),
        ("skipped", "step 5: a gradient is not finite"),
        ("skipped", "step 6: a gradient\nis not finite." + 300 * "x"),
        ("warning", "left out here: three kinds are told"),
        ("note", "of no interest"),
    ]
    troubles = dict(troubles_of(run_of(tmp_path / "run", FALLING, events=events)))
    assert list(troubles) == ["skipped", "spikes", "alarms"]
    assert troubles["skipped"].startswith("2 steps left out, the last: step 6: a gradient is not")
    assert troubles["spikes"].startswith("1 jump of the loss: step 3")
    assert troubles["alarms"] == "1 alarm: step 4, layer 1: 1 expert (8) received no token"
    assert max(map(len, troubles.values())) < 200


def test_failures_that_a_run_survived(tmp_path):
    run_of(tmp_path / "run", FALLING)
    for epoch in (2, 10, 3, 4):
        place = tmp_path / "run" / "failures" / str(epoch)
        place.mkdir(parents=True)
        failure = {"kind": "Killed", "message": "signal 9", "rank": epoch, "step": 7,
                   "action": "restart 1 of 3, from step 5"}  # fmt: skip
        (place / "failure.json").write_text(json.dumps(failure))
    (tmp_path / "run" / "failures" / "step-9").mkdir()
    (tmp_path / "run" / "failures" / "11").mkdir()
    (tmp_path / "run" / "failures" / "11" / "failure.json").write_text("{")
    run = Run.load(tmp_path / "run")
    assert [failure["rank"] for failure in run.earlier_failures] == [2, 3, 4, 10]
    survived = dict(troubles_of(run))["survived"]
    assert survived.startswith("4 failures, the newest 3: killed (rank 3, step 7), restart 1 of 3")
    assert survived.index("rank 4") < survived.index("rank 10") and "rank 2" not in survived
    assert "failures/11/failure.json" in dict(troubles_of(run))["files"]


def test_runs_without_a_step(tmp_path):
    run = run_of(tmp_path / "run", [], steps=10)
    assert state_of(run) == "interrupted"
    text = explain(run).text
    assert "before its first step" in text and "no checkpoint" in text
    (tmp_path / "run" / "failure.json").write_text('{"kind": "OSError", "message": "x"}')
    assert "before its first step: exception" in explain(Run.load(tmp_path / "run")).text


def test_uneven_gradients_without_progress_want_a_lower_rate(tmp_path):
    run = run_of(tmp_path / "run", scattered(5.0, 0.0), unigram=3.2)
    rows = [replace(row, grad_norm=50.0 if row.step % 30 == 0 else 1.0) for row in run.metrics]
    course = losses_of(replace(run, metrics=tuple(rows)))
    assert "too high" in course.verdict and course.change == "train.lr=0.003"


@pytest.mark.parametrize("kind", ["disk", "warning"])
def test_a_run_that_ended_on_a_full_disk(tmp_path, kind):
    text = "checkpoint of step 3 not saved: /r/step-3: No space left on device: 10 bytes needed"
    run = run_of(tmp_path / "run", FALLING, steps=200, events=[("start", "x"), (kind, text)])
    explanation = explain(run)
    assert (explanation.state, explanation.cause) == ("interrupted", "disk full")
    assert "while a disk was full" in explanation.text and text in explanation.text
    assert "Free space" in explanation.text and "out-of-memory" not in explanation.text


def test_missing_rows_are_named(tmp_path):
    """Rows cut out of the middle, at the beginning and at the end; the file removed."""
    folder = tmp_path / "run"
    run_of(folder, FALLING)
    file, num_steps = folder / "metrics.jsonl", len(FALLING)
    (folder / "summary.json").write_text(json.dumps({"steps": num_steps}))
    lines = file.read_text().splitlines(keepends=True)
    for kept, words in (
        (lines[:10] + lines[15:], "5 steps are missing (11 to 15)"),
        (lines[1:20] + lines[21:], "2 steps are missing (1, 21)"),
        (lines[:-3], f"3 steps are missing ({num_steps - 2} to {num_steps})"),
    ):
        file.write_text("".join(kept))
        assert words in dict(explain(Run.load(folder)).lines)["files"]
        assert words in page.write(folder).read_text()
    file.write_text("".join(lines[:10] + lines[15:]))
    seen = [event.text for event in Watched(folder).look() if event.kind == "warning"]
    assert seen == ["metrics.jsonl: 5 steps are missing (11 to 15)"]
    file.unlink()
    explanation = explain(Run.load(folder))
    assert "without a step" not in explanation.text and f"step {num_steps}" in explanation.text
    assert f"{num_steps} steps are missing (1 to {num_steps})" in explanation.text
    (folder / "checkpoints" / "step-7").mkdir(parents=True)
    seen = [event.text for event in Watched(folder).look() if event.kind == "warning"]
    assert seen == ["metrics.jsonl: 7 steps are missing (1 to 7)"]


def test_rows_of_the_first_schema(tmp_path):
    """Rows without a schema, of a version without waits, memory and events, and no plan."""
    row = {"step": 1, "loss": 3.0, "grad_norm": 1, "aux_loss": 0, "tokens": 9, "lr": 0.1,
           "tokens_per_second": 9, "seconds": 1}  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"step": 2}))
    explanation = explain(Run.load(tmp_path))
    assert (
        explanation.cause == "killed"
        and "step 2" in explanation.text
        and "9 tokens/s" in explanation.text
    )


def test_the_page_fits_a_terminal(tmp_path):
    events = [(kind, 50 * "many words ") for kind in ("rollback", "skipped", "copies", "alarm")]
    explanation = explain(run_of(tmp_path / "run", FALLING, {100: 9.0}, 3.2, events=events))
    for width in (60, 100):
        lines = explanation.wrapped(width).splitlines()
        assert max(len(line) for line in lines if not line.startswith("next: ")) <= width
    assert len(explanation.lines) <= 7 and explanation.to_json()["lines"] == dict(explanation.lines)
