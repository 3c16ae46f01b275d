"""Calibrations as files: the table that ships with the package, and Cluster files of users."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from moemesh.config.cluster import Cluster, OwnRun, cluster_of_device
from moemesh.config.errors import UserError
from moemesh.config.limits import few
from moemesh.config.suggest import nearest_choice
from moemesh.config.toml import format_key, format_value
from moemesh.planner.accuracy.calibrate import NO_RUN
from moemesh.planner.accuracy.published import PublishedRun
from moemesh.planner.speed import accelerator_of_cluster
from moemesh.planner.timing.calibration import EFFICIENCIES, NAMES, Calibration
from moemesh.planner.timing.own_runs import OwnRuns
from moemesh.report.document import plural

#: Largest difference to one of a factor that is not written.
_NO_DEVIATION = 0.01


def calibration_toml(calibration: Calibration, heading: str) -> str:
    """The calibration as TOML for :func:`read_calibration`."""
    tables = {"shared": calibration.shared}
    for kind in ("stack", "release", "cluster"):
        levels: Mapping[str, Mapping[str, float]] = getattr(calibration, f"{kind}s")
        for key, factors in sorted(levels.items()):
            moved = {name: x for name, x in factors.items() if abs(x - 1) >= _NO_DEVIATION}
            tables[f"{kind}.{format_key(key)}"] = moved
    # Fitted numbers are written with four significant digits.
    tables = {
        name: {key: float(f"{value:.4g}") for key, value in values.items()}
        for name, values in tables.items()
    }
    for stack, settings in sorted(calibration.allocations.items()):
        tables[f"memory.{format_key(stack)}"] = dict(settings)
    lines = [f"# {line}" for line in heading.splitlines()]
    for name, values in tables.items():
        lines += ["", f"[{name}]"]
        lines += [f"{format_key(key)} = {format_value(x)}" for key, x in values.items()]
    return "\n".join(lines) + "\n"


def use_cluster(
    runs: Sequence[PublishedRun], calibration: Calibration, cluster: Cluster
) -> tuple[list[PublishedRun], Calibration]:
    """Runs and calibration with a Cluster file's data sheet and constants for rows of its device.

    Raises UserError if the file has a constant that the time model lacks.
    """
    device = accelerator_of_cluster(cluster)
    if unknown := sorted(set(cluster.constants) - set(NAMES)):
        nearest = nearest_choice(unknown[0], NAMES)
        raise UserError(f"cluster {cluster.name} has an unknown constant {unknown[0]}; {nearest}")
    release = newest_release(cluster.own_runs)
    newest = calibration.release_factors(release)
    factors = {
        name: value / calibration.shared[name] / newest.get(name, 1.0)
        for name, value in cluster.constants.items()
    }
    known, own_runs = dict(calibration.clusters), dict(calibration.own)
    changed: list[PublishedRun] = []
    for run in runs:
        if run.device is None or run.device.name != device.name:
            changed.append(run)
            continue
        key = f"{run.cluster.rpartition('/')[0]}/{cluster.name}"
        known[key] = {**calibration.deviations(run.cluster), **factors}
        own_runs[key] = OwnRuns(cluster.own_runs)
        changed.append(replace(run, device=device, cluster=key, release=run.release or release))
    return changed, replace(calibration, clusters=known, own=own_runs)


def newest_release(runs: Sequence[OwnRun]) -> str:
    """The newest release among a cluster's runs, to which its constants belong; "" without one."""
    return max((run.release for run in runs), default="")


def runs_of_cluster(runs: Sequence[PublishedRun], wanted: str | None) -> list[PublishedRun]:
    """The runs of cluster `wanted`, or of the table's only cluster. Raises UserError without runs,
    for several clusters if none is wanted, and for an unknown one."""
    counts = Counter(run.cluster for run in runs)
    if not counts:
        raise UserError(NO_RUN)
    if wanted is None and len(counts) > 1:
        ids = {name: [run.id for run in runs if run.cluster == name] for name in counts}
        listed = "; ".join(
            f"{name} ({plural(number, 'run')}: {few(ids[name], 6)})"
            for name, number in counts.most_common(8)
        )
        raise UserError(
            f"the table has runs of {len(counts)} clusters: {listed}; choose one with --cluster"
        )
    name = wanted or next(iter(counts))
    if name not in counts:
        nearest = nearest_choice(name, tuple(counts))
        raise UserError(f"the table has no finished run of cluster {name}; {nearest}")
    return [run for run in runs if run.cluster == name]


def fitted_cluster(
    runs: Sequence[PublishedRun], calibration: Calibration, own: Sequence[OwnRun] = ()
) -> Cluster:
    """The Cluster of some runs: the data sheet of their device, their calibrated constants, and the
    runs as corrections. Efficiencies are at most 1: links whose data sheet is exceeded by the runs
    get the bandwidth that was reached (:func:`beaten`)."""
    first = runs[0]
    device = first.device
    assert device is not None
    constants = calibration.constants(first.cluster, newest_release(own))
    nodes = max(math.ceil(int(float(run.row["gpus"])) / device.node_size) for run in runs)
    latency = float(constants.collective_latency_us) * 1e-6
    efficiencies = {name: float(getattr(constants, name)) for name in EFFICIENCIES}
    links = {
        f"{place}_node_bandwidth": getattr(device, f"{place}_node_bandwidth")
        * max(efficiencies[f"{place}_node_efficiency"], 1.0)
        for place in ("intra", "inter")
    }
    values = {
        name: float(f"{min(getattr(constants, name), most):.6g}")
        for name in NAMES
        for most in (1.0 if name in EFFICIENCIES else math.inf,)
    }
    fitted = {"name": first.cluster, "nodes": nodes, "constants": values, "own_runs": tuple(own)}
    latencies = {f"{place}_node_latency": latency for place in ("intra", "inter")}
    return cluster_of_device(device).model_copy(update=fitted | links | latencies)


def beaten(
    runs: Sequence[PublishedRun], calibration: Calibration, own: Sequence[OwnRun] = ()
) -> list[str]:
    """A sentence for each number of the data sheet that is below the runs' measurements."""
    first = runs[0]
    device, constants = first.device, calibration.constants(first.cluster, newest_release(own))
    assert device is not None
    sentences: list[str] = []
    for name, peak in EFFICIENCIES.items():
        if (value := float(getattr(constants, name))) <= 1:
            continue
        written = f"{name} = 1 is written"
        if peak.endswith("_node_bandwidth"):
            stated = getattr(device, peak)
            written = f"{peak} = {value * stated:.4g} is written in place of {stated:.4g} bytes/s"
        sentences.append(
            f"{peak} of {device.name} is too low: the runs imply {value:.3f} of it; {written}"
        )
    return sentences
