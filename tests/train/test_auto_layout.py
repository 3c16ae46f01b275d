"""Fewer or more ranks than the plan needs: another layout of the same run, with the same losses."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from moemesh.comm.mesh import Mesh
from moemesh.config.plan import Plan
from moemesh.config.run import RunConfig
from moemesh.sharding.load_run import load_run
from moemesh.train.auto_layout import NoLayout, fit, fit_here, is_trained, nearest
from moemesh.train.command import WorldSizeError, check_world_size, open_samples, train_rank
from moemesh.train.console import Console
from moemesh.train.records.run_folder import RunFolder
from tests.ranks import mesh_on_ranks
from tests.train import runs
from tests.train.runs import arguments, metrics

STEPS = 9


def config_of(folder: Path, **keys: Any) -> RunConfig:
    usual = {"data__global_batch": 12, "train__steps": STEPS, "plan__dp": 4, "plan__ep": 4}
    return runs.config_of(folder, **usual | keys)


class _StopAfter:
    """A stop request after a number of steps."""

    exit_code = 143
    after = None

    def __init__(self, steps: int) -> None:
        self._left = steps

    @property
    def requested(self) -> bool:
        self._left -= 1
        return self._left <= 0


def train_on_rank(mesh: Mesh, folder: Path, name: str, plan: Plan, steps: int) -> list[float]:
    config = replace(config_of(folder), plan=plan)
    run = RunFolder.open(folder / name)
    samples = open_samples(config, run.path)
    stop: Any = _StopAfter(steps)
    console = Console(silent=True)
    train_rank(config=config, mesh=mesh, folder=run, samples=samples, console=console, stop=stop)
    return runs.losses(metrics(run.path)) if mesh.rank == 0 else []


@pytest.mark.slow
def test_four_then_three_then_two_ranks_are_one_run(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    whole, *_ = mesh_on_ranks(
        config.plan.layout, train_on_rank, tmp_path, "whole", config.plan, STEPS
    )
    losses: list[float] = []
    for ranks in (4, 3, 2):
        plan = fit(config, ranks, None, on_gpus=False).plan
        assert plan.world_size == ranks
        layout = plan.layout
        losses, *_ = mesh_on_ranks(layout, train_on_rank, tmp_path, "run", plan, STEPS // 3)
    assert len(losses) == len(whole) == STEPS
    assert losses == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6, 7, 8, 12])
def test_any_number_of_ranks_has_a_plan(tmp_path: Path, ranks: int) -> None:
    config = config_of(tmp_path, plan__tp=2, plan__dp=2)
    layout = fit(config, ranks, None, on_gpus=False)
    assert layout.plan.world_size == ranks and is_trained(config, layout.plan)
    given = load_run([], [*_as_given(config), *layout.overrides()]).config
    assert given.plan == layout.plan
    for plan in islice(nearest(config, ranks), 3):
        assert plan.world_size == ranks and is_trained(config, plan)


def _as_given(config: RunConfig) -> list[str]:
    plan = [f"plan.{name}={getattr(config.plan, name)}" for name in ("dp", "tp", "ep")]
    return [*plan, f"data.path={config.data.path}", "data.global_batch=12", "data.seq_len=16"]


def test_what_would_change_the_result_is_refused(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"plan__dp": 1, "plan__ep": 1, "plan__pp": 2, "plan__microbatches": 2}
    config = config_of(tmp_path, **keys, plan__schedule="pipedream")
    with pytest.raises(NoLayout, match="change what is learned: start 2 ranks"):
        fit(config, 3, None, on_gpus=False)
    with pytest.raises(NoLayout, match="give --ranks N"):
        fit_here(config_of(tmp_path), None, {})
    exact = fit(config_of(tmp_path, plan__combine="exact"), 2, None, on_gpus=False)
    assert exact.plan.combine == "exact"


def test_ranks_of_torchrun_are_counted(tmp_path: Path) -> None:
    variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    layout = fit_here(config_of(tmp_path), None, variables)
    assert layout.plan.world_size == 6 and not layout.is_printed
    assert fit_here(
        config_of(tmp_path), None, variables | {"RANK": "0", "LOCAL_RANK": "0"}
    ).is_printed


def test_a_wrong_number_of_ranks_names_the_nearest_layouts(tmp_path: Path) -> None:
    with pytest.raises(WorldSizeError) as caught:
        check_world_size(config_of(tmp_path), 3)
    text = str(caught.value)
    assert "3 ranks were started" in text and "--auto-layout" in text
    assert "plan.dp=3 plan.ep=1; plan.dp=1 plan.cp=3" in text


def test_the_flag_answers_without_torch(tmp_path: Path) -> None:
    given = arguments(tmp_path / "run", plan__dp=4, plan__ep=4, data__global_batch=12)
    code = (
        "import sys; from moemesh.cli import main; sys.argv[1:] = sys.argv[2:]\n"
        "try: main()\nfinally: assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, "-", *given, "--auto-layout", "--ranks", "3"]
    done = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        "layout   for 3 ranks in place of 4" in done.stdout and "plan     3 rank(s)" in done.stdout
    )
