"""`moemesh bench links`: shapes of groups, fits, and the Cluster file that the planner reads."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

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

SIZES = (1024, 65536, 4194304)


def test_every_shape_once() -> None:
    found = [(shape.ranks, shape.members, shape.stride) for shape in shapes(8, 4)]
    assert found == [(2, 1, 4), (2, 2, 1), (4, 2, 2), (4, 4, 1), (8, 4, 1)]
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
    found = fit(operation, ranks, SIZES, times)
    assert found.alpha == pytest.approx(alpha, rel=1e-6)
    assert found.beta == pytest.approx(beta, rel=1e-6)
    assert found.error < 1e-6 and found.root_error < 1e-6


@pytest.mark.parametrize("loss", [0.0, 0.3, 4.0])
def test_the_loss_of_a_narrow_side_comes_back(loss: float) -> None:
    """Of rate(side) = peak / (1 + loss 64 / side), from a full side and one of 64."""
    side, peak = 1024, 3e12
    full, narrow = (peak / (1 + loss * 64 / size) for size in (side, 64))
    assert side_loss(full, narrow, side) == pytest.approx(max(loss, 1e-3), rel=1e-9)


def test_a_root_fits_what_a_line_cannot() -> None:
    sizes = [2.0**power for power in range(10, 28, 2)]
    times = [1e-5 + 3e-8 * size**0.5 + 2e-11 * size for size in sizes]
    found = fit("all_reduce", 8, sizes, times)
    assert found.root == pytest.approx((1e-5, 3e-8, 2e-11), rel=1e-4)
    assert found.root_error < 1e-6 < 0.02 < found.error


def test_no_term_is_negative() -> None:
    found = fit("send", 2, SIZES, (1e-3, 5e-4, 1e-4))
    assert found.alpha >= 0 and found.beta >= 0 and min(found.root) >= 0
    with pytest.raises(UserError, match="as many of each"):
        fit("send", 2, SIZES, (1e-3,))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"ranks": 1}, "joins at least 2"),
        ({"ranks": 4, "ranks_per_node": 3}, "ranks-per-node (3) must divide ranks (4)"),
        ({"hosts": 3}, "hosts (3) must divide ranks (4)"),
        ({"hosts": 2, "link": "fast"}, "is no rate"),
        ({"operations": "all_gather,broadcst"}, "no operation 'broadcst'"),
        ({"sizes": "4m,many"}, "'many' is no size"),
        ({"sizes": ","}, "at least one"),
        ({"device": "tpu"}, "choose from cpu, cuda"),
        ({"device": "cuda", "hosts": 2}, "on the CPU"),
    ],
)
def test_settings_that_do_not_fit(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as told:
        LinksSettings(**keys)
    assert words in str(told.value)


def measured(mesh: Mesh, stride: int) -> tuple[list[dict[str, Any]], int]:
    shape = GroupShape(ranks=2, members=2, stride=stride)
    return measure_shape(mesh, shape, OPERATIONS, (1000, 4096), 1), len(mesh.ledger)


def test_ranks_measure_every_operation_alike() -> None:
    found = mesh_on_ranks(Layout(dp=2), measured, 1)
    rows, entries = found[0]
    assert entries == len(OPERATIONS) and found[1][0] == rows
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
    found = result()
    file = tmp_path / "cluster.toml"
    file.write_text(cluster_of(found, "two hosts").to_toml("Measured."))
    cluster = load_cluster(str(file))
    assert (cluster.name, cluster.nodes, cluster.gpus_per_node) == ("two hosts", 2, 2)
    assert cluster.intra_node_bandwidth == pytest.approx(1e9, rel=1e-4)
    assert cluster.inter_node_bandwidth == pytest.approx(100e6, rel=1e-4)
    assert cluster.inter_node_latency == pytest.approx(200e-6, rel=1e-4)
    # The planner's own unit of the loss with few rows is that of an A100.
    assert cluster.constants["gemm_row_loss"] == pytest.approx(2.0 * 312e12 / 8e10)
    assert cluster.constants["gemm_width_loss"] == 0.5
    assert len(cluster.links) == len(found["links"])
    for curve, row in zip(cluster.links, found["links"], strict=True):
        assert curve.bytes == tuple(row["bytes"])
        assert curve.seconds == pytest.approx(row["seconds"], rel=1e-5)
    text = links_text(found)
    assert "with √S" in text and "hosts at 1gbit" in text and "4.0 MiB" in text
    assert LinkFit(**found["links"][0]["fit"]).error < 1e-6


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
    assert (
        len(json.loads(done.stdout)["links"])
        == len(OPERATIONS)
        == len(load_cluster(str(file)).links)
    )
    plain = load_cluster(str(file)).model_copy(update={"links": ()})
    (tmp_path / "plain.toml").write_text(plain.to_toml("Without the table."))
    seconds = [
        estimate_named("tiny", str(path), "tp=2", 64, 8).seconds["tensor"]
        for path in (file, tmp_path / "plain.toml")
    ]
    assert seconds[0] != seconds[1]
    refused = subprocess.run(
        [commands.python(), "-m", "moemesh", "bench", "links", "--ranks", "1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert refused.returncode == 2 and "joins at least 2" in refused.stderr
