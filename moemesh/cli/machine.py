"""Verbs on this machine: doctor looks for what stands in the way of a run, bench links measures."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from moemesh.bench.settings import BenchError, LinksSettings
from moemesh.cli import completion
from moemesh.cli.application import AsJson, app, bench_app
from moemesh.cli.terminal import table
from moemesh.trace.memory_profile import format_bytes
from moemesh.trace.strict_json import strict_json


@app.command(short_help="Check this machine for what stands in the way of a run.")
def doctor(
    out: Annotated[Path, "Folder that runs will be written to.", "DIR"] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Look at versions, devices, disk, locks, shared memory, limits, host name, ports, clock,
    environment and links of this machine; each passes, warns or fails, with the fix.

    Takes at most half a minute. Exit code 0 without a failure, 1 with one. On a cluster, once on
    every node: srun --ntasks-per-node=1 moemesh doctor --out /shared/runs
    """
    from moemesh.bench.examination import Diagnosis, examine

    found: list[Diagnosis] = []
    for one in examine(out, os.environ):
        found.append(one)
        if not as_json:
            typer.echo(f"{one.verdict}  {one.name:13}  {one.text}")
            if one.fix:
                typer.echo(f"{'':21}fix: {one.fix}")
    verdicts = [one.verdict for one in found]
    if as_json:
        typer.echo(strict_json([one._asdict() for one in found]))
    else:
        counts = ", ".join(f"{verdicts.count(word)} {word}" for word in ("pass", "warn", "fail"))
        typer.echo(counts)
    raise typer.Exit(1 if "fail" in verdicts else 0)


@bench_app.command(
    "links",
    short_help="Collectives over sizes and groups.",
    completions={"operations": completion.collectives},
)
def bench_links(
    settings: LinksSettings,
    name: Annotated[str, "Name of the cluster in the file."] = "measured",
    out: Annotated[Path | None, "Write a Cluster file.", "CLUSTER.toml"] = None,
    as_json: AsJson = False,
    found: Annotated[Path | None, typer.Option("--found", hidden=True)] = None,
) -> None:
    """Time collectives over sizes, group sizes and members per node; write a Cluster file.

    `estimate` and `plan` take their times from the file. Example:

        moemesh bench links --hosts 2 --link 1gbit --out cluster.toml
    """
    from moemesh.bench import links
    from moemesh.bench.link_cluster import cluster_file
    from moemesh.report.files import write_texts

    if out is not None and not out.parent.is_dir():
        raise BenchError(f"--out {out}: there is no folder {out.parent}")
    result = links.run(settings, found)
    if result is not None and out is not None:
        write_texts([(out, cluster_file(result, name))])
    if result is not None:
        typer.echo(strict_json(result, indent=2) if as_json else links_text(result))


def links_text(found: dict[str, Any]) -> str:
    """A row for each operation and shape of group: times by size, and the fits."""
    settings, device = found["settings"], found["device"]
    sizes = sorted({size for row in found["links"] for size in row["bytes"]})
    header = ("operation", "ranks", "a node", *map(format_bytes, sizes))
    rows = []
    for row in found["links"]:
        fit, times = row["fit"], dict(zip(row["bytes"], row["seconds"], strict=True))
        rate = f"{1e-6 / fit['beta']:.0f}" if fit["beta"] else "-"
        rows.append(
            (
                *(row["operation"], str(row["ranks"]), str(row["members_per_node"])),
                *(f"{times[size] * 1e3:.3f}" if size in times else "" for size in sizes),
                *(f"{fit['alpha'] * 1e6:.1f}", rate),
                *(f"{fit['error']:.1%}", f"{fit['root_error']:.1%}"),
            )
        )
    rates = ", ".join(f"{name} {peak / 1e9:.1f}" for name, peak in device["peak_flops"].items())
    where = f" on {settings['hosts']} hosts at {settings['link']}" if settings["hosts"] else ""
    return (
        f"{settings['ranks']} ranks{where}: milliseconds, medians of the slowest rank\n"
        f"{table((*header, 'α µs', '1/β MB/s', 'error', 'with √S'), rows)}\n"
        f"a device: GFLOP/s {rates}; {device['memory_bandwidth'] / 1e9:.1f} GB/s of memory"
    )
