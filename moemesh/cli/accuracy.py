"""The verbs `validate` and `calibrate`: tables of measured runs in, statistics or constants out."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moemesh.cli.application import app
from moemesh.cli.options import options_from
from moemesh.cli.terminal import table

if TYPE_CHECKING:
    from moemesh.planner.accuracy.calibrate import LeftOut
    from moemesh.planner.accuracy.validate import ErrorStatistics, Validation
    from moemesh.planner.intervals import Intervals

_NUM_WORST = 12

_SHARED_HEADING = """\
Constants of the time and memory model, fitted by `moemesh calibrate --shared` to published runs.
[shared]: values for every cluster; [cluster."stack/device"]: factors on them, [stack.name] on
devices it was not seen on, [release."stack 26.02"] of its releases; [memory.stack]: how software
allocates (see moemesh.planner.memory.Allocation)."""


_Runs = Annotated[Path, "Table of measured runs, one row each.", "<RUNS.csv>"]
_Shapes = Annotated[Path | None, "Shapes; default model_archs.json beside it.", "FILE"]


@dataclass(frozen=True, kw_only=True)
class ValidateRequest:
    """Measured runs, and what to compare and write of their predictions."""

    runs: _Runs
    archs: _Shapes = None
    out: Annotated[
        Path | None, "Write rows and statistics.", {"names": ("--json",), "metavar": "FILE"}
    ] = None
    cluster: Annotated[list[str] | None, "Cluster of its device. May be repeated.", "FILE"] = None
    plot: Annotated[Path | None, "Write an SVG picture.", "FILE"] = None
    cross: Annotated[
        bool, "Refit without each group, model, stack.", {"names": ("--cross-validate",)}
    ] = False
    intervals: Annotated[
        Path | None,
        "Refit without each source; print 80 % intervals and their coverage, write the errors.",
        "FILE",
    ] = None


@app.command("validate", short_help="Predict a table of measured runs.")
@options_from(ValidateRequest)
def validate_runs(request: ValidateRequest) -> None:
    """Predict every row of a table of measured runs, and say how far off it is.

    Prints errors of step time, memory, "fits" and the chosen layout by source. Example:

        moemesh validate runs.csv --json predictions.json
    """
    from moemesh.config.cluster import load_cluster
    from moemesh.planner.accuracy.calibrate import cross_validate, intervals_toml, left_out_errors
    from moemesh.planner.accuracy.calibration_file import use_cluster
    from moemesh.planner.accuracy.published import read_runs
    from moemesh.planner.accuracy.validate import json_text, summarize, validate
    from moemesh.planner.timing.calibration import prior_calibration, shipped_calibration
    from moemesh.report.agreement import Agreement, agreement_chart
    from moemesh.report.files import write_texts

    read = read_runs(request.runs, request.archs)
    calibration = shipped_calibration()
    for source in request.cluster or []:
        read, calibration = use_cluster(read, calibration, load_cluster(source))
    further = list[str]()
    start = replace(prior_calibration(), allocations=calibration.allocations)
    if request.cross:
        validation = summarize(cross_validate(read, start))
        kinds: tuple[tuple[LeftOut, str], ...] = (("model", "model"), ("stack", "software stack"))
        for kind, name in kinds:
            unseen = summarize(cross_validate(read, start, left_out=kind))
            further += ["", f"with a whole {name} left out:", _errors(_by_kind(unseen))]
    else:
        validation = validate(read, calibration)
    texts = [] if request.out is None else [(request.out, json_text(validation))]
    if request.plot is not None:
        points = [
            Agreement(
                name=f"{one.run.id} {one.run.row.get('model', '')}",
                series=one.run.source or one.run.cluster,
                measured=one.run.seconds,
                predicted=one.seconds,
            )
            for one in validation.predictions
            if one.seconds and one.run.seconds and one.run.ended == "ok"
        ]
        title = "Step time of published runs, predicted and measured"
        chart = agreement_chart("agreement", title, points, unit="seconds a step")
        texts.append((request.plot, chart))
    write_texts(texts)
    if request.intervals is not None:
        errors = left_out_errors(read, start)
        write_texts([(request.intervals, intervals_toml(errors))])
        further += ["", intervals_text(errors), "", f"wrote {request.intervals}"]
    typer.echo("\n".join([report(validation), *further]))


@dataclass(frozen=True, kw_only=True)
class CalibrateRequest:
    """Measured runs to fit, and the file to write."""

    runs: _Runs
    out: Annotated[Path, "File to write.", "CLUSTER.toml"]
    archs: _Shapes = None
    cluster: Annotated[str | None, "Cluster of the table.", "NAME"] = None
    shared: Annotated[bool, "Fit all clusters and what they share."] = False


@app.command(short_help="Fit a cluster to measured runs.")
@options_from(CalibrateRequest)
def calibrate(request: CalibrateRequest) -> None:
    """Fit the few constants of a cluster to measured runs and write its Cluster file.

    Example:

        moemesh calibrate runs.csv --out mine.toml
    """
    from moemesh.planner.accuracy.calibrate import fit, measured_runs
    from moemesh.planner.accuracy.calibration_file import (
        calibration_toml,
        cluster_toml,
        fitted_cluster,
        runs_of_cluster,
    )
    from moemesh.planner.accuracy.published import read_runs
    from moemesh.planner.accuracy.validate import validate
    from moemesh.planner.timing.calibration import prior_calibration, shipped_calibration
    from moemesh.report.files import write_texts

    out, read = request.out, read_runs(request.runs, request.archs)
    if request.shared:
        start = replace(prior_calibration(), allocations=shipped_calibration().allocations)
        found = fit(read, start)
        write_texts([(out, calibration_toml(found, _SHARED_HEADING))])
        typer.echo(report(validate(read, found)))
        return
    chosen = runs_of_cluster(measured_runs(read), request.cluster)
    calibration = fit(chosen, shipped_calibration(), share=False)
    fitted = fitted_cluster(chosen, calibration)
    write_texts(
        [(out, cluster_toml(fitted, f"Fitted to {len(chosen)} runs of {request.runs.name}."))]
    )
    typer.echo(f"{report(validate(chosen, calibration))}\n\nwrote {out}: {fitted.name}")


def intervals_text(found: "Intervals") -> str:
    """The widths of the intervals, and how many runs of each left-out source lie within."""
    devices = sorted(found.well_measured)
    lines = [
        "80 % intervals, and the share of a left-out source within those of the other sources:",
        f"step time on {', '.join(devices)}: {_factor(found.seconds_width((*devices, '')[0]))}; "
        f"on other devices: {_factor(found.seconds_width(''))}; "
        f"memory: {_factor(found.memory_width)}",
    ]
    both = {"step time": found.seconds_coverage(), "memory": found.memory_coverage()}
    for name, coverage in both.items():
        rows = [
            (source, str(coverage.rows[source]), f"{share:.0%}")
            for source, share in sorted(coverage.by_source.items())
        ]
        rows.append(("mean over sources", "", f"{coverage.of_sources:.1%}"))
        rows.append(("mean over rows", "", f"{coverage.of_rows:.1%}"))
        lines += ["", table((name, "rows", "within"), rows)]
    return "\n".join(lines)


def _factor(width: float) -> str:
    return f"x {exp(-width):.2f} to {exp(width):.2f}"


def report(validation: "Validation") -> str:
    """The statistics as a table for a terminal, worst rows last."""
    errors = [*validation.by_source.items(), *_by_kind(validation)]
    if validation.memory:
        errors.append(("memory", validation.memory))
    lines = [_errors(errors)]
    if fit := validation.fit:
        lines.append(
            f"fits / does not fit: {fit.right:.1%} of {fit.count} right, "
            f"{fit.wrongly_fits:.1%} said to fit but ran out of memory"
        )
    if chosen := validation.selection:
        lines.append(
            f"selection in {chosen.groups} groups: mean regret {chosen.mean_regret:.1%}, "
            f"worst {chosen.worst_regret:.1%}, {chosen.out_of_memory} picks out of memory"
        )
    off = [one for one in validation.predictions if one.error is not None]
    if worst := sorted(off, key=lambda one: -abs(one.error or 0.0))[:_NUM_WORST]:
        rows = [
            (
                *(one.run.id, one.run.row.get("model", "")[:28]),
                *(f"{one.seconds:.4g}", f"{one.run.seconds:.4g}", f"{one.error:+.1%}"),
            )
            for one in worst
        ]
        header = ("worst row", "model", "predicted s", "measured s", "error")
        lines += ["", table(header, rows, left=2)]
    unpriced = [one.run for one in validation.predictions if one.seconds is None]
    if unpriced:
        lines += ["", f"{len(unpriced)} rows not priced:"]
        reasons: dict[str, list[str]] = defaultdict(list)
        for run in unpriced:
            reasons[run.reason].append(run.id)
        for reason, ids in reasons.items():
            shown = ", ".join(ids[:6]) + (" ..." if len(ids) > 6 else "")
            lines.append(f"  {reason} ({shown})")
    return "\n".join(lines)


def _by_kind(validation: "Validation") -> "list[tuple[str, ErrorStatistics]]":
    kinds = (("dense step time", validation.dense), ("MoE step time", validation.moe))
    return [(name, found) for name, found in kinds if found]


def _errors(rows: "Sequence[tuple[str, ErrorStatistics]]") -> str:
    return table(
        ("source", "rows", "median", "p95", "worst", "bias"),
        [
            (
                *(name, str(found.count), f"{found.median:.1%}", f"{found.p95:.1%}"),
                *(f"{found.worst:.1%}", f"{found.bias:+.1%}"),
            )
            for name, found in rows
        ],
    )
