"""``moemesh bench links``: how long collectives take, by size and by the shape of their group.

A shape is a number of ranks and how many of them share a node. Ranks `stride` apart make groups of
one shape, and all of them run at once, as the groups of an axis do in training: what they share,
they share here too. A time is the median over rounds of the slowest rank's. With ``--out`` the
table becomes a Cluster file, with what the devices compute and α, β where nothing was measured.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from moemesh.bench import hosts
from moemesh.bench.device import measure_device
from moemesh.bench.link_fit import LinkFit, fit
from moemesh.bench.links_rank import OPERATIONS, Shape, measure_shape
from moemesh.comm import collectives, launch
from moemesh.comm.mesh import Mesh
from moemesh.config.cluster import Cluster, LinkCurve
from moemesh.config.errors import UserError
from moemesh.config.layout import Layout
from moemesh.config.section import divisors
from moemesh.trace.memory import format_bytes

_TIMEOUT_SECONDS = 600.0
#: The peak in units of which the planner's loss with few rows is told (`planner/timing/compute`).
_REFERENCE_PEAK = 312e12
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


class BenchError(UserError):
    """Settings of a benchmark that do not fit together."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure; each field is the option of the same name. Raises BenchError.

    ``sizes`` of the full tensor with commas ("1k,4m"), ``operations`` names with commas or "all",
    ``ranks_per_node = 0`` means one node (or as many as ``hosts``), ``device`` cpu or cuda.
    """

    ranks: int = 4
    ranks_per_node: int = 0
    hosts: int = 0
    link: str = "1gbit"
    sizes: str = "1k,8k,64k,512k,4m"
    operations: str = "all"
    rounds: int = 9
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise BenchError(f"ranks ({self.ranks}): a link joins at least 2")
        self._divides("ranks-per-node", self.node)
        if self.hosts:
            hosts.link_rate(self.link)
            self._divides("hosts", self.hosts)
            if self.ranks_per_node not in (0, self.ranks // self.hosts):
                raise BenchError(
                    f"{self.hosts} hosts of {self.ranks // self.hosts} ranks are not "
                    f"ranks-per-node {self.ranks_per_node}"
                )
        for name in self.wanted:
            if name not in OPERATIONS:
                known = ", ".join(OPERATIONS)
                raise BenchError(f"no operation {name!r} here: all, or some of {known}")
        if self.device not in ("cpu", "cuda"):
            raise BenchError(f"no device {self.device!r}: cpu or cuda")
        if self.hosts and self.device == "cuda":
            raise BenchError("hosts are emulated for ranks on the CPU: device cpu, or hosts 0")
        if not self.num_bytes:
            raise BenchError(f"sizes {self.sizes!r}: at least one is needed, such as 1k,64k,4m")

    def _divides(self, name: str, part: int) -> None:
        if part < 1 or self.ranks % part:
            raise BenchError(f"{name} ({part}) must divide ranks ({self.ranks})")

    @property
    def node(self) -> int:
        """Ranks of one node."""
        if self.hosts:
            return max(1, self.ranks // self.hosts)
        return self.ranks_per_node or self.ranks

    @property
    def wanted(self) -> tuple[str, ...]:
        return OPERATIONS if self.operations == "all" else tuple(self.operations.split(","))

    @property
    def num_bytes(self) -> tuple[int, ...]:
        """Sizes in bytes, ascending. Raises BenchError for what is no size."""
        found: set[int] = set()
        for word in filter(None, (part.strip().lower() for part in self.sizes.split(","))):
            unit = word[-1] if word[-1] in "kmg" else ""
            number = word.removesuffix(unit)
            if not number.isdecimal() or not 4 <= int(number) * _UNITS[unit] <= 2**32:
                raise BenchError(f"sizes: {word!r} is no size from 4 to 4g, such as 64k")
            found.add(int(number) * _UNITS[unit])
        return tuple(sorted(found))

    def arguments(self) -> list[str]:
        """The command line of these settings, for the ranks."""
        given = ((field.name, getattr(self, field.name)) for field in fields(self))
        options = ((f"--{name.replace('_', '-')}", str(value)) for name, value in given)
        return ["bench", "links", *(word for option in options for word in option)]


def shapes(num_ranks: int, node_size: int) -> list[Shape]:
    """Every shape that groups of equally distant ranks can have, each once, small ones first."""
    found: dict[tuple[int, int], Shape] = {}
    for size in divisors(num_ranks)[1:]:
        for stride in divisors(num_ranks // size):
            members = min(max(node_size // stride, 1), size)
            found.setdefault((size, members), Shape(ranks=size, members=members, stride=stride))
    return [found[key] for key in sorted(found)]


def command(settings: Settings, *, as_json: bool, out: Path | None, name: str) -> int:
    """Start the ranks that `settings` ask for, or be one of them; returns the exit code.

    `out`: the Cluster file to write, for a cluster called `name`.
    """
    if launch.joined():
        return _rank(settings, as_json, out, name)
    launch.check_device("cuda" if settings.device == "cuda" else "cpu", settings.ranks)
    if out is not None and not out.parent.is_dir():
        raise BenchError(f"--out {out}: there is no folder {out.parent}")
    with tempfile.TemporaryDirectory(prefix="moemesh-links-") as folder:
        file = Path(folder) / "links.json"
        arguments = [*settings.arguments(), "--found", str(file)]
        if settings.hosts:
            with hosts.hosts(settings.hosts, settings.link) as names:
                hosts.run_ranks(
                    names,
                    ranks_per_host=settings.node,
                    command=[sys.executable, "-m", "moemesh", *arguments],
                    timeout=_TIMEOUT_SECONDS,
                )
        elif code := launch.launch(settings.ranks, arguments):
            return code
        found = json.loads(file.read_text())
    _deliver(found, as_json, out, name)
    return 0


def rank_command(settings: Settings, file: Path) -> int:
    """What a rank that :func:`command` started does: rank 0 writes `file`."""
    found = _measured(settings)
    if found is not None:
        file.write_text(json.dumps(found))
    return 0


def _rank(settings: Settings, as_json: bool, out: Path | None, name: str) -> int:
    """A rank that torchrun started."""
    found = _measured(settings)
    if found is not None:
        _deliver(found, as_json, out, name)
    return 0


def _measured(settings: Settings) -> dict[str, Any] | None:
    """The result on rank 0, None elsewhere."""
    ranks = launch.start("cuda" if settings.device == "cuda" else "cpu", _TIMEOUT_SECONDS)
    if ranks.world_size != settings.ranks:
        raise BenchError(f"{ranks.world_size} ranks were started for ranks = {settings.ranks}")
    found = run(settings, ranks.device)
    launch.stop()
    return found if ranks.rank == 0 else None


def run(settings: Settings, device: Any) -> dict[str, Any]:
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
        "settings": asdict(settings),
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


def _deliver(found: dict[str, Any], as_json: bool, out: Path | None, name: str) -> None:
    if out is not None:
        settings = found["settings"]
        where = f"{settings['ranks']} ranks on {settings['device']}"
        if settings["hosts"]:
            where += f", {settings['hosts']} emulated hosts at {settings['link']}"
        heading = f"Measured by `moemesh bench links`: {where}."
        out.write_text(cluster_of(found, name).to_toml(heading), encoding="utf-8")
    print(json.dumps(found, indent=2) if as_json else table(found))


def cluster_of(found: dict[str, Any], name: str) -> Cluster:
    """The Cluster that a result describes; rates are those reached, so efficiencies are 1."""
    settings, device = Settings(**found["settings"]), found["device"]
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


def table(found: dict[str, Any]) -> str:
    """A line for each operation and shape: times by size, and what the fits say."""
    settings, device = found["settings"], found["device"]
    sizes = sorted({size for row in found["links"] for size in row["bytes"]})
    head = ("operation", "ranks", "a node", *(format_bytes(size) for size in sizes))
    rows = [(*head, "α µs", "1/β MB/s", "error", "with √S")]
    for row in found["links"]:
        one = LinkFit(**row["fit"])
        times = dict(zip(row["bytes"], row["seconds"], strict=True))
        rows.append(
            (
                row["operation"],
                str(row["ranks"]),
                str(row["members_per_node"]),
                *(f"{times[size] * 1e3:.3f}" if size in times else "" for size in sizes),
                f"{one.alpha * 1e6:.1f}",
                f"{1e-6 / one.beta:.0f}" if one.beta else "-",
                f"{one.error:.1%}",
                f"{one.root_error:.1%}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    rates = ", ".join(f"{name} {peak / 1e9:.1f}" for name, peak in device["peak_flops"].items())
    where = f" on {settings['hosts']} hosts at {settings['link']}" if settings["hosts"] else ""
    return "\n".join(
        [
            f"{settings['ranks']} ranks{where}: milliseconds, medians of the slowest rank",
            *lines,
            f"a device: GFLOP/s {rates}; {device['memory_bandwidth'] / 1e9:.1f} GB/s of memory",
        ]
    )
