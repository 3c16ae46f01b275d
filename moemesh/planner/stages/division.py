"""Where to cut a model into pipeline stages: inter-operator dynamic programming.

With m microbatches and stage times t_i (forward and backward of one microbatch) a pipeline step
takes

    T = sum of t_i + (m - 1) * max of t_i

(Alpa, arXiv:2201.12023, equation 2). For a given largest time the least sum is a dynamic program
over (stage, first layer, devices left). The least T is found over the largest times that occur,
in halves: the sum can only fall as the largest time may grow, so

    T >= sum at the upper end + (m - 1) * lower end

bounds everything between two of them and most are never tried. Every stage is charged with its own
number of microbatches in flight: costs are a table by stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moemesh.config.errors import UserError
from moemesh.planner.operators.graph import FloatArray

IntArray = NDArray[np.intp]


class StageError(UserError):
    """A division into stages that cannot be."""


class NoPartitionError(StageError):
    """Every division has a stage of infinite cost."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The best division found.

    Stage i holds layers first_layers[i] up to the next one's. `submeshes` has the kind of mesh of
    each stage (all 0 when there is one kind). No division is better than `lower_bound`;
    `evaluations` counts runs of the inner dynamic program.
    """

    seconds: float
    first_layers: tuple[int, ...]
    num_layers: int
    stage_seconds: tuple[float, ...]
    submeshes: tuple[int, ...]
    lower_bound: float
    evaluations: int

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Number of layers of each stage."""
        ends = (*self.first_layers[1:], self.num_layers)
        return tuple(end - first for first, end in zip(self.first_layers, ends, strict=True))

    @property
    def stages(self) -> tuple[range, ...]:
        """The layers of each stage."""
        ends = (*self.first_layers[1:], self.num_layers)
        return tuple(range(first, end) for first, end in zip(self.first_layers, ends, strict=True))


def pipeline_seconds(stage_seconds: Sequence[float], num_microbatches: int) -> float:
    """sum of t_i + (m - 1) * max of t_i; infinite if a stage is."""
    largest = max(stage_seconds)
    if largest == np.inf:
        return np.inf
    return float(sum(stage_seconds) + (num_microbatches - 1) * largest)


def best_partition(
    table: FloatArray,
    num_microbatches: int,
    *,
    devices: Sequence[int] | None = None,
    num_devices: int | None = None,
    tolerance: float = 0.0,
) -> Partition:
    """The division of least `pipeline_seconds`.

    table[i, first, end] are the seconds of stage i with layers first .. end - 1, infinite where it
    does not fit; shape (stages, layers + 1, layers + 1). With a choice of meshes there is one more
    axis, table[i, g, first, end], and a stage on mesh kind g uses devices[g] of `num_devices`,
    which are all used (as in Alpa). Candidates within a relative `tolerance` of the best are
    skipped and enter the lower bound. Raises NoPartitionError when nothing is finite, StageError on
    tables that make no sense.
    """
    costs = _with_meshes(table, devices, num_devices, num_microbatches)
    used = np.zeros(1, dtype=int) if devices is None else np.asarray(devices, dtype=int)
    search = _Search(costs, used, num_devices or 0, num_microbatches)
    free = search.run(np.inf)
    if free is None:
        raise NoPartitionError(
            f"no division of {costs.shape[2] - 1} layers into {costs.shape[0]} stages has finite "
            "costs"
        )
    times = np.unique(costs[np.isfinite(costs)])
    smallest = search.bottleneck()
    tight = search.run(smallest)
    assert tight is not None
    best = min(free, tight, key=lambda found: found.total)
    bound = np.inf
    low, high = (int(np.searchsorted(times, value)) for value in (smallest, free.largest))
    spans = [(low, tight, high, free)] if low < high else []
    while spans:
        low, lower, high, upper = spans.pop()
        if high - low < 2 or lower.sum <= upper.sum:
            continue
        least = upper.sum + (num_microbatches - 1) * times[low + 1]
        if least >= best.total * (1 - tolerance):
            bound = min(bound, least)
            continue
        middle = (low + high) // 2
        found = search.run(float(times[middle]))
        assert found is not None
        best = min(best, found, key=lambda one: one.total)
        # What was found at `middle` may already hold further down: nothing lies between.
        below = int(np.searchsorted(times, found.largest))
        spans += [(middle, found, high, upper), (low, lower, max(below, low), found)]
    return Partition(
        seconds=best.total,
        first_layers=best.first_layers,
        num_layers=costs.shape[2] - 1,
        stage_seconds=best.stage_seconds,
        submeshes=best.submeshes,
        lower_bound=float(min(bound, best.total)),
        evaluations=search.runs,
    )


def smallest_bottleneck(
    table: FloatArray, *, devices: Sequence[int] | None = None, num_devices: int | None = None
) -> float:
    """min over divisions of the largest entry; arguments as in `best_partition`.

    Entries may be of any sign; infinite when there is no division.
    """
    costs = np.asarray(table, dtype=float)
    used = np.zeros(1, dtype=int) if devices is None else np.asarray(devices, dtype=int)
    search = _Search(costs[:, None] if devices is None else costs, used, num_devices or 0, 1)
    return search.bottleneck()


def submeshes(nodes: int, gpus_per_node: int) -> tuple[tuple[int, int], ...]:
    """The meshes that Alpa lets a stage have: (1, 2^k) inside a node, then whole nodes (n, g).

    Any of them that add up to nodes * gpus_per_node devices can be laid out without overlap
    (arXiv:2201.12023, theorem 1) when gpus_per_node is a power of two. Raises StageError otherwise.
    """
    if nodes < 1 or gpus_per_node < 1:
        raise StageError(f"{nodes} nodes of {gpus_per_node} devices: both must be at least 1")
    if gpus_per_node & (gpus_per_node - 1):
        nearest = 1 << (gpus_per_node.bit_length() - 1)
        raise StageError(
            f"gpus_per_node ({gpus_per_node}) must be a power of two for meshes to tile a node; "
            f"nearest: {nearest} or {2 * nearest}"
        )
    inside = [(1, 1 << power) for power in range(gpus_per_node.bit_length())]
    return (*inside, *((count, gpus_per_node) for count in range(2, nodes + 1)))


@dataclass(frozen=True, kw_only=True)
class _Found:
    total: float
    sum: float
    largest: float
    first_layers: tuple[int, ...]
    stage_seconds: tuple[float, ...]
    submeshes: tuple[int, ...]


class _Search:
    """The inner dynamic program: the least sum of stage times when none exceeds a limit."""

    def __init__(
        self, costs: FloatArray, devices: NDArray[np.int_], num_devices: int, num_microbatches: int
    ) -> None:
        self.costs = costs
        self.devices = [int(count) for count in devices]
        self.num_devices = num_devices
        self.num_microbatches = num_microbatches
        self.num_layers = costs.shape[2] - 1
        self.runs = 0

    def run(self, limit: float) -> _Found | None:
        """The best division with all stage times <= limit; None when there is none."""
        self.runs += 1
        costs = np.where(self.costs <= limit, self.costs, np.inf)
        least = self._start()
        back: list[tuple[IntArray, IntArray]] = []
        for stage in costs:
            after, first, kind = self._advance(least, stage, np.add)
            back.append((first, kind))
            least = after
        if not np.isfinite(least[self.num_layers, self.num_devices]):
            return None
        return self._undo(back)

    def bottleneck(self) -> float:
        """The least possible largest stage time."""
        least = self._start()
        least[0, 0] = -np.inf
        for stage in self.costs:
            least, _, _ = self._advance(least, stage, np.maximum)
        return float(least[self.num_layers, self.num_devices])

    def _start(self) -> FloatArray:
        least = np.full((self.num_layers + 1, self.num_devices + 1), np.inf)
        least[0, 0] = 0.0
        return least

    def _advance(
        self, least: FloatArray, stage: FloatArray, combine: np.ufunc
    ) -> tuple[FloatArray, IntArray, IntArray]:
        """One more stage: least[layers done, devices used], its first layer and its mesh kind."""
        after = np.full(least.shape, np.inf)
        first = np.zeros(least.shape, dtype=np.intp)
        kind = np.zeros(least.shape, dtype=np.intp)
        for number, count in enumerate(self.devices):
            if count > self.num_devices:
                continue
            # (devices before, first layer, end)
            before = least[:, : self.num_devices + 1 - count].T
            total = combine(before[:, :, None], stage[number][None])
            where = total.argmin(axis=1)
            value = np.take_along_axis(total, where[:, None], axis=1)[:, 0].T
            better = value < after[:, count:]
            after[:, count:][better] = value[better]
            first[:, count:][better] = where.T[better]
            kind[:, count:][better] = number
        return after, first, kind

    def _undo(self, back: list[tuple[IntArray, IntArray]]) -> _Found:
        end, used = self.num_layers, self.num_devices
        firsts: list[int] = []
        kinds: list[int] = []
        seconds: list[float] = []
        for stage in range(len(back) - 1, -1, -1):
            first, kind = int(back[stage][0][end, used]), int(back[stage][1][end, used])
            seconds.append(float(self.costs[stage, kind, first, end]))
            firsts.append(first)
            kinds.append(kind)
            end, used = first, used - self.devices[kind]
        seconds.reverse()
        return _Found(
            total=pipeline_seconds(seconds, self.num_microbatches),
            sum=float(sum(seconds)),
            largest=max(seconds),
            first_layers=tuple(reversed(firsts)),
            stage_seconds=tuple(seconds),
            submeshes=tuple(reversed(kinds)),
        )


def _with_meshes(
    table: FloatArray,
    devices: Sequence[int] | None,
    num_devices: int | None,
    num_microbatches: int,
) -> FloatArray:
    """The table with an axis for mesh kinds, checked; empty stages are ruled out."""
    costs = np.array(table, dtype=float)
    if devices is None:
        if costs.ndim != 3:
            raise StageError(
                f"a table of stage costs has 3 axes (stage, first, end), not {costs.ndim}"
            )
        costs = costs[:, None]
    elif num_devices is None or costs.ndim != 4 or costs.shape[1] != len(devices):
        raise StageError(
            f"with {len(devices)} kinds of mesh the table has axes (stage, {len(devices)}, first, "
            f"end) and num_devices is given; got shape {costs.shape}, num_devices {num_devices}"
        )
    num_stages, num_layers = costs.shape[0], costs.shape[2] - 1
    check_counts(num_layers, num_stages, num_microbatches)
    if costs.shape[3] != num_layers + 1:
        raise StageError(f"first and end must have equal lengths, got {costs.shape[2:]}")
    first, end = np.indices(costs.shape[2:])
    costs[:, :, first >= end] = np.inf
    if np.isnan(costs).any() or (costs < 0).any():
        raise StageError("stage costs contain NaN or values below 0")
    return costs


def check_counts(num_layers: int, num_stages: int, num_microbatches: int) -> None:
    """Raise StageError unless every stage can have a layer."""
    if num_layers < 1 or num_stages < 1 or num_microbatches < 1:
        raise StageError(
            f"{num_layers} layers, {num_stages} stages and {num_microbatches} microbatches: each "
            "must be at least 1"
        )
    if num_stages > num_layers:
        raise StageError(
            f"{num_stages} stages cannot each hold one of {num_layers} layers; at most "
            f"{num_layers} stages"
        )
