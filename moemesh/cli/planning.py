"""Verbs of the planner: estimate and plan."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import shlex
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Annotated

import typer

from moemesh.cli import completion
from moemesh.cli.application import AsJson, app
from moemesh.cli.options import BATCH, CLUSTER, LENGTH, MODEL, PLAN, options_from
from moemesh.cli.terminal import progress
from moemesh.planner.requests import HEADROOM_HELP, PlanRequest
from moemesh.trace.strict_json import strict_json


@app.command(short_help="Price one layout, without running it.")
def estimate(
    cluster: Annotated[str, CLUSTER],
    model: Annotated[str | None, MODEL] = None,
    plan: Annotated[str | None, PLAN] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="A run's TOML file or folder, in place of --model, --plan, --seq-len and "
            "--global-batch: with its dtype and optimizer.",
        ),
    ] = None,
    seq_len: Annotated[int | None, LENGTH] = None,
    global_batch: Annotated[int | None, BATCH] = None,
    rank: Annotated[
        str,
        typer.Option(
            metavar="RANK",
            help="Pipeline rank of the traffic: first, inner, last, a number, or worst (memory).",
        ),
    ] = "worst",
    headroom: Annotated[str | None, typer.Option(metavar="SHARE|SIZE", help=HEADROOM_HELP)] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            "--kv-cache",
            metavar="BATCHxTOKENS",
            help='Also the KV cache of so many sequences of so many tokens: "32x4096".',
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Parameters, FLOPs, memory, traffic and seconds of one layout, without running it.

    Example:

        moemesh estimate --model qwen3-30b-a3b --cluster dgx_h100 \\
            --plan "tp=2,dp=4,ep=8,data=zero1,microbatch=1" --seq-len 4096 --global-batch 256

        moemesh estimate --config first.toml --cluster laptop_cpu
    """
    from moemesh.planner.memory import read_cache_size

    if config is not None:
        # What a configuration says may not be said a second time.
        own = {
            "--model": model,
            "--plan": plan,
            "--seq-len": seq_len,
            "--global-batch": global_batch,
        }
        if twice := [name for name, value in own.items() if value is not None]:
            raise typer.BadParameter(f"--config says it already: leave out {', '.join(twice)}")
        from moemesh.planner.estimate import estimate_run
        from moemesh.sharding.load_run import load_run

        with progress("estimating", quiet=as_json):
            run = load_run([config]).config
            found = estimate_run(run, cluster, rank=rank, headroom=headroom)
    elif model is None or plan is None:
        fix = "--model tiny --plan dp=2"
        raise typer.BadParameter(f"give --model and --plan, or --config; fix: {fix}")
    else:
        from moemesh.planner.estimate import estimate_named

        with progress("estimating", quiet=as_json):
            found = estimate_named(
                model, cluster, plan, seq_len, global_batch, rank=rank, headroom=headroom
            )
    wanted = None if cache is None else read_cache_size(cache)
    if as_json:
        typer.echo(strict_json(found.to_json(wanted), indent=2))
        return
    from moemesh.cli.planning_text import estimate_text

    typer.echo(estimate_text(found, wanted))


@app.command(short_help="Find the best layouts of a model on a cluster.")
@options_from(
    PlanRequest, model=completion.models, cluster=completion.clusters, settings=completion.settings
)
def plan(
    request: PlanRequest,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the answer as a page, offline.")
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="Write the first layout as a file for train."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also parts of time and memory, limits, assumptions.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find the best layouts of a model on a cluster, with reasons and a certificate.

    Seconds, tokens a second, MFU and memory with 80 % intervals; with --tokens days and GPU-hours;
    with --why what is wrong with a layout that you name. The first layout is as fast as the
    fastest and safer or simpler where one is; `moemesh train` takes what --write writes. Examples:

        moemesh plan --model qwen3-30b-a3b --cluster dgx_h100 --seq-len 4k --global-batch 256 \\
            --trainable --write plan.toml

        moemesh plan --model deepseek-v3 --cluster dgx_h100 --nodes 64 --seq-len 4096 \\
            --global-batch 15360 --tokens 14.8T --why tp=8,ep=64,data=zero3
    """
    from moemesh.planner.search.command import PLAN_FILE, plan_file, plan_named, to_json
    from moemesh.report.files import check_target, write_texts

    for path, kind in ((html, "<!DOCTYPE"), (write, PLAN_FILE)):
        if path is not None:
            check_target(path, kind)
    with progress("searching layouts", quiet=as_json) as tell:
        found = plan_named(request, tell)
    names = ("model", "cluster", "seq_len", "global_batch")
    given = [(f"--{name.replace('_', '-')}", str(getattr(request, name))) for name in names]
    asked = shlex.join(word for pair in given for word in pair)
    if html is not None:
        from moemesh.cli.plan_text import plan_html

        write_texts([(html, plan_html(found, asked))])
    answer = to_json(found)
    is_written = write is not None and not answer["plans"][0]["not_trained"]
    if write is not None and is_written:
        write_texts([(write, plan_file(found))])
    if as_json:
        typer.echo(strict_json(answer, indent=2))
    else:
        from moemesh.cli.plan_text import plan_text

        is_shown = [one.roles or request.top or explain for one in found.candidates[: request.top]]
        found = replace(found, candidates=tuple(compress(found.candidates, is_shown)))
        typer.echo(plan_text(found, asked, str(write) if is_written else "", explain=explain))
    if write is not None and not is_written:
        from moemesh.config.errors import UserError

        refused = ", ".join(answer["plans"][0]["not_trained"])
        raise UserError(f"{write} is not written: `moemesh train` does not carry out {refused}")
