"""A Cluster file from what `moemesh bench links` measured; no torch, for it reads only a result."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from moemesh.bench.link_fit import LinkFit
from moemesh.bench.settings import LinksSettings
from moemesh.config.cluster import Cluster, LinkCurve

#: The peak in units of which the planner's loss with few rows is given (`planner/timing/compute`).
_REFERENCE_PEAK = 312e12


def cluster_file(found: dict[str, Any], name: str) -> str:
    """The text of a Cluster file that holds a result."""
    settings = found["settings"]
    where = f"{settings['ranks']} ranks on {settings['device']}"
    if settings["hosts"]:
        where += f", {settings['hosts']} emulated hosts at {settings['link']}"
    heading = f"Measured by `moemesh bench links`: {where}."
    return cluster_of(found, name).to_toml(heading, explained=True)


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
