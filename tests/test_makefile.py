"""The Makefile installs the right build of torch, in a folder whose name has spaces."""

from __future__ import annotations

import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import ended

ROOT = Path(__file__).parent.parent
#: Stands for Python: makes environments of itself, writes its arguments down instead of installing,
#: has no package whose requirement is in REFUSED, and runs programs.
PYTHON = f"""#!/bin/sh
case "$1 $2" in
"-c "*) exec "{sys.executable}" "$@" ;;
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip")
  echo "$*" >> "$LOG"
  case "$*" in *"$REFUSED"*) echo no such version >&2; exit 1 ;; esac ;;
esac
"""
PINNED, NEWEST = "torch==2.13.0", "torch>=2.10"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "a clone"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    (folder / "a python").write_text(PYTHON)
    (folder / "a python").chmod(0o755)
    return folder


@pytest.fixture
def index() -> Iterator[str]:
    """The address of an index that answers."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/cpu/torch/" else 404)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/cpu"
        server.shutdown()


def make(clone: Path, *words: str, refused: str = "nothing") -> subprocess.CompletedProcess[str]:
    """Run `make` without the variables of the `make` that runs the tests, and without a proxy."""
    hidden = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES")
    environ = {k: v for k, v in os.environ.items() if k not in hidden}
    environ |= {"LOG": str(clone / "log"), "REFUSED": refused, "no_proxy": "127.0.0.1"}
    return ended(["make", *words, "PYTHON=./a python"], cwd=clone, env=environ)


def installed(clone: Path) -> list[list[str]]:
    """Arguments of each call of pip, torch first."""
    lines = (clone / "log").read_text().splitlines()
    requests = [line.split("--no-compile ")[1] for line in lines if "install" in line]
    return [line.split() for line in requests]


def test_the_cpu_build_is_taken_where_the_index_answers(clone: Path, index: str) -> None:
    done = make(clone, ".venv/ready", "GPU=", f"CPU_WHEELS={index}")
    assert done.returncode == 0, done.stderr
    assert installed(clone) == [["--extra-index-url", index, PINNED], ["-e", "."]]
    assert (clone / ".venv/ready").exists() and not done.stderr
    make(clone, ".venv/ready", "GPU=", f"CPU_WHEELS={index}")
    assert len(installed(clone)) == 2  # once
    make(clone, ".venv/tools", "GPU=", f"CPU_WHEELS={index}")
    assert installed(clone)[2:] == [["-e", ".[dev]"]]


@pytest.mark.parametrize(
    ("cores", "plan"), [(1, ""), (2, "plan.dp=2 plan.ep=2"), (4, "plan.tp=2 plan.dp=2 plan.ep=4")]
)
def test_training_takes_as_many_ranks_as_there_are_cores(
    clone: Path, cores: int, plan: str
) -> None:
    command = make(clone, "-n", "train", f"CORES={cores}").stdout.splitlines()[-1]
    assert " ".join(re.findall(r"--set (plan\S+)", command)) == plan


def test_an_index_that_does_not_answer_changes_nothing(clone: Path, index: str) -> None:
    done = make(clone, ".venv/ready", "GPU=", f"CPU_WHEELS={index}/nothing")
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert installed(clone) == [[PINNED], ["-e", "."]]


def test_a_python_without_the_pinned_version_gets_the_newest(clone: Path) -> None:
    done = make(clone, ".venv/ready", "CPU_WHEELS=", refused=PINNED)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert installed(clone) == [[PINNED], [NEWEST], ["-e", "."]]


def test_what_stands_in_the_way_of_the_last_attempt_is_shown(clone: Path) -> None:
    done = make(clone, ".venv/ready", "CPU_WHEELS=", refused="torch")
    assert done.returncode != 0 and done.stderr.count("no such version") == 1
    assert not (clone / ".venv/ready").exists()


@pytest.mark.parametrize(("gpu", "expected"), [("", True), ("/usr/bin/nvidia-smi", False)])
def test_a_gpu_means_the_default_build(clone: Path, gpu: str, expected: bool) -> None:
    done = make(clone, "-n", ".venv/ready", f"GPU={gpu}")
    assert ('--extra-index-url "https://download.pytorch.org' in done.stdout) is expected


def test_the_driver_is_found_by_its_tool(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = clone / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    assert "download.pytorch.org" not in make(clone, "-n", ".venv/ready").stdout


def test_an_old_python_is_named_before_anything_is_installed(clone: Path) -> None:
    old = '#!/bin/sh\nshift; echo "import sys; sys.version_info = (3, 9); $1" | '
    (clone / "a python").write_text(f'{old}exec "{sys.executable}" -\n')
    done = make(clone, "train")
    assert done.returncode != 0 and "Python 3.11 or newer is needed" in done.stderr
    assert not (clone / ".venv").exists()


def test_ci_calls_the_commands_of_the_readme_in_its_order() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    called = [line.split()[1] for line in lines if line.startswith("make ")]
    shown = (ROOT / "README.md").read_text().partition("## Two commands")[2].partition("\n## ")[0]
    readme = [line.split()[2] for line in shown.splitlines() if line.startswith("$ make ")]
    assert called == [*readme, "check", "house"] == ["train", "test", "check", "house"]
