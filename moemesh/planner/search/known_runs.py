"""Published runs of a model on a kind of device, beside what is predicted for their layouts."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, cast

from moemesh.config.cluster import Cluster
from moemesh.planner.layout import PlannedLayout, Precision
from moemesh.planner.plan_text import read_plan
from moemesh.planner.shapes.load import Model, load_model
from moemesh.planner.speed import Speed
from moemesh.planner.timing.hardware import accelerator_of_cluster
from moemesh.planner.timing.price import pricing


@dataclass(frozen=True, kw_only=True)
class KnownRun:
    """Measured `seconds` of a step of `layout`, whose precision is that of the run, and the
    `predicted` ones; `here` in the precision that was asked for. `speed` is the measured one."""

    source: str
    device: str
    layout: PlannedLayout
    seconds: float
    predicted: float
    here: float
    speed: Speed

    def to_json(self, tokens: float | None) -> dict[str, Any]:
        """One of the key "published" of ``plan --json``."""
        return {
            **{name: getattr(self, name) for name in ("source", "device", "seconds")},
            "predicted_seconds": self.predicted,
            "predicted_seconds_here": self.here,
            "devices": self.layout.world_size,
            "precision": self.layout.precision,
            "plan": self.layout.key,
            "speed": self.speed.to_json(tokens),
        }


def known_runs(model: Model, cluster: Cluster, precision: Precision) -> Iterator[KnownRun]:
    """Runs of the same sizes on the same kind of device, on however many of them."""
    home = files("moemesh.config") / "presets" / "calibration"
    table = tomllib.loads((home / "layouts.toml").read_text(encoding="utf-8"))
    price = pricing(cluster)
    for run in table["run"]:
        if run["device"] != accelerator_of_cluster(cluster).name:
            continue
        known = load_model(run["model"])
        if model.shape.model_copy(update={"name": known.shape.name}) != known.shape:
            continue
        layout = read_plan(run["plan"], model=known).layout
        layout = layout.changed(precision=cast("Precision", run["precision"]))
        asked = layout.changed(precision=precision)
        yield KnownRun(
            **{key: run[key] for key in ("source", "device", "seconds")},
            layout=layout,
            predicted=price.seconds(model.shape, layout)["total"],
            here=price.seconds(model.shape, asked)["total"],
            speed=Speed.of(model.shape, layout, cluster, run["seconds"]),
        )
