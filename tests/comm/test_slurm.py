"""Ranks of srun: Slurm's variables, and the script of `moemesh launch` under a stand-in srun."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from moemesh.comm.slurm import SlurmError, first_host, rank_of, ranks_of_slurm, tasks_per_node
from moemesh.config.jobs import ClusterJob
from tests.train.runs import arguments, metrics
from tests.waiting import PATIENCE, until

STEP = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_STEP_TASKS_PER_NODE": "8,4",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def test_a_task_is_a_rank() -> None:
    assert ranks_of_slurm(STEP) == {
        "RANK": "9",
        "WORLD_SIZE": "12",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "20042",
    }
    assert rank_of(STEP) == 9


@pytest.mark.parametrize(
    "environment",
    [
        {},
        STEP | {"RANK": "3"},  # torchrun inside of srun
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},
        # The shell of a batch script: no step.
        {key: value for key, value in STEP.items() if not key.startswith("SLURM_STEP")},
    ],
)
def test_other_processes_are_no_tasks(environment: dict[str, str]) -> None:
    assert ranks_of_slurm(environment) == {}
    assert rank_of(environment) == int(environment.get("RANK", 0))


def test_tasks_that_are_dealt_out_in_turn_are_refused() -> None:
    with pytest.raises(SlurmError, match="--distribution=block"):
        ranks_of_slurm(STEP | {"SLURM_PROCID": "3"})


def test_short_forms() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("4") == [4]
    lists = ["n1", "n1,n2", "n[1,3-5],m1", "a[08-12]-b[1-2],c"]
    assert [first_host(one) for one in lists] == ["n1", "n1", "n1", "a08-b1"]


SRUN = """#!{python}
import os, signal, subprocess, sys
command = [part for part in sys.argv[1:] if not part.startswith("--distribution")
           and not part.startswith("--kill")]
command = [sys.executable, "-m", "moemesh", *command[1:]]
step = {{"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost"}}
tasks = [subprocess.Popen(command, env=os.environ | step | {{"SLURM_PROCID": str(i),
         "SLURM_LOCALID": "0", "SLURM_NODEID": str(i)}}) for i in range(2)]
signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""


def stand_in(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755 | stat.S_IXUSR)


@pytest.mark.slow
def test_a_batch_job_saves_before_its_time_is_up_and_goes_on(tmp_path: Path) -> None:
    """Two tasks on two "nodes" of this machine; USR1 to the script, as Slurm sends it."""
    stand_in(tmp_path, "srun", SRUN.format(python=sys.executable))
    stand_in(tmp_path, "scontrol", f'#!/bin/bash\necho "$@" >> {tmp_path}/asked\n')
    out = tmp_path / "run"
    given = arguments(out, plan__dp=2, train__steps=150, train__validate_every=0)
    job = ClusterJob(name="job", arguments=tuple(given), out=str(out), nodes=2, ranks_per_node=1,
              uses_gpus=False)  # fmt: skip
    stand_in(tmp_path, "job.sbatch", job.text("slurm"))
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "OMP_NUM_THREADS": "1",
    }
    script = subprocess.Popen(
        ["bash", str(tmp_path / "job.sbatch")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until((out / "metrics.jsonl").exists, script)
    script.send_signal(signal.SIGUSR1)
    said, err = script.communicate(timeout=PATIENCE)
    assert script.returncode == 143, said + err
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    stopped = metrics(out)[-1]["step"]
    assert stopped < 150
    assert f"stopped at step {stopped}, saved" in said
    done = subprocess.run(
        ["bash", str(tmp_path / "job.sbatch")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resumed from step {stopped}" in done.stdout
    assert (tmp_path / "asked").read_text() == "requeue 7\n"


def test_a_mistake_is_told_once(tmp_path: Path) -> None:
    stand_in(tmp_path, "srun", SRUN.format(python=sys.executable))
    done = subprocess.run(
        [str(tmp_path / "srun"), "moemesh", "train", "--set", "plan.dp=0"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("1 problem") == 1
