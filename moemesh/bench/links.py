"""``moemesh bench links``: how long collectives take, by size and by the shape of their group.

A shape is a number of ranks and how many of them share a node. Ranks `stride` apart make groups of
one shape, and all of them run at once, as the groups of an axis do in training: what they share,
they share here too. A time is the median over rounds of the slowest rank's. With ``--out`` the
table becomes a Cluster file, with what the devices compute and α, β where nothing was measured.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from moemesh.bench.device import measure_device
from moemesh.bench.link_fit import fit
from moemesh.bench.links_rank import GroupShape, measure_shape
from moemesh.bench.ranks import on_ranks
from moemesh.bench.settings import LinksSettings
from moemesh.comm import collectives
from moemesh.comm.mesh import Mesh
from moemesh.config.divisors import divisors
from moemesh.config.layout import Layout


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
        ("moemesh", "bench", "links"),
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
