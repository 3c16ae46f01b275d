"""``moemesh bench links``: how long collectives take, by size and by the shape of their group.

A shape is a number of ranks and how many of them share a node. Ranks `stride` apart make groups of
one shape, and all of them run at once, as the groups of an axis do in training: what they share,
they share here too. A time is the median over rounds of the slowest rank's. With ``--out`` the
table becomes a Cluster file, with what the devices compute and α, β where nothing was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from moemesh.bench.device import measure_device
from moemesh.bench.link_fit import LinkFit, fit
from moemesh.bench.links_rank import GroupShape, measure_shape
from moemesh.bench.ranks import on_ranks
from moemesh.bench.settings import LinksSettings
from moemesh.comm import collectives
from moemesh.comm.mesh import Mesh
from moemesh.config.cluster import Cluster, LinkCurve
from moemesh.config.layout import Layout
from moemesh.config.section import divisors

#: The peak in units of which the planner's loss with few rows is given (`planner/timing/compute`).
_REFERENCE_PEAK = 312e12


def shapes(num_ranks: int, node_size: int) -> list[GroupShape]:
    """Every shape that groups of equally distant ranks can have, each once, small ones first."""
    found: dict[tuple[int, int], GroupShape] = {}
    for size in divisors(num_ranks)[1:]:
        for stride in divisors(num_ranks // size):
            members = min(max(node_size // stride, 1), size)
            found.setdefault(
                (size, members), GroupShape(ranks=size, members=members, stride=stride)
            )
    return [found[key] for key in sorted(found)]


def run(settings: LinksSettings, found: Path | None = None) -> dict[str, Any] | None:
    """Measure on the ranks that `settings` ask for; None where another rank has the result."""
    return on_ranks(
        "links",
        settings,
        lambda ranks: measured(settings, ranks.device),
        num_ranks=settings.ranks,
        found=found,
        device=settings.device,
    )


def measured(settings: LinksSettings, device: Any) -> dict[str, Any]:
    """Measure on every rank; the same object on all, as ``--json`` prints it."""
    world = settings.ranks
    table: list[dict[str, Any]] = []
    for shape in shapes(world, settings.node):
        layout = Layout(
            pp=world // (shape.ranks * shape.stride),
            dp=shape.ranks,
            tp=shape.stride,
            ranks_per_node=settings.node,
        )
        mesh = Mesh.create(layout, device)
        table += measure_shape(mesh, shape, settings.wanted, settings.num_bytes, settings.rounds)
    mesh = Mesh.create(Layout(dp=world, ranks_per_node=settings.node), device)
    collectives.barrier(mesh["world"])
    rates = measure_device(mesh.device, settings.node, settings.rounds)
    told = collectives.gather_json(rates.to_json(), mesh.control)
    return {
        "settings": settings.to_json(),
        "links": [row | _fitted(row) for row in table],
        "device": {
            "name": told[0]["name"],
            "memory_bytes": min(rank["memory_bytes"] for rank in told),
            **{
                key: median(rank[key] for rank in told)
                for key in ("memory_bandwidth", "row_loss", "width_loss")
            },
            "peak_flops": {
                dtype: median(rank["peak_flops"][dtype] for rank in told)
                for dtype in told[0]["peak_flops"]
            },
        },
    }


def _fitted(row: dict[str, Any]) -> dict[str, Any]:
    return {"fit": asdict(fit(row["operation"], row["ranks"], row["bytes"], row["seconds"]))}


def cluster_file(found: dict[str, Any], name: str) -> str:
    """The text of a Cluster file that holds a result."""
    settings = found["settings"]
    where = f"{settings['ranks']} ranks on {settings['device']}"
    if settings["hosts"]:
        where += f", {settings['hosts']} emulated hosts at {settings['link']}"
    return cluster_of(found, name).to_toml(f"Measured by `moemesh bench links`: {where}.")


def cluster_of(found: dict[str, Any], name: str) -> Cluster:
    """The Cluster that a result describes; rates are those reached, so efficiencies are 1."""
    settings, device = LinksSettings(**found["settings"]), found["device"]
    inside = [row for row in found["links"] if row["members_per_node"] == row["ranks"]]
    across = [row for row in found["links"] if row["members_per_node"] < row["ranks"]]
    near = _typical(inside or across)
    far = _typical(across or inside)
    return Cluster(
        name=name,
        nodes=settings.ranks // settings.node,
        gpus_per_node=settings.node,
        memory_bytes=device["memory_bytes"],
        memory_bandwidth=device["memory_bandwidth"],
        peak_flops=device["peak_flops"],
        intra_node_bandwidth=near[1],
        intra_node_latency=near[0],
        inter_node_bandwidth=far[1],
        inter_node_latency=far[0],
        accelerator=device["name"],
        constants={
            "gemm_efficiency": 1.0,
            "gemm_row_loss": device["row_loss"]
            * _REFERENCE_PEAK
            / device["peak_flops"]["bfloat16"],
            "gemm_width_loss": device["width_loss"],
            "memory_efficiency": 1.0,
            "intra_node_efficiency": 1.0,
            "inter_node_efficiency": 1.0,
            "collective_latency_us": max(near[0], far[0], 1e-9) * 1e6,
        },
        links=tuple(
            LinkCurve(
                operation=row["operation"],
                ranks=row["ranks"],
                members_per_node=row["members_per_node"],
                bytes=tuple(map(float, row["bytes"])),
                seconds=tuple(row["seconds"]),
            )
            for row in found["links"]
        ),
    )


def _typical(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """(latency of a hop, bytes/s of one rank) as the medians over operations and shapes.

    A ring of m members a node leaves it over m links: each has an m-th of the group's rate.
    """
    fits = [(LinkFit(**row["fit"]), row) for row in rows]
    latency = median(one.alpha for one, _ in fits)
    rates: list[float] = []
    for one, row in fits:
        if one.beta > 0:
            shared = row["members_per_node"] if row["members_per_node"] < row["ranks"] else 1
            rates.append(1 / one.beta / shared)
    # Latency alone explains the times: the largest message bounds the rate from below.
    slowest = [max(row["bytes"]) / max(row["seconds"]) for row in rows]
    return latency, median(rates or slowest)
