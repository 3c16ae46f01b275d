"""A Cluster file from the result of `moemesh bench links`, without torch.

Lines through measured collectives: α and β of the closed form, and the same with a term √S.

| model | time of S bytes |
|---|---|
| alpha-beta | hops(n) α + volume(n, S) β, both of the ring or direct form |
| with a root | a + b √S + c S: bandwidth still grows with the size of messages |

Both are fitted to relative errors, so that a microsecond counts as much as a second; no term is
negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moemesh.bench.settings import LinksSettings
from moemesh.config.cluster import Cluster, LinkCurve
from moemesh.config.errors import UserError

#: Peak operations/s for which the planner states its loss with few rows (`planner/timing/compute`).
_REFERENCE_PEAK = 312e12


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    """`alpha` seconds a hop and `beta` seconds a byte that a rank sends, with their mean relative
    `error`; `root`: (a, b, c) of the model with √S, with `root_error`."""

    alpha: float
    beta: float
    error: float
    root: tuple[float, float, float]
    root_error: float


def hops_and_volume(operation: str, ranks: int) -> tuple[float, float]:
    """(number of messages in sequence, bytes that a rank sends / bytes of the full tensor)."""
    share = (ranks - 1) / ranks
    match operation:
        case "all_reduce":
            return 2 * (ranks - 1), 2 * share
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return ranks - 1, share
        case "send":
            return 1, 1.0
        case _:
            raise UserError(f"no operation {operation!r} is measured on links")


def fit(operation: str, ranks: int, sizes: Sequence[float], seconds: Sequence[float]) -> LinkFit:
    """Both lines through the medians of one group. Raises UserError for no or broken numbers."""
    if not sizes or len(sizes) != len(seconds) or min(sizes) <= 0 or min(seconds) <= 0:
        raise UserError(
            f"{operation} of {ranks} ranks: {len(sizes)} sizes and {len(seconds)} times above 0 "
            "are needed, one time for each size"
        )
    size, time = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    hops, volume = hops_and_volume(operation, ranks)
    line = np.stack([np.full_like(size, hops), volume * size], axis=1)
    (alpha, beta), error = _least_relative(line, time)
    curve = np.stack([np.ones_like(size), np.sqrt(size), size], axis=1)
    (a, b, c), root_error = _least_relative(curve, time)
    return LinkFit(alpha=alpha, beta=beta, error=error, root=(a, b, c), root_error=root_error)


def _least_relative(
    terms: NDArray[np.float64], time: NDArray[np.float64]
) -> tuple[list[float], float]:
    """Non-negative weights of the columns of `terms` [n, k], and the mean relative error."""
    # Imported late: slow, and only this function needs it.
    from scipy.optimize import nnls

    # Columns are scaled to one size: a byte and a microsecond differ by ten powers of ten.
    relative = terms / time[:, None]
    scale = np.abs(relative).max(axis=0)
    solution: Any = nnls(relative / scale, np.ones_like(time))[0]
    weights = solution / scale
    return [float(w) for w in weights], float(np.abs(terms @ weights / time - 1).mean())


def origin_of(result: dict[str, Any]) -> str:
    """A sentence on the origin of a Cluster made from a result."""
    settings = result["settings"]
    machine = f"{settings['ranks']} ranks on {settings['device']}"
    if settings["hosts"]:
        machine += f", {settings['hosts']} emulated hosts at {settings['link']}"
    return f"Measured by `moemesh bench links`: {machine}."


def cluster_of(result: dict[str, Any], name: str) -> Cluster:
    """The Cluster that a result describes; rates are those reached, so efficiencies are 1."""
    settings, device = LinksSettings(**result["settings"]), result["device"]
    inside = [row for row in result["links"] if row["members_per_node"] == row["ranks"]]
    across = [row for row in result["links"] if row["members_per_node"] < row["ranks"]]
    near_latency, near_bandwidth = _typical(inside or across)
    far_latency, far_bandwidth = _typical(across or inside)
    return Cluster(
        name=name,
        nodes=settings.ranks // settings.node,
        gpus_per_node=settings.node,
        memory_bytes=device["memory_bytes"],
        memory_bandwidth=device["memory_bandwidth"],
        peak_flops=device["peak_flops"],
        intra_node_bandwidth=near_bandwidth,
        intra_node_latency=near_latency,
        inter_node_bandwidth=far_bandwidth,
        inter_node_latency=far_latency,
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
            "collective_latency_us": max(near_latency, far_latency, 1e-9) * 1e6,
        },
        links=tuple(
            LinkCurve(
                operation=row["operation"],
                ranks=row["ranks"],
                members_per_node=row["members_per_node"],
                bytes=tuple(map(float, row["bytes"])),
                seconds=tuple(row["seconds"]),
            )
            for row in result["links"]
        ),
    )


def _typical(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """(seconds of a hop, bytes/s of one rank) as the medians over operations and shapes. A group
    with m members on a node leaves it over m links: each has an m-th of the group's rate."""
    fits = [(LinkFit(**row["fit"]), row) for row in rows]
    latency = median(fitted.alpha for fitted, _ in fits)
    rates: list[float] = []
    for fitted, row in fits:
        if fitted.beta > 0:
            shared = row["members_per_node"] if row["members_per_node"] < row["ranks"] else 1
            rates.append(1 / fitted.beta / shared)
    # Without a rate (latency alone explains the times), that of the largest tensor takes its place.
    slowest = [max(row["bytes"]) / max(row["seconds"]) for row in rows]
    return latency, median(rates or slowest)
