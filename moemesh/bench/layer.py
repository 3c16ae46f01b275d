"""``moemesh bench layer``: one MoE layer, forward and backward, as a multiple of what bounds it.

Every number of ranks is measured in processes of its own that the launcher starts, with the
allocator set as in training. The bounds are measured in the same processes, taking turns with the
layer (:mod:`moemesh.bench.bounds`): bare expert products on one rank; bare expert products plus
bare all-to-all on several. The tokens of a shape are those of all ranks together, so that the work
in total is the same for any number of ranks. A workload of :mod:`moemesh.bench.workloads` may
choose the experts in the router's place; the bounds then have its loads too.
"""

from __future__ import annotations

import json as jsonlib
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moemesh.bench.layer_rank import MakeDispatcher, measure
from moemesh.bench.shapes import SHAPES
from moemesh.bench.workloads import WORKLOADS
from moemesh.comm import launch
from moemesh.comm.mesh import Mesh
from moemesh.config.errors import UserError
from moemesh.config.layout import Layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TIMEOUT_SECONDS = 300.0


class BenchError(UserError):
    """A benchmark was asked for something that it cannot measure."""


def command(
    *,
    shape: str,
    ranks: str,
    dtype: str,
    rounds: int,
    json: bool,
    out: Path | None,
    make_dispatcher: MakeDispatcher,
    workload: str = "",
) -> int:
    """Measure and print; returns the exit code.

    `shape` is a name or "all" (A and B), `ranks` numbers like "1,4", `dtype` a name or "all".
    `make_dispatcher` makes what sends the rows where there are several ranks. `out` is a file for
    the JSON object. `workload` names loads with commas, or "all"; "" leaves the choice to the
    router. A process that is itself a rank measures only its own number of ranks.
    """
    shapes = ["A", "B"] if shape == "all" else [shape]
    dtypes = list(DTYPES) if dtype == "all" else [dtype]
    counts = _parse_ranks(ranks)
    loads = list(WORKLOADS) if workload == "all" else workload.split(",")
    _check(shapes, dtypes, counts, loads)
    if launch.joined():
        _run_rank(shapes, dtypes, loads, rounds, json, out, make_dispatcher)
        return 0
    results: list[dict[str, Any]] = []
    machine: dict[str, Any] = {}
    for name in shapes:
        for kind in dtypes:
            for count in counts:
                code, found = _run_ranks(count, name, kind, rounds, workload)
                if found is None:
                    return code
                machine = found["machine"]
                results += found["results"]
    _deliver({"machine": machine, "results": results}, json, out)
    return 0


def _run_ranks(
    num_ranks: int, shape: str, dtype: str, rounds: int, workload: str
) -> tuple[int, dict[str, Any] | None]:
    """Start the ranks of one measurement; its exit code and, if that is 0, its JSON object."""
    with tempfile.TemporaryDirectory(prefix="moemesh-bench-") as folder:
        file = Path(folder) / "result.json"
        options = {"--shape": shape, "--dtype": dtype, "--ranks": num_ranks, "--rounds": rounds}
        if workload:
            options["--workload"] = workload
        arguments = [str(word) for pair in options.items() for word in pair]
        code = launch.launch(num_ranks, ["bench", "layer", *arguments, "--out", str(file)])
        return code, jsonlib.loads(file.read_text()) if code == 0 else None


def _run_rank(
    shapes: Sequence[str],
    dtypes: Sequence[str],
    loads: Sequence[str],
    rounds: int,
    json: bool,
    out: Path | None,
    make_dispatcher: MakeDispatcher,
) -> None:
    ranks = launch.start("cpu", _TIMEOUT_SECONDS)
    # Ranks that torchrun started are left alone by the launcher, but a figure must say one thing.
    keeps = launch.keep_freed_memory()
    mesh = Mesh.create(Layout(dp=ranks.world_size, ep=ranks.world_size), ranks.device)
    results = [
        {"shape": shape, **_sizes(shape), "dtype": dtype, "ranks": ranks.world_size}
        | {"rounds": rounds, "workload": load}
        | measure(SHAPES[shape], DTYPES[dtype], mesh, rounds, make_dispatcher, load)
        for shape in shapes
        for dtype in dtypes
        for load in loads
    ]
    if ranks.rank == 0:
        _deliver({"machine": _machine(keeps), "results": results}, json, out)
    launch.stop()


def _sizes(shape: str) -> dict[str, int]:
    sizes = SHAPES[shape]
    return {
        "tokens": sizes.tokens,
        "hidden": sizes.hidden,
        "width": sizes.width,
        "num_experts": sizes.num_experts,
        "top_k": sizes.top_k,
    }


def _parse_ranks(text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        raise BenchError(f'--ranks "{text}": numbers separated by commas, such as 1,4') from None
    if min(counts) < 1:
        raise BenchError(f"--ranks {text}: every number of ranks must be at least 1")
    return counts


def _check(
    shapes: Sequence[str], dtypes: Sequence[str], counts: Sequence[int], loads: Sequence[str]
) -> None:
    for given, known in ((shapes, SHAPES), (dtypes, DTYPES), (loads, ("", *WORKLOADS))):
        for name in given:
            if name not in known:
                raise BenchError(f'"{name}" is none of {", ".join([*known, "all"])}')
    for name in shapes:
        for count in counts:
            if SHAPES[name].num_experts % count:
                experts = SHAPES[name].num_experts
                raise BenchError(f"{count} ranks must divide the {experts} experts of shape {name}")


def _machine(keeps_freed_memory: bool) -> dict[str, Any]:
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads_per_rank": torch.get_num_threads(),
        "keeps_freed_memory": keeps_freed_memory,
    }


def _deliver(found: dict[str, Any], json: bool, out: Path | None) -> None:
    if out is not None:
        out.write_text(jsonlib.dumps(found, indent=2))
    if json:
        print(jsonlib.dumps(found, indent=2))
    elif out is None and sys.stdout.isatty():
        _print_table(found)
    elif out is None:
        print(plain_text(found))


COLUMNS = ("shape", "dtype", "load", "ranks", "layer ms", "GEMM ms", "all-to-all ms", "x bound")
COLUMNS += ("quartiles", "x bound, CPU", "saved MB", "peak MB", "slowest parts ms")


def table_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row of text for each measurement, under COLUMNS. MB are 10^6 bytes of the worst rank."""
    rows = []
    for result in found["results"]:
        seconds, ratio, parts = result["seconds"], result["ratio"], result["parts_seconds"]
        peaks = [peak for peak in result["peak_bytes"] if peak is not None]
        exchange = seconds.get("all_to_all")
        rows.append(
            (
                result["shape"],
                result["dtype"],
                result["workload"] or "router",
                str(result["ranks"]),
                f"{seconds['layer']['median'] * 1e3:.1f}",
                f"{seconds['gemm']['median'] * 1e3:.1f}",
                f"{exchange['median'] * 1e3:.1f}" if exchange else "-",
                f"{ratio['median']:.3f}",
                f"{ratio['quartile_1']:.3f} .. {ratio['quartile_3']:.3f}",
                f"{result['cpu_ratio']['median']:.3f}",
                f"{max(result['saved_bytes']) / 1e6:.1f}",
                f"{max(peaks) / 1e6:.1f}" if peaks else "-",
                " ".join(f"{name} {value * 1e3:.1f}" for name, value in parts.items()),
            )
        )
    return rows


def _headline(machine: dict[str, Any]) -> str:
    kept = "keeps freed memory" if machine["keeps_freed_memory"] else "default allocator"
    return (
        f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"{machine['threads_per_rank']} thread(s) per rank, {kept}"
    )


def plain_text(found: dict[str, Any]) -> str:
    """The table without any drawing, for files and pipes."""
    rows = [COLUMNS, *table_rows(found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([_headline(found["machine"]), *lines])


def _print_table(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*COLUMNS, title=_headline(found["machine"]))
    for row in table_rows(found):
        table.add_row(*row)
    Console().print(table)
