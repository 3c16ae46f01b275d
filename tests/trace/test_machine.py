"""Only one module depends on Linux, and each of its functions returns a value on other systems."""

from __future__ import annotations

import mmap
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import moemesh
from moemesh.trace import machine
from tests.drill.rank import open_sockets
from tests.waiting import until
from tests.without_linux import leave_linux

#: Calls, folders and files that other systems do not have.
WORDS = re.compile(
    "sched_getaffinity|/proc|/dev/shm|mallopt|malloc_trim|prctl|boot_id|posix_fadvise|ctypes"
    "|clear_refs|/sys/fs"
)
#: Text of a file for machines of others: a container of Kubernetes has this folder.
FOR_OTHERS = {"config/jobs.py"}


def test_no_other_module_knows_what_only_linux_has() -> None:
    package = Path(moemesh.__file__).parent
    modules = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if WORDS.search(file.read_text(encoding="utf-8"))
    }
    assert modules - FOR_OTHERS == {"trace/machine.py"}


def test_one_function_starts_python() -> None:
    """A module that is started with -m alone imports from the current directory first."""
    package = Path(moemesh.__file__).parent
    files = [file for file in package.rglob("*.py") if '"-m"' in file.read_text(encoding="utf-8")]
    assert files == [package / "config/python.py"]


def test_linux_is_read() -> None:
    """Values of the machine of the tests, where every one of them exists."""
    state, seconds = machine.process_state(os.getpid())
    assert state == "R" and seconds > 0
    assert 0 < machine.available_bytes() < 1 << 50
    assert machine.usable_cores() == len(os.sched_getaffinity(0))
    assert machine.processor() and machine.process_namespace().startswith("pid:")
    assert machine.boot_name() not in ("", socket.gethostname())
    peak = machine.peak_growth()
    # Pages of their own: an allocator may hand out memory that an earlier test has freed.
    held = mmap.mmap(-1, 64 << 20)
    for page in range(0, len(held), mmap.PAGESIZE):
        held[page] = 1
    grown = peak()
    if grown is not None:  # a sandbox may forget the peak
        assert len(held) // 2 < grown < 4 * len(held)
    child = os.fork()
    if child == 0:
        os._exit(3)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert machine.zombie_exit_code(child) == 3
    os.waitpid(child, 0)
    assert machine.zombie_exit_code(child) is None
    assert machine.return_freed_memory()


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/", {"cpu.max": "250000 100000"}, 2),
        ("0::/a/b", {"cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 1),
        ("0::/a/b", {"a/cpu.max": "900000 100000", "a/b/cpu.max": "300000 100000"}, 3),
        # The path in a container is that of the host.
        ("0::/kubepods/pod", {"cpu.max": "400000 100000"}, 4),
        (
            "4:cpu,cpuacct:/docker/1\n3:memory:/x",
            {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"},
            2,
        ),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ("0::/", {"cpu.max": "max 100000"}, 64),
        ("", {}, 64),
    ],
)
def test_cores_within_the_quota_of_the_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(machine, "OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        file = tmp_path / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert machine.usable_cores() == cores


def test_sockets_that_others_reach_are_found() -> None:
    with socket.create_server(("", 0)), socket.create_server(("127.0.0.1", 0)):
        assert len(open_sockets([os.getpid()]) or ()) == 1


CHILD = """
import os, sys, time
from moemesh.trace.machine import die_with_parent
if die_with_parent():
    print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is a call of Linux")
def test_a_process_dies_with_its_parent() -> None:
    start = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    with subprocess.Popen(
        [sys.executable, "-c", start, CHILD], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert machine.process_state(child)[0] in ("S", "R")
        parent.kill()
        try:
            until(lambda: machine.process_state(child)[0] in ("", "Z", "X"))
        finally:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def test_without_linux_each_function_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    handle = os.open(file, os.O_RDONLY)
    leave_linux(monkeypatch.setattr, monkeypatch.delattr)
    assert machine.usable_cores() == os.cpu_count()
    assert machine.processor() != ""
    assert machine.boot_name() == socket.gethostname()
    assert machine.process_namespace() == ""
    assert machine.available_bytes() == 1 << 62
    assert machine.process_state(os.getpid()) == ("", 0.0)
    assert machine.zombie_exit_code(os.getpid()) is None
    assert machine.peak_growth()() is None
    assert not machine.keep_freed_memory() and not machine.return_freed_memory()
    assert not machine.die_with_parent()
    machine.drop_from_cache(handle)
    os.close(handle)
