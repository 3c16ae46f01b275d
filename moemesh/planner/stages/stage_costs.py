"""What a pipeline stage costs: its layers' times under its own memory and microbatches in flight.

A layer has one or several options (with and without recomputation, say): seconds, state bytes and
saved bytes of each. A stage picks one option a layer so that

    sum of state bytes + in flight * sum of saved bytes + fixed bytes <= cap

and its seconds are least: a small knapsack, worked through once for equal sets of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moemesh.planner.operators.graph import Assignment, FloatArray
from moemesh.planner.operators.labels import undominated
from moemesh.planner.operators.pareto import MemoryCapError
from moemesh.planner.stages.division import (
    Partition,
    StageError,
    best_partition,
    check_counts,
    smallest_bottleneck,
)

IntArray = NDArray[np.intp]
InFlight = Literal["1f1b", "gpipe"]
#: Points of a stage's (bytes, seconds) frontier that are kept.
MAX_FRONTIER = 2**10


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Options of one layer; the three have equal lengths. Bytes saved are of one microbatch."""

    seconds: tuple[float, ...]
    state_bytes: tuple[float, ...]
    saved_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        lengths = {len(self.seconds), len(self.state_bytes), len(self.saved_bytes)}
        if len(lengths) != 1 or not self.seconds:
            raise StageError(
                f"a layer has {len(self.seconds)} times, {len(self.state_bytes)} state and "
                f"{len(self.saved_bytes)} saved bytes: give equally many, at least 1"
            )
        for name in ("seconds", "state_bytes", "saved_bytes"):
            for value in getattr(self, name):
                if not value >= 0 or (name != "seconds" and value == np.inf):
                    raise StageError(f"a layer has {name} = {value}; it is a number of at least 0")


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Layers and how they are to be run.

    `in_flight` is "1f1b" (stage i of p holds min(m, p - i) microbatches), "gpipe" (m) or one number
    a stage. `cap_bytes` is one number or one a stage, None for no cap. `boundary_seconds[l]` are
    charged to the stage that receives the output of layer l from another stage, `fixed_bytes` to
    every stage. Lists and arrays are taken for tuples.
    """

    layers: Sequence[Layer]
    num_stages: int
    num_microbatches: int
    in_flight: InFlight | Sequence[float] | FloatArray = "1f1b"
    cap_bytes: float | Sequence[float] | FloatArray | None = None
    boundary_seconds: Sequence[float] | FloatArray = ()
    fixed_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "in_flight", "cap_bytes", "boundary_seconds"):
            value: object = getattr(self, name)
            if isinstance(value, list | np.ndarray):
                object.__setattr__(self, name, tuple(cast("list[object]", value)))
        if isinstance(self.in_flight, str) and self.in_flight not in ("1f1b", "gpipe"):
            raise StageError(f"in_flight {self.in_flight!r}: 1f1b, gpipe, or one number a stage")
        check_counts(len(self.layers), self.num_stages, self.num_microbatches)
        lengths = {
            "in_flight": (self.in_flight, self.num_stages),
            "cap_bytes": (self.cap_bytes, self.num_stages),
        }
        if len(self.boundary_seconds):
            lengths["boundary_seconds"] = (self.boundary_seconds, len(self.layers) - 1)
        for name, (value, length) in lengths.items():
            if isinstance(value, tuple) and len(value) != length:
                raise StageError(f"{name} has {len(value)} numbers; {length} are needed")

    @property
    def in_flight_counts(self) -> tuple[float, ...]:
        """Microbatches whose activations each stage holds at its peak."""
        if not isinstance(self.in_flight, str):
            return tuple(float(count) for count in self.in_flight)
        count = self.num_microbatches
        if self.in_flight == "gpipe":
            return (float(count),) * self.num_stages
        return tuple(float(min(count, self.num_stages - i)) for i in range(self.num_stages))

    @property
    def caps(self) -> tuple[float, ...]:
        """Bytes that the layers of each stage may take, fixed bytes already taken off."""
        caps = self.cap_bytes
        if caps is None:
            return (np.inf,) * self.num_stages
        given = np.broadcast_to(np.asarray(caps, dtype=float), (self.num_stages,))
        return tuple(float(cap) - self.fixed_bytes for cap in given)

    @property
    def boundaries(self) -> tuple[float, ...]:
        """Seconds that a stage pays for starting at each layer; nothing for the first."""
        given = tuple(self.boundary_seconds)
        return (0.0, *(given or (0.0,) * (len(self.layers) - 1)))


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """A partition, the chosen option of every layer and the bytes of every stage.

    `exact` is False when a frontier outgrew its cap; the partition is then the best of those seen.
    """

    partition: Partition
    options: tuple[int, ...]
    stage_bytes: tuple[float, ...]
    exact: bool


def layers_from_costs(
    seconds: Sequence[ArrayLike] | FloatArray,
    state_bytes: Sequence[ArrayLike] | FloatArray | None = None,
    saved_bytes: Sequence[ArrayLike] | FloatArray | None = None,
) -> tuple[Layer, ...]:
    """Layers from plain numbers; each entry is one number, or one an option."""
    nothing = [np.zeros(np.size(entry)) for entry in seconds]
    states = nothing if state_bytes is None else state_bytes
    saved = nothing if saved_bytes is None else saved_bytes
    columns = (seconds, states, saved)
    if len({len(column) for column in columns}) != 1:
        raise StageError(
            f"{len(columns[0])} layers have {len(columns[1])} state and {len(columns[2])} saved "
            "byte entries: one a layer"
        )
    return tuple(
        Layer(seconds=_floats(time), state_bytes=_floats(state), saved_bytes=_floats(keep))
        for time, state, keep in zip(*columns, strict=True)
    )


def layer_from_points(points: Sequence[Assignment]) -> Layer:
    """A layer whose options are the Pareto points of its block (`pareto.pareto_points`)."""
    return Layer(
        seconds=tuple(point.seconds for point in points),
        state_bytes=tuple(point.state_bytes for point in points),
        saved_bytes=tuple(point.saved_bytes for point in points),
    )


def plan_stages(pipeline: Pipeline, *, tolerance: float = 0.0) -> StagePlan:
    """The division and the options of least sum of t_i + (m - 1) * max of t_i.

    Raises MemoryCapError with the smallest cap that works, StageError when no time is finite.
    """
    counts = pipeline.in_flight_counts
    knapsacks = [
        _Knapsack(pipeline.layers, count, cap)
        for count, cap in zip(counts, pipeline.caps, strict=True)
    ]
    check_fits(pipeline)
    table = stage_table(pipeline, knapsacks)
    partition = best_partition(table, pipeline.num_microbatches, tolerance=tolerance)
    options: list[int] = []
    stage_bytes: list[float] = []
    for knapsack, layers in zip(knapsacks, partition.stages, strict=True):
        chosen, num_bytes = knapsack.choose(layers)
        options += chosen
        stage_bytes.append(num_bytes + pipeline.fixed_bytes)
    return StagePlan(
        partition=partition,
        options=tuple(options),
        stage_bytes=tuple(stage_bytes),
        exact=not any(knapsack.thinned for knapsack in knapsacks),
    )


def stage_table(pipeline: Pipeline, knapsacks: Sequence[_Knapsack] | None = None) -> FloatArray:
    """Least seconds [stage, first, end] for `best_partition`, infinite where over the cap."""
    if knapsacks is None:
        knapsacks = [
            _Knapsack(pipeline.layers, count, cap)
            for count, cap in zip(pipeline.in_flight_counts, pipeline.caps, strict=True)
        ]
    starts = np.array([*pipeline.boundaries, 0.0])
    made: dict[tuple[float, float], FloatArray] = {}
    for knapsack in knapsacks:
        key = (knapsack.in_flight, knapsack.cap)
        if key not in made:
            made[key] = knapsack.table() + starts[:, None]
    return np.stack([made[knapsack.in_flight, knapsack.cap] for knapsack in knapsacks])


def check_fits(pipeline: Pipeline) -> None:
    """Raise MemoryCapError unless some division and options fit; it names the smallest cap."""
    caps = pipeline.caps
    if np.isnan(caps).any():
        raise StageError("the memory cap is NaN")
    if all(cap == np.inf for cap in caps):
        return
    tables: list[FloatArray] = []
    for count, cap in zip(pipeline.in_flight_counts, caps, strict=True):
        lightest = [
            min(
                state + count * saved
                for time, state, saved in zip(
                    layer.seconds, layer.state_bytes, layer.saved_bytes, strict=True
                )
                if np.isfinite(time) or not np.isfinite(layer.seconds).any()
            )
            for layer in pipeline.layers
        ]
        tables.append(_sums(lightest) - (cap if np.isfinite(cap) else 0.0))
        if cap == np.inf:
            tables[-1][np.isfinite(tables[-1])] = -np.inf
    short = smallest_bottleneck(np.stack(tables))
    if short <= 0:
        return
    # The same shortage for every stage: with one cap for all, the cap itself.
    given = pipeline.cap_bytes
    smallest = max(caps) + short + pipeline.fixed_bytes
    what = (
        f"the smallest cap that works is {smallest:.0f} bytes"
        if not isinstance(given, tuple)
        else f"every stage needs {short:.0f} bytes more, or fewer microbatches in flight"
    )
    raise MemoryCapError(
        f"no division of {len(pipeline.layers)} layers into {pipeline.num_stages} stages fits in "
        f"{min(caps) + pipeline.fixed_bytes:.0f} bytes a stage: {what}",
        smallest,
    )


@dataclass(kw_only=True, eq=False)
class _Frontier:
    """Undominated (bytes, seconds) of a run of layers, and how each point was made."""

    seconds: FloatArray
    num_bytes: FloatArray
    before: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    option: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.intp))


class _Knapsack:
    """Options of runs of layers for one number of microbatches in flight and one cap."""

    def __init__(self, layers: Sequence[Layer], in_flight: float, cap: float) -> None:
        self.layers = layers
        self.in_flight = in_flight
        self.cap = cap
        self.thinned = False
        kinds: dict[Layer, int] = {}
        self.kinds = [kinds.setdefault(layer, len(kinds)) for layer in layers]
        self._fastest_bytes = [self._of_fastest(layer) for layer in layers]

    def table(self) -> FloatArray:
        """Least seconds [first, end] within the cap."""
        num_layers = len(self.layers)
        one_option = all(len(layer.seconds) == 1 for layer in self.layers)
        if one_option or sum(self._fastest_bytes) <= self.cap:
            seconds = _sums([min(layer.seconds) for layer in self.layers])
            return np.where(_sums(self._fastest_bytes) <= self.cap, seconds, np.inf)
        table = np.full((num_layers + 1, num_layers + 1), np.inf)
        seen: dict[tuple[int, ...], _Frontier] = {}
        for first in range(num_layers):
            frontier = _Frontier(seconds=np.zeros(1), num_bytes=np.zeros(1))
            counts = [0] * (max(self.kinds) + 1)
            rest = sum(self._fastest_bytes)
            for end in range(first + 1, num_layers + 1):
                counts[self.kinds[end - 1]] += 1
                rest -= self._fastest_bytes[end - 1]
                # The same layers in another order have the same frontier.
                key = tuple(counts)
                if key not in seen:
                    seen[key] = self._extend(frontier, self.layers[end - 1], rest)
                frontier = seen[key]
                if not len(frontier.seconds):
                    break
                table[first, end] = frontier.seconds.min()
        return table

    def choose(self, layers: range) -> tuple[list[int], float]:
        """The options of the fastest choice within the cap for a run of layers, and its bytes."""
        frontiers = [_Frontier(seconds=np.zeros(1), num_bytes=np.zeros(1))]
        rest = sum(self._fastest_bytes)
        for index in layers:
            rest -= self._fastest_bytes[index]
            frontiers.append(self._extend(frontiers[-1], self.layers[index], rest))
        row = int(frontiers[-1].seconds.argmin())
        num_bytes = float(frontiers[-1].num_bytes[row])
        options: list[int] = []
        for frontier in reversed(frontiers[1:]):
            options.append(int(frontier.option[row]))
            row = int(frontier.before[row])
        options.reverse()
        return options, num_bytes

    def _bytes(self, layer: Layer) -> FloatArray:
        return np.array(layer.state_bytes) + self.in_flight * np.array(layer.saved_bytes)

    def _of_fastest(self, layer: Layer) -> float:
        """Bytes of the lightest of the fastest options."""
        fastest = min(layer.seconds)
        return float(self._bytes(layer)[np.array(layer.seconds) == fastest].min())

    def _extend(self, frontier: _Frontier, layer: Layer, rest: float) -> _Frontier:
        """One layer more; all other layers of the model take `rest` bytes at their fastest."""
        seconds = (frontier.seconds[:, None] + np.array(layer.seconds)).ravel()
        num_bytes = (frontier.num_bytes[:, None] + self._bytes(layer)).ravel()
        rows = np.flatnonzero((num_bytes <= self.cap) & np.isfinite(seconds))
        cell = np.zeros(len(rows), dtype=np.intp)
        rows = rows[undominated(cell, seconds[rows], num_bytes[rows])]
        # Where the fastest of everything else still fits, saving more bytes cannot help.
        ample = int(np.searchsorted(num_bytes[rows], self.cap - rest, side="right"))
        rows = rows[max(ample - 1, 0) :]
        if len(rows) > MAX_FRONTIER:
            self.thinned = True
            rows = rows[np.linspace(0, len(rows) - 1, MAX_FRONTIER).round().astype(int)]
        before, option = np.divmod(rows, len(layer.seconds))
        return _Frontier(
            seconds=seconds[rows], num_bytes=num_bytes[rows], before=before, option=option
        )


def _sums(values: Sequence[float]) -> FloatArray:
    """Sums over [first, end), shape (layers + 1, layers + 1); infinite where empty."""
    num_layers = len(values)
    table = np.full((num_layers + 1, num_layers + 1), np.inf)
    for first in range(num_layers):
        table[first, first + 1 :] = np.cumsum(np.asarray(values, dtype=float)[first:])
    return table


def _floats(value: ArrayLike) -> tuple[float, ...]:
    return tuple(float(entry) for entry in np.atleast_1d(np.asarray(value, dtype=float)))
