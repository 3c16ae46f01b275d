"""``moemesh bench links``: how long collectives take, by size and by the shape of their group.

A shape is a number of ranks and how many of them share a node. Ranks `stride` apart make groups of
one shape. All groups of a shape run at once, as those of an axis do in training, and share links in
the same way. A time is the median over rounds of the slowest rank's. With ``--out`` the table
becomes a Cluster file, with rates of the devices, and α, β for shapes that were not measured.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from moemesh.bench import hosts
from moemesh.bench.link_cluster import fit
from moemesh.bench.settings import BenchError, HostSettings, LinksSettings, Settings
from moemesh.comm import collectives, cuda, launch, point_to_point, transfers
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout
from moemesh.config.limits import parse_json
from moemesh.config.python import python_command
from moemesh.config.suggest import divisors
from moemesh.trace.machine import keep_freed_memory, physical_bytes

#: Longest time of a benchmark on emulated hosts; elsewhere of one collective.
TIMEOUT_SECONDS = 1200.0


def on_ranks(
    command: Sequence[str],
    settings: Settings,
    measure: Callable[[launch.Ranks], Any],
    *,
    num_ranks: int,
    found: Path | None,
    device: launch.Device = "cpu",
) -> Any | None:
    """The result of `measure` on rank 0 of `num_ranks` ranks (0: as many as torchrun started).

    The result is made of JSON's types. If this process is a rank, it calls `measure`; rank 0
    returns the result, or writes it to the file `found` and returns None, as all other ranks do.
    Any other process starts the ranks with `command` (a module and its first arguments), the
    settings and ``--found`` with a temporary file, and returns what rank 0 has written. A rank that
    fails ends this process with its exit code; on emulated hosts it raises HostsError.
    """
    if launch.joined():
        ranks = launch.start(device, TIMEOUT_SECONDS)
        keep_freed_memory()
        if num_ranks and ranks.world_size != num_ranks:
            raise BenchError(f"{ranks.world_size} ranks were started for ranks = {num_ranks}")
        result = measure(ranks)
        launch.stop()
        if ranks.rank == 0 and found is not None:
            found.write_text(json.dumps(result))
        return result if ranks.rank == 0 and found is None else None
    with tempfile.TemporaryDirectory(prefix="moemesh-bench-") as folder:
        file = Path(folder) / "found.json"
        command = python_command(*command, *settings.words(), "--found", str(file))
        if isinstance(settings, HostSettings) and settings.hosts:
            with hosts.hosts(settings.hosts, settings.link) as names:
                hosts.run_ranks(
                    names,
                    ranks_per_host=settings.node,
                    command=command,
                    timeout=TIMEOUT_SECONDS,
                )
        else:
            cuda.check(device, num_ranks)
            if code := launch.launch(num_ranks, [], entry=command[1:]):
                raise SystemExit(code)
        return parse_json(file.read_text())


#: Seconds for which one sample repeats an operation, and the maximum number of repeats.
_SAMPLE_SECONDS, _MOST_REPEATS = 2e-3, 20
#: Phase and caller of these operations in the ledger.
_LABELS = {"phase": "bench", "caller": "bench.links"}
_NUMBER_BYTES = 4
#: Unit of side lengths in the formula of lost efficiency, and the least loss: constants of a
#: Cluster must be above 0.
TILE = 64
_LEAST_LOSS = 1e-3
#: Side length of the products, and elements of the copied tensor, by type of device.
_SIDE = {"cpu": 1024, "cuda": 8192}
_NUMBERS = {"cpu": 1 << 24, "cuda": 1 << 28}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class GroupShape:
    """Groups of `ranks`, `stride` apart, of which `members` share a node."""

    ranks: int
    members: int
    stride: int


def shapes(num_ranks: int, node_size: int) -> list[GroupShape]:
    """Every shape that groups of equally distant ranks can have, each once, small ones first."""
    by_size: dict[tuple[int, int], GroupShape] = {}
    for size in divisors(num_ranks)[1:]:
        for stride in divisors(num_ranks // size):
            members = min(max(node_size // stride, 1), size)
            shape = GroupShape(ranks=size, members=members, stride=stride)
            by_size.setdefault((size, members), shape)
    return [by_size[key] for key in sorted(by_size)]


def run(settings: LinksSettings, found: Path | None = None) -> dict[str, Any] | None:
    """Measure on the ranks of `settings`; the result, or None where :func:`on_ranks` has none."""
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
        # Groups of dp have `shape.ranks` members, tp = `shape.stride` apart.
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
    all_rates = collectives.gather_json(rates, mesh.control)
    return {
        "settings": settings.to_json(),
        "links": [
            row | {"fit": asdict(fit(row["operation"], row["ranks"], row["bytes"], row["seconds"]))}
            for row in table
        ],
        "device": {
            "name": all_rates[0]["name"],
            "memory_bytes": min(rank["memory_bytes"] for rank in all_rates),
            **{
                key: median(rank[key] for rank in all_rates)
                for key in ("memory_bandwidth", "row_loss", "width_loss")
            },
            "peak_flops": {
                dtype: median(rank["peak_flops"][dtype] for rank in all_rates)
                for dtype in all_rates[0]["peak_flops"]
            },
        },
    }


def measure_shape(
    mesh: Mesh, shape: GroupShape, operations: Sequence[str], sizes: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """A row for each operation: bytes of the full tensor, and medians in seconds. The groups are
    those of the mesh's axis ``dp``; all ranks of the mesh call this and get the same rows."""
    axis, rows = mesh["dp"], list[dict[str, Any]]()
    for operation in operations:
        if operation == "send" and shape.ranks > 2:
            continue
        measured: dict[int, float] = {}
        for size in sizes:
            numbers = -(-size // (_NUMBER_BYTES * shape.ranks)) * shape.ranks
            if numbers * _NUMBER_BYTES in measured:
                continue
            full = torch.zeros(numbers, device=axis.device)
            part = torch.zeros(numbers // axis.size, device=axis.device)
            pair = point_to_point.receive if axis.index else point_to_point.send
            calls: dict[str, Callable[..., object]] = {
                "all_reduce": partial(transfers.all_reduce_, full, axis),
                "all_gather": partial(transfers.all_gather, part, axis),
                "reduce_scatter": partial(transfers.reduce_scatter, full, axis),
                "all_to_all": partial(transfers.all_to_all, full, axis),
                "send": partial(pair, full, axis, 1 - axis.index),
            }
            run = partial(calls[operation], **_LABELS)
            _timed(run, mesh, 1)  # not counted: the first use makes connections
            longest = max(collectives.gather_json(_timed(run, mesh, 1), mesh.control))
            repeats = min(max(int(_SAMPLE_SECONDS / longest), 1), _MOST_REPEATS)
            samples = [_timed(run, mesh, repeats) for _ in range(rounds)]
            of_rounds = zip(*collectives.gather_json(samples, mesh.control), strict=True)
            measured[numbers * _NUMBER_BYTES] = median(map(max, of_rounds))  # the slowest rank's
        rows.append(
            {
                "operation": operation,
                "ranks": shape.ranks,
                "members_per_node": shape.members,
                "bytes": list(measured),
                "seconds": list(measured.values()),
            }
        )
    return rows


def _timed(run: Callable[[], object], mesh: Mesh, repeats: int) -> float:
    """Mean seconds of `run` on this rank; all ranks of the mesh start together."""
    collectives.barrier(mesh["world"])
    synchronize(mesh.device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(mesh.device)
    return (time.perf_counter() - start) / repeats


def measure_device(device: torch.device, ranks_per_node: int, rounds: int) -> dict[str, Any]:
    """Rates of this rank's device, medians of `rounds`: operations/s of the largest products by
    dtype, losses with few rows and with narrow sides (in bfloat16), bytes/s read and written, and
    its bytes of memory.

    A product of [M, K] and [K, N] is taken to run at peak / ((1 + r 64/M) (1 + n 64/N)
    (1 + n 64/K)), as the planner's time model has it: three shapes in bfloat16 give its peak, r and
    n, with which the peaks of other dtypes follow from their rates.
    All ranks measure at the same time, as they compute in training: on a machine that they share,
    each gets its part.
    """
    side = _SIDE[device.type]

    def rate(dtype: torch.dtype, rows: int, columns: int) -> float:
        left = torch.randn(rows, side, device=device).to(dtype)
        right = torch.randn(side, columns, device=device).to(dtype)
        seconds = median_seconds(lambda: torch.mm(left, right), device, rounds)
        return 2 * rows * columns * side / seconds

    rates = {name: rate(dtype, side, side) for name, dtype in DTYPES.items()}
    full = rates["bfloat16"]
    row_loss = side_loss(full, rate(torch.bfloat16, TILE, side), side)
    width_loss = side_loss(full, rate(torch.bfloat16, side, TILE), side)
    # Peak over the rate of the large product, which has losses, too.
    lost = (1 + row_loss * TILE / side) * (1 + width_loss * TILE / side) ** 2
    source = torch.zeros(_NUMBERS[device.type] // 4, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), device, rounds)
    bandwidth = 2 * source.numel() * source.element_size() / seconds
    # Memory of the device, or this rank's part of the machine's memory.
    memory_bytes = physical_bytes() // ranks_per_node
    if device.type == "cuda":
        memory_bytes = int(torch.cuda.get_device_properties(device).total_memory)
    return {
        "peak_flops": {name: reached * lost for name, reached in rates.items()},
        "row_loss": row_loss,
        "width_loss": width_loss,
        "memory_bandwidth": bandwidth,
        "memory_bytes": memory_bytes,
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
    }


def side_loss(full: float, narrow: float, side: int) -> float:
    """l of rate = peak / (1 + l 64 / side), from the rates with a full side and one of 64."""
    ratio = full / narrow
    # Beyond this ratio not even an infinite loss explains the times.
    ratio = min(max(ratio, 1.0), 0.99 * side / TILE)
    return max((ratio - 1) / (1 - ratio * TILE / side), _LEAST_LOSS)


def median_seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median time of `rounds` calls, after two calls that are not counted."""
    taken: list[float] = []
    for number in range(rounds + 2):
        start = time.perf_counter()
        work()
        synchronize(device)
        if number >= 2:
            taken.append(time.perf_counter() - start)
    return median(taken)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
