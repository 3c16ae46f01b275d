"""Verbs of the planner: estimate and plan."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import shlex
from dataclasses import dataclass, replace
from itertools import chain, compress
from pathlib import Path
from typing import Annotated, Any

import typer

from moemesh.cli import completion
from moemesh.cli.application import AsJson, app
from moemesh.cli.options import given
from moemesh.cli.terminal import progress
from moemesh.planner.requests import EstimateRequest, PlanRequest
from moemesh.trace.strict_json import strict_json


@app.command(short_help="Price one layout, without running it.")
def estimate(request: EstimateRequest, as_json: AsJson = False) -> None:
    """Parameters, FLOPs, memory, traffic and seconds of one layout, without running it.

    Example:

        moemesh estimate --model qwen3-30b-a3b --cluster dgx_h100 \\
            --plan "tp=2,dp=4,ep=8,data=zero1,microbatch=1" --seq-len 4096 --global-batch 256

        moemesh estimate --config first.toml --cluster laptop_cpu
    """
    from moemesh.planner import estimate as planner
    from moemesh.planner.memory import read_cache_size

    model, plan = request.model, request.plan
    if request.config is not None:
        # What a configuration says may not be said a second time.
        if twice := ", ".join(given(request, "model", "plan", "seq_len", "global_batch")):
            raise typer.BadParameter(f"--config says it already: leave out {twice}")
    elif model is None or plan is None:
        fix = "--model tiny --plan dp=2"
        raise typer.BadParameter(f"give --model and --plan, or --config; fix: {fix}")
    look: Any = {"rank": request.rank, "headroom": request.headroom}
    with progress("estimating", quiet=as_json):
        if request.config is not None:
            from moemesh.sharding.load_run import load_run

            config = load_run([request.config]).config
            found = planner.estimate_run(config, request.cluster, **look)
        else:
            assert model is not None and plan is not None
            batch = request.seq_len, request.global_batch
            found = planner.estimate_named(model, request.cluster, plan, *batch, **look)
    cache = None if request.cache is None else read_cache_size(request.cache)
    if as_json:
        typer.echo(strict_json(found.to_json(cache), indent=2))
    else:
        from moemesh.cli.plan_text import estimate_text

        typer.echo(estimate_text(found, cache))


@dataclass(frozen=True)
class PlanOptions(PlanRequest):
    """The search, and what is written and shown of its answer."""

    html: Annotated[Path | None, "Write the answer as a page, offline.", "FILE"] = None
    write: Annotated[Path | None, "Write the first layout as a file for train.", "FILE.toml"] = None
    explain: Annotated[bool, "Also parts of time and memory, limits, assumptions."] = False


@app.command(
    short_help="Find the best layouts of a model on a cluster.",
    completions={"settings": completion.settings},
)
def plan(request: PlanOptions, as_json: AsJson = False) -> None:
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

    html, write, explain = request.html, request.write, request.explain
    for path, kind in ((html, "<!DOCTYPE"), (write, PLAN_FILE)):
        if path is not None:
            check_target(path, kind)
    with progress("searching layouts", quiet=as_json) as tell:
        found = plan_named(request, tell)
    names = ("model", "cluster", "seq_len", "global_batch")
    values = (str(getattr(request, name)) for name in names)
    asked = shlex.join(chain(*zip(given(request, *names), values, strict=True)))
    if html is not None:
        from moemesh.cli.plan_text import plan_document

        write_texts([(html, plan_document(found, asked).to_html())])
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
