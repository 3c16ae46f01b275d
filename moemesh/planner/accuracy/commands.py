"""The verbs `validate` and `calibrate`: tables of measured runs in, statistics or constants out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moemesh.config.cluster import Cluster, load_cluster
from moemesh.config.errors import UserError
from moemesh.config.suggest import nearest_choice
from moemesh.planner.accuracy.calibrate import LeftOut, cross_validate, fit, measured_runs
from moemesh.planner.accuracy.calibration_file import calibration_toml, cluster_toml
from moemesh.planner.accuracy.published import PublishedRun, read_runs
from moemesh.planner.accuracy.validate import (
    Validation,
    by_kind,
    json_text,
    report,
    summarize,
    validate,
)
from moemesh.planner.timing.calibration import Calibration, prior_calibration, shipped_calibration
from moemesh.planner.timing.constants import NAMES
from moemesh.planner.timing.hardware import Accelerator, accelerator_of_cluster
from moemesh.report.agreement import Agreement, agreement_chart

_SHARED_HEADING = """\
Constants of the time and memory model, fitted by `moemesh calibrate --shared` to published runs.
[shared]: values for every cluster; [cluster."stack/device"]: factors on them, [stack.name] on
devices it was not seen on, [release."stack 26.02"] of its releases; [memory.stack]: how software
allocates (see moemesh.planner.peak_memory.Allocation)."""


def validate_command(
    table: Path,
    archs: Path | None,
    out: Path | None,
    clusters: Sequence[str],
    *,
    plot: Path | None = None,
    cross: bool = False,
) -> str:
    """Predict every row of a table; writes the JSON object to `out` and the picture to `plot`.

    Returns the statistics. With `cross` every finished run is predicted by a fit that saw no run
    of its group instead of the packaged constants: minutes, and the honest figures.
    """
    runs = read_runs(table, archs)
    calibration = shipped_calibration()
    for source in clusters:
        runs, calibration = use_cluster(runs, calibration, load_cluster(source))
    further = ""
    if cross:
        start = replace(prior_calibration(), allocations=calibration.allocations)
        validation = summarize(cross_validate(runs, start))
        further = _further_left_out(runs, start)
    else:
        validation = validate(runs, calibration)
    if out is not None:
        _write(out, json_text(validation))
    if plot is not None:
        _write(plot, _picture(validation))
    return report(validation) + further


def _further_left_out(runs: Sequence[PublishedRun], start: Calibration) -> str:
    """Errors of models, and of software stacks, that a fit has not seen at all."""
    lines: list[str] = []
    kinds: tuple[tuple[LeftOut, str], ...] = (("model", "model"), ("stack", "software stack"))
    for kind, name in kinds:
        found = summarize(cross_validate(runs, start, left_out=kind))
        lines += ["", f"with a whole {name} left out:", *by_kind(found)]
    return "\n" + "\n".join(lines)


def _picture(validation: Validation) -> str:
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
    return agreement_chart("agreement", title, points, unit="seconds a step")


def calibrate_command(
    table: Path, archs: Path | None, out: Path, wanted: str | None, shared: bool
) -> str:
    """Fit the constants of the one cluster of a table (or of the one `wanted`) and write its
    Cluster file; with `shared` all constants of all clusters, as the package ships them."""
    runs = read_runs(table, archs)
    if shared:
        start = replace(prior_calibration(), allocations=shipped_calibration().allocations)
        found = fit(runs, start)
        _write(out, calibration_toml(found, _SHARED_HEADING))
        return report(validate(runs, found))
    chosen = _one_cluster(measured_runs(runs), wanted)
    calibration = fit(chosen, shipped_calibration(), share=False)
    cluster = _cluster_file(chosen, calibration)
    _write(out, cluster_toml(cluster, f"Fitted to {len(chosen)} runs of {table.name}."))
    return f"{report(validate(chosen, calibration))}\n\nwrote {out}: {cluster.name}"


def use_cluster(
    runs: Sequence[PublishedRun], calibration: Calibration, cluster: Cluster
) -> tuple[list[PublishedRun], Calibration]:
    """Let a Cluster file speak for the rows of its device: its data sheet and its constants.

    Raises UserError when the file names a constant that the time model does not have.
    """
    device = accelerator_of_cluster(cluster)
    if unknown := sorted(set(cluster.constants) - set(NAMES)):
        nearest = nearest_choice(unknown[0], NAMES)
        raise UserError(f"cluster {cluster.name} has an unknown constant {unknown[0]}; {nearest}")
    factors = {name: value / calibration.shared[name] for name, value in cluster.constants.items()}
    known = dict(calibration.clusters)
    changed: list[PublishedRun] = []
    for run in runs:
        if run.device is None or run.device.name != device.name:
            changed.append(run)
            continue
        key = f"{run.cluster.rpartition('/')[0]}/{cluster.name}"
        known[key] = {**calibration.deviations(run.cluster), **factors}
        changed.append(replace(run, device=device, cluster=key, release=""))
    return changed, replace(calibration, clusters=known)


def _one_cluster(runs: Sequence[PublishedRun], wanted: str | None) -> list[PublishedRun]:
    counts = Counter(run.cluster for run in runs)
    if not counts:
        raise UserError(
            "no row of the table has a finished run with a layout and a step time; "
            "`moemesh validate` says why for each row"
        )
    if wanted is None and len(counts) > 1:
        listed = ", ".join(f"{name} ({count})" for name, count in counts.most_common(8))
        raise UserError(
            f"the table has runs of {len(counts)} clusters: {listed}; choose one with --cluster"
        )
    name = wanted or next(iter(counts))
    if name not in counts:
        nearest = nearest_choice(name, tuple(counts))
        raise UserError(f"the table has no finished run of cluster {name}; {nearest}")
    return [run for run in runs if run.cluster == name]


def _cluster_file(runs: Sequence[PublishedRun], calibration: Calibration) -> Cluster:
    first = runs[0]
    device = first.device
    assert device is not None
    constants = calibration.constants(first.cluster)
    nodes = max(math.ceil(int(float(run.row["gpus"])) / device.node_size) for run in runs)
    latency = float(constants.collective_latency_us) * 1e-6
    return Cluster(
        name=first.cluster,
        accelerator=device.name,
        nodes=nodes,
        gpus_per_node=device.node_size,
        memory_bytes=int(device.memory_bytes),
        memory_bandwidth=device.memory_bandwidth,
        peak_flops=_peaks(device),
        intra_node_bandwidth=device.intra_node_bandwidth,
        intra_node_latency=latency,
        inter_node_bandwidth=device.inter_node_bandwidth,
        inter_node_latency=latency,
        constants={name: float(f"{getattr(constants, name):.6g}") for name in NAMES},
    )


def _peaks(device: Accelerator) -> dict[str, float]:
    half, eight, four = device.peak_flops
    found = {"bfloat16": half}
    if eight > half:
        found["float8"] = eight
    if four > eight:
        found["float4"] = four
    return found


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
