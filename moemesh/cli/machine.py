"""Verbs of machines: `doctor` and `bench links` for this one, `cluster` for any."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moemesh.bench.settings import BenchError, LinksSettings
from moemesh.cli import options
from moemesh.cli.application import AsJson, app, bench_app, cluster_app
from moemesh.cli.terminal import table
from moemesh.config.errors import ConfigError, Problem, UserError
from moemesh.config.limits import parse_json
from moemesh.config.suggest import nearest_choice
from moemesh.report.files import write_texts
from moemesh.trace.memory_profile import format_bytes
from moemesh.trace.strict_json import strict_json

if TYPE_CHECKING:
    from moemesh.config.cluster import Cluster


@app.command(short_help="Check this machine for obstacles to a run.")
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

    diagnoses: list[Diagnosis] = []
    for diagnosis in examine(out, os.environ):
        diagnoses.append(diagnosis)
        if not as_json:
            typer.echo(f"{diagnosis.verdict}  {diagnosis.name:13}  {diagnosis.text}")
            if diagnosis.fix:
                typer.echo(f"{'':21}fix: {diagnosis.fix}")
    verdicts = [diagnosis.verdict for diagnosis in diagnoses]
    if as_json:
        typer.echo(strict_json([diagnosis._asdict() for diagnosis in diagnoses]))
    else:
        counts = ", ".join(f"{verdicts.count(word)} {word}" for word in ("pass", "warn", "fail"))
        typer.echo(counts)
    raise typer.Exit(1 if "fail" in verdicts else 0)


@bench_app.command(
    "links",
    short_help="Collectives over sizes and groups.",
    completions={"operations": options.collectives},
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
    from moemesh.bench.link_cluster import cluster_of, origin_of

    if out is not None and not out.parent.is_dir():
        raise BenchError(f"--out {out}: the folder {out.parent} does not exist")
    if (result := links.run(settings, found)) is None:
        return
    if out is not None:
        text = cluster_of(result, name).to_toml(origin_of(result), explained=True)
        write_texts([(out, text)])
    typer.echo(strict_json(result, indent=2) if as_json else links_text(result))


def links_text(result: dict[str, Any]) -> str:
    """Table of operations and shapes of groups: times by size, and the fits."""
    settings, device = result["settings"], result["device"]
    sizes = sorted({size for row in result["links"] for size in row["bytes"]})
    header = ("operation", "ranks", "a node", *map(format_bytes, sizes))
    rows = []
    for row in result["links"]:
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


#: (lowest rate of one device in one direction, bytes/s; kind of links) inside a node and between
#: nodes.
_INSIDE = (
    (100e9, "NVLink, Infinity Fabric or their like, from device to device"),
    (10e9, "PCIe, shared with the host and its cards"),
    (0.0, "slower than PCIe: through the host's memory or loopback"),
)
_BETWEEN = (
    (100e9, "as fast as NVLink (one domain over several nodes)"),
    (20e9, "InfiniBand or RoCE with RDMA, a card for each device"),
    (1e9, "Ethernet, or cards that several devices share"),
    (0.0, "slow Ethernet: little but a pipeline or rare sums should cross it"),
)


@dataclass(frozen=True, kw_only=True)
class ClusterFileRequest:
    """A file to write, its origin, and the changes."""

    out: Annotated[Path, "File to write.", "<CLUSTER.toml>"]
    preset: Annotated[
        str | None, "Start from a preset or a file.", {"names": ("--from",), "metavar": "C"}
    ] = None
    device: Annotated[str | None, "Start from a device's data sheet: H100-80G, MI300X.", "NAME"] = (
        None
    )
    links: Annotated[
        Path | None, "File with the output of `moemesh bench links --json`.", "FILE"
    ] = None
    nodes: Annotated[int | None, "Nodes.", {"min": 1}] = None
    gpus_per_node: Annotated[int | None, "Devices of a node.", {"min": 1}] = None
    name: Annotated[str | None, "Name of the cluster."] = None
    force: Annotated[bool, "Replace an existing file."] = False


@cluster_app.command(
    "init", short_help="Write a commented cluster file.", completions={"preset": options.clusters}
)
def init(request: ClusterFileRequest) -> None:
    """Write a cluster file with the meaning and unit of every key, to be edited.

    It starts from a preset (by default dgx_h100), from a device's data sheet, or from links that
    were measured on this machine. Examples:

        moemesh cluster init mine.toml --device H200-141G --nodes 4

        moemesh bench links --json > links.json && moemesh cluster init mine.toml --links links.json
    """
    out, name = request.out, request.name or request.out.stem
    if sum(source is not None for source in (request.preset, request.device, request.links)) > 1:
        raise typer.BadParameter("give one of --from, --device and --links")
    if out.exists() and not request.force:
        raise UserError(f"{out} exists; --force replaces it")
    if request.links is not None:
        from moemesh.bench.link_cluster import cluster_of, origin_of

        try:
            result = parse_json(request.links.read_text(encoding="utf-8"))
            cluster, heading = cluster_of(result, name), origin_of(result)
        except OSError as error:
            raise UserError(f"{request.links}: {error.strerror or error}") from error
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise UserError(
                f"{request.links}: not what `moemesh bench links --json` prints "
                f"({type(error).__name__}: {error})"
            ) from error
        if problems := cluster.check():
            raise ConfigError(problems)
        if request.nodes or request.gpus_per_node:
            raise typer.BadParameter("--links has the number of nodes and devices")
    elif request.device is not None:
        from moemesh.config.cluster import cluster_of_device
        from moemesh.config.devices import ACCELERATORS, accelerator_of

        sheet = ACCELERATORS.get(request.device) or accelerator_of(request.device)
        if sheet is None:
            message = "no data sheet of a device with this name is packaged"
            fix = nearest_choice(request.device, tuple(ACCELERATORS))
            problem = Problem.of("not-a-choice", "device", request.device, message, fix)
            raise ConfigError([problem])
        cluster = cluster_of_device(sheet)
        heading = f"From the data sheet of {sheet.name}; latencies and the network are assumptions."
    else:
        from moemesh.config.cluster import load_cluster

        source = request.preset or "dgx_h100"
        cluster, heading = load_cluster(source), f"Started from {source}."
    changes = {"nodes": request.nodes, "gpus_per_node": request.gpus_per_node}
    given = {key: value for key, value in changes.items() if value is not None}
    cluster = cluster.model_copy(update={"name": name} | given)
    origin, quoted = heading, shlex.quote(str(out))
    heading += (
        "\nBandwidths are those of one device in one direction. Edit what differs, then see"
        f"\n`moemesh cluster show {quoted}`; `moemesh plan --cluster {quoted}` reads it."
    )
    write_texts([(out, cluster.to_toml(heading, explained=True))], replaces=True)
    typer.echo(f"wrote {out}: {cluster.num_devices} devices; see `moemesh cluster show {out}`")
    typer.echo(origin)


@cluster_app.command("show", short_help="Explain a cluster in words and numbers.")
def show(
    cluster: Annotated[str, "Preset, TOML file, or devices: 8xMI300X.", "<CLUSTER>"],
    as_json: AsJson = False,
) -> None:
    """Links by their kinds, peaks, memory, and the intensity from which on arithmetic bounds it.

    Example:

        moemesh cluster show dgx_h100
    """
    from moemesh.config.cluster import load_cluster

    description = load_cluster(cluster)
    typer.echo(strict_json(_facts(description), indent=2) if as_json else cluster_text(description))


@cluster_app.command("list", short_help="List packaged clusters, and devices with a data sheet.")
def list_clusters(as_json: AsJson = False) -> None:
    """List what --cluster knows by name, and what `cluster init --device` does."""
    from moemesh.config.cluster import load_cluster
    from moemesh.config.devices import ACCELERATORS, MACHINES
    from moemesh.config.sources import preset_names
    from moemesh.planner.speed import peak_flops

    described = [load_cluster(name) for name in preset_names("clusters")]
    if as_json:
        facts = [_facts(cluster) for cluster in described]
        names = {"devices": list(ACCELERATORS), "machines": list(MACHINES)}
        typer.echo(strict_json({"clusters": facts, **names}, indent=2))
        return
    header = ("cluster", "a node", "memory", "bf16 TFLOP/s", "in a node", "between nodes")
    rows = [
        (
            *(cluster.name, f"{cluster.gpus_per_node} {cluster.accelerator or 'processes'}"),
            *(format_bytes(cluster.memory_bytes), f"{peak_flops(cluster, 'bfloat16') / 1e12:,.4g}"),
            *(_rate(cluster.intra_node_bandwidth), _rate(cluster.inter_node_bandwidth)),
        )
        for cluster in described
    ]
    typer.echo(table(header, rows, left=2))
    typer.echo(
        "\ndevices for `--cluster 8xNAME` and `moemesh cluster init --device`: "
        + ", ".join(ACCELERATORS)
        + "\n\nmachine types of clouds for `--cluster 4xNAME`: "
        + ", ".join(MACHINES)
    )


def cluster_text(cluster: "Cluster") -> str:
    """The cluster as text: its numbers, and their meaning for a plan."""
    import textwrap

    from moemesh.planner.speed import device_balance
    from moemesh.planner.timing.price import pricing
    from moemesh.report.document import plural

    inside, across = cluster.intra_node_bandwidth, cluster.inter_node_bandwidth
    usable = pricing(cluster).usable_share
    rows = [
        (f"  {dtype}", f"{peak / 1e12:,.4g}", f"{peak / cluster.memory_bandwidth:,.4g}")
        for dtype, peak in cluster.peak_flops.items()
    ]
    ratio = inside / across
    balance = device_balance(cluster, "bfloat16")
    sentences = [
        f"Between nodes a device sends {ratio:,.3g} times slower than inside one: what exchanges "
        "in every layer (tp, cp, and ep where it fits) belongs inside a node; data and pipeline "
        "parallelism cross nodes."
        if ratio > 1
        else "Links between nodes are as fast as those inside: groups may span nodes.",
        f"A product with less than {balance:,.0f} operations a byte in bfloat16 waits for memory, "
        "one with more for arithmetic; `moemesh estimate` prints the intensities of a layout.",
    ]
    if cluster.links:
        most = max(curve.ranks for curve in cluster.links)
        sentences.append(
            f"{len(cluster.links)} measured collectives of up to {most} ranks replace forms."
        )
    if cluster.constants:
        sentences.append(f"{len(cluster.constants)} constants of the time model are its own.")
    kinds = [
        next(kind for least, kind in known if rate >= least)
        for rate, known in ((inside, _INSIDE), (across, _BETWEEN))
    ]
    accelerator = cluster.accelerator and f", {cluster.accelerator}"
    facts = [
        ("devices", f"{cluster.num_devices:,} ({plural(cluster.nodes, 'node')} of "
                    f"{cluster.gpus_per_node}){accelerator}"),
        ("memory", f"{format_bytes(cluster.memory_bytes)} a device, {usable:.1%} usable, "
                   f"{_rate(cluster.memory_bandwidth)}"),
        ("inside a node", f"{_rate(inside)} a device and direction, "
                          f"{cluster.intra_node_latency * 1e6:.3g} us: {kinds[0]}"),
        ("between nodes", f"{_rate(across)} a device and direction ({across * 8 / 1e9:,.4g} Gb/s), "
                          f"{cluster.inter_node_latency * 1e6:.3g} us: {kinds[1]}"),
    ]  # fmt: skip
    width = max(len(name) for name, _ in facts)
    lines = [cluster.name]
    for name, value in facts:
        start = f"  {name:{width}}  "
        lines += textwrap.wrap(start + value, 80, subsequent_indent=" " * len(start))
    header = ("  peak of products", "TFLOP/s", "turns compute bound at FLOP/byte")
    lines += ["", table(header, rows), ""]
    for sentence in sentences:
        lines += textwrap.wrap(sentence, 80)
    return "\n".join(lines)


def _facts(cluster: "Cluster") -> dict[str, Any]:
    """The JSON object of a cluster."""
    from moemesh.planner.timing.price import pricing

    return cluster.model_dump(mode="json", exclude={"links", "constants"}) | {
        "num_devices": cluster.num_devices,
        "usable_share": pricing(cluster).usable_share,
        "compute_bound_from": {
            dtype: peak / cluster.memory_bandwidth for dtype, peak in cluster.peak_flops.items()
        },
        "measured_links": len(cluster.links),
    }


def _rate(number: float) -> str:
    """Rate in bytes per second as text in decimal units, as in data sheets."""
    for unit, size in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6)):
        if number >= size:
            return f"{number / size:,.4g} {unit}"
    return f"{number:,.4g} B/s"
