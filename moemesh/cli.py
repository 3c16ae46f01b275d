"""The verbs of the command, one short function each; what a verb needs is imported inside it."""

# No `from __future__ import annotations` here: typer reads the annotations, and nothing heavy may
# be imported at the top, or `moemesh --help` becomes slow.
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moemesh import __version__

if TYPE_CHECKING:
    from moemesh.config.load import Resolved

#: Exit code of every mistake in what the user gave.
USER_ERROR = 2

_PLAIN = {"rich_markup_mode": None, "pretty_exceptions_enable": False}

app = typer.Typer(
    name="moemesh",
    help="Train mixture-of-experts transformers over a mesh of devices.",
    no_args_is_help=True,
    **_PLAIN,
)
config_app = typer.Typer(help="Show or check a configuration.", no_args_is_help=True, **_PLAIN)
bench_app = typer.Typer(help="Measure parts of the library.", no_args_is_help=True, **_PLAIN)
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")

ConfigFile = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG.toml", help="TOML file of the run; every key has a default."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Set one key, over the file and the environment. May be repeated.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


class Shape(StrEnum):
    """The MoE layers that `bench layer` knows."""

    A = "A"
    B = "B"
    TINY = "tiny"
    ALL = "all"


class Dtype(StrEnum):
    """Number types that can be measured."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    ALL = "all"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moemesh {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Train mixture-of-experts transformers over a mesh of devices."""


@app.command()
def train(
    config: ConfigFile = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder of the run.")
    ] = None,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-change", metavar="KEY", help="On resume, accept another value of this key."
        ),
    ] = None,
) -> None:
    """Train a model: starts the ranks itself, or joins those that torchrun started.

    Without a file it trains the preset "tiny" on Python's own library sources. Example:

        moemesh train --set plan.dp=2 --set plan.ep=2 --out runs/first
    """
    # Checked first: a mistake must be told before torch, which takes seconds, is imported.
    _load(config, overrides)
    # Read when torch loads OpenMP. Threads that spin while they wait make a step up to 40 times
    # slower as soon as another process wants a core (measured, docs/log.md 2026-11-20).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from moemesh.train import command

    raise typer.Exit(command.train(config, overrides or [], out, allow_change or []))


@config_app.command("show")
def config_show(
    config: ConfigFile = None,
    overrides: Overrides = None,
    origin: Annotated[
        bool, typer.Option("--origin/--no-origin", help="Say where each value came from.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Print every key with its value and where it came from."""
    resolved = _load(config, overrides)
    if as_json:
        _show_json(resolved, origin)
    elif sys.stdout.isatty():
        _show_table(resolved, origin)
    else:
        _show_plain(resolved, origin)


@config_app.command("check")
def config_check(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Check a configuration; exit code 2 and every problem when it is wrong."""
    plan = _load(config, overrides).config.plan
    degrees = " ".join(f"{name}={getattr(plan, name)}" for name in ("pp", "dp", "cp", "tp"))
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    typer.echo(f"ok: {ranks} ({degrees}, ep={plan.ep} etp={plan.etp} edp={plan.edp})")


@bench_app.command("layer")
def bench_layer(
    shape: Annotated[Shape, typer.Option(help="Which MoE layer; all: A and B.")] = Shape.ALL,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "1,4",
    dtype: Annotated[Dtype, typer.Option(help="Number type.")] = Dtype.FLOAT32,
    rounds: Annotated[int, typer.Option(min=1, help="Timed repetitions.")] = 15,
    workload: Annotated[
        str,
        typer.Option(help="Loads W0 to W7, with commas, or all; default: the router's own choice."),
    ] = "",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the JSON object there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time one MoE layer against its bare matrix products and exchanges."""
    from moemesh.bench import layer
    from moemesh.parallel.expert.build import make_dispatcher

    code = layer.command(
        shape=shape.value,
        ranks=ranks,
        dtype=dtype.value,
        rounds=rounds,
        json=as_json,
        out=out,
        make_dispatcher=make_dispatcher,
        workload=workload,
    )
    if code:
        raise typer.Exit(code)


@bench_app.command("dispatch")
def bench_dispatch(
    workload: Annotated[str, typer.Option(help="W0 to W7, several with commas, or all.")] = "W0",
    dispatcher: Annotated[str, typer.Option(help="Names with commas, or all.")] = "all",
    ranks: Annotated[int, typer.Option(min=1, help="Ranks; all share the experts.")] = 4,
    ranks_per_node: Annotated[
        int, typer.Option(min=0, help="Where node borders lie; 0: one node.")
    ] = 0,
    hosts: Annotated[
        int, typer.Option(min=0, help="Emulate as many hosts (Linux, root); 0: none.")
    ] = 0,
    link: Annotated[str, typer.Option(help="Rate of each host's link.")] = "1gbit",
    experts: Annotated[int, typer.Option(min=1, help="Experts of the layer.")] = 64,
    top_k: Annotated[int, typer.Option(min=1, help="Experts per token.")] = 8,
    groups: Annotated[int, typer.Option(min=1, help="Placement groups of the workload.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of all ranks together.")] = 4096,
    hidden: Annotated[int, typer.Option(min=1, help="Numbers of a token's row.")] = 512,
    width: Annotated[int, typer.Option(min=1, help="Width of one expert.")] = 256,
    payload: Annotated[str, typer.Option(help="Dispatched rows: same or fp8.")] = "same",
    dtype: Annotated[Dtype, typer.Option(help="Number type.")] = Dtype.FLOAT32,
    mode: Annotated[str, typer.Option(help="dispatch_only or moe_fwd_bwd.")] = "dispatch_only",
    chunks: Annotated[int, typer.Option(min=1, help="Also measure so many chunks.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the routing.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Time every dispatcher under a given load, against the bare all-to-all.

    All take turns; a step takes as long as its slowest rank. Example:

        moemesh bench dispatch --workload W3 --hosts 2 --link 1gbit
    """
    from moemesh.bench import dispatch
    from moemesh.parallel.expert import build

    settings = dispatch.Settings(
        workload=workload,
        dispatcher=dispatcher,
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        hosts=hosts,
        link=link,
        experts=experts,
        top_k=top_k,
        groups=groups,
        tokens=tokens,
        hidden=hidden,
        width=width,
        payload=payload,
        dtype=dtype.value,
        mode=mode,
        chunks=chunks,
        rounds=rounds,
        seed=seed,
    )
    raise typer.Exit(dispatch.command(settings, build, as_json=as_json))


@bench_app.command("partition")
def bench_partition(
    case: Annotated[str, typer.Option(help="Name of a case, or all.")] = "all",
    evaluations: Annotated[int, typer.Option(min=1, help="Divisions a baseline tries.")] = 25_600,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each; the median counts.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Compare learned and random division into stages with the exact one."""
    from moemesh.bench import partition
    from moemesh.planner.stages.partition_cases import compare

    raise typer.Exit(
        partition.command(compare, case=case, evaluations=evaluations, seeds=seeds, json=as_json)
    )


@app.command("schedule")
def show_schedule(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A schedule, 'search', or a text or CSV file.")
    ],
    ranks: Annotated[int | None, typer.Option(help="Pipeline ranks.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Of a step, all pipes together.")] = None,
    stages_per_rank: Annotated[int | None, typer.Option(help="Chunks of layers per rank.")] = None,
    forward: Annotated[
        str, typer.Option(help="Time of a microbatch on a rank's layers, or a list per stage.")
    ] = "1",
    dgrad: Annotated[str, typer.Option(help="Likewise, input-gradient half.")] = "1",
    wgrad: Annotated[str, typer.Option(help="Likewise, weight-gradient half.")] = "1",
    block: Annotated[str | None, typer.Option(help="Of a forward with a backward.")] = None,
    comm: Annotated[str, typer.Option(help="Of a message between two ranks.")] = "0",
    weight_memory: Annotated[
        str, typer.Option(help="Share of the activations that weight gradients need.")
    ] = "1",
    slices: Annotated[int | None, typer.Option(help="terapipe: slices of a sequence.")] = None,
    window: Annotated[int | None, typer.Option(help="Backwards per update.")] = None,
    in_flight: Annotated[
        int | None, typer.Option(help="ampnet: most microbatches under way.")
    ] = None,
    memory_cap: Annotated[
        str | None, typer.Option(help="search: most activation per rank.")
    ] = None,
    relaxed: Annotated[
        bool, typer.Option("--relaxed", help="Leave out wrap-around waits, as some papers do.")
    ] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Trace for Perfetto.")] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="As text, or .csv.")] = None,
    as_text: Annotated[bool, typer.Option("--text", help="Print only the picture.")] = False,
    as_json: AsJson = False,
) -> None:
    """Simulate a pipeline schedule, draw it, and compare it with its formulas.

    Activation counts microbatches on one rank's layers. Example:

        moemesh schedule zb_h2 --ranks 4 --microbatches 8 --svg zb_h2.svg
    """
    from moemesh.schedule import command

    request = command.Request(
        name=name,
        ranks=ranks,
        microbatches=microbatches,
        stages_per_rank=stages_per_rank,
        num_slices=slices,
        window=window,
        max_in_flight=in_flight,
        forward=forward,
        dgrad=dgrad,
        wgrad=wgrad,
        block=block,
        comm=comm,
        weight_memory=weight_memory,
        memory_cap=memory_cap,
        relaxed=relaxed,
    )
    found = command.answer(request)
    if svg is not None or trace is not None:
        from moemesh.report import timeline_files

        drawn = found.simulation.timeline
        timeline_files.write(drawn, svg=svg, trace=trace, title=found.title, held=found.held)
    if save is not None:
        command.save(found.schedule, save)
    if as_json:
        import json

        typer.echo(json.dumps(found.to_json()))
        return
    from moemesh.report import timeline_text

    picture = timeline_text.draw(found.simulation.timeline)
    typer.echo(picture if as_text else command.table(found, picture))


@app.command()
def estimate(
    model: Annotated[
        str, typer.Option("--model", metavar="M", help="Preset, config.json or TOML file.")
    ],
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="C", help="Cluster preset or TOML file.")
    ],
    plan: Annotated[
        str,
        typer.Option("--plan", metavar="PLAN", help='"tp=8,pp=4,...", a preset or a TOML file.'),
    ],
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", metavar="S", help="Tokens of a sequence.")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", metavar="B", help="Sequences of a step.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Parameters, FLOPs, memory, traffic and seconds of one layout, without running it.

    Example:

        moemesh estimate --model qwen3-30b-a3b --cluster dgx_h100 \\
            --plan "tp=2,dp=4,ep=8,data=zero1,microbatch=1" --seq-len 4096 --global-batch 256
    """
    from moemesh.planner import estimate as planner

    typer.echo(planner.command(model, cluster, plan, seq_len, global_batch, as_json=as_json))


@bench_app.command("pipeline")
def bench_pipeline(
    schedule: Annotated[str, typer.Option(help="Name of a schedule.")] = "1f1b",
    ranks: Annotated[int, typer.Option(min=1, help="Pipeline ranks.")] = 4,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches of a step.")] = 16,
    stages_per_rank: Annotated[int, typer.Option(min=1, help="Chunks on a rank.")] = 1,
    seconds: Annotated[
        float, typer.Option(min=0, help="How long a stage sleeps for F, I and W each; 0: not.")
    ] = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 5,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the JSON object there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time the executor of pipelines, with empty stages or with stages that sleep."""
    from moemesh.bench import pipeline

    settings = pipeline.Settings(
        schedule=schedule,
        ranks=ranks,
        microbatches=microbatches,
        stages_per_rank=stages_per_rank,
        seconds=seconds,
        rounds=rounds,
    )
    raise typer.Exit(pipeline.command(settings, as_json=as_json, out=out))


class Precision(StrEnum):
    """Number types of the planned matrix products."""

    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8"
    FLOAT4 = "float4"


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="Preset, config.json or TOML file.")],
    cluster: Annotated[str, typer.Option(help="Preset or TOML file.")],
    seq_len: Annotated[int, typer.Option(help="Tokens of one sequence.")],
    global_batch: Annotated[int, typer.Option(help="Sequences of one step.")],
    nodes: Annotated[
        int | None, typer.Option(help="Nodes, in place of the cluster's own number.")
    ] = None,
    top: Annotated[int, typer.Option(help="How many layouts to show.")] = 5,
    precision: Annotated[
        Precision, typer.Option(help="Of the matrix products.")
    ] = Precision.BFLOAT16,
    anywhere: Annotated[
        bool, typer.Option("--anywhere", help="Let tensor groups cross nodes, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find the best layouts of a model on a cluster, with reasons and a certificate. Example:

    moemesh plan --model deepseek-v3 --cluster dgx_h100 --nodes 256 --seq-len 4096 --global-batch 15360
    """
    from moemesh.planner.search import command as search_command

    found = search_command.command(
        model,
        cluster,
        seq_len,
        global_batch,
        nodes=nodes,
        top=top,
        precision=precision.value,
        anywhere=anywhere,
        as_json=as_json,
    )
    typer.echo(found)


class BalancePolicy(StrEnum):
    """Where replicas of an expert may live."""

    HIERARCHICAL = "hierarchical"
    GLOBAL = "global"


@app.command()
def balance(
    loads: Annotated[
        Path, typer.Argument(metavar="LOADS", help="JSON, CSV, NumPy file, or a run's folder.")
    ],
    gpus: Annotated[int, typer.Option(help="GPUs; all get equally many slots.")],
    replicas: Annotated[
        int | None,
        typer.Option(help="Slots in all; one per expert (only a permutation) if not given."),
    ] = None,
    nodes: Annotated[int, typer.Option(help="Nodes of the GPUs.")] = 1,
    groups: Annotated[int, typer.Option(help="Groups of experts that share a node.")] = 1,
    previous: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Placement in use: move few replicas.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="With --previous: how far from the bound is near enough.")
    ] = 0.05,
    effort: Annotated[str, typer.Option(help="fast, quality or seconds.")] = "quality",
    policy: Annotated[
        BalancePolicy | None, typer.Option(help="Default: hierarchical where groups fit nodes.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw the load of each GPU.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Place replicas of experts on GPUs for given loads; one row of loads is one layer. Example:

    moemesh balance loads.json --replicas 288 --gpus 32 --nodes 4 --groups 8
    """
    from moemesh.balance import command
    from moemesh.report.balance import balance_heat_maps

    settings = command.Settings(
        loads=loads,
        replicas=replicas,
        gpus=gpus,
        nodes=nodes,
        groups=groups,
        previous=previous,
        tolerance=tolerance,
        effort=effort,
        policy=None if policy is None else policy.value,
    )
    raise typer.Exit(command.command(settings, balance_heat_maps, as_json=as_json, svg=svg))


@bench_app.command("balance")
def bench_balance(
    layers: Annotated[int, typer.Option(min=1, help="Layers of each load shape.")] = 58,
    experts: Annotated[int, typer.Option(min=1, help="Experts of a layer.")] = 256,
    replicas: Annotated[int, typer.Option(min=1, help="Slots of a layer.")] = 288,
    groups: Annotated[int, typer.Option(min=1, help="Groups of experts.")] = 8,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 4,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the static placement.")] = 32,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the exact loads.")] = 64,
    spare_slots: Annotated[int, typer.Option(min=0, help="Spare slots of each rank.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Timed repetitions.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the loads.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compare expert balancers with the published one, on loads of every shape."""
    from moemesh.bench import balance as bench

    settings = bench.Settings(
        layers=layers,
        experts=experts,
        replicas=replicas,
        groups=groups,
        nodes=nodes,
        gpus=gpus,
        ranks=ranks,
        spare_slots=spare_slots,
        rounds=rounds,
        seed=seed,
    )
    raise typer.Exit(bench.command(settings, as_json=as_json))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
) -> None:
    """Write report.html into the folder of a run and print its path."""
    from moemesh.report import page

    typer.echo(str(page.write(run)))


RunsTable = Annotated[
    Path, typer.Argument(metavar="RUNS.csv", help="Table of measured runs, one row each.")
]
ArchsFile = Annotated[
    Path | None,
    typer.Option("--archs", metavar="FILE", help="Shapes; default model_archs.json beside it."),
]


@app.command()
def validate(
    runs: RunsTable,
    archs: ArchsFile = None,
    out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write rows and statistics.")
    ] = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option("--cluster", metavar="FILE", help="Cluster of its device. May be repeated."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Write an SVG picture.")
    ] = None,
    cross: Annotated[
        bool,
        typer.Option("--cross-validate", help="Refit without each group of runs; minutes."),
    ] = False,
) -> None:
    """Predict every row of a table of measured runs, and say how far off it is.

    Prints errors of step time, memory, "fits" and the chosen layout by source. Example:

        moemesh validate runs.csv --json predictions.json
    """
    from moemesh.planner.accuracy import commands

    text = commands.validate_command(runs, archs, out, cluster or [], plot=plot, cross=cross)
    typer.echo(text)


@app.command()
def calibrate(
    runs: RunsTable,
    out: Annotated[Path, typer.Option("--out", metavar="CLUSTER.toml", help="File to write.")],
    archs: ArchsFile = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="NAME", help="Which cluster of the table.")
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Fit all clusters and what they share.")
    ] = False,
) -> None:
    """Fit the few constants of a cluster to measured runs and write its Cluster file."""
    from moemesh.planner.accuracy import commands

    typer.echo(commands.calibrate_command(runs, archs, out, cluster, shared))


def main() -> None:
    """Run the command. Mistakes of the user end in one message on stderr and exit code 2."""
    try:
        code = app(prog_name="moemesh", standalone_mode=False)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader of our output left (`moemesh ... | head`): nobody is there to be told.
        sys.stderr.close()
        code = 1
    except Exception as error:
        code = _fail(error)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(error: Exception) -> int:
    """Print a user's mistake and return its exit code; anything else is ours and goes on."""
    if type(error).__name__ == "Abort":
        return 130
    # typer carries its own copy of click, whose exceptions have no public name: they are known by
    # what they can do.
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        error.show()
        if hint := _option_hint(getattr(error, "option_name", "")):
            print(hint, file=sys.stderr)
        return USER_ERROR
    from moemesh.config.errors import is_user_error

    if not is_user_error(error):
        raise error
    # A stray byte of the command line must not turn the message into another error.
    message = str(error).encode(errors="backslashreplace").decode()
    print(f"moemesh: {message}", file=sys.stderr)
    return USER_ERROR


def _option_hint(option: str) -> str:
    """For an unknown option that names a key: how keys are set."""
    if not option:
        return ""
    from moemesh.config.schema import sections_with
    from moemesh.config.suggest import FOREIGN_NAMES

    name = option.lstrip("-").replace("-", "_")
    keys = [name] if "." in name else [f"{section}.{name}" for section in sections_with(name)]
    if name in FOREIGN_NAMES:
        keys = [FOREIGN_NAMES[name]]
    return f"Keys of the configuration are set with --set {keys[0]}=VALUE" if keys else ""


def _load(config: Path | None, overrides: list[str] | None) -> "Resolved":
    from moemesh.config.load import load_run

    return load_run([config] if config else [], overrides or [])


def _rows(resolved: "Resolved") -> list[tuple[str, str, str]]:
    """(key, value as TOML, origin) of every key."""
    from moemesh.config.load import config_values
    from moemesh.config.toml import format_value

    return [
        (
            f"{section}.{key}",
            "(not set)" if value is None else format_value(value),
            resolved.origins[f"{section}.{key}"],
        )
        for section, fields in config_values(resolved.config).items()
        for key, value in fields.items()
    ]


def _show_plain(resolved: "Resolved", origin: bool) -> None:
    rows = _rows(resolved)
    key_width = max(len(key) for key, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    for key, value, source in rows:
        line = f"{key:{key_width}} = {value:{value_width}}  # {source}" if origin else ""
        typer.echo(line or f"{key:{key_width}} = {value}")


def _show_table(resolved: "Resolved", origin: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("key", "value", *(["origin"] if origin else []))
    for key, value, source in _rows(resolved):
        # Text, because a value such as "[red]" is no markup of ours.
        cells = [Text(key), Text(value), *([Text(source)] if origin else [])]
        table.add_row(*cells, style="dim" if source == "default" else "")
    Console().print(table)


def _show_json(resolved: "Resolved", origin: bool) -> None:
    import json

    from moemesh.config.load import config_values

    shown: dict[str, object] = {"config": config_values(resolved.config)}
    if origin:
        shown["origins"] = resolved.origins
    typer.echo(json.dumps(shown, indent=2))


if __name__ == "__main__":
    main()
