"""`benchmarks.step` measures the same work twice: both trainers have the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import step
from benchmarks.settings import GENERATED, StepSettings
from benchmarks.step_peer import peer_step, write_model
from benchmarks.text import step_text
from benchmarks.turns import tokens_of_round
from moemesh.comm.mesh import Mesh
from moemesh.trace.machine import OPENMP_WAITING, limit_spinning
from tests.ranks import mesh_on_ranks
from tests.waiting import PATIENCE

SIZES = {"layers": 2, "hidden": 64, "width": 32, "experts": 4, "top_k": 2, "vocabulary": 256}


def losses_of_both(mesh: Mesh, settings: StepSettings, folder: Path) -> list[list[float]]:
    """The losses of two steps of our contender and of the peer, on this rank's mesh."""
    values = SimpleNamespace(**settings.to_json(), lora_alpha=16, generated=GENERATED)
    steps = [
        step.our_step(mesh, settings, folder, settings.dtype),
        peer_step(values, folder, settings.dtype, mesh.device),
    ]
    rounds = [tokens_of_round(settings, number) for number in range(2)]
    return [[take(tokens_BS) for tokens_BS in rounds] for take in steps]


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"plan": "dp=2,ep=2", "dtype": "float32", "sequences": 4, "seq_len": 16}, 1e-4),
        pytest.param(
            {"plan": "dp=2", "dtype": "bfloat16", "sequences": 4, "seq_len": 16},
            0.05,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"implementation": "transformers", "dtype": "float32", "seq_len": 16},
            1e-4,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"work": "evaluate", "dtype": "float32", "seq_len": 192}, 1e-5, marks=pytest.mark.slow
        ),
        pytest.param(
            {"work": "generate", "dtype": "float32", "seq_len": 192}, 1e-5, marks=pytest.mark.slow
        ),
    ],
)
def test_both_do_the_same_work(options: dict[str, Any], bound: float, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    settings = StepSettings(**options, **SIZES)  # type: ignore[arg-type]
    write_model(tmp_path, settings)
    layout = settings.layout.layout
    for ours, theirs in mesh_on_ranks(layout, losses_of_both, settings, tmp_path):
        assert ours == pytest.approx(theirs, abs=bound, rel=0)


@pytest.mark.slow
def test_contenders_take_turns_in_processes_of_their_own() -> None:
    pytest.importorskip("transformers")
    options = ["--plan", "dp=2,ep=2", "--dtype", "float32", "--rounds", "2", "--sequences", "4"]
    options += ["--seq-len", "16", "--neighbours", "1", "--json"]
    options += [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
    options = [word.replace("top_k", "top-k") for word in options]
    command = [sys.executable, "-m", "benchmarks.step", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (result,) = document["results"]
    assert result["loss_difference"] < 1e-4
    assert all(value > 0 for value in result["peak_bytes"].values())
    lines = step_text(document).splitlines()
    assert "plan dp=2,ep=2, 1 and 1 thread(s)" in lines[0] and "beside 1 busy" in lines[0]


def test_the_peer_has_none_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that `moemesh` sets for itself are removed; those that the user has set stay."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    for name in OPENMP_WAITING:
        monkeypatch.delenv(name, raising=False)
    limit_spinning(os.environ)
    with tempfile.TemporaryDirectory() as turns:
        _, environment = step.peer_command(StepSettings(turns=turns))
    assert not OPENMP_WAITING.keys() & environment.keys()
    assert environment["OMP_NUM_THREADS"] == "2"
