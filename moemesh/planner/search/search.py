"""The best layouts of a model on a cluster, with a certificate of what was left out and why.

Every legal layout of the :class:`Space` is enumerated in columns: its memory, by the same formulas
that price one layout, and a lower bound of its time, which leaves out how the schedule's waiting
depends on uneven stages. Layouts that fit are then priced in the order of their bounds, schedules
simulated, until the next bound is above what was found. So nothing that was left out could have
been better, under the model: the certificate names the rules and their counts. The one rule that is
an assumption (tensor groups stay inside a node) is listed and can be switched off.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from moemesh.config.cluster import Cluster
from moemesh.config.errors import ConfigError, Problem
from moemesh.planner.arithmetic import FloatArray
from moemesh.planner.memory import PeakMemory
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.search.space import Family, IntArray, Space, families
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.timing.columns import Software, layout_row, precision_of
from moemesh.planner.timing.price import pricing

#: Sums of the bound and of the price are rounded in another order.
_ROUNDING = 1e-9
#: Layouts that are sorted at once: more than a search prices.
_FIRST = 2000


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout with its price; `change`: what differs from the one that it is named beside
    ("recompute none -> full")."""

    layout: PlannedLayout
    seconds: float
    breakdown: dict[str, float]
    memory: PeakMemory
    #: Answers that it is, of :mod:`moemesh.planner.search.advice`, and its near-copies.
    roles: tuple[str, ...] = ()
    alike: int = 0
    change: str = ""

    @classmethod
    def of(
        cls, layout: PlannedLayout, memory: PeakMemory, parts: dict[str, float], change: str = ""
    ) -> Candidate:
        """A layout with its peak and the parts of its step, `total` among them."""
        return cls(
            layout=layout, seconds=parts["total"], breakdown=parts, memory=memory, change=change
        )

    @property
    def needed(self) -> float:
        """Bytes that a device must have."""
        return self.memory.needed


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The proof of a search. `lower_bound_seconds`: no layout of the space that fits is faster
    under the model; `compute_floor_seconds`: no layout at all is, with the same operations.

    `examined` layouts were priced or cut by a bound; `rejected` counts by reason, legal layouts
    that do not fit in memory among them; `assumptions` are rules that no bound proves.
    """

    lower_bound_seconds: float
    compute_floor_seconds: float
    examined: int
    rejected: dict[str, int]
    assumptions: tuple[str, ...]


class SearchSpace:
    """All layouts of a space with their memory, ordered by a bound of their time; priced on demand.

    Layouts are told by their number in the enumeration.
    """

    def __init__(
        self,
        shape: ModelShape,
        cluster: Cluster,
        space: Space,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`tell` is called with how far the search is. Raises ConfigError when nothing is legal."""
        self.shape, self.cluster, self.space, self._tell = shape, cluster, space, tell
        self.pricing = pricing(cluster)
        self.rejected: Counter[str] = Counter()
        self.examined = 0
        self._families: list[Family] = []
        self._prices: dict[int, dict[str, float]] = {}
        bounds: list[FloatArray] = []
        needed: list[FloatArray] = []
        mechanisms: list[NDArray[np.int8]] = []
        for family in families(shape, space, self.rejected):
            self._families.append(family)
            needed.append(family.memory_bytes(shape, self.pricing))
            bounds.append(family.seconds_bound(shape, self.pricing))
            mechanisms.append(family.mechanisms)
            self.examined += family.size
            tell(f"{self.examined:,} layouts")
        if not bounds:
            batch = space.global_batch
            told = counted(dict(self.rejected.most_common(3)))
            message = f"no layout of {space.num_devices} devices is legal for this model and batch "
            fix = f"global_batch = {max(-(-batch // space.num_devices), 1) * space.num_devices}"
            problem = Problem.of("no-plan", "global_batch", batch, f"{message}({told})", fix)
            raise ConfigError([problem])
        self.bounds, self.needed = np.concatenate(bounds), np.concatenate(needed)
        self.mechanisms = np.concatenate(mechanisms)
        sizes = [len(part) for part in bounds]
        self._starts: IntArray = np.cumsum([0, *sizes])

    @property
    def capacity(self) -> float:
        """Bytes of a device that a job may use."""
        return self.cluster.memory_bytes * self.pricing.usable_share

    def layout(self, index: int) -> PlannedLayout:
        """Layout number `index` of the enumeration."""
        family = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._families[family].layout(index - int(self._starts[family]))

    def memory(self, index: int) -> PeakMemory:
        """Its peak on the worst rank, in parts."""
        return self.pricing.memory(self.shape, self.layout(index))

    def breakdown(self, index: int) -> dict[str, float]:
        """Its seconds in parts, with `total`."""
        if index not in self._prices:
            self._tell(f"{self.examined:,} layouts, {len(self._prices):,} priced in full")
            self._prices[index] = self.pricing.seconds(self.shape, self.layout(index))
        return self._prices[index]

    def seconds(self, index: int) -> float:
        """Its seconds of a step."""
        return self.breakdown(index)["total"]

    def fitting(self, capacity: float, count: int) -> list[int]:
        """The `count` fastest layouts that need at most `capacity` bytes, fastest first.

        Layouts of equal time under the model follow by memory, smallest first.
        """
        return self._fastest(self._in_order(self.needed <= capacity), count)

    def fastest(self, numbers: IntArray, count: int) -> list[int]:
        """The `count` fastest of layouts, as :meth:`fitting`."""
        return self._fastest(_ascending(numbers, self.bounds), count)

    @cached_property
    def _lowest(self) -> IntArray:
        """The first layouts by their bound: no question looks at many more of them."""
        return np.fromiter(
            islice(_ascending(np.arange(len(self.bounds)), self.bounds), _FIRST), int
        )

    def _in_order(self, allowed: NDArray[np.bool_]) -> Iterator[int]:
        """The layouts of a mask by their bound."""
        first = self._lowest
        yield from first[allowed[first]].tolist()
        rest = allowed.copy()
        rest[first] = False
        yield from _ascending(np.flatnonzero(rest), self.bounds)

    def _fastest(self, order: Iterator[int], count: int) -> list[int]:
        found: list[tuple[float, float, int]] = []
        for index in order:
            if len(found) >= count and self.bounds[index] > found[count - 1][0] * (1 + _ROUNDING):
                break
            insort(found, (self.seconds(index), float(self.needed[index]), index))
        return [index for _, _, index in found[:count]]

    def faster_that_do_not_fit(self, than: float, count: int) -> list[int]:
        """Layouts with less than `than` seconds, the one that misses its memory by least first."""
        may = np.flatnonzero((self.bounds < than) & (self.needed > self.capacity))
        nearest = islice(_ascending(may, self.needed), 50 * count)
        faster = (index for index in nearest if self.seconds(index) < than)
        return list(islice(faster, count))

    def smallest(self) -> int:
        """A layout that needs least memory: what is nearest when nothing fits."""
        return int(np.argmin(self.needed))

    def candidate(self, index: int) -> Candidate:
        """One layout with its price in full."""
        return Candidate.of(self.layout(index), self.memory(index), self.breakdown(index))

    def certificate(self, best: float) -> Certificate:
        """The proof for an incumbent of `best` seconds."""
        rejected = {name: count for name, count in sorted(self.rejected.items()) if count}
        if too_large := int((self.needed > self.capacity).sum()):
            rejected["does not fit in memory"] = too_large
        layout = PlannedLayout(
            dp=self.space.num_devices,
            seq_len=self.space.seq_len,
            global_batch=self.space.num_devices,
            precision=self.space.precision,
        )
        row = replace(
            layout_row(self.shape, layout, Software()),
            microbatches=self.space.global_batch / self.space.num_devices,
        )
        floor = self.pricing.compute_floor(self.shape, row, precision_of(layout))
        assumptions = ["ZeRO-2 and ZeRO-3 are not combined with a pipeline"]
        if self.space.tensor_inside_node:
            assumptions.insert(0, "tensor and expert-tensor groups stay inside a node")
        return Certificate(
            lower_bound_seconds=best,
            compute_floor_seconds=floor,
            examined=self.examined,
            rejected=rejected,
            assumptions=tuple(assumptions),
        )


def counted(rejected: Mapping[str, int]) -> str:
    """Layouts that were left out, as counts: "3 x tp would cross nodes"."""
    return "; ".join(f"{count:,} x {name}" for name, count in rejected.items())


def _ascending(numbers: IntArray, values: FloatArray) -> Iterator[int]:
    """Layouts by their value, equal ones by number. The first few are found before the rest is
    sorted: nobody reads millions of them."""
    parts = [numbers]
    if len(numbers) > _FIRST:
        own = values[numbers]
        is_first = own <= np.partition(own, _FIRST)[_FIRST]
        parts = [numbers[is_first], numbers[~is_first]]
    for part in parts:
        yield from map(int, part[np.argsort(values[part], kind="stable")])
