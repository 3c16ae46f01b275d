"""Verbs that train: `train`, `launch`, and `replay` and `repro`, which repeat steps."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from moemesh.cli.application import AsJson, ConfigFile, Overrides, app, load
from moemesh.cli.options import given
from moemesh.config.errors import ConfigError, UserError
from moemesh.report.files import write_texts
from moemesh.trace.memory_profile import PREDICTED_HELD, format_bytes
from moemesh.trace.strict_json import strict_json

if TYPE_CHECKING:
    from moemesh.config.data import DataConfig
    from moemesh.train.preparation import Preparation

#: Files of every run; docs/run-folder.md describes them.
FILES = (
    *("config.toml", "plan.json", "data.json", "metrics.jsonl", "events.jsonl", "loads.jsonl"),
    *("ledger.json", "ledger_predicted.json", "timeline.json", "memory.json", "summary.json"),
    "report.html",
)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """A configuration, the folder of the run, and options of its start and end."""

    config: ConfigFile = None
    overrides: Overrides = None
    out: Annotated[Path | None, "Folder of the run.", "DIR"] = None
    allow_change: Annotated[
        list[str] | None, "Accept another value of this key on resume.", "KEY"
    ] = None
    auto_layout: Annotated[
        bool, "Choose another plan where the plan's ranks are not available."
    ] = False
    ranks: Annotated[
        int | None,
        "Ranks to start here with --auto-layout; by default one for each GPU.",
        {"metavar": "N", "min": 1},
    ] = None
    dry_run: Annotated[
        bool, "Check everything and print what would be done; write and start nothing."
    ] = False
    stop_after: Annotated[
        int | None,
        "Save and stop after this step; rerun without it to continue.",
        {"metavar": "STEP", "min": 1},
    ] = None
    takeover: Annotated[
        bool, "Take over the run folder and train.checkpoint_folder from an active run."
    ] = False
    profile: Annotated[
        int | None,
        "Profile N steps on every rank after four others; write DIR/profile and stop.",
        {"metavar": "N", "min": 1},
    ] = None


#: Keys that `moemesh plan` does not choose.
_TO_CHOOSE = ("train.steps", "train.lr", "data.path", "data.tokenizer")


@app.command(short_help="Train a model on the ranks of a plan.")
def train(options: TrainOptions) -> None:
    """Train a model: starts the ranks itself, or joins those that torchrun started.

    Without a file it trains the preset "tiny" on Python's own library sources. Given the folder of
    a run in place of a file, it resumes that run; with --out it starts a new one with its
    configuration. Examples:

        moemesh train --set plan.dp=2 --set plan.ep=2 --out runs/first

        moemesh train runs/first --set train.steps=400
    """
    from moemesh.comm.slurm import ranks_of

    config, overrides = options.config, options.overrides or []
    # Check first: mistakes must be reported before torch, which takes seconds, is imported. Ranks
    # that are already started check shared facts at their rendezvous.
    resolved = load(config, overrides, with_data=True)
    if options.ranks is not None and not options.auto_layout:
        raise typer.BadParameter("goes with --auto-layout", param_hint="--ranks")
    if options.auto_layout:
        from moemesh.train.auto_layout import fit_here

        fitted = fit_here(resolved.config, options.ranks, os.environ)
        if fitted.overrides():
            keys = {override.partition("=")[0] for override in fitted.overrides()}
            others = [override for override in overrides if override.partition("=")[0] not in keys]
            overrides = [*others, *fitted.overrides()]
            resolved = load(config, overrides)
            if fitted.is_printed:
                typer.echo(fitted.text())
    from moemesh.train.preparation import RunRequest, finished, prepare

    request = RunRequest(
        resolved=resolved,
        config_file=config,
        overrides=overrides,
        out=options.out,
        allowed_changes=options.allow_change or [],
        takeover=options.takeover,
        stop_after=options.stop_after,
        profile_steps=options.profile,
    )
    dry_run, prepared = options.dry_run, None
    if dry_run or not ranks_of(os.environ):
        quiet = dry_run or options.allow_change or options.profile is not None
        if not quiet and (text := finished(request)) is not None:
            typer.echo(text)
            return
        prepared = prepare(request, (lambda text: None) if dry_run else _print)
    if dry_run:
        assert prepared is not None
        typer.echo(preparation_text(prepared))
        return
    if options.profile is not None:  # silence the profiler's own messages
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    from moemesh.train import command

    raise typer.Exit(command.train(request, prepared))


def _print(text: str) -> None:
    """Print and flush; a closed console does not stop a run."""
    with suppress(OSError, ValueError):
        print(text, flush=True)


def preparation_text(prepared: "Preparation") -> str:
    """The plan, the inputs and the files to be written, one fact per line."""
    from moemesh.checkpoint.retention import disk_warning
    from moemesh.config.plan import DEGREES
    from moemesh.planner.machine_memory import MOST_RANKS
    from moemesh.planner.traffic.own_memory import predicted_memory
    from moemesh.report.document import plural
    from moemesh.train.preparation import warnings_before_ranks
    from moemesh.train.records.kept_schedules import has_name

    config, folder, need = prepared.request.config, prepared.folder, prepared.disk
    plan, train, data = config.plan, config.train, config.data
    disk_note = disk_warning(config, folder.checkpoints)
    resume = "nothing there: a new run"
    if saved_steps := prepared.steps:
        more = f", the newest of {len(saved_steps)}" if len(saved_steps) > 1 else ""
        resume = f"from {folder.checkpoints / f'step-{saved_steps[0]}'}{more}"
    elif folder.has_run:
        resume = f"{folder.path} holds a run without a checkpoint: from the first step"
    recorded = prepared.request.readable.config
    # With many ranks, check the first of each stage.
    step = 1 if plan.world_size <= MOST_RANKS else plan.world_size // plan.pp
    profiles = (predicted_memory(recorded, rank) for rank in range(0, plan.world_size, step))
    worst = max(profiles, key=lambda profile: profile.peak)
    whose = "the only rank" if plan.world_size == 1 else f"rank {worst.rank}, the fullest rank"
    degrees = "  ".join(f"{name}={getattr(plan, name)}" for name in DEGREES)
    ends = plural(train.steps, "step") if train.epochs is None else f"{train.epochs:g} epoch(s)"
    facts: list[str] = []
    if (samples := prepared.samples) is not None:  # the data was read
        num_steps = train.steps
        if train.epochs is not None:
            num_steps = samples.steps(train.epochs, data.global_batch)
        facts += samples.reading(num_steps, data.global_batch)
        counts = samples.num_training, samples.num_validation
        facts.append("samples  {:,} for training, {:,} for validation".format(*counts))
        facts += samples.loss_lines(data.tokenizer)
        facts += prepared.notes
    files = [*FILES, *([] if has_name(plan) else ["schedule.txt"])]
    checkpoints, last = f"{train.checkpoints_kept} kept", train.steps
    if train.epochs is None:
        first = min(train.checkpoint_every or last, last)
        more = f" and further ones, {checkpoints}" if first < last else ""
        files.append(f"checkpoints/step-{first}{more}")
    else:
        files.append(f"checkpoints/step-N, {checkpoints}")
    lines = [
        f"plan     {plan.world_size} rank(s)  {degrees}  edp={plan.edp}",
        f"steps    {ends} of {data.global_batch:,} sequences of {data.seq_len:,} tokens",
        f"memory   {format_bytes(worst.peak)} {PREDICTED_HELD}, of {whose}: "
        f"{format_bytes(worst.peak - worst.activations)} of weights, gradients and optimizer, "
        f"{format_bytes(worst.activations)} of activations",
        f"disk     {format_bytes(need.checkpoint)} a checkpoint, {format_bytes(need.most)} with "
        f"{train.checkpoints_kept} kept, the best and one being written; "
        f"{format_bytes(need.free)} free",
        *_data(data),
        *facts,
        f"tokens   by {data.tokenizer}",
        *([f"weights  {config.model_path}"] if config.model_path is not None else []),
        *([f"adapters {config.lora.path}"] if config.lora.path is not None else []),
        f"resume   {resume}",
        *(f"         changed since the last call: {change}" for change in prepared.changes),
        f"writes   {folder.path}: {', '.join(files)}",
        *(f"note: {warning}" for warning in warnings_before_ranks(recorded)),
        *(f"note: {warning}" for warning in (disk_note,) if warning),
        "Nothing was written or started. Leave out --dry-run to train.",
    ]
    return "\n".join(lines)


def _data(data: "DataConfig") -> Iterator[str]:
    """Lines on each source and its files."""
    from moemesh.data.input_files import find
    from moemesh.data.sources import name_of, token_files, validation_source

    sources = [("data    ", source) for source in data.all_sources]
    if data.validation is not None:
        sources.append(("validate", validation_source(data)))
    for title, source in sources:
        prefixes = token_files(source)
        files = [] if prefixes is not None else find(source.path, source.format)
        if prefixes is not None:
            content = f"{len(prefixes)} pair(s) of token files"
        elif any(file.is_on_hub for file in files):
            content = "a dataset of the Hugging Face Hub, not looked at"
        else:
            size = sum(file.num_bytes for file in files) / 1e6
            content = f"{len(files):,} file(s), {size:,.1f} MB"
        yield f"{title} {name_of(source)}: {content}"


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A run, its launcher, and the options of schedulers."""

    config: ConfigFile = None
    overrides: Overrides = None
    out: Annotated[Path | None, "Folder of the run, on shared disk.", "DIR"] = None
    local: Annotated[bool, "This machine: train here."] = False
    torchrun: Annotated[bool, "A script that is started on every node."] = False
    slurm: Annotated[bool, "A batch script for Slurm."] = False
    k8s: Annotated[bool, "A job for Kubernetes."] = False
    sky: Annotated[bool, "A task for SkyPilot."] = False
    ranks_per_node: Annotated[
        int | None, "Ranks of a node. [default: that of the plan, or 8]", {"min": 1}
    ] = None
    hours: Annotated[
        float | None, "Slurm: time limit. [default: 24]", {"min": 0.1, "max": 8760}
    ] = None
    partition: Annotated[str | None, "Slurm."] = None
    account: Annotated[str | None, "Slurm."] = None
    image: Annotated[str | None, "Kubernetes: image with moemesh."] = None
    accelerator: Annotated[str | None, "SkyPilot: such as H100."] = None
    file: Annotated[Path | None, "File to write.", "FILE"] = None
    dry_run: Annotated[bool, "Print it; write and start nothing."] = False


@app.command(short_help="Start a run here, or write the file that starts it on a cluster.")
def launch(request: LaunchRequest) -> None:
    """Write a commented file that starts a run on a cluster, checked as train would check it.

    Nothing is submitted. The same file resumes a run that was stopped. Example:

        moemesh launch --set plan.dp=16 --set plan.ep=8 --out /shared/runs/first --slurm
    """
    from moemesh.config.jobs import FILES, ClusterJob, Launcher
    from moemesh.config.trainable import refusals

    config, overrides = request.config, request.overrides or []
    launchers = [name for name in get_args(Launcher) if getattr(request, name)]
    if len(launchers) != 1:
        fix = " or ".join(f"--{name}" for name in launchers or ("local", "slurm"))
        message = "give one of --local, --torchrun, --slurm, --k8s, --sky"
        raise typer.BadParameter(f"{message}; fix: {fix}")
    (launcher,) = launchers
    options_of = {"slurm": ("hours", "partition", "account")}
    options_of |= {"k8s": ("image",), "sky": ("accelerator",)}
    for other, names in options_of.items():
        if other != launcher and (options := given(request, *names)):
            raise typer.BadParameter(f"{options[0]} goes with --{other}, not --{launcher}")
    if launcher == "local" and (options := given(request, "ranks_per_node", "file")):
        raise typer.BadParameter(f"{options[0]} is for a file, which --local does not write")
    resolved = load(config, overrides)
    run = resolved.config
    if problems := refusals(run):
        raise ConfigError(problems)
    planned, given_ranks = run.plan.ranks_per_node, request.ranks_per_node
    if given_ranks is not None and planned not in (None, given_ranks):
        message = f"conflicts with plan.ranks_per_node = {planned}: both are the ranks of a node"
        fix = f"--ranks-per-node {planned}, or --set plan.ranks_per_node={given_ranks}"
        raise typer.BadParameter(f"{message}; fix: {fix}", param_hint="--ranks-per-node")
    name = config.stem if config else run.model_preset
    folder = (request.out or Path("runs") / name).expanduser().absolute()
    arguments = ["train", *([str(config.absolute())] if config else [])]
    arguments += [word for override in overrides for word in ("--set", override)]
    job = ClusterJob.of(
        run,
        [*arguments, "--out", str(folder)],
        folder,
        run.plan.world_size if launcher == "local" else request.ranks_per_node,
        **{name: getattr(request, name) for names in options_of.values() for name in names},
        programs=str(Path(sys.executable).parent),
        directory=str(Path.cwd()),
    )
    text = job.text(launcher)
    # Keys that a plan leaves to the user, at their defaults.
    is_set = {key: not resolved.origins[key].startswith("default") for key in _TO_CHOOSE}
    is_set["train.steps"] |= run.train.epochs is not None
    is_set["data.path"] |= bool(run.data.sources)
    is_set["data.tokenizer"] |= run.model_path is not None
    values = {"train.steps": f" (now {run.train.steps})", "train.lr": f" (now {run.train.lr:g})"}
    unset = [f"{key}{values.get(key, '')}" for key in _TO_CHOOSE if not is_set[key]]
    choices = f"still to choose: {', '.join(unset)}" if unset else ""
    if request.dry_run:
        typer.echo(text, nl=False)
        if choices:
            typer.echo(choices, err=True)
        return
    if launcher == "local":
        from moemesh.train.preparation import RunRequest, prepare

        run_request = RunRequest(
            resolved=resolved, config_file=config, overrides=overrides, out=folder
        )
        prepared = prepare(run_request)  # before torch is imported
        from moemesh.train import command

        raise typer.Exit(command.train(run_request, prepared))
    target = request.file or Path(FILES[launcher])
    if target.is_file() and target.read_text(encoding="utf-8", errors="replace") != text:
        raise UserError(
            f"{target} exists with other content, perhaps with changes of yours: "
            "name another with --file, or remove it"
        )
    write_texts([(target, text)])
    nodes = f"{job.nodes} node(s) of {job.ranks_per_node} ranks"
    typer.echo(
        f"{nodes}: wrote {shlex.quote(str(target))}; see its first lines for how to start it"
    )
    if choices:
        typer.echo(choices)
    if not is_set["data.path"]:
        typer.echo(
            "note: data.path is not set: the job would train on Python's own library sources, "
            f"with data.tokenizer = {run.data.tokenizer}"
        )


@app.command(short_help="Repeat a step whose numbers were not finite, and find the first of them.")
def replay(
    bundle: Annotated[Path, "A folder of failures/ in a run, such as step-12.", "<BUNDLE>"],
    alone: Annotated[bool, "Replay on one rank, for any plan of the run."] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Repeat the forward and backward of one step, from a replay bundle.

    A run writes a bundle when the loss or a gradient of a step is not finite. Example:

        moemesh replay runs/tiny/failures/step-12

    It prints where the first value that is not finite comes from: rank, microbatch, layer, expert,
    parameter and samples.
    """
    from moemesh.train.numerics.repro_bundle import replay as run

    raise typer.Exit(run(bundle, overrides or (), alone=alone, as_json=as_json))


@app.command(short_help="Repeat the first steps of a run and compare the losses bit by bit.")
def repro(
    run: Annotated[Path, "Folder of a run.", "<RUN>"],
    steps: Annotated[int, "Number of steps.", {"min": 1}] = 20,
    out: Annotated[Path | None, "Folder of the second run; default: RUN-repro.", "DIR"] = None,
    as_json: AsJson = False,
) -> None:
    """Retrain the first steps of a run, from the files of its folder, and compare.

    Exit code 0: equal to the bit; 1: something differs, and what differs between the two runs is
    named; 2: the run cannot be repeated. Example:

        moemesh repro runs/first --steps 20
    """
    import sys

    from moemesh.report.document import plural
    from moemesh.train.repro import repro as repeat

    def log(text: str) -> None:
        print(text, file=sys.stderr if as_json else sys.stdout, flush=True)

    repeated, causes, folder = repeat(run, out, steps, log, shows_steps=not as_json)
    if as_json:
        result = {**asdict(repeated), "differences": causes, "folder": str(folder)}
        typer.echo(strict_json(result, indent=1))
    else:
        lines = [
            "",
            f"equal to the bit: losses and gradient norms of {plural(repeated.steps, 'step')}",
        ]
        if repeated.first_step is not None:
            lines[1:] = [
                f"different: step {repeated.first_step} is the first, {repeated.key} "
                f"{repeated.before!r} then, {repeated.after!r} now",
                f"{repeated.num_different} of {repeated.steps} steps differ, losses by at most "
                f"{repeated.largest:.3g}",
            ]
        if causes:
            lines += ["what differs between the two runs:", *(f"  {cause}" for cause in causes)]
        elif repeated.first_step is not None:
            lines.append(
                "no difference of packages, hardware, git, data or environment is recorded: "
                "another process on the machine cannot be the reason, a change of the library or "
                "of files in place can"
            )
        typer.echo("\n".join([*lines, f"second run: {folder}"]))
    raise typer.Exit(0 if repeated.first_step is None else 1)
