"""`moemesh bench links`, and hosts as network namespaces: bytes that cross, no remains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from moemesh.bench import hosts
from moemesh.bench.hosts import HostsError, link_rate, run_ranks
from moemesh.bench.link_cluster import LinkFit, cluster_of, fit, hops_and_volume
from moemesh.bench.links import GroupShape, measure_shape, shapes, side_loss
from moemesh.bench.settings import OPERATIONS, LinksSettings
from moemesh.cli.machine import links_text
from moemesh.comm.mesh import Mesh
from moemesh.config.cluster import load_cluster
from moemesh.config.errors import UserError
from moemesh.config.layout import Layout
from moemesh.planner.estimate import estimate_named
from tests import commands
from tests.ranks import mesh_on_ranks
from tests.waiting import PATIENCE

REASON = hosts.why_not()
emulated = pytest.mark.skipif(REASON is not None, reason=f"cannot emulate hosts: {REASON}")


def namespaces(pid: int) -> set[str]:
    """Hosts of one process: other workers emulate theirs beside them."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = {line.split()[0] for line in listed.stdout.splitlines()}
    return {name for name in names if name.startswith(f"moemesh-{pid}-")}


def test_rates_are_bits_per_second() -> None:
    assert [link_rate(link) for link in ("1gbit", "200mbit", "2.5gbit")] == [1e9, 2e8, 2.5e9]
    for wrong in ("1g", "fast", "-1gbit", "1kbit", "1tbit", "900gbit", ""):
        with pytest.raises(HostsError, match="must be a rate"):
            link_rate(wrong)


@pytest.mark.slow
@emulated
def test_two_hosts_send_the_bytes_of_the_formula_and_hierarchical_wins() -> None:
    """1 MiB a rank and direction, flat, at 100 Mbit: far above the noise of a busy machine."""
    options = "--hosts 2 --link 100mbit --ranks 4 --tokens 512 --hidden 512 --dtype bfloat16"
    names = "all_to_all,hierarchical"
    command = [sys.executable, "-m", "benchmarks.dispatch", "--json", "--rounds", "3"]
    process = subprocess.Popen(
        [*command, "--dispatcher", names, *options.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    (result,) = json.loads(out)["workloads"]
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
    assert not namespaces(process.pid)


@emulated
def test_a_rank_that_fails_is_named_and_everything_is_removed() -> None:
    script = (
        "import os, sys, time; os.environ['RANK'] == '3' and sys.exit('no more'); time.sleep(1000)"
    )
    failed = pytest.raises(HostsError, match=r"rank 3 failed with exit code 1:\nno more")
    with failed, hosts.hosts(2, "1gbit") as names:
        assert namespaces(os.getpid()) > set(names)
        run_ranks(names, ranks_per_host=2, command=[sys.executable, "-c", script], timeout=1000)
    assert not namespaces(os.getpid())


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


SIZES = (1024, 65536, 4194304)


def test_every_shape_once() -> None:
    triples = [(shape.ranks, shape.members, shape.stride) for shape in shapes(8, 4)]
    assert triples == [(2, 1, 4), (2, 2, 1), (4, 2, 2), (4, 4, 1), (8, 4, 1)]
    assert [(s.ranks, s.members) for s in shapes(6, 6)] == [(2, 2), (3, 3), (6, 6)]
    for shape in shapes(16, 4):
        layout = Layout(pp=16 // (shape.ranks * shape.stride), dp=shape.ranks, tp=shape.stride)
        for group in layout.groups("dp"):
            nodes = [rank // 4 for rank in group]
            assert len(group) == shape.ranks and nodes.count(nodes[0]) == shape.members


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_line_through_closed_forms_gives_them_back(operation: str) -> None:
    alpha, beta, ranks = 30e-6, 1 / 5e9, 4
    hops, volume = hops_and_volume(operation, ranks)
    times = [hops * alpha + volume * size * beta for size in SIZES]
    fitted = fit(operation, ranks, SIZES, times)
    assert fitted.alpha == pytest.approx(alpha, rel=1e-6)
    assert fitted.beta == pytest.approx(beta, rel=1e-6)
    assert fitted.error < 1e-6 and fitted.root_error < 1e-6


@pytest.mark.parametrize("loss", [0.0, 0.3, 4.0])
def test_the_loss_of_a_narrow_side_comes_back(loss: float) -> None:
    """The loss in rate(side) = peak / (1 + loss 64 / side), from a full side and a side of 64."""
    side, peak = 1024, 3e12
    full, narrow = (peak / (1 + loss * 64 / size) for size in (side, 64))
    assert side_loss(full, narrow, side) == pytest.approx(max(loss, 1e-3), rel=1e-9)


def test_a_root_fits_what_a_line_cannot() -> None:
    sizes = [2.0**power for power in range(10, 28, 2)]
    times = [1e-5 + 3e-8 * size**0.5 + 2e-11 * size for size in sizes]
    fitted = fit("all_reduce", 8, sizes, times)
    assert fitted.root == pytest.approx((1e-5, 3e-8, 2e-11), rel=1e-4)
    assert fitted.root_error < 1e-6 < 0.02 < fitted.error


def test_no_term_is_negative() -> None:
    fitted = fit("send", 2, SIZES, (1e-3, 5e-4, 1e-4))
    assert fitted.alpha >= 0 and fitted.beta >= 0 and min(fitted.root) >= 0
    with pytest.raises(UserError, match="one time for each size"):
        fit("send", 2, SIZES, (1e-3,))


def measured(mesh: Mesh, stride: int) -> tuple[list[dict[str, Any]], int]:
    shape = GroupShape(ranks=2, members=2, stride=stride)
    return measure_shape(mesh, shape, OPERATIONS, (1000, 4096), 1), len(mesh.ledger)


def test_ranks_measure_every_operation_alike() -> None:
    results = mesh_on_ranks(Layout(dp=2), measured, 1)
    rows, entries = results[0]
    assert entries == len(OPERATIONS) and results[1][0] == rows
    assert [row["operation"] for row in rows] == list(OPERATIONS)
    for row in rows:
        # Rounded up, so that every rank has a whole number of equal parts.
        assert row["bytes"] == [1000, 4096] and min(row["seconds"]) > 0


def result() -> dict[str, Any]:
    """Two hosts of two ranks; links of 1 GB/s inside and 100 MB/s a rank between them."""
    settings, links = LinksSettings(hosts=2), []
    for shape in shapes(settings.ranks, settings.node):
        across = shape.members < shape.ranks
        beta = 1 / (100e6 * shape.members if across else 1e9)
        alpha = 200e-6 if across else 50e-6
        for operation in OPERATIONS:
            hops, volume = hops_and_volume(operation, shape.ranks)
            times = [hops * alpha + volume * size * beta for size in SIZES]
            row = {"operation": operation, "ranks": shape.ranks}
            row |= {"members_per_node": shape.members, "bytes": list(SIZES), "seconds": times}
            links.append(row | {"fit": asdict(fit(operation, shape.ranks, SIZES, times))})
    device = {"name": "", "memory_bytes": 2**32, "memory_bandwidth": 1e10}
    device |= {"peak_flops": {"float32": 4e10, "bfloat16": 8e10}, "row_loss": 2.0}
    device["width_loss"] = 0.5
    return {"settings": asdict(settings), "links": links, "device": device}


def test_the_cluster_file_says_what_was_measured(tmp_path: Path) -> None:
    measurement = result()
    file = tmp_path / "cluster.toml"
    file.write_text(cluster_of(measurement, "two hosts").to_toml("Measured."))
    cluster = load_cluster(str(file))
    assert (cluster.name, cluster.nodes, cluster.gpus_per_node) == ("two hosts", 2, 2)
    assert cluster.intra_node_bandwidth == pytest.approx(1e9, rel=1e-4)
    assert cluster.inter_node_bandwidth == pytest.approx(100e6, rel=1e-4)
    assert cluster.inter_node_latency == pytest.approx(200e-6, rel=1e-4)
    # The planner's own unit of the loss with few rows is that of an A100.
    assert cluster.constants["gemm_row_loss"] == pytest.approx(2.0 * 312e12 / 8e10)
    assert cluster.constants["gemm_width_loss"] == 0.5
    assert len(cluster.links) == len(measurement["links"])
    for curve, row in zip(cluster.links, measurement["links"], strict=True):
        assert curve.bytes == tuple(row["bytes"])
        assert curve.seconds == pytest.approx(row["seconds"], rel=1e-5)
    text = links_text(measurement)
    assert "with √S" in text and "hosts at 1gbit" in text and "4.0 MiB" in text
    assert LinkFit(**measurement["links"][0]["fit"]).error < 1e-6


@pytest.mark.slow
def test_the_verb_writes_what_estimate_reads(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    arguments = ["--ranks", "2", "--sizes", "1k,64k", "--rounds", "2", "--out", str(file), "--json"]
    done = subprocess.run(
        [commands.python(), "-m", "moemesh", "bench", "links", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    measured, cluster = json.loads(done.stdout)["links"], load_cluster(str(file))
    assert len(measured) == len(cluster.links) == len(OPERATIONS)
    plain = cluster.model_copy(update={"links": ()})
    (tmp_path / "plain.toml").write_text(plain.to_toml("Without the table."))
    seconds = [
        estimate_named("tiny", str(path), "tp=2", 64, 8).seconds["tensor"]
        for path in (file, tmp_path / "plain.toml")
    ]
    assert seconds[0] != seconds[1]
