"""Verbs of the planner: `estimate`, `plan` and `partition`."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import shlex
from dataclasses import dataclass, replace
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moemesh.cli import options
from moemesh.cli.application import AsJson, app, load
from moemesh.cli.options import given
from moemesh.cli.terminal import interval, progress, table
from moemesh.config.errors import UserError
from moemesh.planner.requests import EstimateRequest, PartitionRequest, PlanRequest
from moemesh.report.files import check_target, write_texts
from moemesh.trace.strict_json import strict_json

if TYPE_CHECKING:
    from moemesh.planner.stages.answer import Partition


@app.command(short_help="Price one layout, without running it.")
def estimate(request: EstimateRequest, as_json: AsJson = False) -> None:
    """Parameters, FLOPs, memory, traffic and seconds of one layout, without running it.

    Example:

        moemesh estimate --model qwen3-30b-a3b --cluster dgx_h100 \\
            --plan "tp=2,dp=4,ep=8,data=zero1,microbatch=1" --seq-len 4096 --global-batch 256

        moemesh estimate --config first.toml --cluster laptop_cpu
    """
    from moemesh.planner import estimate as planner
    from moemesh.planner.speed import read_cache_size

    model, plan = request.model, request.plan
    if request.config is not None:
        if repeated := ", ".join(given(request, "model", "plan", "seq_len", "global_batch")):
            raise typer.BadParameter(f"--config has these values: leave out {repeated}")
    elif model is None or plan is None:
        fix = "--model tiny --plan dp=2"
        raise typer.BadParameter(f"give --model and --plan, or --config; fix: {fix}")
    keywords: Any = {name: getattr(request, name) for name in ("rank", "headroom", "price")}
    with progress("estimating", quiet=as_json):
        if request.config is not None:
            config = load(request.config, None).config
            priced = planner.estimate_run(config, request.cluster, **keywords)
        else:
            assert model is not None and plan is not None
            batch = request.seq_len, request.global_batch
            priced = planner.estimate_named(model, request.cluster, plan, *batch, **keywords)
    cache = None if request.cache is None else read_cache_size(request.cache)
    if as_json:
        typer.echo(strict_json(priced.to_json(cache), indent=2))
    else:
        from moemesh.cli.plan_text import estimate_text

        typer.echo(estimate_text(priced, cache))


@dataclass(frozen=True)
class PlanOptions(PlanRequest):
    """The search, its files, and the output."""

    html: Annotated[Path | None, "Write the answer as a page, offline.", "FILE"] = None
    write: Annotated[Path | None, "Write the first layout as a file for train.", "FILE.toml"] = None
    explain: Annotated[bool, "Also parts of time and memory, limits, assumptions."] = False


@app.command(
    short_help="Find the best layouts of a model on a cluster.",
    completions={"settings": options.settings},
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
    from moemesh.config.sources import read_overrides
    from moemesh.planner.search.command import (
        PLAN_FILE,
        not_trained,
        plan_file,
        plan_named,
        to_json,
    )

    for note in read_overrides(request.settings or ()).notes:
        typer.echo(f"moemesh: note: {note}", err=True)
    html, write, explain = request.html, request.write, request.explain
    for path, kind in ((html, "<!DOCTYPE"), (write, PLAN_FILE)):
        if path is not None:
            check_target(path, kind)
    with progress("searching layouts", quiet=as_json) as log:
        planned = plan_named(request, log)
    names = ("model", "cluster", "seq_len", "global_batch")
    values = (str(getattr(request, name)) for name in names)
    arguments = shlex.join(chain(*zip(given(request, *names), values, strict=True)))
    texts: list[tuple[Path, str]] = []
    if html is not None:
        from moemesh.cli.plan_text import plan_document

        texts.append((html, plan_document(planned, arguments).to_html()))
    refused = not_trained(planned.candidates[0].layout, planned.model)
    is_written = write is not None and not refused
    if write is not None and is_written:
        texts.append((write, plan_file(planned)))
    write_texts(texts)
    if as_json:
        typer.echo(strict_json(to_json(planned), indent=2))
    else:
        from moemesh.cli.plan_text import plan_text

        is_shown = [
            candidate.roles or request.top or explain
            for candidate in planned.candidates[: request.top]
        ]
        planned = replace(planned, candidates=tuple(compress(planned.candidates, is_shown)))
        file = str(write) if is_written else ""
        typer.echo(plan_text(planned, arguments, file, explain=explain))
    if write is not None and not is_written:
        reasons = ", ".join(refused)
        raise UserError(f"{write} is not written: `moemesh train` does not carry out {reasons}")


#: Most named operators on which a plan differs; --json has all.
_MOST_NAMES = 4


@app.command(short_help="Cut a model into stages and operator strategies.")
def partition(request: PartitionRequest, as_json: AsJson = False) -> None:
    """Cut a model into pipeline stages and lay out the operators of each.

    Example:

        moemesh partition --model qwen3-30b-a3b --cluster dgx_h100 --nodes 2 --global-batch 256
    """
    from moemesh.planner.stages.partition import compare

    with progress("cutting the model", quiet=as_json):
        partitions = compare(request)
    if as_json:
        summaries = [cut.summary() for cut in partitions]
        rows = {"methods": summaries} if request.method == "all" else {}
        typer.echo(strict_json({**partitions[0].to_json(), **rows}, indent=2))
    else:
        typer.echo(_text(partitions[0]))
        if len(partitions) > 1:
            heads = ("method", "seconds", "gap", "evaluations", "wall")
            compared = [
                (
                    *(cut.method, f"{cut.seconds:.6g}", f"{cut.gap:.2%}"),
                    *(f"{cut.evaluations:,}", f"{cut.wall_seconds:.3g} s"),
                )
                for cut in partitions
            ]
            typer.echo(f"\n{table(heads, compared)}")


def _text(cut: "Partition") -> str:
    from moemesh.trace.memory_profile import PREDICTED_PEAK, format_bytes

    mesh = " x ".join(f"{axis} {size}" for axis, size in cut.mesh.items())
    lines = [
        f"{cut.model} on {cut.num_devices} devices of {cut.cluster}, "
        f"{cut.global_batch} a step in {cut.microbatches} "
        f"microbatch{'es' * (cut.microbatches != 1)}; "
        f"mesh of a stage: {mesh}",
        f"{cut.method}: {cut.seconds:.6g} s a step, {cut.gap:.2%} above the optimum, "
        f"{cut.evaluations:,} evaluations",
        "",
    ]
    rows = [
        (
            str(number),
            interval(stage.layers) if stage.layers else ", ".join(stage.operators) or "-",
            interval(stage.ranks),
            f"{stage.seconds:.6g}",
            format_bytes(round(stage.memory_bytes)),
            f"{stage.in_flight:g}",
            str(stage.assignment),
        )
        for number, stage in enumerate(cut.stages)
    ]
    of_stage = "layers" if cut.implied or not cut.stages[0].operators else "operators"
    heads = ("stage", of_stage, "ranks", "seconds", "held", "in flight", "assignment")
    lines.append(table(heads, rows, left=3))
    for number, assignment in enumerate(cut.assignments):
        if all(stage.assignment != number for stage in cut.stages):
            continue
        nodes = [
            (item.group, item.operator, item.strategy, str(item.count), f"{item.seconds:.4g}")
            for item in assignment.operators
        ]
        edges = [
            (
                *(edge.group, f"{edge.source} -> {edge.target}", f"{edge.before} -> {edge.after}"),
                f"{edge.seconds:.4g}",
            )
            for edge in assignment.edges
            if edge.seconds > 0
        ]
        heads = ("group", "operator", "strategy", "layers", "node seconds")
        lines += ["", f"assignment {number}", table(heads, nodes, left=3)]
        if edges:
            heads = ("group", "edge", "change of layout", "edge seconds")
            lines += ["", table(heads, edges, left=3)]
    lines.append("")
    implied = cut.implied
    if cut.cut_seconds is not None:
        lines.append(f"every operator cut over all devices instead: {cut.cut_seconds:.6g} s")
    elif implied is None:
        lines.append("plan: no legal plan has these stages")
    else:
        lines += [
            f"plan: {', '.join(f'{key}={value}' for key, value in implied.keys().items())}",
            f"  carries out {implied.agreement:.0%} of the operator time as above",
            f"  the {cut.seconds:.6g} s above count operators at the peak rates of the device; "
            "`moemesh estimate`, with launches, the optimizer",
            f"  and the rates that are reached, gives {implied.seconds:.6g} s and "
            f"{format_bytes(round(implied.memory_bytes))} ({PREDICTED_PEAK})"
            + ("" if implied.fits else ", which does not fit"),
        ]
        if implied.differing:
            shown = ", ".join(implied.differing[:_MOST_NAMES])
            more = len(implied.differing) - _MOST_NAMES
            rest = f" and {more} more" if more > 0 else ""
            lines.append(f"  laid out otherwise: {shown}{rest}")
        if implied.not_trained:
            lines.append(f"  not trained by this version: {', '.join(implied.not_trained)}")
        lines += ["", implied.command] if implied.command else []
    return "\n".join(lines)
