"""Tests change nothing of the user's, and nothing of the user's changes what they find."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import commands, sandbox
from tests.ranks import RankFailed, run_on_ranks
from tests.report.fake_run import write_fake_run
from tests.sandbox import ROOT
from tests.waiting import PATIENCE, ended

pytest_plugins = ["pytester"]

WHERE = "import os; print(os.getcwd()); print(os.environ['HOME']); print(os.environ['SAID'])"
NONE = "no such file"


def where(rank: int) -> list[str]:
    return [os.getcwd(), os.environ["HOME"], os.environ["SAID"]]


@pytest.fixture(scope="module")
def of_module() -> list[Path]:
    Path("file").touch()
    return [Path.cwd(), Path.home()]


@pytest.mark.parametrize("time", [1, 2])
def test_a_test_has_a_directory_and_a_home(
    time: int, of_module: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [Path.cwd(), Path.home()]
    assert not set(places) & set(of_module) and ROOT not in places
    for place in places:
        assert list(place.iterdir()) == [], "another test was here"
        (place / "file").touch()
    monkeypatch.setenv("SAID", str(time))
    mine = [*map(str, places), str(time)]
    assert run_on_ranks(2, where) == [mine, mine]
    for python in (commands.python(), sys.executable):
        done = subprocess.run([python, "-c", WHERE], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == mine


def test_variables_of_the_user_are_gone() -> None:
    assert not list(filter(sandbox.FOREIGN.match, os.environ))
    for name in ("MOEMESH__train__steps", "GIT_DIR", "RANK", "LOCAL_RANK", "SLURM_PROCID"):
        assert sandbox.FOREIGN.match(name), name
    for name in ("PATH", "MOEMESH_TEST_BROWSER", "TMPDIR", "LINES_OF_MINE", "CUDA_VISIBLE_DEVICES"):
        assert not sandbox.FOREIGN.match(name), name


# The guard of the checkout.

CHANGES: dict[str, Callable[[], object]] = {
    "open": lambda: (ROOT / NONE).write_text(""),
    "os.open": lambda: os.open(ROOT / "moemesh" / NONE, os.O_CREAT),
    "os.mkdir": lambda: (ROOT / "runs" / NONE).mkdir(parents=True),
    "os.remove": lambda: (ROOT / NONE).unlink(),
    "os.rename from": lambda: (ROOT / NONE).rename("here"),
    "os.rename to": lambda: Path(NONE).rename(ROOT / NONE),
    "os.symlink": lambda: (ROOT / NONE / NONE).symlink_to("here"),
    "shutil.rmtree": lambda: shutil.rmtree(ROOT / NONE),
    "subprocess.Popen": lambda: subprocess.run(["true"], cwd=ROOT, check=True),
    "os.scandir": lambda: os.scandir(ROOT / "runs"),
    "open runs": lambda: (ROOT / "runs" / NONE).read_text(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_who_touches_the_checkout_fails(name: str) -> None:
    with pytest.raises(AssertionError, match=rf"test_who_touches.* {ROOT}"):
        CHANGES[name]()
    assert len(sandbox.violations()) == 1


def test_documents_are_read_and_copied(tmp_path: Path) -> None:
    assert (ROOT / "README.md").read_text() and os.listdir(ROOT)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "link").symlink_to(ROOT / "docs")
    (tmp_path / "link").unlink()
    assert sandbox.violations() == []


def leave_something(rank: int) -> None:
    (ROOT / NONE / NONE).write_text("")


def test_ranks_and_commands_are_watched() -> None:
    with pytest.raises(RankFailed, match=f"leaves the checkout alone: open {ROOT}"):
        run_on_ranks(1, leave_something)
    program = f"open({str(ROOT / NONE / NONE)!r}, 'w')"
    done = subprocess.run([commands.python(), "-c", program], capture_output=True, text=True)
    assert done.returncode == 1 and f"leaves the checkout alone: open {ROOT}" in done.stderr


CARELESS = """
import pathlib
from tests.sandbox import ROOT

def test_careful():
    pathlib.Path("left").touch()

def test_careless():
    try:
        (ROOT / "none" / "left").touch()
    except (AssertionError, OSError):
        pass

def test_later():
    assert not pathlib.Path("left").exists()
"""


def test_a_test_that_goes_on_fails_by_name(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    file = pytester.makepyfile(CARELESS)
    result = pytester.runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines([f"*none{os.sep}left", f"ERROR {file.name}::test_careless - *"])


# A copy of the checkout that has been used.

#: Variables of a user's environment; each changes the work or the output of a command.
USED = {
    "MOEMESH__train__steps": "0",
    "MOEMESH__plan__tp": "3",
    "MOEMESH__model__preset": '"none"',
    "RANK": "1",
    "WORLD_SIZE": "2",
    "SLURM_PROCID": "1",
    "GIT_DIR": "/none",
    "COLUMNS": "20",
    "FORCE_COLOR": "1",
    "GITHUB_ACTIONS": "true",
    "HF_HOME": "/none",
}


def used_checkout(folder: Path) -> Path:
    """The files of the project with those of its user: runs, data, settings."""
    for part in ROOT.iterdir():
        if part.is_file():
            shutil.copy(part, folder)
        elif part.name == ".ci" or not (part.match(".*") or part.name in {"runs", "build", "site"}):
            shutil.copytree(part, folder / part.name, ignore=shutil.ignore_patterns("__pycache__"))
    runs = folder / "runs"
    write_fake_run(runs / "tiny")
    write_fake_run(runs / "train_tiny", num_steps=4)
    for file in (runs / "train_tiny").iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    for name in ("first", "lora", "gpu", "a"):
        (runs / name / "checkpoints" / "step-00000002.tmp").mkdir(parents=True)
        (runs / name / "config.toml").write_text("[model\n")
    (runs / "file").write_text("no run")
    for name in ("moemesh.toml", "config.toml", "bad.toml", "a.toml", "tokenizer.json", "a.txt"):
        (folder / name).write_text("{[")
    (folder / "data").mkdir()
    (folder / "data" / "corpus.txt").write_bytes(b"\xff\xfe")
    return folder


def contents(folder: Path) -> dict[str, str]:
    """A digest of each file, but those that Python and pytest keep for themselves."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else ""
        for path in sorted(folder.rglob("*"))
        if not {"__pycache__", ".pytest_cache"} & set(path.relative_to(folder).parts)
    }


def run_in_a_used_checkout(folder: Path, *arguments: str, timeout: float) -> None:
    (folder / "home" / "runs" / "tiny").mkdir(parents=True)
    (folder / "home" / ".gitconfig").write_text("[[")
    checkout = folder / "checkout"
    checkout.mkdir()
    used_checkout(checkout)
    before = contents(folder)
    given = [sys.executable, "-m", "pytest", "--color=no", *arguments]
    environ = os.environ | USED | {"HOME": str(folder / "home"), "PYTHONPATH": ""}
    done = ended(given, cwd=checkout, env=environ, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE), done.stdout
    assert contents(folder) == before


@pytest.mark.slow
def test_verbs_that_write_pass_in_a_used_checkout(tmp_path: Path) -> None:
    """Those that look for a run, or make one, where they are called, and find one of the user's."""
    run_in_a_used_checkout(
        tmp_path,
        "tests/test_sandbox.py::test_variables_of_the_user_are_gone",
        "tests/cli/test_data.py::"
        "test_a_vocabulary_beyond_the_embedding_is_refused_before_anything_is_read",
        "tests/train/test_preparation.py::test_a_dry_run_says_all_and_writes_nothing",
        "tests/train/test_preparation.py::test_a_finished_run_is_told_before_its_data_is_read",
        timeout=PATIENCE,
    )


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_all_default_tests_pass_in_a_used_checkout(tmp_path: Path) -> None:
    nested = f"tests/test_sandbox.py::{test_verbs_that_write_pass_in_a_used_checkout.__name__}"
    run_in_a_used_checkout(tmp_path, f"--deselect={nested}", timeout=4 * 3600)
