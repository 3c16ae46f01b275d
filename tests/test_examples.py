"""Every example is short and runs; the runs that they make are read back."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import commands
from tests.documents import SMALL_RUN

EXAMPLES = Path(__file__).parent.parent / "examples"
TESTED = {"train_tiny.toml", "one_layer_by_hand.py", "compare_plans.py", "read_a_run.py"}


def run(*arguments: str | Path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MOEMESH__")}
    done = subprocess.run(
        [commands.python(), *map(str, arguments)],
        env=environment | SMALL_RUN,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_short_and_tested() -> None:
    found = {path.name: path for path in EXAMPLES.iterdir() if path.is_file()}
    assert found.keys() == TESTED
    for path in found.values():
        assert len(path.read_text().splitlines()) <= 40, path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of train_tiny.toml."""
    out = tmp_path_factory.mktemp("tiny") / "run"
    printed = run("-m", "moemesh", "train", EXAMPLES / "train_tiny.toml", "--out", out)
    assert "16 experts, top 4" in printed and "dispatcher=all_gather" in printed
    return out


def test_read_a_run(tiny: Path) -> None:
    printed = run(EXAMPLES / "read_a_run.py", tiny)
    assert "step     2  loss" in printed and "warning" not in printed
    for axis in ("tp", "ep_etp", "stage"):
        assert re.search(rf"^rank [01] sends +\d+\.\d+ MiB a step over {axis} ", printed, re.M)


def test_one_layer_by_hand() -> None:
    printed = run(EXAMPLES / "one_layer_by_hand.py")
    counts = re.search(r"rows of each expert: \[(.*)\]", printed)
    assert counts is not None
    assert sum(map(int, counts[1].split(","))) == 6 * 2


def test_compare_plans(tmp_path: Path) -> None:
    printed = run(EXAMPLES / "compare_plans.py", tmp_path)
    assert "step 3: loss" in printed
    assert (tmp_path / "spread" / "report.html").is_file()
