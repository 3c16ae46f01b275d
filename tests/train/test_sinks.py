"""Sinks: rows for other programs; no failure of a sink ends the loop."""

from __future__ import annotations

import csv
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from moemesh.config.errors import ConfigError
from moemesh.sharding.load_run import load_run
from moemesh.train import preparation
from moemesh.train.preparation import untrainable
from moemesh.train.records import rows as module
from moemesh.train.records.rows import CsvSink, Sinks, WandbSink
from tests.trace.test_run import row


class Collector:
    """A sink that keeps its rows; `stops` makes it wait, `fails` raise."""

    def __init__(self, fails: bool = False, stops: threading.Event | None = None) -> None:
        self.steps: list[int] = []
        self.is_closed = False
        self._fails, self._stops = fails, stops

    def write(self, given: object) -> None:
        if self._stops is not None:
            self._stops.wait()
        if self._fails:
            raise OSError(28, "No space left on device")
        self.steps.append(given.step)  # type: ignore[attr-defined]

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def openers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OPENERS", {})


def opened(tmp_path: Path, **found: Collector) -> tuple[Sinks, list[str]]:
    said: list[str] = []
    for name, sink in found.items():
        module.OPENERS[name] = lambda folder, first, sink=sink: sink
    return Sinks(tuple(found), tmp_path, 1, lambda text, kind: said.append(text)), said


def test_every_sink_gets_every_row_in_order(tmp_path: Path) -> None:
    one, other = Collector(), Collector()
    sinks, said = opened(tmp_path, one=one, other=other)
    for step in range(1, 101):
        sinks.put(row(step))
    sinks.close()
    sinks.close()
    assert one.steps == other.steps == list(range(1, 101))
    assert one.is_closed and not said


def test_a_sink_that_fails_costs_rows_and_one_warning(tmp_path: Path) -> None:
    bad, good = Collector(fails=True), Collector()
    sinks, said = opened(tmp_path, bad=bad, good=good)
    for step in range(1, 21):
        sinks.put(row(step))
    sinks.close()
    assert good.steps == list(range(1, 21))
    assert said == [
        "sink bad fails (OSError: [Errno 28] No space left on device); rows are dropped for it",
        "rows that sinks did not get: bad 20",
    ]


def test_a_sink_that_cannot_be_opened_costs_its_rows(tmp_path: Path) -> None:
    def refuse(folder: Path, first: int) -> Collector:
        raise SystemExit("no login")

    module.OPENERS["x"], said = refuse, list[str]()
    sinks = Sinks(("x",), tmp_path, 1, lambda text, kind: said.append(text))
    sinks.put(row(1))
    sinks.close()
    assert said[0].startswith("sink x cannot be opened (SystemExit: no login)")
    assert said[1] == "rows that sinks did not get: x 1"


def test_a_sink_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_QUEUED", 10)
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.3)
    released = threading.Event()
    stuck = Collector(stops=released)
    sinks, said = opened(tmp_path, stuck=stuck)
    start = time.monotonic()
    for step in range(1, 1001):
        sinks.put(row(step))
    sinks.close()
    released.set()
    assert time.monotonic() - start < 100  # it hangs until it is released
    assert said[0] == "sinks (stuck) are too slow: rows are dropped for them"
    assert "did not end in 0.3 s; 10 rows are lost" in said[1]
    assert said[2] in [f"rows that sinks did not get: not queued {n}" for n in (989, 990)]
    assert len(said) == 3


def test_no_thread_without_sinks(tmp_path: Path) -> None:
    before = threading.active_count()
    sinks, _ = opened(tmp_path)
    sinks.put(row(1))
    assert threading.active_count() == before
    sinks.close()


def test_csv_goes_on_behind_the_checkpoint(tmp_path: Path) -> None:
    first = CsvSink(tmp_path, 1)
    for step in range(1, 6):
        first.write(row(step, loss=1 / step))
    second = CsvSink(tmp_path, 4)
    second.write(row(4, loss=0.1 + 0.2, validation_loss=None))
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(one["step"], float(one["loss"])) for one in rows] == [
        ("1", 1.0), ("2", 0.5), ("3", 1 / 3), ("4", 0.1 + 0.2)
    ]  # fmt: skip
    assert rows[-1]["validation_loss"] == ""


def test_wandb_is_one_run_over_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            calls.append((step, values["loss"], "validation_loss" in values))

        def finish(self) -> None:
            calls.append("finish")

    def init(**given: object) -> Run:
        calls.append((given["id"], given["resume"]))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    for step in (1, 2):
        sink = WandbSink(tmp_path, step)
        sink.write(row(step))
        sink.close()
    assert calls[0] == calls[3] and calls[0][1] == "allow"  # type: ignore[index]
    assert calls[1:3] == [(1, 2.5, False), "finish"]


def test_a_package_that_is_missing_is_named_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preparation, "find_spec", lambda name: None)
    (problem,) = untrainable(load_run([], ['train.sinks=["csv", "wandb"]']))
    assert problem.key == "train.sinks" and "pip install wandb" in problem.fix
    with pytest.raises(ConfigError, match="tensorboard"):
        load_run([], ['train.sinks=["tensorbord"]'])
