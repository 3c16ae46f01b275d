"""Hostile files: depth and size of JSON and TOML, control characters, links in a run's folder."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.header import read_header
from moemesh.config.limits import one_line, parse_json, parse_toml, visible
from moemesh.monitor.lease import RunFolderError, read_claim
from moemesh.report import svg
from moemesh.report.watch import Watched
from moemesh.train.records.run_folder import RunFolder
from tests.test_cli import Invoke, run_all_guarded

#: A title of the window, a clear screen, C1, a line of another direction, a line separator.
STEERING = "\x1b]0;mine\x07\x1b[2J\x9b31m\u202eabc\u2066\u2028\r"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def test_what_steers_a_terminal_is_escaped() -> None:
    shown = r"\x1b]0;mine\x07\x1b[2J\x9b31m\u202eabc\u2066\u2028\r"
    assert visible(STEERING) == shown
    assert visible("ü 漢字 👩\u200d💻\ta\nb") == "ü 漢字 👩\u200d💻\ta\nb"
    assert one_line("a\nb") == r"a\nb"
    assert svg.escape("<\x1b\u202e>") == r"&lt;\x1b\u202e&gt;"


def test_no_verb_prints_what_steers_a_terminal() -> None:
    commands = (
        ["config", "check", f"no{STEERING}.toml"],
        ["report", f"no{STEERING}"],
        ["plan", "--model", f"x{STEERING}"],
        ["train", "--set", f"data.path={STEERING}", "--dry-run"],
        ["balance", f"x{STEERING}.csv", "--gpus", "2"],
        ["train", f"--{STEERING}"],
    )
    done = run_all_guarded({"torch"}, *commands)
    assert done.returncode == 2
    assert not CONTROLS.search(done.stdout + done.stderr)
    messages = done.stderr.split("moemesh: ")[1:]
    assert len(messages) == len(commands)
    assert all("\\x1b" in message or "\\u001B" in message for message in messages)


def test_names_of_tensors_are_refused_with_what_they_hold(tmp_path: Path) -> None:
    header = json.dumps({f"a{STEERING}\n": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}})
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
    with pytest.raises(CheckpointError, match="a name has control characters") as caught:
        read_header(file)
    assert not CONTROLS.search(str(caught.value))
    assert "\n" not in str(caught.value)


def test_events_of_another_are_shown_without_steering(tmp_path: Path, invoke: Invoke) -> None:
    name = tmp_path / "run[red]"
    name.mkdir()
    event = {"time": "now\n", "kind": "note", "text": f"x{STEERING}\ny", "step": 1}
    last = event | {"kind": "finished", "text": "done"}
    (name / "events.jsonl").write_text(json.dumps(event) + "\n" + json.dumps(last) + "\n")
    code, out, _ = invoke("watch", str(name))
    assert code == 0 and not CONTROLS.search(out)
    watched = Watched(name)
    watched.look()
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        console.print(watched.view.panel(100))
    assert not CONTROLS.search(captured.get())


def test_depth_and_size_are_limited(tmp_path: Path) -> None:
    deep = "[" * 100_000
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(deep)
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_toml(f"a = {deep}")
    begin = time.process_time()
    twice = json.dumps({f"{number}": 0 for number in range(200_000)})[:-1] + ', "199999": 1}'
    with pytest.raises(ValueError, match="the key 199999 is repeated"):
        parse_json(twice)
    assert parse_json('{"a": 1, "a": 2}', last_counts=True) == {"a": 2}
    for text in (
        ".".join("a" * 50_000) + " = 1",
        f"[{'.'.join('a' * 50_000)}]",
        f"a = {{ {' . '.join('b' * 50_000)} = 1 }}",
        ".".join(['"x"'] * 50_000) + " = 1",
    ):
        with pytest.raises(ValueError, match="more than 100 parts"):
            parse_toml(f"# first\n{text}\n")
    assert time.process_time() - begin < 5
    assert parse_toml("a = [" + "0.5, " * 500 + "]")["a"] == [0.5] * 500
    (tmp_path / "lease").write_text(deep)
    assert read_claim(tmp_path) is None


@pytest.mark.parametrize("name", ["lease", "events.jsonl", "logs/rank-0.err", "checkpoints", "x"])
def test_a_run_writes_through_no_link(tmp_path: Path, name: str) -> None:
    other = tmp_path / "precious"
    other.write_text("mine")
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(other)
    with pytest.raises(RunFolderError, match="is a symbolic link"):
        RunFolder.open(tmp_path / "run")
    assert other.read_text() == "mine"
    link.unlink()
    RunFolder.open(tmp_path / "run").lock()
