"""The best layouts of a model on a cluster, with reasons and a certificate of excluded layouts.

Every legal layout of the :class:`Space` is enumerated in columns: its memory, by the same formulas
that price one layout, and a lower bound of its time, which ignores the effect of uneven stages on
waiting. Layouts that fit are then priced in the order of their bounds, with simulated schedules,
until the next bound exceeds the price of the last requested one. Under the model no excluded layout
is better; the certificate lists the rules with their counts, and the rules that are assumptions:
that tensor groups stay inside a node, which can be switched off, and that a pipeline has no ZeRO-2
or ZeRO-3.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain, groupby, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moemesh.config.cluster import Cluster
from moemesh.config.devices import GIB
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.plan import DEGREES
from moemesh.planner.arithmetic import FloatArray
from moemesh.planner.memory import PeakMemory
from moemesh.planner.planned_layout import TRAINED, PlannedLayout
from moemesh.planner.search.space import Family, IntArray, Space, families
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.timing.columns import Software, layout_row
from moemesh.planner.timing.price import pricing
from moemesh.trace.memory_profile import format_bytes

#: Tolerance between a bound and a price, whose sums are rounded in another order.
_ROUNDING = 1e-9
#: Number of layouts that are sorted first: more than a search prices.
_FIRST = 2000
#: Number of layouts from which on their prices are computed in columns.
_FEWEST_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout with its price; `change` describes its difference to a reference layout
    ("recompute none -> full")."""

    layout: PlannedLayout
    #: Seconds of a step by part, with `total`.
    breakdown: dict[str, float]
    memory: PeakMemory
    #: Roles in the answer (:func:`choose`), and number of near-copies that are not shown.
    roles: tuple[str, ...] = ()
    alike: int = 0
    change: str = ""

    @property
    def seconds(self) -> float:
        return self.breakdown["total"]


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The proof of a search. `lower_bound_seconds` is a bound for all layouts of the space that
    fit; `compute_floor_seconds` for any layout with the same operations.

    `examined` counts the legal layouts: each was priced, does not fit in memory, or was excluded by
    its bound. `rejected`: reason -> number of excluded combinations (of degrees, if a rule excludes
    them alone), and of legal layouts that do not fit; `assumptions`: unproven rules.
    """

    lower_bound_seconds: float
    compute_floor_seconds: float
    examined: int
    rejected: dict[str, int]
    assumptions: tuple[str, ...]


class SearchSpace:
    """All layouts of a space with their memory, ordered by a bound of their time; priced on demand.

    Layouts are identified by their index in the enumeration.
    """

    def __init__(
        self,
        shape: ModelShape,
        cluster: Cluster,
        space: Space,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`progress` is called with status texts. Raises ConfigError if nothing is legal."""
        self.shape, self.cluster, self.space, self._progress = shape, cluster, space, progress
        self.pricing = pricing(cluster)
        self.rejected: Counter[str] = Counter()
        self.examined = 0
        self._families: list[Family] = []
        self._prices: dict[int, dict[str, float]] = {}
        needed: list[FloatArray] = []
        for family in families(shape, space, self.rejected):
            self._families.append(family)
            needed.append(family.memory_bytes(shape, self.pricing))
            self.examined += family.size
            progress(f"{self.examined:,} layouts")
        if not needed:
            batch, count = space.global_batch, space.num_devices
            reasons = counted(dict(self.rejected.most_common(3)))
            message = f"no layout of {space.num_devices} devices is legal for this model and batch "
            multiples = {batch // count * count, -(-batch // count) * count} - {0}
            fix = f"global_batch = {' or '.join(map(str, sorted(multiples)))}"
            fix = "another number of devices" if multiples == {batch} else fix
            problem = Problem.of("no-plan", "global_batch", batch, f"{message}({reasons})", fix)
            raise ConfigError([problem])
        self.needed = np.concatenate(needed)
        self._starts: IntArray = np.cumsum([0, *map(len, needed)])

    @cached_property
    def bounds(self) -> FloatArray:
        """Lower bounds of the seconds of a step; not computed if no layout fits."""
        return np.concatenate(
            [family.seconds_bound(self.shape, self.pricing) for family in self._families]
        )

    @cached_property
    def mechanisms(self) -> NDArray[np.int8]:
        """:attr:`Family.mechanisms` of all layouts."""
        return np.concatenate([family.mechanisms for family in self._families])

    @property
    def capacity(self) -> float:
        """Bytes of a device that a job may use."""
        return self.cluster.memory_bytes * self.pricing.usable_share

    def layout(self, index: int) -> PlannedLayout:
        """Layout `index` of the enumeration."""
        family = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._families[family].layout(index - int(self._starts[family]))

    def memory(self, index: int) -> PeakMemory:
        """Peak memory of layout `index` on the worst rank, in parts."""
        return self.pricing.memory(self.shape, self.layout(index))

    def breakdown(self, index: int) -> dict[str, float]:
        """Seconds of a step of layout `index` by part, with `total`."""
        if index not in self._prices:
            self._progress(f"{self.examined:,} layouts, {len(self._prices):,} priced in full")
            self._prices[index] = self.pricing.seconds(self.shape, self.layout(index))
        return self._prices[index]

    def seconds(self, index: int) -> float:
        return self.breakdown(index)["total"]

    def fitting(self, capacity: float, count: int) -> list[int]:
        """The `count` fastest layouts that need at most `capacity` bytes, fastest first.

        Layouts of equal time under the model follow by memory, smallest first.
        """
        allowed = self.needed <= capacity
        if not allowed.any():
            return []
        first = self._lowest
        order = first[allowed[first]].tolist()
        allowed[first] = False
        rest = _ascending(np.flatnonzero(allowed), self.bounds)
        return self.fastest(chain(order, rest), count)

    @cached_property
    def _lowest(self) -> IntArray:
        """The first layouts by their bound; few callers need more of them."""
        every = np.arange(len(self.bounds))
        return np.fromiter(islice(_ascending(every, self.bounds), _FIRST), int)

    def fastest(self, order: Iterable[int], count: int) -> list[int]:
        """The `count` fastest of the layouts in `order` (ascending bounds), sorted like those of
        :meth:`fitting`."""
        #: (seconds, bytes, index)
        priced: list[tuple[float, float, int]] = []
        order = iter(order)
        # The first `count` are priced in any case.
        first = list(islice(order, count))
        missing = [index for index in first if index not in self._prices]
        for part in (missing[start : start + _FIRST] for start in range(0, len(missing), _FIRST)):
            if len(part) >= _FEWEST_AT_ONCE:
                layouts = [self.layout(index) for index in part]
                prices = self.pricing.seconds_of_all(self.shape, layouts)
                self._prices |= zip(part, prices, strict=True)
        for index in chain(first, order):
            if len(priced) >= count and self.bounds[index] > priced[count - 1][0] * (1 + _ROUNDING):
                break
            insort(priced, (self.seconds(index), float(self.needed[index]), index))
        return [index for _, _, index in priced[:count]]

    def smallest(self) -> int:
        """Index of the layout that needs the least memory."""
        return int(np.argmin(self.needed))

    def candidate(self, index: int) -> Candidate:
        return Candidate(
            layout=self.layout(index), breakdown=self.breakdown(index), memory=self.memory(index)
        )

    def certificate(self, best: float) -> Certificate:
        """The proof for an incumbent of `best` seconds."""
        rejected = {name: count for name, count in sorted(self.rejected.items()) if count}
        if too_large := int((self.needed > self.capacity).sum()):
            rejected["does not fit in memory"] = too_large
        space, count = self.space, self.space.num_devices
        # The floor is the time of a layout with data parallelism alone.
        values: dict[str, Any] = dict(space.trained)
        values |= {"seq_len": space.seq_len, "global_batch": count, "precision": space.precision}
        layout = PlannedLayout(dp=count, **values)
        row = layout_row(self.shape, layout, Software())
        # A layout rounds its microbatches up; the fraction keeps the floor a bound.
        row = replace(row, microbatches=space.global_batch / count)
        floor = self.pricing.compute_floor(self.shape, row, layout.precision)
        assumptions: list[str] = []
        if space.tensor_inside_node:
            assumptions.append("tensor and expert-tensor groups stay inside a node")
        if not space.sharded_pipelines:
            assumptions.append("ZeRO-2 and ZeRO-3 are not combined with a pipeline")
        return Certificate(
            lower_bound_seconds=best,
            compute_floor_seconds=floor,
            examined=self.examined,
            rejected=rejected,
            assumptions=tuple(assumptions),
        )


def counted(rejected: Mapping[str, int]) -> str:
    """Counts of excluded combinations as text: "3 x tp would cross nodes"."""
    return "; ".join(f"{count:,} x {name}" for name, count in rejected.items())


def _ascending(numbers: IntArray, values: FloatArray) -> Iterator[int]:
    """Layouts by ascending value, equal ones by index. The first ones are yielded before the rest
    is sorted, because callers rarely need millions of them."""
    parts = [numbers]
    if len(numbers) > _FIRST:
        selected = values[numbers]
        is_first = selected <= np.partition(selected, _FIRST)[_FIRST]
        parts = [numbers[is_first], numbers[~is_first]]
    for part in parts:
        yield from map(int, part[np.argsort(values[part], kind="stable")])


# The layouts that answer a search: different ones, each with its roles.
#
# Step times within :data:`TIE` count as equal, because the model's error is larger. The *fastest*
# layout has the least time; the *safest* is the fastest one whose whole memory interval fits the
# device. The leader is the safest if it is within :data:`SAFER` of the fastest, else the fastest.
# The *recommended* layout is the one with the fewest mechanisms (:meth:`Family.mechanisms`) among
# those that tie with the leader, then with the least risk for memory, then with the least time. The
# *simplest* has the fewest mechanisms within :data:`NEAR` of the fastest.


#: Relative differences of step times: a tie, a near-copy, and the accepted loss of a simpler and of
#: a safer layout. All are less than the model's error; a run that ends out of memory loses more.
TIE, COPY, NEAR, SAFER = 0.02, 0.01, 0.05, 0.10
#: Near-copies are counted among `top` x this many layouts.
_MOST_COMPARED = 8
#: Fields that cut the weights over ranks.
_WEIGHTS = ("pp", "tp", "ep", "etp", "stages_per_rank")


def choose(search: SearchSpace, top: int, safe_bytes: float) -> dict[int, Candidate]:
    """Up to `top` (at least 2) different layouts that fit, by index in the search: first the
    recommended one, then by seconds. The fastest is always included; the result is empty if none
    fits. A layout of at most `safe_bytes` is safe."""
    top = max(top, 2)
    if not (first := search.fitting(search.capacity, 1)):
        return {}
    fastest = first[0]
    seconds = search.seconds(fastest)
    fits = search.needed <= search.capacity
    safe = search.fitting(min(search.capacity, safe_bytes), 1)
    # The leader, and the layouts that may tie with it.
    leader, pool = fastest, fits
    if safe and search.seconds(safe[0]) <= seconds * (1 + SAFER):
        leader, pool = safe[0], fits & (search.needed <= safe_bytes)
    limit = min(search.seconds(leader) * (1 + TIE), seconds * (1 + SAFER))
    # A layout may have several roles; the recommended one has all that apply to it.
    ties = np.flatnonzero(pool & (search.bounds <= limit))
    risks = np.maximum(search.needed[ties] - safe_bytes, 0.0)
    best = _least_within(search, ties, (search.mechanisms[ties], risks), limit)
    roles = {best: ["recommended"]}
    is_fastest = search.seconds(best) == seconds
    roles.setdefault(best if is_fastest else fastest, []).append("fastest")
    if safe:
        is_safe = search.needed[best] <= safe_bytes
        roles.setdefault(best if is_safe else safe[0], []).append("safest")
    # The fastest of the layouts with the fewest mechanisms that are nearly as fast as any.
    limit = seconds * (1 + NEAR)
    near = np.flatnonzero(fits & (search.bounds <= limit))
    simplest = _least_within(search, near, (search.mechanisms[near],), limit)
    is_simple = search.mechanisms[best] == search.mechanisms[simplest]
    roles.setdefault(best if is_simple else simplest, []).append("simplest")
    # The next layouts fill the answer, and those that resemble an earlier one are counted for it.
    copies = dict.fromkeys(list(roles)[:top], 0)
    #: Answers by the two keys of :func:`_likeness`.
    answers: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for index in copies:
        for key in _likeness(search.layout(index)):
            answers[key].append(index)
    compared, count = set(roles), top
    while count <= top * _MOST_COMPARED:
        layouts = search.fitting(search.capacity, count)
        for index in layouts:
            if index in compared:
                continue
            compared.add(index)
            by_weights, by_axes = _likeness(search.layout(index))
            limit = search.seconds(index) / (1 + COPY)
            as_fast = (other for other in answers[by_axes] if search.seconds(other) >= limit)
            original = next(chain(answers[by_weights], as_fast), None)
            if original is not None:
                copies[original] += 1
            elif len(copies) < top:
                copies[index] = 0
                answers[by_weights].append(index)
                answers[by_axes].append(index)
        if len(copies) == top or len(layouts) < count:
            break
        count *= 2
    others = [index for index in copies if index != best]
    others.sort(key=lambda index: (search.seconds(index), search.needed[index], index))
    return {
        index: replace(
            search.candidate(index), roles=tuple(roles.get(index, ())), alike=copies[index]
        )
        for index in (best, *others)
    }


def _least_within(
    search: SearchSpace, layouts: IntArray, merits: Sequence[NDArray[Any]], limit: float
) -> int:
    """The layout with the least of `merits` (the first counts most) among those of at most `limit`
    seconds, of equal ones the fastest. Layouts of larger merits are not priced."""
    order = np.lexsort(merits[::-1]).tolist()
    groups = groupby(order, lambda row: tuple(merit[row] for merit in merits))
    equals = (_ascending(layouts[list(rows)], search.bounds) for _, rows in groups)
    firsts = (search.fastest(group, 1)[0] for group in equals)
    return next(index for index in firsts if search.seconds(index) <= limit)


def _likeness(layout: PlannedLayout) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Two keys of near-copies: mechanisms and cuts of the weights (only the cut of the batch
    differs), and mechanisms with the used axes (for layouts of nearly equal time)."""
    mechanisms = (
        *(layout.schedule, layout.stages_per_rank > 1, layout.recompute),
        *(layout.zero > 1, layout.dispatcher),
    )
    weights = tuple(getattr(layout, axis) for axis in _WEIGHTS)
    axes = tuple(getattr(layout, axis) > 1 for axis in DEGREES)
    return ("weights", *mechanisms, *weights), ("axes", *mechanisms, *axes)


#: Additional memory per device in a sensitivity, in GiB.
MORE_MEMORY = (4, 8, 16, 32)
#: Largest number of faster layouts that :func:`advise` compares.
_MOST_FASTER = 12
#: Entries of a breakdown that are not waiting: the total, and the parts that compute.
_WORK = ("total", "compute", "attention")
#: Fields compared by :func:`difference`, in the order of its text.
_COMPARED = (
    "pp", "schedule", "stages_per_rank", "dp", "cp", "tp", "ep", "etp", "zero", "recompute",
    "microbatch", "attention_exit", "dispatcher",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Sentences about the best layout. `binding`: the binding constraint and its price;
    `sensitivity`: (additional bytes per device, seconds with them); `why_not`: one line for each
    of at most 5 faster layouts that do not fit, those that lack the least memory."""

    binding: str
    sensitivity: tuple[tuple[int, float], ...]
    why_not: tuple[str, ...]


def advise(search: SearchSpace, best: int, fastest: int) -> Advice:
    """Explain layout `best`, which is as good as the fastest that fits."""
    seconds, memory = search.seconds(fastest), search.memory(fastest)
    sensitivity: list[tuple[int, float]] = []
    for more in MORE_MEMORY:
        first = search.fitting(search.capacity + more * GIB, 1)[0]
        sensitivity.append((more * GIB, min(search.seconds(first), seconds)))
    whose = "" if best == fastest else f" of the fastest ({seconds:.3f} s)"
    if helps := [
        (more, less_time) for more, less_time in sensitivity if less_time < 0.999 * seconds
    ]:
        more, less_time = helps[0]
        binding = (
            f"memory of pipeline rank {memory.rank}{whose}: +{more // GIB} GiB a device would make "
            f"a step {1 - less_time / seconds:.1%} faster"
        )
    else:
        parts = search.breakdown(fastest)
        waits = {name: parts[name] for name in parts if name not in _WORK}
        name = max(waits, key=lambda part: waits[part])
        share = waits[name] / seconds
        binding = f"not memory: {name} takes {share:.1%} of a step{whose} besides computing"
    # Layouts that are faster than all that fit, in the order of the memory that they lack. Of those
    # with a lower bound, at most 50 are priced for each one to compare.
    too_large = np.flatnonzero((search.bounds < seconds) & (search.needed > search.capacity))
    nearest = islice(_ascending(too_large, search.needed), 50 * _MOST_FASTER)
    faster = (index for index in nearest if search.seconds(index) < seconds)
    why_not: dict[str, str] = {}
    best_seconds = search.seconds(best)
    for index in islice(faster, _MOST_FASTER):
        layout, memory = search.layout(index), search.memory(index)
        short = format_bytes(round(memory.needed - search.capacity))
        change = difference(search.layout(best), layout)
        why_not.setdefault(
            change,
            f"{change}: {1 - search.seconds(index) / best_seconds:.1%} faster, pipeline rank "
            f"{memory.rank} short by {short}",
        )
        if len(why_not) == 5:
            break
    return Advice(binding=binding, sensitivity=tuple(sensitivity), why_not=tuple(why_not.values()))


def difference(old: PlannedLayout, new: PlannedLayout) -> str:
    """The changes from one layout to the other: "tp 4 -> 2, recompute full -> none"."""
    changes = [
        f"{name} {_word(getattr(old, name))} -> {_word(getattr(new, name))}"
        for name in _COMPARED
        if getattr(old, name) != getattr(new, name)
    ]
    return ", ".join(changes) or "nothing"


def _word(value: Any) -> str:
    if isinstance(value, frozenset):
        return "+".join(sorted(map(str, value))) or "none"  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return str(value)


def what_would_fit(search: SearchSpace) -> str:
    """Text on the layout that needs the least memory, and on the bytes that it lacks."""
    index = search.smallest()
    layout, needed = search.layout(index), float(search.needed[index]) / search.pricing.usable_share
    lacking = needed - search.cluster.memory_bytes
    untuned = {field.name: field.default for field in fields(layout) if field.name in TRAINED}
    shown = replace(layout, ranks_per_node=0, **untuned).text
    return (
        f"the smallest, {shown}, needs {format_bytes(round(needed))} a device, "
        f"{format_bytes(round(lacking))} more than there is"
    )
