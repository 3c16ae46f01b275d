"""Completion of a shell, by the protocol of its script: words in the environment, names out."""

from __future__ import annotations

from pathlib import Path

import pytest

from moemesh.bench.settings import OPERATIONS
from moemesh.config.dispatcher_table import DISPATCHERS
from moemesh.config.schedule_table import SCHEDULES
from moemesh.config.schema import all_keys
from moemesh.config.sources import preset_names
from tests.test_cli import Invoke, run_guarded

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


def ask(monkeypatch: Patch, line: str, shell: str = "bash") -> None:
    """Ask as the script of a shell does for the last word of `line`."""
    monkeypatch.setenv("_MOEMESH_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("plan --model ", {*preset_names(), *preset_names("shapes")}),
        ("plan --cluster dgx_h", {"dgx_h100", "dgx_h200"}),
        ("partition --cluster lap", {"laptop_cpu"}),
        ("explain runs/first --cluster lap", {"laptop_cpu"}),
        ("cluster show lap", {"laptop_cpu"}),
        ("estimate --plan ", set(preset_names("plans"))),
        ("dispatch ", set(preset_names("routings"))),
        ("dispatch --dispatcher ", {*DISPATCHERS, "auto"}),
        ("schedule ", {*SCHEDULES, "search"}),
        ("bench links --operations ", {"all", *OPERATIONS}),
        ("bench links --operations send,all_to", {"send,all_to_all"}),
        ("train --set ", {f"{key}=" for key in all_keys()}),
        ("config show --set plan.schedule=zb_h", {"plan.schedule=zb_h1", "plan.schedule=zb_h2"}),
        ("layout --set model.preset=ti", {"model.preset=tiny"}),
        ("train --set plan.overlap_blocks=t", {"plan.overlap_blocks=true"}),
        ("train --set plan.tp=", set()),
        ("train --set nowhere.tp=", set()),
    ],
)
def test_names(invoke: Invoke, monkeypatch: Patch, line: str, names: set[str]) -> None:
    ask(monkeypatch, f"moemesh {line}")
    code, out, err = invoke()
    assert (code, err, set(out.split())) == (0, "", names)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(invoke: Invoke, monkeypatch: Patch, shell: str) -> None:
    ask(monkeypatch, "moemesh plan --model tin", shell)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    code, out, _ = invoke()
    assert code == 0 and "tiny" in out


def test_keys_need_neither_torch_nor_numpy(monkeypatch: Patch) -> None:
    ask(monkeypatch, "moemesh train --set plan.dispatch")
    process = run_guarded({"torch", "numpy"})
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.split() == ["plan.dispatcher=", "plan.dispatch_chunks="]


def test_the_script_is_installed(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    # Without this the shell is that of a parent process, and the tests may have no such parent.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    process = run_guarded({"torch", "numpy"}, "--install-completion", "bash")
    assert process.returncode == 0, process.stdout + process.stderr
    scripts = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("_MOEMESH_COMPLETE" in path.read_text() for path in scripts)
