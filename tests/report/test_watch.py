"""Watching a run: only what is new is read, and the end is known from the files."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console
from typer import Exit

from moemesh.cli.insight import watch
from moemesh.config.errors import UserError
from moemesh.report import watch as module
from moemesh.report.watch import Curve, Tail, View, Watched, sparkline
from tests.trace.test_run import row

BIN = [sys.executable, "-m", "moemesh", "watch"]


def append(file: Path, *rows: dict[str, object]) -> None:
    with file.open("a") as opened:
        opened.writelines(json.dumps(one) + "\n" for one in rows)


def event(kind: str, text: str = "", step: int | None = None) -> dict[str, object]:
    return {"time": "2026-01-01T00:00:00+00:00", "step": step, "kind": kind, "text": text}


def lease(folder: Path, pid: int, host: str = "") -> None:
    body = {"host": host or socket.gethostname(), "pid": pid, "started": "now"}
    (folder / "lease").write_text(json.dumps(body))


def run(folder: Path, steps: int = 3, total: int = 10) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text(f"[train]\nsteps = {total}\n")
    append(folder / "events.jsonl", event("start", "model  7 layers\nplan   2 rank(s)"))
    details = {
        "mfu": 0.4,
        "tflops_per_rank": 0.01,
        "load_max_over_mean": 1.5,
        "data_seconds": 0.02,
        "memory_bytes": 2**31,
    }
    append(folder / "metrics.jsonl", *(row(n, **details).to_json() for n in range(1, steps + 1)))
    lease(folder, os.getpid())
    return folder


def shown(view: View, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(view.panel(width))
    return console.export_text()


def test_a_panel_says_what_one_asks(tmp_path: Path) -> None:
    watched = Watched(run(tmp_path / "run"))
    append(watched.folder / "events.jsonl", event("alarm", "routing\ncollapses"))
    append(watched.folder / "events.jsonl", event("note", "note: a high rate"))
    watched.look()
    text = shown(watched.view)
    for part in (
        "step 3/10", "loss 2.5000", "left", "tokens/s", "1,000", "40.0%", "2.00 GiB",
        "data 20%", "fullest 1.50 x the mean", "alarm: routing collapses", "run",
    ):  # fmt: skip
        assert part in text, part
    assert "note: a high rate" in text and "note: note" not in text
    names = [line.strip("│ ").split("  ")[0] for line in text.splitlines()]
    assert {"tokens/s", "compute", "peak memory", "waits"} <= {*names}, names
    for width in (30, 79, 200):
        assert max(map(len, shown(watched.view, width).splitlines())) <= width
    assert "step 3/10  loss 2.5000" in watched.view.line()


def test_only_new_lines_are_read_and_torn_ones_later(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    tail = Tail(file)
    assert tail.objects() == (False, None)
    file.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert tail.objects() == (False, [{"a": 1}, {"a": 2}])
    assert tail.objects() == (False, None)
    with file.open("a") as opened:
        opened.write(': 3}\nbad\n[1]\n{"a": 4}\n')
    assert tail.objects() == (False, [{"a": 3}, {"a": 4}])
    file.write_text('{"a": 9}\n')
    assert tail.objects() == (True, [{"a": 9}])


def test_long_files_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_READ_BYTES", 1000)
    watched = Watched(run(tmp_path / "run", steps=200))
    watched.look()
    assert watched.view.row is not None and watched.view.row.step == 200


def test_rows_that_were_cut_back_are_forgotten(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", steps=5)
    watched = Watched(folder)
    watched.look()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:2]))
    watched.look()
    assert watched.view.row is not None and watched.view.row.step == 2
    append(folder / "metrics.jsonl", *(row(n, loss=9.0).to_json() for n in (3, 4, 5, 6)))
    watched.look()
    assert watched.view.row.step == 6


def test_curves_are_bounded() -> None:
    curve = Curve()
    for value in range(100_000):
        curve.add(float(value))
    curve.add(float("nan"))
    assert len(curve.points) < module.MOST_POINTS
    assert curve.points == sorted(curve.points) and curve.points[-1] > 99_000
    assert len(sparkline(curve.points, 40)) == 40


def test_how_a_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run(tmp_path / "run")
    watched = Watched(folder)
    watched.look()
    assert watched.end() is None
    gone = subprocess.Popen(["true"])
    gone.wait()
    lease(folder, gone.pid)
    assert watched.end() == (False, "the run has stopped running")
    (folder / "failure.json").write_text(json.dumps({"rank": 1, "message": "out of\nmemory"}))
    assert watched.end() == (False, "the run has failed: out of memory")
    lease(folder, gone.pid, host="elsewhere")
    assert watched.end() == (False, "the run has failed: out of memory")
    (folder / "failure.json").unlink()
    assert watched.end() is None  # another host: its state is unknown
    body = json.loads((folder / "lease").read_text())
    (folder / "lease").write_text(json.dumps({**body, "held": True, "counter": 7}))
    assert watched.end() is None
    monkeypatch.setattr(module, "_BEAT_SECONDS", -1.0)  # it has stood still for too long
    assert watched.end() == (False, "the run has stopped running")
    monkeypatch.undo()
    (folder / "lease").unlink()  # a copy of the other files
    assert Watched(folder).end() is None
    assert watched.end() is None
    monkeypatch.setattr(module, "_BEAT_SECONDS", -1.0)
    assert watched.end() == (False, "the run has stopped running")
    monkeypatch.undo()
    (folder / "lease").write_text(json.dumps({**body, "held": False}))
    assert watched.end() == (False, "the run has stopped running")
    for kind, how in (("finished", "has finished"), ("stopped", "has been stopped")):
        append(folder / "events.jsonl", event(kind))
        watched.look()
        assert watched.end() == (True, f"the run {how}")
    lease(folder, os.getpid())
    append(folder / "events.jsonl", event("start"))  # it continues, to another end
    (folder / "config.toml").write_text("[train]\nsteps = 50\n")
    watched.look()
    assert watched.end() is None and watched.view.total == 50


def test_lines_in_a_pipe_until_the_end(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")

    command = [*BIN, str(folder), "--every", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith("start: model  7 layers\n")
        assert process.stdout.readline().endswith("start: plan   2 rank(s)\n")
        assert process.stdout.readline().startswith("step 3/10  loss 2.5")
        append(folder / "metrics.jsonl", row(4).to_json())
        append(folder / "events.jsonl", event("finished", "validation loss 2"))
        lines = process.stdout.read().splitlines()
    assert process.returncode == 0 and len(lines) == 3
    assert lines[1].startswith("step 4/10") and lines[2] == "the run has finished"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    for name, wait, reason in (
        ("notes", 0.0, "holds no run"),
        ("absent", 0.2, "holds no run"),
        ("file", 60.0, "is a file"),
        ("empty", 0.2, "holds no run"),
        ("no/such", 0.2, "holds no run"),
        ("no/such/run", 60.0, "must exist before"),
    ):
        with pytest.raises(UserError, match=reason):
            watch(tmp_path / name, every=None, wait=wait)


def test_a_run_that_begins_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def begin() -> None:
        append(run(tmp_path / "run") / "events.jsonl", event("stopped"))

    timer = threading.Timer(0.1, begin)
    timer.start()
    with pytest.raises(Exit) as end:
        watch(tmp_path / "run", every=0.1, wait=60.0)
    timer.join()
    assert end.value.exit_code == 0
    assert "the run has been stopped" in capsys.readouterr().out
