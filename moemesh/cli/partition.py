"""The verb `partition`: stages, operator strategies and the plan that they imply."""

# No `from __future__ import annotations` here: typer reads the annotations.
from typing import TYPE_CHECKING

import typer

from moemesh.cli.application import AsJson, app
from moemesh.cli.terminal import interval, progress, table
from moemesh.planner.requests import PartitionRequest
from moemesh.trace.strict_json import strict_json

if TYPE_CHECKING:
    from moemesh.planner.stages.answer import Partition


#: Operators that are named where a plan differs; --json has all.
_MOST_NAMES = 4


@app.command(short_help="Cut a model into stages and operator strategies.")
def partition(request: PartitionRequest, as_json: AsJson = False) -> None:
    """Cut a model into pipeline stages and lay out the operators of each.

    Example:

        moemesh partition --model qwen3-30b-a3b --cluster dgx_h100 --nodes 2 --global-batch 256
    """
    from moemesh.planner.stages.partition import compare

    with progress("cutting the model", quiet=as_json):
        found = compare(request)
    if as_json:
        rows = {"methods": [one.summary() for one in found]} if request.method == "all" else {}
        typer.echo(strict_json({**found[0].to_json(), **rows}, indent=2))
    else:
        typer.echo(_text(found[0]))
        if len(found) > 1:
            heads = ("method", "seconds", "gap", "evaluations", "wall")
            compared = [
                (
                    *(one.method, f"{one.seconds:.6g}", f"{one.gap:.2%}"),
                    *(f"{one.evaluations:,}", f"{one.wall_seconds:.3g} s"),
                )
                for one in found
            ]
            typer.echo(f"\n{table(heads, compared)}")


def _text(found: "Partition") -> str:
    """A readable answer."""
    from moemesh.trace.memory_profile import PREDICTED_PEAK, format_bytes

    mesh = " x ".join(f"{axis} {size}" for axis, size in found.mesh.items())
    lines = [
        f"{found.model} on {found.num_devices} devices of {found.cluster}, "
        f"{found.global_batch} a step in {found.microbatches} "
        f"microbatch{'es' * (found.microbatches != 1)}; "
        f"mesh of a stage: {mesh}",
        f"{found.method}: {found.seconds:.6g} s a step, {found.gap:.2%} above the optimum, "
        f"{found.evaluations:,} evaluations",
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
        for number, stage in enumerate(found.stages)
    ]
    of_stage = "layers" if found.implied or not found.stages[0].operators else "operators"
    heads = ("stage", of_stage, "ranks", "seconds", "held", "in flight", "assignment")
    lines.append(table(heads, rows, left=3))
    for number, assignment in enumerate(found.assignments):
        if all(stage.assignment != number for stage in found.stages):
            continue
        nodes = [
            (one.group, one.operator, one.strategy, str(one.count), f"{one.seconds:.4g}")
            for one in assignment.operators
        ]
        edges = [
            (
                *(one.group, f"{one.source} -> {one.target}", f"{one.before} -> {one.after}"),
                f"{one.seconds:.4g}",
            )
            for one in assignment.edges
            if one.seconds > 0
        ]
        heads = ("group", "operator", "strategy", "layers", "node seconds")
        lines += ["", f"assignment {number}", table(heads, nodes, left=3)]
        if edges:
            heads = ("group", "edge", "change of layout", "edge seconds")
            lines += ["", table(heads, edges, left=3)]
    lines.append("")
    implied = found.implied
    if found.cut_seconds is not None:
        lines.append(f"every operator cut over all devices instead: {found.cut_seconds:.6g} s")
    elif implied is None:
        lines.append("plan: no legal plan has these stages")
    else:
        lines += [
            f"plan: {', '.join(f'{key}={value}' for key, value in implied.keys().items())}",
            f"  carries out {implied.agreement:.0%} of the operator time as above",
            f"  the {found.seconds:.6g} s above count operators at the peak rates of the device; "
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
