"""The wheel holds every file of the package, and runs where nothing else of the clone is."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import arguments, metrics
from tests.waiting import ended

ROOT = Path(__file__).parent.parent
#: Files of a wheel besides the package.
BESIDE = ("pyproject.toml", "README.md", "LICENSE")


def source(folder: Path, place: Callable[[Path, Path], object]) -> Path:
    for name in ("moemesh", *BESIDE):
        place(ROOT / name, folder / name)
    return folder


def test_every_file_of_the_package_is_in_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the discovery of setuptools itself, without a build."""
    setuptools: Any = pytest.importorskip("setuptools")
    configuration: Any = pytest.importorskip("setuptools.config.pyprojecttoml")
    monkeypatch.chdir(source(tmp_path, lambda file, link: link.symlink_to(file)))
    distribution = setuptools.Distribution({"script_name": "setup.py"})
    configuration.apply_configuration(distribution, "pyproject.toml")
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    packed = {
        *(Path(file) for _, _, file in build.find_all_modules()),
        *(Path(folder) / name for _, folder, _, names in build.data_files for name in names),
    }
    expected = {
        file.relative_to(ROOT)
        for file in (ROOT / "moemesh").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert packed == expected
    assert {file.suffix for file in expected} == {
        ".py",
        ".pyi",
        ".toml",
        ".html",
        ".jinja",
        ".typed",
    }


@pytest.mark.slow
def test_a_wheel_in_an_environment_of_its_own_trains(tmp_path: Path) -> None:
    """This environment lends the dependencies of the package, but not moemesh itself."""
    pytest.importorskip("setuptools")
    pip = [sys.executable, "-m", "pip", "--quiet"]
    ignored = shutil.ignore_patterns("__pycache__")
    clone = tmp_path / "clone"
    clone.mkdir()
    source(
        clone,
        lambda a, b: shutil.copytree(a, b, ignore=ignored) if a.is_dir() else shutil.copy(a, b),
    )
    call(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(clone))
    (wheel,) = tmp_path.glob("moemesh-*.whl")
    shutil.rmtree(clone)
    python = tmp_path / "own/bin/python"
    call(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "own"))
    call(*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    # Folders of a .pth file come last, and their own .pth files, an editable moemesh, do not count.
    lent = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site,) = (tmp_path / "own").glob("lib/*/site-packages")
    (site / "lent.pth").write_text("\n".join(lent))
    out = tmp_path / "run"
    command = str(python.parent / "moemesh")
    call(command, *arguments(out, plan__dp=2, train__steps=2), cwd=tmp_path)
    assert len(metrics(out)) == 2 and (out / "report.html").is_file()
    assert "finished step 2 of 2" in call(command, "explain", str(out), cwd=tmp_path)
    call(command, "generate", str(out), "--prompt", "def ", "--max-tokens", "2", cwd=tmp_path)
    # The second job of the README: its own command, and the file that it writes.
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (words,) = re.findall(r"^\$ moemesh (plan .* --write plan\.toml)$", readme, re.MULTILINE)
    chosen = call(command, *shlex.split(words), "--html", "plan.html", cwd=tmp_path)
    assert "moemesh train plan.toml" in chosen and (tmp_path / "plan.html").is_file()
    call(command, "config", "check", "plan.toml", cwd=tmp_path)
    printed = call(str(python), "-c", "import moemesh; print(moemesh.__file__)", cwd=tmp_path)
    assert printed.startswith(str(site))


def call(*command: str, **options: Any) -> str:
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = ended(command, env=environ, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
