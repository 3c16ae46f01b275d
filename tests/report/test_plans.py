"""A run that went on under another plan: every figure of speed is of the current plan."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moemesh.report import page
from moemesh.report.bounds import evidence_of
from moemesh.report.explain import explain
from moemesh.trace.run import MetricsRow, Run, read_metrics
from tests.report.fake_run import CONFIG, entry, write_fake_run

SECOND = CONFIG.replace("pp = 2\ndp = 1", "pp = 1\ndp = 2")


def two_plans(folder: Path, *, first: int = 301, config: str = SECOND, last: int = 400) -> Run:
    """A run whose steps from `first` on were taken by a second start, with `config`, in a tenth of
    the time."""
    write_fake_run(folder)
    rows = [
        row if row.step < first else replace(row, seconds=0.02, tokens_per_second=204_800.0)
        for row in read_metrics(folder)
        if row.step <= last
    ]
    (folder / "metrics.jsonl").write_text("".join(map(MetricsRow.to_line, rows)))
    starts = [
        {"number": 1, "started": "2026-11-22T11:36:02+00:00", "first_step": 1, "config": CONFIG},
        {"number": 2, "started": "2026-11-22T12:00:00+00:00", "first_step": first,
         "config": config},
    ]  # fmt: skip
    (folder / "provenance.json").write_text(json.dumps({"schema": 1, "starts": starts}))
    return Run.load(folder)


def test_plans_and_their_steps_follow_from_the_starts(tmp_path: Path) -> None:
    run = two_plans(tmp_path / "run")
    assert [(one.first, one.last, one.record["dp"]) for one in run.plans] == [
        (1, 300, 1),
        (301, 400, 2),
    ]
    assert [row.step for row in run.current] == [*range(302, 401)]


@pytest.mark.parametrize("config", [CONFIG, CONFIG.replace("seed = 1", "seed = 2")])
def test_a_start_under_the_same_plan_is_no_change(tmp_path: Path, config: str) -> None:
    run = two_plans(tmp_path / "run", config=config)
    assert [(one.first, one.last) for one in run.plans] == [(1, 400)]
    assert not run.marks and not run.of_steps and len(run.current) == 399


@pytest.mark.parametrize("key", ["seq_len = 256", "global_batch = 16"])
def test_batches_of_another_size_are_a_change(tmp_path: Path, key: str) -> None:
    run = two_plans(tmp_path / "run", config=CONFIG.replace(key, f"{key}0"))
    assert [(one.first, one.last) for one in run.plans] == [(1, 300), (301, 400)]


def test_steps_done_again_belong_to_the_later_plan_and_a_plan_may_have_none(tmp_path: Path) -> None:
    assert two_plans(tmp_path / "again", first=1).plans[0].first == 1
    run = two_plans(tmp_path / "none", first=301, last=300)
    assert run.current == () and run.plans[-1].words == "steps 301 on, none of which has ended"
    assert "tokens/s" not in explain(run).text
    (
        page.document(run).to_html(),
        page.comparison(run, run).to_html(),
    )  # the page of a run that has just restarted


def test_explain_tells_the_speed_of_the_current_plan(tmp_path: Path) -> None:
    run = two_plans(tmp_path / "run")
    assert dict(explain(run).lines)["speed"] == (
        "204,800 tokens/s, 0.02 s a step (median, steps 301 to 400)"
    )
    assert dict(explain(Run.load(write_fake_run(tmp_path / "one"))).lines)["speed"].endswith(
        "(median)"
    )


def test_loads_of_ranks_are_those_of_the_current_plan(tmp_path: Path) -> None:
    run = two_plans(tmp_path / "run", first=391)  # its loads are in the bin of step 400 alone
    newest = [one.rank_max_over_mean for one in run.loads if one.step == 400]
    assert evidence_of(run).fact("fullest rank over mean") == pytest.approx(
        sum(newest) / len(newest)
    )


def test_the_page_names_plans_and_marks_where_they_change(tmp_path: Path) -> None:
    text = page.document(two_plans(tmp_path / "run")).to_html()
    assert "Tokens per second, median, steps 301 to 400" in text and ">204.8k<" in text
    assert "steps 1 to 300" in text and "pp = 2, tp = 2, ep = 2, microbatches = 4" in text
    assert "Median over all steps but the first, steps 301 to 400" in text
    # Losses, rate, norm and speed, wide and narrow, and the balance of experts.
    assert text.count(">plan 2</text>") == 12
    assert "plan 2" not in page.document(Run.load(write_fake_run(tmp_path / "one"))).to_html()


def test_the_page_tells_starts_apart_from_what_was_said_at_them(tmp_path: Path) -> None:
    run = two_plans(tmp_path / "run")
    assert (
        "Started 2026-11-22 11:36:02 UTC, resumed 2026-11-22 12:00 UTC."
        in page.document(run).to_html()
    )
    start = next(event for event in run.events if event.kind == "start")
    once = replace(run, starts=run.starts[:1], events=(start, start))
    assert "Started 2026-11-22 11:36:02 UTC." in page.document(once).to_html()


def test_the_comparison_is_of_the_current_plans(tmp_path: Path) -> None:
    run, one = two_plans(tmp_path / "run"), Run.load(write_fake_run(tmp_path / "one"))
    text = page.comparison(one, run).to_html()
    assert ">204.8k<" in text and "run: plan 2" in text
    assert "Of run, which has had 2 plans, medians, memory and traffic" in text


def test_bytes_of_validation_are_no_bytes_of_a_step(tmp_path: Path) -> None:
    run = Run.load(write_fake_run(tmp_path / "run"))
    before = page.comparison(run, run).to_html().split("Sent in a step of training")[1][:200]
    for ledger in run.ledgers.values():
        size = 2**30
        ledger.record(**entry("tp", "all_gather", "evaluate", "attention", 1, size, size, size))
    assert (
        page.comparison(run, run).to_html().split("Sent in a step of training")[1][:200] == before
    )
