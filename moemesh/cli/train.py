"""The verb that trains."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moemesh.cli.application import ConfigFile, Overrides, app, load
from moemesh.trace.memory_profile import PREDICTED_HELD, format_bytes

if TYPE_CHECKING:
    from moemesh.config.data import DataConfig
    from moemesh.train.preparation import Preparation


#: Files of every run; docs/run-folder.md says what is in them.
FILES = (
    *("config.toml", "plan.json", "data.json", "metrics.jsonl", "events.jsonl", "loads.jsonl"),
    *("ledger.json", "ledger_predicted.json", "timeline.json", "memory.json", "summary.json"),
    "report.html",
)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """A configuration, the folder of the run, and how it starts and ends."""

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
        bool, "Check everything and say what would be done; write and start nothing."
    ] = False
    stop_after: Annotated[
        int | None,
        "Save and end behind this step; the same command without it goes on.",
        {"metavar": "STEP", "min": 1},
    ] = None
    takeover: Annotated[
        bool, "Take run folder and train.checkpoint_folder from a run at work there."
    ] = False
    profile: Annotated[
        int | None,
        "Profile N steps behind four without it on every rank into DIR/profile, and end.",
        {"metavar": "N", "min": 1},
    ] = None


@app.command(short_help="Train a model on the ranks of a plan.")
def train(options: TrainOptions) -> None:
    """Train a model: starts the ranks itself, or joins those that torchrun started.

    Without a file it trains the preset "tiny" on Python's own library sources. The folder of a run
    in place of a file goes on with that run; with --out it starts a new one of its configuration.
    Examples:

        moemesh train --set plan.dp=2 --set plan.ep=2 --out runs/first

        moemesh train runs/first --set train.steps=400
    """
    from moemesh.comm.slurm import ranks_of_slurm

    config, overrides = options.config, options.overrides or []
    # Checked first: a mistake must be told before torch, which takes seconds, is imported. Ranks
    # that were started already check what they share when they meet.
    resolved = load(config, overrides)
    if options.ranks is not None and not options.auto_layout:
        raise typer.BadParameter("goes with --auto-layout", param_hint="--ranks")
    if options.auto_layout:
        from moemesh.train.auto_layout import fit_here

        fitted = fit_here(resolved.config, options.ranks, os.environ)
        if fitted.overrides():
            keys = {one.partition("=")[0] for one in fitted.overrides()}
            given = [one for one in overrides if one.partition("=")[0] not in keys]
            overrides = [*given, *fitted.overrides()]
            resolved = load(config, overrides)
            if fitted.is_told:
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
    if dry_run or not ("RANK" in os.environ or ranks_of_slurm(os.environ)):
        quiet = dry_run or options.allow_change or options.profile is not None
        if not quiet and (text := finished(request)) is not None:
            typer.echo(text)
            return
        prepared = prepare(request, (lambda text: None) if dry_run else _say)
    if dry_run:
        assert prepared is not None
        typer.echo(preparation_text(prepared))
        return
    if options.profile is not None:  # torch's profiler says on the terminal that it starts
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    from moemesh.train import command

    raise typer.Exit(command.train(request, prepared))


def _say(text: str) -> None:
    """Print at once; a console that is gone stops no run."""
    with suppress(OSError, ValueError):
        print(text, flush=True)


def preparation_text(prepared: "Preparation") -> str:
    """The plan, what is found and what would be written, one fact a line."""
    from moemesh.train.preparation import (
        MOST_RANKS,
        disk_warning,
        predicted_memory,
        warnings_before_ranks,
    )

    config, folder, need = prepared.request.config, prepared.folder, prepared.disk
    plan, train, data = config.plan, config.train, config.data
    disk_note = disk_warning(config, folder.checkpoints)
    resume = "nothing there: a new run"
    if steps := prepared.steps:
        more = f", the newest of {len(steps)}" if len(steps) > 1 else ""
        resume = f"from {folder.checkpoints / f'step-{steps[0]}'}{more}"
    elif folder.has_run:
        resume = f"{folder.path} holds a run without a checkpoint: from the first step"
    kept = prepared.request.readable.config
    # Of many ranks the first of each stage stand for all.
    step = 1 if plan.world_size <= MOST_RANKS else plan.world_size // plan.pp
    each = (predicted_memory(kept, rank) for rank in range(0, plan.world_size, step))
    worst = max(each, key=lambda profile: profile.peak)
    whose = "the only rank" if plan.world_size == 1 else f"rank {worst.rank}, the fullest rank"
    degrees = "  ".join(f"{name}={getattr(plan, name)}" for name in ("pp", "dp", "cp", "tp"))
    ends = f"{train.steps:,} steps" if train.epochs is None else f"{train.epochs:g} epoch(s)"
    lines = [
        f"plan     {plan.world_size} rank(s)  {degrees}  ep={plan.ep}  etp={plan.etp}  "
        f"edp={plan.edp}",
        f"steps    {ends} of {data.global_batch:,} sequences of {data.seq_len:,} tokens",
        f"memory   {format_bytes(worst.peak)} {PREDICTED_HELD}, of {whose}: "
        f"{format_bytes(worst.peak - worst.activations)} of weights, gradients and optimizer, "
        f"{format_bytes(worst.activations)} of activations",
        f"disk     {format_bytes(need.checkpoint)} a checkpoint, {format_bytes(need.most)} with "
        f"{train.checkpoints_kept} kept and one being written; {format_bytes(need.free)} free",
        *_data(data),
        *_samples(prepared),
        f"tokens   by {data.tokenizer}",
        *([f"weights  {config.model_path}"] if config.model_path is not None else []),
        *([f"adapters {config.lora.path}"] if config.lora.path is not None else []),
        f"resume   {resume}",
        *(f"         changed since the last call: {change}" for change in prepared.changes),
        f"writes   {folder.path}: {', '.join(_files(prepared))}",
        *(f"note: {warning}" for warning in warnings_before_ranks(kept)),
        *(f"note: {warning}" for warning in (disk_note,) if warning),
        "Nothing was written or started. Leave out --dry-run to train.",
    ]
    return "\n".join(lines)


def _data(data: "DataConfig") -> Iterator[str]:
    """Each source with its files."""
    from moemesh.data.input_files import find
    from moemesh.data.sources import name_of, token_files, validation_source

    every = [("data    ", source) for source in data.all_sources]
    if data.validation is not None:
        every.append(("validate", validation_source(data)))
    for title, source in every:
        prefixes = token_files(source)
        files = [] if prefixes is not None else find(source.path, source.format)
        if prefixes is not None:
            found = f"{len(prefixes)} pair(s) of token files"
        elif any(file.is_on_hub for file in files):
            found = "a dataset of the Hugging Face Hub, not looked at"
        else:
            size = sum(file.num_bytes for file in files) / 1e6
            found = f"{len(files):,} file(s), {size:,.1f} MB"
        yield f"{title} {name_of(source)}: {found}"


def _samples(prepared: "Preparation") -> Iterator[str]:
    """How many samples the data makes, where it was read."""
    samples, config = prepared.samples, prepared.request.config
    if samples is None:
        return
    drawn = config.train.steps * config.data.global_batch
    times = max(samples.epochs(drawn)) if config.train.epochs is None else config.train.epochs
    text = f"samples  {samples.num_training:,} for training, read {times:.3g} times"
    yield f"{text}; {samples.num_validation:,} for validation"
    if (learned := samples.num_learned) is not None:
        yield f"chat     conversations by the template of {config.data.tokenizer}"
        yield f"         {learned:,} tokens bear loss"
    yield from prepared.notes


def _files(prepared: "Preparation") -> Iterator[str]:
    from moemesh.train.records.kept_schedules import has_name

    config = prepared.request.config
    yield from FILES
    if not has_name(config.plan):
        yield "schedule.txt"
    if config.train.epochs is None:
        every, last = config.train.checkpoint_every, config.train.steps
        saved = last if not every else min(every, last)
        yield f"checkpoints/step-{saved}" + (
            f" and further ones, {config.train.checkpoints_kept} kept" if saved < last else ""
        )
    else:
        yield f"checkpoints/step-N, {config.train.checkpoints_kept} kept"
