"""The page of several runs."""

import html
import json
import re

import pytest

from moemesh.cli import insight
from moemesh.config.errors import UserError
from moemesh.report import page
from moemesh.report.explain import explain
from moemesh.trace.run import Run, RunError
from moemesh.trace.step_seconds import StepSeconds
from tests.report.fake_run import CONFIG, write_fake_run
from tests.report.test_page import Document, read, tables


@pytest.fixture
def runs(tmp_path):
    first = write_fake_run(tmp_path / "first", num_steps=40)
    second = write_fake_run(tmp_path / "second", num_steps=60)
    config = CONFIG.replace("tp = 2", "tp = 4").replace("lr = 0.001", "lr = 0.002")
    (second / "config.toml").write_text(config.replace('schedule = "1f1b"\n', ""))
    return first, second


def words(table: str) -> str:
    return " ".join(table.split())


def test_what_differs_comes_first(runs):
    sections = tables(read(page.write_comparison(*runs)))
    assert next(iter(sections)) == "Keys that differ"
    # A key that one file lacks has its default there: schedule is 1f1b in both.
    rows = words(sections["Keys that differ"])
    assert rows == "Key first second plan.tp 2 4 train.lr 0.001 0.002"


def test_results_curves_traffic_and_memory(runs):
    first, second = runs
    ledgers = json.loads((second / "ledger.json").read_text()) | {"steps": 2}
    (second / "ledger.json").write_text(json.dumps(ledgers))
    text = read(page.write_comparison(first, second))
    document = Document(text)
    sections = tables(text)
    results = words(sections["Results, speed, memory and traffic"])
    assert "Steps 40 60 +50.0 %" in results
    assert "State stopped stopped" in results or "State interrupted interrupted" in results
    traffic = words(sections["Bytes sent in one step by all ranks"])
    assert "pp forward 2.0 MiB 1.0 MiB -50.0 %" in traffic
    assert "peak 321.2 MiB 321.2 MiB none" in words(
        sections["Memory of the rank that holds most of each class (held, measured)"]
    )
    for name in ("first", "second"):
        assert text.count(f">{name}</text>") >= 10
    identities = [attributes["id"] for _, attributes in document.tags if "id" in attributes]
    assert len(identities) == len(set(identities))


def test_three_runs(tmp_path, runs):
    third = write_fake_run(tmp_path / "third", num_steps=20)
    config = (third / "config.toml").read_text()
    (third / "config.toml").write_text(config.replace("lr = 0.001", "lr = 0.003"))
    sections = tables(read(page.write_comparison(*runs, third)))
    keys = words(sections["Keys that differ"])
    assert keys == "Key first second third plan.tp 2 4 2 train.lr 0.001 0.002 0.003"
    results = words(sections["Results, speed, memory and traffic"])
    assert "Steps 40 60 20 Tokens" in results and "Change" not in results


def test_runs_with_little_in_them(tmp_path, runs):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.toml").write_text(CONFIG)
    Document(read(page.write_comparison(runs[0], empty)))
    text = read(page.write_comparison(empty, empty))
    assert "Every key has the same value." in text and "No run has a ledger.json." in text
    alone = {"steps": 3, "ranks": [{"rank": 0, "entries": []}]}
    (empty / "ledger.json").write_text(json.dumps(alone))
    text = read(page.write_comparison(empty, empty))
    assert "No rank of a run sent anything" in text and "No run has a ledger.json." not in text
    with pytest.raises(RunError):
        page.write_comparison(runs[0], tmp_path / "none")


def test_out(tmp_path, runs, capsys):
    insight.report(runs[0], [runs[1]], tmp_path / "both.html")
    assert capsys.readouterr().out.strip() == str(tmp_path / "both.html")
    assert not (runs[0] / page.COMPARISON).exists()
    insight.report(runs[0], None, tmp_path / "one.html")
    assert "first" in read(tmp_path / "one.html")
    for wrong in (tmp_path / "none" / "x.html", tmp_path):
        with pytest.raises(UserError, match="cannot be written"):
            insight.report(runs[0], None, wrong)


def test_seconds_by_part_and_the_explanations_are_compared(tmp_path):
    folders = [write_fake_run(tmp_path / name, num_steps=20) for name in ("a", "b")]
    for folder, attention in zip(folders, (2.0, 3.0), strict=True):
        seconds = StepSeconds(steps=19, ranks={0: {"attention": attention, "optimizer": 1.0}})
        (folder / "seconds.json").write_text(json.dumps(seconds.to_json()))
    text = page.write_comparison(*folders).read_text()
    row = r"attention</th><td>2,000.000</td><td>3,000.000</td><td>\+50.0 %</td>"
    assert re.search(row, text) and "Exposed communication" not in text
    for name, folder in zip("ab", folders, strict=True):
        sentences = " ".join(explain(Run.load(folder)).sentences)
        assert f"<b>{name}:</b> {sentences}" in html.unescape(text)
