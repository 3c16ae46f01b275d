"""Ranks that end well, fail, are killed, are interrupted, are restarted, or lose their launcher."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moemesh.comm import launch
from moemesh.comm.mesh import Mesh
from moemesh.monitor import rendezvous
from moemesh.monitor.supervisor import STOPPING_SOON
from tests import commands
from tests.waiting import PATIENCE, until

RANK = r"""
import os, resource, signal, sys, time
import torch
import torch.distributed as dist
from moemesh.comm import launch
from moemesh.monitor.devices import DeviceError

what, folder = sys.argv[1:]
if what == "orphan" and os.environ["RANK"] == "1":
    launch.die_with_parent = lambda: False  # as where the kernel cannot see to it
ranks = launch.start("cpu", 60)
total = torch.ones(1) * (ranks.rank + 1)
dist.all_reduce(total)
said = f"{ranks.rank} {ranks.world_size} {ranks.local_rank} {ranks.ranks_per_node} {ranks.device}"
said += f" {total.item()} {os.environ['GLOO_SOCKET_IFNAME']}"

def touch(times):
    start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.empty(1 << 24).fill_(0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start

if what == "end well":
    touch(15)  # the heap needs a few to grow to its size
    said += f" {touch(5) < 16384}"  # else that many pages each time
sys.stdout.write(f"{said}\n")
sys.stdout.flush()
if what == "fail" and ranks.rank == 1:
    raise RuntimeError("gone wrong")
if what == "tell" and ranks.rank == 0:
    launch.report_failure(KeyError("told"))
    sys.exit(7)
if what == "kill" and ranks.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if what == "restart":
    dist.barrier()  # everybody has spoken
if what == "restart" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and ranks.rank == 1:
    sys.exit(1)
if what in ("fail", "tell", "kill", "restart"):
    dist.barrier()
if what in ("interrupt", "orphan"):
    got = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: got.append(signal.Signals(number).name))
    with open(f"{folder}/{ranks.rank}.tmp", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{folder}/{ranks.rank}.tmp", f"{folder}/ready-{ranks.rank}")
    while not got:
        time.sleep(0.02)
    time.sleep(0.5)
    open(f"{folder}/saved-{ranks.rank}", "w").write(" ".join(got))
# As a rank of a run that has more steps.
launch.stop(128 + signal.Signals[got[0]] if what == "interrupt" else 0)
"""

START = """
import os, sys
from pathlib import Path
from moemesh.comm.launch import launch
script, what, folder, sys.executable = sys.argv[1:]
Path(folder, "launcher").write_text(str(os.getpid()))
sys.exit(launch(2, [what, folder], log_folder=Path(folder) / "logs", entry=[script]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    return path


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}


def begin(
    script: Path, what: str, python: str, of_ranks: str | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, "-c", START, str(script), what, str(script.parent), of_ranks or python],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )


def test_ranks_run_and_only_rank_0_speaks(script):
    process = begin(script, "end well", commands.python())
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")
    assert out == "0 2 0 2 cpu 3.0 lo True\n"
    logs = script.parent / "logs"
    assert (logs / "rank-1.out").read_text() == "1 2 1 2 cpu 3.0 lo True\n"
    assert (logs / "rank-1.err").read_text() == ""


@pytest.mark.representative(
    "fail-1-moemesh: rank 1 failed with exit code 1: RuntimeError: gone wrong"
)
@pytest.mark.parametrize(
    ("what", "code", "first_line"),
    [
        ("fail", 1, "moemesh: rank 1 failed with exit code 1: RuntimeError: gone wrong"),
        ("tell", 7, "moemesh: rank 0 failed with exit code 7: KeyError: 'told'"),
        ("kill", 137, "moemesh: rank 1 was killed by SIGKILL"),
    ],
)
def test_the_first_rank_that_failed_is_named_once(script, what, code, first_line):
    process = begin(script, what, commands.python())
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert err.splitlines()[0] == first_line
    assert "elastic" not in err and "closed by peer" not in err and "reset by peer" not in err
    assert err.count("Traceback") == (1 if what == "fail" else 0)
    if what != "tell":  # what rank 0 saw is kept, but not shown
        assert "RuntimeError" in (script.parent / "logs" / "rank-0.err").read_text()


def test_logs_that_cannot_be_written_end_no_run(tmp_path, capfd):
    """Nor hide how it ended."""
    logs = tmp_path / "logs"
    logs.write_text("no folder")
    ended = launch.run_ranks(2, [], logs=logs, entry=("-c", "import sys; sys.exit(3)"))
    assert ended.code == 3 and ended.verdict is not None and ended.verdict.kind == "exited"
    assert f"{logs}/rank-1.out cannot be written (Not a directory)" in capfd.readouterr().err


def test_ranks_meet_elsewhere_where_shared_memory_is_full(tmp_path, monkeypatch):
    shared, other = tmp_path / "shared", tmp_path / "other"
    shared.mkdir(), other.mkdir()
    monkeypatch.setattr(rendezvous, "shared_memory", lambda: shared)
    monkeypatch.setattr(rendezvous.tempfile, "tempdir", str(other))
    with rendezvous.rendezvous_folder(4096) as folder:
        assert folder.parent == shared
    full = shutil.disk_usage(tmp_path)._replace(free=2 << 20)
    monkeypatch.setattr(rendezvous.shutil, "disk_usage", lambda place: full)
    with rendezvous.rendezvous_folder(4096) as folder:
        assert folder.parent == shared
    with rendezvous.rendezvous_folder(2 << 20) as folder:
        assert folder.parent == other and rendezvous.has_supervisor(folder)
    assert not [*shared.iterdir(), *other.iterdir()]


@pytest.mark.representative("SIGTERM")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_reaches_every_rank_once_and_they_can_save(script, number):
    # The launcher is in the group itself, each rank by a process that passes signals on.
    process = begin(script, "interrupt", commands.python())
    until(lambda: len(list(script.parent.glob("ready-*"))) == 2, process)
    launcher = int((script.parent / "launcher").read_text())
    os.killpg(launcher, number)  # as a terminal does: to the whole foreground group
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number
    answer = f"\nmoemesh: {STOPPING_SOON}\n" if number == signal.SIGINT else ""
    assert err == f"{answer}moemesh: stopped by {number.name}\n"
    for rank in range(2):
        assert (script.parent / f"saved-{rank}").read_text() == number.name


@pytest.mark.slow
def test_ranks_die_with_their_launcher(script):
    """A rank that lived on would write into a folder that the next run has for itself: the kernel
    ends rank 0, a thread of its own rank 1."""
    process = begin(script, "orphan", commands.python(), of_ranks=sys.executable)
    ready = [script.parent / f"ready-{rank}" for rank in range(2)]
    until(lambda: all(path.exists() for path in ready), process)
    pids = [int(path.read_text()) for path in ready]
    process.kill()
    process.communicate()
    until(lambda: not any(is_alive(pid) for pid in pids))
    assert not list(script.parent.glob("saved-*"))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_torchrun_restarts_over_gloo(script):
    command = [commands.python(), "-m", "torch.distributed.run", "--standalone"]
    # With two ranks stale addresses in the store can go unnoticed; with four hardly ever.
    command += ["--nproc-per-node=4", "--max-restarts=1", str(script), "restart", "-"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, env=environment()
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == sorted([f"{rank} 4 {rank} 4 cpu 10.0 lo" for rank in range(4)] * 2)


def test_a_process_that_is_no_rank_is_a_world_of_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    hook, threads = sys.excepthook, torch.get_num_threads()
    assert not launch.joined()
    ranks = launch.start("cpu", 5)
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.ranks_per_node) == (0, 1, 0, 1)
    assert not torch.distributed.is_initialized() and sys.excepthook is hook
    assert Mesh.single(ranks.device).world_size == 1
    launch.stop()
    torch.set_num_threads(threads)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(
        ValueError, match=r"build without CUDA|want a CUDA device each, 0 found|does not start"
    ):
        launch.start("cuda", 5)
