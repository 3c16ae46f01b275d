"""The verb launch: a run on one machine or on a cluster."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moemesh.cli.application import ConfigFile, Overrides, app, load

if TYPE_CHECKING:
    from moemesh.config.jobs import Launcher


@app.command(short_help="Start a run here, or write the file that starts it on a cluster.")
def launch(
    config: ConfigFile = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder of the run, on shared disk.")
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="This machine: train here.")] = False,
    torchrun: Annotated[
        bool, typer.Option("--torchrun", help="A script that is started on every node.")
    ] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="A batch script for Slurm.")] = False,
    k8s: Annotated[bool, typer.Option("--k8s", help="A job for Kubernetes.")] = False,
    sky: Annotated[bool, typer.Option("--sky", help="A task for SkyPilot.")] = False,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks of a node. [default: that of the plan, or 8]")
    ] = None,
    hours: Annotated[float, typer.Option(min=0.1, help="Slurm: time limit.")] = 24.0,
    partition: Annotated[str | None, typer.Option(help="Slurm.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm.")] = None,
    image: Annotated[str | None, typer.Option(help="Kubernetes: image with moemesh.")] = None,
    accelerator: Annotated[str | None, typer.Option(help="SkyPilot: such as H100.")] = None,
    file: Annotated[Path | None, typer.Option(metavar="FILE", help="File to write.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print it; write and start nothing.")
    ] = False,
) -> None:
    """Write a commented file that starts a run on a cluster, checked as train would check it.

    Nothing is submitted. The same file goes on with a run that was stopped. Example:

        moemesh launch --set plan.dp=16 --set plan.ep=8 --out /shared/runs/first --slurm
    """
    from moemesh.config.errors import ConfigError
    from moemesh.config.jobs import FILES, ClusterJob
    from moemesh.config.trainable import refusals

    asked: list[Launcher] = [
        name
        for name, is_asked in (
            ("local", local), ("torchrun", torchrun), ("slurm", slurm), ("k8s", k8s), ("sky", sky)
        )
        if is_asked
    ]  # fmt: skip
    if len(asked) != 1:
        fix = " or ".join(f"--{name}" for name in asked or ("local", "slurm"))
        one = "give one of --local, --torchrun, --slurm, --k8s, --sky"
        raise typer.BadParameter(f"{one}; fix: {fix}")
    resolved = load(config, overrides)
    run = resolved.config
    if problems := refusals(run):
        raise ConfigError(problems)
    name = config.stem if config else run.model_preset
    folder = (out or Path("runs") / name).expanduser().absolute()
    arguments = ["train", *([str(config.absolute())] if config else [])]
    for override in overrides or []:
        arguments += ["--set", override]
    arguments += ["--out", str(folder)]
    job = ClusterJob.of(
        run,
        arguments,
        folder,
        run.plan.world_size if local else ranks_per_node,
        hours=hours,
        partition=partition,
        account=account,
        image=image,
        accelerator=accelerator,
        programs=str(Path(sys.executable).parent),
        directory=str(Path.cwd()),
    )
    (launcher,) = asked
    text = job.text(launcher)
    if dry_run:
        typer.echo(text, nl=False)
        return
    if launcher == "local":
        from moemesh.train.preparation import RunRequest, prepare

        given = overrides or []
        request = RunRequest(resolved=resolved, config_file=config, overrides=given, out=folder)
        prepared = prepare(request)  # before torch is imported
        from moemesh.train import command

        code = command.train(request, prepared)
        raise typer.Exit(code)
    from moemesh.report.files import write_texts

    target = file or Path(FILES[launcher])
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
