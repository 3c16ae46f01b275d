"""The command works in any folder, for any user: real interpreters, nothing preloaded."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest

from moemesh.cli import application
from tests.train.runs import arguments, metrics
from tests.waiting import PATIENCE, ended

SHADOWS = ("torch", "json", "socket", "pickle", "typing")
NOBODY = 65534
#: Path of the console script, which pip installs next to the interpreter.
SCRIPT = Path(sys.executable).parent / "moemesh"
COMMAND = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-P", "-m", "moemesh"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a name of many letters, whose files have names of modules; the clone's too."""
    folder = tmp_path / "Übung für alle ✓"
    folder.mkdir()
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f'raise ImportError("{name} of the current directory")')
    for name in ("moemesh", "numpy"):
        (folder / name).mkdir()
    return folder


def environment(path: Path | None = None) -> dict[str, str]:
    """A plain one: the locale C, ASCII for output, no home."""
    dropped = ("HOME", "LANG", "PYTHONUTF8", "PYTHONPATH", "PYTHONSAFEPATH")
    kept = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("LC_")}
    kept |= {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    return kept | ({"PYTHONPATH": str(path)} if path is not None else {})


def run(
    *words: str, cwd: Path, code: int = 0, **options: object
) -> subprocess.CompletedProcess[str]:
    done = ended([*COMMAND, *words], cwd=cwd, encoding="ascii", **options)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.slow
def test_ranks_import_nothing_from_the_current_directory_but_from_pythonpath(
    folder: Path, tmp_path: Path
) -> None:
    """Training in a folder whose name is not ASCII."""
    path = tmp_path / "a path"
    path.mkdir()
    started = tmp_path / "started"
    (path / "sitecustomize.py").write_text(
        f"import os; open({str(started)!r}, 'a').write(os.environ.get('RANK', 'launcher') + '\\n')"
    )
    out = folder / "läuft"
    words = arguments(out, plan__dp=2, train__steps=2)
    done = run(*words, cwd=folder, env=environment(path))
    assert "l\\xe4uft" in done.stdout
    assert len(metrics(out)) == 2
    assert set(started.read_text().split()) >= {"launcher", "0", "1"}


def test_processes_that_tokenize_import_nothing_from_the_current_directory(folder: Path) -> None:
    texts = folder / "Texte"
    texts.mkdir()
    for name in "ab":
        (texts / f"{name}.txt").write_text("some text, " * 100)
    words = ("tokenize", "Texte", "aus/x", "--tokenizer", "bytes", "--processes", "2")
    run(*words, cwd=folder, env=environment())
    assert (folder / "aus/x.bin").stat().st_size == 2201


@pytest.mark.slow
def test_a_user_without_rights_or_a_home_trains_on_one_core() -> None:
    """Skipped where the tests do not run as root, or only root may read this Python."""
    options = {"user": NOBODY, "group": NOBODY, "env": environment() | {"HOME": "/"}}
    core = {min(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as name:  # pytest's own are closed to others
        folder = Path(name)
        try:
            os.chown(folder, NOBODY, NOBODY)
            run("--version", cwd=folder, **options)
        except (OSError, AssertionError) as error:
            pytest.skip(f"cannot be another user here: {error}")
        words = arguments(folder / "run", plan__dp=2, train__steps=2)
        run(*words, cwd=folder, preexec_fn=lambda: os.sched_setaffinity(0, core), **options)
        assert len(metrics(folder / "run")) == 2
        assert (folder / "run").stat().st_uid == NOBODY
        (folder / "closed").mkdir(mode=0o700)  # to all but root
        done = run("train", "--out", "closed/run", cwd=folder, code=2, **options)
        assert done.stderr == "moemesh: closed/run/report.html: Permission denied\n"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("Could not determine home directory."),
            "a path begins with ~ and the name of an unknown user: write it in full",
        ),
        (PermissionError(13, "Permission denied", "closed/run"), "closed/run: Permission denied"),
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "a" * 300),
            f"{'a' * 300}: File name too long",
        ),
    ],
)
def test_a_path_that_the_system_refuses_is_no_traceback(
    error: Exception,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*words: Any, **options: Any) -> None:
        if isinstance(error, RuntimeError):
            Path("~nobody-of-that-name").expanduser()
        raise error

    with pytest.raises(SystemExit) as ended:
        application.run(cast("Any", fail), "moemesh")
    assert ended.value.code == 2 and capsys.readouterr().err == f"moemesh: {message}\n"
    monkeypatch.setenv("RANK", "1")  # its launcher wants the traceback of a rank
    if isinstance(error, OSError):
        with pytest.raises(type(error)):
            application.run(cast("Any", fail), "moemesh")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
@pytest.mark.parametrize(
    "words", [("config", "show"), ("layout", "--model", "tiny", "--plan", "dp=2")]
)
def test_a_full_device_under_the_output_is_one_line(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True)
    line = "moemesh: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, line)


@pytest.mark.parametrize("closed", ["<&- >&-", "<&- >&- 2>&-"])
def test_closed_streams(tmp_path: Path, closed: str) -> None:
    """Runs whose caller has closed the standard streams, as some init systems do."""
    words = arguments(tmp_path / "run", plan__dp=2, train__steps=1)
    command = f"{shlex.join([*COMMAND, *words])} {closed}"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert len(metrics(tmp_path / "run")) == 1
    layout = shlex.join([*COMMAND, "layout", "--model", "tiny", "--plan", "dp=2"])
    assert subprocess.run(["sh", "-c", f"{layout} {closed}"], timeout=PATIENCE).returncode == 0
