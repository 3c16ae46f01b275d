"""Hosts as network namespaces: bytes that cross, who is faster, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from moemesh.bench import hosts
from moemesh.bench.hosts import HostsError, link_rate, run_ranks
from tests.waiting import PATIENCE

REASON = hosts.why_not()
emulated = pytest.mark.skipif(REASON is not None, reason=f"cannot emulate hosts: {REASON}")


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines() if line.startswith("moemesh-")}


def test_rates_are_bits_per_second() -> None:
    assert [link_rate(link) for link in ("1gbit", "200mbit", "2.5gbit")] == [1e9, 2e8, 2.5e9]
    for wrong in ("1g", "fast", "-1gbit", "1kbit", "1tbit", "900gbit", ""):
        with pytest.raises(HostsError, match="is no rate"):
            link_rate(wrong)


@pytest.mark.slow
@emulated
def test_two_hosts_send_the_bytes_of_the_formula_and_hierarchical_wins() -> None:
    """1 MiB a rank and direction, flat, at 100 Mbit: far above the noise of a busy machine."""
    options = "--hosts 2 --link 100mbit --ranks 4 --tokens 512 --hidden 512 --dtype bfloat16"
    names = "all_to_all,hierarchical"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.dispatch", "--json", "--rounds", "3"),
            *("--dispatcher", names, *options.split()),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["workloads"]
    flat, node_aware = result["dispatchers"]
    for entry in (flat, node_aware):
        assert entry["bytes_as_expected"] and entry["dropped"] == 0
        # On the wire: rows, their weights and ids, headers of TCP and IP, acknowledgements.
        assert 1.0 < entry["link_bytes"] / entry["across_bytes"] < 1.2
    # W0 gives every token experts on both hosts: four copies cross, or one.
    assert flat["across_bytes"] == 2 * 512 * 4 * 1024
    assert node_aware["across_bytes"] == 2 * 512 * 1024
    assert node_aware["seconds"]["p50"] < 0.6 * flat["seconds"]["p50"]
    assert node_aware["link_bytes"] < 0.3 * flat["link_bytes"]
    # At the stated rate: 2 MiB a host take 0.168 s there and back.
    assert flat["seconds"]["p50"] > 0.9 * 2 * 512 * 4 * 1024 / 2 / (1e8 / 8)
    assert not namespaces() & {f"moemesh-{os.getpid()}-host0"}


@emulated
def test_a_rank_that_fails_is_named_and_everything_is_removed() -> None:
    before = namespaces()
    script = (
        "import os, sys, time; os.environ['RANK'] == '3' and sys.exit('no more'); time.sleep(1000)"
    )
    failed = pytest.raises(HostsError, match=r"rank 3 failed with exit code 1:\nno more")
    with failed, hosts.hosts(2, "1gbit") as names:
        assert namespaces() - before > set(names)
        run_ranks(names, ranks_per_host=2, command=[sys.executable, "-c", script], timeout=1000)
    assert namespaces() == before


@emulated
def test_ranks_that_hang_are_stopped() -> None:
    with hosts.hosts(3, "1gbit") as names, pytest.raises(HostsError, match=r"\[0, 1, 2\].*1 s"):
        run_ranks(names, ranks_per_host=1, command=["sleep", "60"], timeout=1)


@emulated
def test_hosts_reach_each_other_and_nothing_else() -> None:
    with hosts.hosts(3, "1gbit") as names:
        for target, reached in (("10.117.0.3", True), ("192.0.2.1", False)):
            code = f"import socket; socket.create_connection(('{target}', 9), timeout=2)"
            done = subprocess.run(
                ["ip", "netns", "exec", names[0], sys.executable, "-c", code],
                capture_output=True,
                text=True,
            )
            assert ("ConnectionRefusedError" in done.stderr) == reached, done.stderr


def test_what_cannot_be_emulated_is_said() -> None:
    refused = pytest.raises(HostsError, match=r"hosts \(1\) must lie between 2 and 16")
    with refused, hosts.hosts(1, "1gbit"):
        pass
