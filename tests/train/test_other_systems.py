"""Runs without what only Linux has: one rank, two, resumed, and with a rank that is killed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests import commands
from tests.drill.rank import Spec
from tests.train.runs import arguments, metrics
from tests.waiting import PATIENCE
from tests.without_linux import MODULE

TWO = {"plan__dp": 2, "train__restarts": 0}


def elsewhere(*words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [commands.python(), "-m", MODULE, *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done


def test_a_run_goes_on_with_two_ranks_and_names_the_one_that_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    one = elsewhere("moemesh", *arguments(out, train__steps=2, train__checkpoint_every=2))
    assert one.returncode == 0, one.stderr
    two = elsewhere("moemesh", *arguments(out, train__steps=4, train__checkpoint_every=2, **TWO))
    assert two.returncode == 0 and "resumed from step 2" in two.stdout, two.stderr
    spec = Spec(action="kill", rank=1, step=6, place="forward", folder=str(tmp_path))
    words = arguments(out, train__steps=8, train__checkpoint_every=2, **TWO)
    killed = elsewhere("tests.drill.rank", spec.text(), *words)
    assert killed.returncode == 137, killed.stderr
    assert "moemesh: rank 1 was killed by SIGKILL\n" in killed.stderr
    assert json.loads((out / "failure.json").read_text())["rank"] == 1
    again = elsewhere("moemesh", *words)
    assert again.returncode == 0, again.stderr
    assert [row["step"] for row in metrics(out)] == list(range(1, 9))
