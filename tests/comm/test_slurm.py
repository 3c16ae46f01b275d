"""Ranks of srun: Slurm's variables, and the script of `moemesh launch` under a fake srun."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from moemesh.cli.application import load
from moemesh.comm.slurm import (
    RankError,
    SlurmError,
    first_host,
    rank_of,
    ranks_of,
    ranks_of_slurm,
    tasks_per_node,
)
from moemesh.config.jobs import ClusterJob
from moemesh.monitor.devices import FOLDER_VARIABLE
from moemesh.sharding.load_run import load_run
from moemesh.train.weights import weight_sources
from tests import commands
from tests.train.runs import arguments, metrics, moemesh
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
        "MASTER_PORT": "12625",
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


def test_neighbouring_jobs_and_steps_have_ports_of_their_own() -> None:
    steps = [(job, step) for job in range(9_900, 10_200) for step in range(60)]
    ports = [
        int(ranks_of(STEP | {"SLURM_JOB_ID": str(j), "SLURM_STEP_ID": str(s)})["MASTER_PORT"])
        for j, s in steps
    ]
    assert len(set(ports)) == len(steps) and min(ports) >= 10_000 and max(ports) < 32_768
    assert ranks_of(STEP | {"SLURM_STEP_RESV_PORTS": "12001-12004"})["MASTER_PORT"] == "12001"
    assert ranks_of(STEP | {"MASTER_PORT": "7"})["MASTER_PORT"] == "7"


WHOLE = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
         "MASTER_ADDR": "a", "MASTER_PORT": "29500"}  # fmt: skip


def without(*names: str, **given: str) -> dict[str, str]:
    return {name: value for name, value in WHOLE.items() if name not in names} | given


def test_the_variables_of_a_rank() -> None:
    assert ranks_of(WHOLE) == WHOLE and ranks_of({"MASTER_PORT": "1"}) == {}
    assert ranks_of({"RANK": "", "WORLD_SIZE": ""}) == {}
    # A pod of one process.
    alone = WHOLE | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert ranks_of(without("LOCAL_RANK", "LOCAL_WORLD_SIZE")) == alone
    assert ranks_of(without("LOCAL_RANK", LOCAL_WORLD_SIZE="1")) == alone
    launched = without("MASTER_ADDR", "MASTER_PORT")
    assert ranks_of(launched | {"MOEMESH_LAUNCHER": "/x"}) == launched


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        *((without(name), f"^{name} is missing, but ") for name in WHOLE if "LOCAL" not in name),
        (without("LOCAL_RANK"), "^LOCAL_RANK is missing, but RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, "),
        # It would be unknown which ranks share the node.
        (without("LOCAL_WORLD_SIZE"), "^LOCAL_WORLD_SIZE is missing, but RANK, WORLD_SIZE, LOCAL"),
        (without("LOCAL_WORLD_SIZE", LOCAL_RANK="0"), "^LOCAL_WORLD_SIZE is missing, but "),
        (without(WORLD_SIZE=""), "^WORLD_SIZE is empty, but "),
        (without(LOCAL_RANK=""), "^LOCAL_RANK is empty, but "),
        (without(WORLD_SIZE="two"), "^WORLD_SIZE is 'two': it must be a whole number of at least"),
        (without(WORLD_SIZE="0"), "WORLD_SIZE is '0': .* at least 1"),
        (without(RANK="-1"), "RANK is '-1': .* at least 0"),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
            "^OMPI_COMM_WORLD_SIZE is 2: ",
        ),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, "^PMI_SIZE is 4: mpirun started this process as one"),
        (without(RANK="4"), "^RANK 4 must be below WORLD_SIZE 4"),
        (without(LOCAL_RANK="2"), "^LOCAL_RANK 2 must be below LOCAL_WORLD_SIZE 2"),
        (without(LOCAL_WORLD_SIZE="8"), "^LOCAL_WORLD_SIZE 8 must not exceed WORLD_SIZE 4"),
        (without(MASTER_PORT="http"), "^MASTER_PORT is 'http': it must be a whole number"),
        (without(MASTER_PORT="65536"), "^MASTER_PORT is 65536: ports end at 65535"),
    ],
)
def test_wrong_variables_of_a_rank_are_named(environment: dict[str, str], words: str) -> None:
    with pytest.raises(RankError, match=words):
        ranks_of(environment)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "MASTER_PORT is missing"),
        (WHOLE | {"RANK": "9"}, "RANK 9 must be below WORLD_SIZE 4"),
        ({"GLOO_SOCKET_IFNAME": "nope7"}, "GLOO_SOCKET_IFNAME names nope7, but .* interfaces .*lo"),
    ],
)
def test_a_wrong_environment_ends_in_one_sentence(
    tmp_path: Path, given: dict[str, str], words: str
) -> None:
    out = tmp_path / "run"
    done = moemesh(*arguments(out, plan__dp=2), env=os.environ | given)
    assert done.returncode == 2 and not out.exists()
    assert re.fullmatch(rf"moemesh: .*{words}.*\n", done.stderr), done.stderr


#: The command, whose ranks print soon and often for whom they wait.
SOON = """
from moemesh.cli import main
from moemesh.comm import launch
launch._FIRST_NOTE_SECONDS = launch._NOTE_SECONDS = 0.5
main()
"""


def waiting(tmp_path: Path, port: int, rank: int = 1) -> subprocess.Popen[str]:
    given = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "localhost"}
    return subprocess.Popen(
        [commands.python(), "-c", SOON, *arguments(tmp_path / "run", plan__dp=3)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | given | {"MASTER_PORT": str(port)},
    )


@pytest.mark.representative("15-143")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ranks_that_wait_for_others_name_them_and_can_be_stopped(
    tmp_path: Path, number: int, code: int
) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        port = taken.getsockname()[1]
    first, second = waiting(tmp_path, port), waiting(tmp_path, port, 2)
    assert first.stderr is not None
    prefix = rf"moemesh: rank 1 waits at localhost:{port} for "
    line = first.stderr.readline()
    assert re.match(prefix + "rank 0 of 3 ranks, which does not answer", line), line
    first.send_signal(number)
    _, rest = first.communicate(timeout=PATIENCE)
    assert first.returncode == code and "frame" not in rest, rest
    # With rank 0 there, rank 1 is missing, and rank 2 until it has come.
    zero = waiting(tmp_path, port, 0)
    assert zero.stderr is not None
    prefix = f"moemesh: rank 0 waits at localhost:{port} for "
    while (line := zero.stderr.readline()) == f"{prefix}2 of 3 ranks (1, 2)\n":
        pass
    assert line == f"{prefix}1 of 3 ranks (1)\n"
    for process in (second, zero):  # in turn: rank 2 fails if rank 0 leaves first
        process.send_signal(number)
        _, rest = process.communicate(timeout=PATIENCE)
        assert process.returncode == code and "frame" not in rest, rest


def test_a_port_that_is_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        process = waiting(tmp_path, port := taken.getsockname()[1], 0)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2, err
    words = "MASTER_PORT) is in use: set MASTER_PORT to a free one, the same for all ranks"
    assert err == f"moemesh: port {port} of localhost ({words}\n"


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
    stand_in(tmp_path, "srun", SRUN.format(python=commands.python()))
    done = subprocess.run(
        [str(tmp_path / "srun"), "moemesh", "train", "--set", "plan.dp=0"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("1 problem") == 1


@pytest.mark.parametrize(
    ("ranks", "counts"),
    [
        ([{}], [1]),
        ([{"RANK": str(rank), "TORCHELASTIC_RUN_ID": "x"} for rank in range(3)], [1, 0, 0]),
        ([{"RANK": str(rank)} for rank in range(2)], [1, 0]),  # of an operator
        ([{"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2"} for rank in range(2)], [1, 0]),
        ([{"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "1"}], [1]),  # no rank of several
        # The launcher of these ranks has printed the notes.
        ([{"RANK": str(rank), FOLDER_VARIABLE: "gone"} for rank in range(2)], [0, 0]),
    ],
    ids=["alone", "torchrun", "operator", "srun", "one task", "moemesh"],
)
def test_one_rank_prints_each_note(
    ranks: list[dict[str, str]],
    counts: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    twice = ["plan.dp=1", "plan.dp=2"]
    (tmp_path / "config.json").touch()  # for a folder of transformers
    monkeypatch.setattr(weight_sources, "load_run", lambda files, keys: load_run([], twice))
    for environment, count in zip(ranks, counts, strict=True):
        with monkeypatch.context() as patched:
            for name in ("RANK", FOLDER_VARIABLE, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
                patched.delenv(name, raising=False)
            for name, value in environment.items():
                patched.setenv(name, value)
            load(None, twice)
            assert capsys.readouterr().err.count("plan.dp is set twice") == count
            weight_sources.config_of(tmp_path, [], prints_notes=True)
            assert capsys.readouterr().err.count("plan.dp is set twice") == count
