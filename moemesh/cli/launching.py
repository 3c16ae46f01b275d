"""The verb launch: a run on one machine or on a cluster."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import typer

from moemesh.cli.application import ConfigFile, Overrides, app, load


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A run, what starts it, and the words of schedulers."""

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
    hours: Annotated[float, "Slurm: time limit.", {"min": 0.1}] = 24.0
    partition: Annotated[str | None, "Slurm."] = None
    account: Annotated[str | None, "Slurm."] = None
    image: Annotated[str | None, "Kubernetes: image with moemesh."] = None
    accelerator: Annotated[str | None, "SkyPilot: such as H100."] = None
    file: Annotated[Path | None, "File to write.", "FILE"] = None
    dry_run: Annotated[bool, "Print it; write and start nothing."] = False


@app.command(short_help="Start a run here, or write the file that starts it on a cluster.")
def launch(request: LaunchRequest) -> None:
    """Write a commented file that starts a run on a cluster, checked as train would check it.

    Nothing is submitted. The same file goes on with a run that was stopped. Example:

        moemesh launch --set plan.dp=16 --set plan.ep=8 --out /shared/runs/first --slurm
    """
    from moemesh.config.errors import ConfigError
    from moemesh.config.jobs import FILES, ClusterJob, Launcher
    from moemesh.config.trainable import refusals

    config, overrides = request.config, request.overrides or []
    asked = [name for name in get_args(Launcher) if getattr(request, name)]
    if len(asked) != 1:
        fix = " or ".join(f"--{name}" for name in asked or ("local", "slurm"))
        one = "give one of --local, --torchrun, --slurm, --k8s, --sky"
        raise typer.BadParameter(f"{one}; fix: {fix}")
    (launcher,) = asked
    resolved = load(config, overrides)
    run = resolved.config
    if problems := refusals(run):
        raise ConfigError(problems)
    name = config.stem if config else run.model_preset
    folder = (request.out or Path("runs") / name).expanduser().absolute()
    arguments = ["train", *([str(config.absolute())] if config else [])]
    arguments += [word for override in overrides for word in ("--set", override)]
    words = ("hours", "partition", "account", "image", "accelerator")
    job = ClusterJob.of(
        run,
        [*arguments, "--out", str(folder)],
        folder,
        run.plan.world_size if launcher == "local" else request.ranks_per_node,
        **{word: getattr(request, word) for word in words},
        programs=str(Path(sys.executable).parent),
        directory=str(Path.cwd()),
    )
    text = job.text(launcher)
    if request.dry_run:
        typer.echo(text, nl=False)
        return
    if launcher == "local":
        from moemesh.train.preparation import RunRequest, prepare

        own = RunRequest(resolved=resolved, config_file=config, overrides=overrides, out=folder)
        prepared = prepare(own)  # before torch is imported
        from moemesh.train import command

        raise typer.Exit(command.train(own, prepared))
    from moemesh.report.files import write_texts

    target = request.file or Path(FILES[launcher])
    if target.is_file() and target.read_text(encoding="utf-8", errors="replace") != text:
        from moemesh.config.errors import UserError

        raise UserError(
            f"{target} is there and is not what would be written, perhaps with changes of yours: "
            "name another with --file, or remove it"
        )
    write_texts([(target, text)])
    nodes = f"{job.nodes} node(s) of {job.ranks_per_node} ranks"
    typer.echo(f"{nodes}: wrote {shlex.quote(str(target))}; its first lines say how to start it")
    if run.data.path is None and not run.data.sources:
        typer.echo(
            "note: data.path is not set: the job would train on Python's own library sources, by "
            f"bytes; set data.path and data.tokenizer{f' in {config}' if config else ''}"
        )
