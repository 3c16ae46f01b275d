"""Two hosts of torchrun, network namespaces of this machine, between which the network is cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from moemesh.bench import hosts
from tests.train.runs import arguments
from tests.waiting import PATIENCE, until

REASON = hosts.why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=f"cannot emulate hosts: {REASON}"),
]


@contextmanager
def nodes(names: Sequence[str], command: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """An agent of torchrun on each host, with one rank."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += ["--master-addr=10.117.0.1", "--master-port=29500"]
    options: dict[str, Any] = {"env": os.environ | {"GLOO_SOCKET_IFNAME": hosts.INTERFACE}}
    options |= {"stderr": subprocess.PIPE, "text": True}
    started = list[subprocess.Popen[str]]()
    for number, name in enumerate(names):
        words = ["ip", "netns", "exec", name, *torchrun, f"--node-rank={number}"]
        started.append(subprocess.Popen([*words, "-m", "moemesh", *command], **options))
    try:
        yield started
    finally:
        for name in names:
            signal_all(name, signal.SIGKILL)


def signal_all(name: str, number: int) -> None:
    """To all processes of a host."""
    for pid in pids(name):
        with suppress(ProcessLookupError):  # it has ended since
            os.kill(pid, number)


def pids(name: str) -> list[int]:
    """The processes of a host."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    return [*map(int, listed.stdout.split())]


def has_ranks(name: str) -> bool:
    """Whether a host has ranks; a watcher is none, and torchrun itself is none."""
    commands: list[str] = []
    for pid in pids(name):
        with suppress(OSError):  # it has ended since
            commands.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode())
    return any(
        "-m\0moemesh\0train" in command and "torch.distributed.run" not in command
        for command in commands
    )


def wait_for(condition: Any) -> float:
    """Wait until `condition()` is true; returns the time."""
    until(condition)
    return time.monotonic()


def rows(out: Path) -> int:
    file = out / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def cut(name: str) -> None:
    subprocess.run(["ip", "-n", name, "link", "set", hosts.INTERFACE, "down"], check=True)


@pytest.mark.parametrize("dies", [False, True])
def test_a_cut_is_named_on_both_sides(tmp_path: Path, dies: bool) -> None:
    """Within ten seconds, and no rank is left. Of a host that dies whole the other side is left."""
    out = tmp_path / "run"
    command = arguments(out, plan__dp=2, train__steps=100_000)
    with hosts.hosts(2, "1gbit") as names, nodes(names, command) as started:
        wait_for(lambda: rows(out) > 5)
        begin = time.monotonic()
        cut(names[1])
        if dies:
            signal_all(names[1], signal.SIGKILL)
        left = names[: 1 if dies else 2]
        for node in range(len(left)):
            file = out / f"failures/1/node-{node}.json"
            assert wait_for(file.exists) - begin < 10
        wait_for(lambda: not any(map(has_ranks, left)))
        for name in names:
            signal_all(name, signal.SIGKILL)
        said = [one.communicate(timeout=PATIENCE)[1] for one in started]
    for node in range(len(left)):
        other, file = 1 - node, out / f"failures/1/node-{node}.json"
        report = json.loads(file.read_text())
        assert (report["kind"], report["rank"]) == ("NetworkCut", node), report
        (host,) = report["unreachable"]
        assert host["ranks"] == [other] and f"10.117.0.{other + 1}" in host["host"]
        assert report["collective"]["missing"] == [other]
        assert f"with rank {other} cannot be reached" in said[node]
    failure = json.loads((out / "failure.json").read_text())
    assert failure["kind"] == "NetworkCut"


def test_a_host_that_is_suspended_is_no_cut(tmp_path: Path) -> None:
    """The kernel of the host answers for its processes; the run continues with it."""
    out = tmp_path / "run"
    command = arguments(out, plan__dp=2, train__steps=100_000)
    with hosts.hosts(2, "1gbit") as names, nodes(names, command) as started:
        wait_for(lambda: rows(out) > 5)
        signal_all(names[1], signal.SIGSTOP)
        before = -1
        while before < rows(out):  # the other host ends the steps that it can
            before = rows(out)
            time.sleep(2)
        time.sleep(12)
        assert rows(out) == before
        signal_all(names[1], signal.SIGCONT)
        wait_for(lambda: rows(out) > before + 5)
        signal_all(names[0], signal.SIGTERM)
        codes = [one.wait(PATIENCE) for one in started]
    assert not (out / "failure.json").exists() and not (out / "failures").exists(), codes
