"""Verbs `validate` and `calibrate`: from tables of measured runs to statistics or constants."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moemesh.cli.application import app
from moemesh.cli.terminal import table
from moemesh.config.errors import UserError
from moemesh.config.limits import few
from moemesh.report.files import write_texts

if TYPE_CHECKING:
    from moemesh.planner.accuracy.calibrate import LeftOut
    from moemesh.planner.accuracy.own import Lesson
    from moemesh.planner.accuracy.validate import Prediction, Validation
    from moemesh.planner.intervals import Intervals

#: Number of printed rows with the largest errors.
_NUM_WORST = 12

_SHARED_HEADING = """\
Constants of the time and memory model, fitted by `moemesh calibrate --shared` to published runs.
[shared]: values for every cluster; [cluster."stack/device"]: factors on them, [stack.name] on
devices it was not seen on, [release."stack 26.02"] of its releases; [memory.stack]: how software
allocates (see moemesh.planner.memory.Allocation)."""


_Runs = Annotated[list[Path], "Tables of measured runs, one row each.", "<RUNS.csv>"]
_Shapes = Annotated[Path | None, "Shapes; default model_archs.json beside it.", "FILE"]


@dataclass(frozen=True, kw_only=True)
class ValidateRequest:
    """Measured runs, and the comparisons and files of their predictions."""

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
    own_runs: Annotated[
        int | None,
        "Errors of each cluster after 4, 12, 50 and N of its runs.",
        {"metavar": "N", "min": 1},
    ] = None


@app.command("validate", short_help="Predict a table of measured runs.")
def validate_runs(request: ValidateRequest) -> None:
    """Predict every row of a table of measured runs, and print the errors.

    Prints errors of step time, memory, "fits" and the chosen layout by source. Example:

        moemesh validate runs.csv --json predictions.json
    """
    from moemesh.config.cluster import load_cluster
    from moemesh.planner.accuracy.calibrate import cross_validate, intervals_toml, left_out_errors
    from moemesh.planner.accuracy.calibration_file import use_cluster
    from moemesh.planner.accuracy.own import lessons
    from moemesh.planner.accuracy.published import read_runs
    from moemesh.planner.accuracy.validate import predict, summarize
    from moemesh.planner.speed import accelerator_of_cluster
    from moemesh.planner.timing.calibration import prior_calibration, shipped_calibration
    from moemesh.report.curves import Agreement, agreement_chart

    clusters = [load_cluster(source) for source in request.cluster or []]
    hardware = accelerator_of_cluster(clusters[0]).name if len(clusters) == 1 else ""
    read = [run for path in request.runs for run in read_runs(path, request.archs, hardware)]
    calibration = shipped_calibration()
    for cluster in clusters:
        read, calibration = use_cluster(read, calibration, cluster)
    further = list[str]()
    start = replace(prior_calibration(), allocations=calibration.allocations)
    if request.cross:
        validation = summarize(cross_validate(read, start))
        kinds: tuple[tuple[LeftOut, str], ...] = (("model", "model"), ("stack", "software stack"))
        for kind, name in kinds:
            unseen = summarize(cross_validate(read, start, left_out=kind))
            further += ["", f"with a whole {name} left out:", _errors(unseen, by_source=False)]
    else:
        validation = summarize(predict(read, calibration))
    if all(prediction.seconds is None for prediction in validation.predictions):
        tables = ", ".join(map(str, request.runs))
        raise UserError("\n".join([f"no row of {tables} can be priced", *_unpriced(validation)]))
    texts = [] if request.out is None else [(request.out, validation.json_text())]
    drawn: defaultdict[str, list[Prediction]] = defaultdict(list)
    for prediction in validation.predictions:
        drawn[prediction.run.source or prediction.run.cluster].append(prediction)
    title = "Step time of published runs, predicted and measured"
    if (number := request.own_runs) is not None:
        counts = sorted({0, 4, 12, 50, number})
        taught = lessons(read, calibration, counts, unseen=start if request.cross else None)
        further += ["", lessons_text(taught, counts, unseen=request.cross)]
        title = f"Step time before and after {number} own runs of each cluster"
        drawn.clear()
        for lesson in taught:
            if lesson.own in (0, number):  # the number of own runs that it was fitted to
                drawn[f"after {number}" if lesson.own else "before"] += lesson.others
    if request.plot is not None:
        points = [
            Agreement(
                name=f"{prediction.run.id} {prediction.run.row.get('model', '')}",
                series=series,
                measured=prediction.run.seconds,
                predicted=prediction.seconds,
            )
            for series, predictions in drawn.items()
            for prediction in predictions
            if prediction.seconds and prediction.run.seconds and prediction.run.ended == "ok"
        ]
        texts.append((request.plot, agreement_chart(title, points, unit="seconds a step")))
    if request.intervals is not None:
        errors = left_out_errors(read, start)
        texts.append((request.intervals, intervals_toml(errors)))
        further += ["", intervals_text(errors), "", f"wrote {request.intervals}"]
    write_texts(texts)
    typer.echo("\n".join([report(validation), *further]))


def lessons_text(taught: "Sequence[Lesson]", counts: "Sequence[int]", *, unseen: bool) -> str:
    """Table of each cluster's errors after fits to each of `counts` numbers of its runs: median,
    95th percentile, coverage of the interval. `unseen`: other runs of its stack were left out."""
    rows: dict[str, dict[int, Lesson]] = defaultdict(dict)
    for lesson in taught:
        rows[lesson.cluster][lesson.own] = lesson
    known = "whose stack was left out of everything" if unseen else "with what is packaged"
    head = f"step time of a cluster's other runs, {known}, after N own runs: median, p95, and the "
    head += "share of runs in the stated 80 % interval"
    cells: list[tuple[str, ...]] = []
    for cluster, after in rows.items():
        shown = {n: f"{x.median:.1%} {x.p95:6.1%} {x.within:4.0%}" for n, x in after.items()}
        number = str(next(iter(after.values())).runs)
        cells.append((cluster, number, *(shown.get(count, "") for count in counts)))
    inside = [[lesson.within for lesson in taught if lesson.own == count] for count in counts]
    means = [f"{sum(shares) / len(shares):.0%}" if shares else "" for shares in inside]
    cells.append(("mean of the clusters within", "", *means))
    return f"{head}\n{table(('cluster', 'runs', *map(str, counts)), cells)}"


@dataclass(frozen=True, kw_only=True)
class CalibrateRequest:
    """Measured runs to fit, and the file to write."""

    runs: Annotated[list[Path], "Tables of measured runs (CSV), or run folders.", "<RUNS>"]
    out: Annotated[Path, "File to write.", "CLUSTER.toml"]
    archs: _Shapes = None
    cluster: Annotated[
        str | None, "The cluster of the folders, or of the tables (one of several).", "NAME|FILE"
    ] = None
    shared: Annotated[bool, "Fit all clusters and what they share."] = False


@app.command(short_help="Fit a cluster to measured runs.")
def calibrate(request: CalibrateRequest) -> None:
    """Fit a cluster to measured runs and write its Cluster file: its few constants, and the
    limits of their predictions.

    Examples:

        moemesh calibrate runs.csv --out mine.toml

        moemesh calibrate runs/* --cluster dgx_h100 --out mine.toml
    """
    from moemesh.config.cluster import load_cluster
    from moemesh.planner.accuracy.calibrate import fit, measured_runs
    from moemesh.planner.accuracy.calibration_file import (
        beaten,
        calibration_toml,
        fitted_cluster,
        runs_of_cluster,
        use_cluster,
    )
    from moemesh.planner.accuracy.own import learn, run_of_folder, unused
    from moemesh.planner.accuracy.published import read_runs
    from moemesh.planner.accuracy.validate import predict, summarize
    from moemesh.planner.speed import accelerator_of_cluster
    from moemesh.planner.timing.calibration import prior_calibration, shipped_calibration

    out, wanted = request.out, request.cluster
    folders = [path for path in request.runs if path.is_dir()]
    tables = [path for path in request.runs if path not in folders]
    hardware = ""
    if wanted is not None:
        with suppress(UserError):  # a name that only the table has
            hardware = accelerator_of_cluster(load_cluster(wanted)).name
    runs = [run for path in tables for run in read_runs(path, request.archs, hardware)]
    machine = None
    if folders:
        if wanted is None:
            raise UserError("run folders do not record their cluster: give --cluster NAME or FILE")
        machine, wanted = load_cluster(wanted), None
        runs += [run_of_folder(path, machine) for path in folders]
    elif wanted is not None and wanted not in {run.cluster for run in runs}:
        with suppress(UserError):  # an unknown name: the message lists those of the table
            machine = load_cluster(wanted)
            runs, _ = use_cluster(runs, shipped_calibration(), machine)
            name = f"/{machine.name}"
            wanted = next((run.cluster for run in runs if run.cluster.endswith(name)), wanted)
    if request.shared:
        start = replace(prior_calibration(), allocations=shipped_calibration().allocations)
        calibration = fit(runs, start)
        write_texts([(out, calibration_toml(calibration, _SHARED_HEADING))])
        typer.echo(report(summarize(predict(runs, calibration))))
        return
    chosen = runs_of_cluster(measured_runs(runs), wanted)
    learned = learn(chosen, shipped_calibration())
    fitted = fitted_cluster(chosen, learned.calibration, learned.runs)
    if machine is not None:  # the rows have the stack of another cluster
        same = ("name", "gpu_hour_price", "usable_share")
        fitted = fitted.model_copy(update={key: getattr(machine, key) for key in same})
    sources = few((path.name for path in request.runs), 4)
    write_texts([(out, fitted.to_toml(f"Learned from {len(chosen)} runs of {sources}."))])
    doubts = [*unused(runs), *learned.doubts]
    doubts += beaten(chosen, learned.calibration, learned.runs)
    paragraphs = [report(summarize(predict(chosen, learned.calibration))), "\n".join(doubts)]
    paragraphs.append(f"wrote {out}: {fitted.name}")
    typer.echo("\n\n".join(filter(None, paragraphs)))


def intervals_text(intervals: "Intervals") -> str:
    """Widths of the intervals, and the share of each left-out source's runs that lie within."""
    devices = sorted(intervals.well_measured)
    other = intervals.seconds_width("")
    known = intervals.seconds_width(devices[0]) if devices else other
    lines = [
        "80 % intervals, and the share of a left-out source within those of the other sources:",
        f"step time on {', '.join(devices)}: {_factor(known)}; on other devices: {_factor(other)}; "
        f"memory: {_factor(intervals.memory_width)}, of stacks in the table "
        f"{_factor(intervals.known_width)}",
    ]
    both = {
        "step time": intervals.seconds_coverage(),
        "memory": intervals.memory_coverage(),
        "memory, known stacks": intervals.memory_coverage(known=True),
    }
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
    """Statistics as tables for a terminal, the worst rows, and notes on rows."""
    from moemesh.planner.accuracy.published import unclear_batch
    from moemesh.report.document import plural

    lines = [_errors(validation)]
    if fit := validation.fit:
        lines.append(
            f"fits / does not fit: {fit.right:.1%} of {fit.count} right, "
            f"{fit.wrongly_fits:.1%} predicted to fit but ran out of memory"
        )
    if chosen := validation.selection:
        lines.append(
            f"selection in {chosen.groups} groups: mean regret {chosen.mean_regret:.1%}, "
            f"worst {chosen.worst_regret:.1%}, {chosen.out_of_memory} picks out of memory"
        )
    compared = [p for p in validation.predictions if p.error is not None]
    if worst := sorted(compared, key=lambda p: -abs(p.error or 0.0))[:_NUM_WORST]:
        rows = [
            (
                *(p.run.id, p.run.model[:28]),
                *(f"{p.seconds:.4g}", f"{p.run.seconds:.4g}", f"{p.error:+.1%}"),
            )
            for p in worst
        ]
        header = ("worst row", "model", "predicted s", "measured s", "error")
        lines += ["", table(header, rows, left=2)]
    if strange := [p.run.id for p in worst if p.is_in_another_unit]:
        lines += ["", f"in another unit, or of another batch: {', '.join(strange)}"]
    if silent := [p.run for p in validation.predictions if p.seconds and p.run.is_silent]:
        names = ", ".join(run.id for run in silent[:6]) + " ..." * (len(silent) > 6)
        lines += ["", f"{plural(len(silent), 'row')} without a measured time or memory: {names}"]
    if filled := [p.run for p in validation.predictions if p.fits and p.run.is_sharded_by_choice]:
        names = ", ".join(run.id for run in filled[:6]) + " ..." * (len(filled) > 6)
        reason = "with ZeRO or sequence parallelism, which the table leaves out, because they fit"
        lines += ["", f"{plural(len(filled), 'row')} priced {reason} only then: {names}"]
    priced = [p.run for p in validation.predictions if p.seconds]
    for words in dict.fromkeys(filter(None, (unclear_batch(run.row) for run in priced))):
        count = sum(unclear_batch(run.row) == words for run in priced)
        lines += ["", f"{plural(count, 'row')} whose {words}"]
    if unpriced := sum(p.seconds is None for p in validation.predictions):
        lines += ["", f"{plural(unpriced, 'row')} not priced:", *_unpriced(validation)]
    return "\n".join(lines)


def _unpriced(validation: "Validation") -> list[str]:
    """Each reason for rows without a prediction, with the first rows and their lines."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for run in (p.run for p in validation.predictions if p.seconds is None):
        line = run.row.get("line", "")
        is_named = not line or run.id == f"line {line}"
        reasons[run.reason].append(run.id if is_named else f"{run.id} in line {line}")
    return [
        f"  {reason} ({', '.join(rows[:6])}{' ...' * (len(rows) > 6)})"
        for reason, rows in reasons.items()
    ]


def _errors(validation: "Validation", *, by_source: bool = True) -> str:
    """Table of errors: of dense and of MoE models, and with `by_source` of each source and of
    memory."""
    kinds = {"dense step time": validation.dense, "MoE step time": validation.moe}
    rows = {**validation.by_source, **kinds, "memory": validation.memory} if by_source else kinds
    return table(
        ("source", "rows", "median", "p95", "worst", "bias"),
        [
            (
                *(name, str(errors.count), f"{errors.median:.1%}", f"{errors.p95:.1%}"),
                *(f"{errors.worst:.1%}", f"{errors.bias:+.1%}"),
            )
            for name, errors in rows.items()
            if errors
        ],
    )
