"""The best layouts of a model on a cluster, why, and a certificate of what was left out.

Every legal layout of the :class:`Space` is enumerated in columns: its memory, by the same formulas
that price one layout, and a lower bound of its time, which leaves out how the schedule's waiting
depends on uneven stages. Layouts that fit are then priced in the order of their bounds, schedules
simulated, until the next bound is above what was found. So nothing that was left out could have
been better, under the model: the certificate names the rules and their counts. The one rule that is
an assumption (tensor groups stay inside a node) is listed and can be switched off.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moemesh.config.cluster import Cluster
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.plan import DEGREES
from moemesh.planner.arithmetic import FloatArray
from moemesh.planner.memory import GIB, PeakMemory
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.search.space import Family, IntArray, Space, families
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.timing.columns import Software, layout_row, precision_of
from moemesh.planner.timing.price import pricing
from moemesh.trace.memory_profile import format_bytes

#: Sums of the bound and of the price are rounded in another order.
_ROUNDING = 1e-9
#: Layouts that are sorted at once: more than a search prices.
_FIRST = 2000


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout with its price; `change`: what differs from the one that it is named beside
    ("recompute none -> full")."""

    layout: PlannedLayout
    #: The parts of its step, `total` among them.
    breakdown: dict[str, float]
    memory: PeakMemory
    #: Answers that it is (:func:`choose`), and how many near-copies it stands for.
    roles: tuple[str, ...] = ()
    alike: int = 0
    change: str = ""

    @property
    def seconds(self) -> float:
        return self.breakdown["total"]


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
        allowed, first = self.needed <= capacity, self._lowest
        order = first[allowed[first]].tolist()
        allowed[first] = False
        rest = _ascending(np.flatnonzero(allowed), self.bounds)
        return self.fastest(chain(order, rest), count)

    @cached_property
    def _lowest(self) -> IntArray:
        """The first layouts by their bound: no question looks at many more of them."""
        every = np.arange(len(self.bounds))
        return np.fromiter(islice(_ascending(every, self.bounds), _FIRST), int)

    def fastest(self, order: Iterable[int], count: int) -> list[int]:
        """The `count` fastest of layouts that come by their bounds, as :meth:`fitting`."""
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
        return Candidate(
            layout=self.layout(index), breakdown=self.breakdown(index), memory=self.memory(index)
        )

    def certificate(self, best: float) -> Certificate:
        """The proof for an incumbent of `best` seconds."""
        rejected = {name: count for name, count in sorted(self.rejected.items()) if count}
        if too_large := int((self.needed > self.capacity).sum()):
            rejected["does not fit in memory"] = too_large
        space, count = self.space, self.space.num_devices
        layout = PlannedLayout(
            dp=count, seq_len=space.seq_len, global_batch=count, precision=space.precision
        )
        row = layout_row(self.shape, layout, Software())
        row = replace(row, microbatches=space.global_batch / count)
        floor = self.pricing.compute_floor(self.shape, row, precision_of(layout))
        assumptions = ["ZeRO-2 and ZeRO-3 are not combined with a pipeline"]
        if space.tensor_inside_node:
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


# The layouts that answer a search: different ones, each with the roles that it has.
#
# Step times within :data:`TIE` are one to the model, whose error is more. The *recommended* layout
# ties with the fastest whose whole interval of memory fits the device, if that one is within
# :data:`SAFER` of the fastest of all, else with the latter; of the ties it has the fewest
# mechanisms, then the least risk for memory, then the least time. Beside it stand the *fastest*,
# the *safest* (the fastest whose whole interval fits) and the *simplest* (the fewest mechanisms
# within :data:`NEAR` of the fastest). :meth:`Family.mechanisms` says what is counted.


#: Shares of a step: of a tie, of a near-copy, and what a simpler and a safer layout may cost. All
#: are less than the model's error; a run that ends without memory costs more than any of them.
TIE, COPY, NEAR, SAFER = 0.02, 0.01, 0.05, 0.10
#: Of so many times the layouts that are shown, near-copies are counted.
_MOST_LOOKED_AT = 8
_WEIGHTS = ("pp", "tp", "ep", "etp", "stages_per_rank")


def choose(found: SearchSpace, top: int, safe_bytes: float) -> dict[int, Candidate]:
    """Up to `top` different layouts that fit, by their number in the search, at least the
    recommended and the fastest: the former, then by seconds; empty where none fits. A layout of at
    most `safe_bytes` is safe."""
    top = max(top, 2)
    if not (first := found.fitting(found.capacity, 1)):
        return {}
    fastest = first[0]
    seconds = found.seconds(fastest)
    fits = found.needed <= found.capacity
    safe = found.fitting(min(found.capacity, safe_bytes), 1)
    leader, pool = fastest, fits
    if safe and found.seconds(safe[0]) <= seconds * (1 + SAFER):
        leader, pool = safe[0], fits & (found.needed <= safe_bytes)
    limit = min(found.seconds(leader) * (1 + TIE), seconds * (1 + SAFER))

    def merit(index: int) -> tuple[int, float, float]:
        risk = max(float(found.needed[index]) - safe_bytes, 0.0)
        return int(found.mechanisms[index]), risk, found.seconds(index)

    may_tie = np.flatnonzero(pool & (found.bounds <= limit)).tolist()
    best = min((one for one in may_tie if found.seconds(one) <= limit), key=merit)
    roles = {best: ["recommended"]}
    roles.setdefault(fastest, []).append("fastest")
    if safe:
        is_safe = found.needed[best] <= safe_bytes
        roles.setdefault(best if is_safe else safe[0], []).append("safest")
    # The fastest of the layouts with the fewest mechanisms that are nearly as fast as any.
    nearly = seconds * (1 + NEAR)
    may = np.flatnonzero(fits & (found.bounds <= nearly))
    levels = found.mechanisms[may]
    same = (_ascending(may[levels == level], found.bounds) for level in np.unique(levels))
    firsts = (found.fastest(order, 1)[0] for order in same)
    simplest = next(index for index in firsts if found.seconds(index) <= nearly)
    is_simple = found.mechanisms[best] == found.mechanisms[simplest]
    roles.setdefault(best if is_simple else simplest, []).append("simplest")
    copies = dict.fromkeys(list(roles)[:top], 0)
    #: Answers by what their near-copies share.
    answers: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for index in copies:
        for key in _likeness(found.layout(index)):
            answers[key].append(index)
    looked_at, count = set(roles), top
    while count <= top * _MOST_LOOKED_AT:
        pool = found.fitting(found.capacity, count)
        for index in pool:
            if index in looked_at:
                continue
            looked_at.add(index)
            same, near = _likeness(found.layout(index))
            limit = found.seconds(index) / (1 + COPY)
            as_fast = (one for one in answers[near] if found.seconds(one) >= limit)
            like = next(chain(answers[same], as_fast), None)
            if like is not None:
                copies[like] += 1
            elif len(copies) < top:
                copies[index] = 0
                answers[same].append(index)
                answers[near].append(index)
        if len(copies) == top or len(pool) < count:
            break
        count *= 2
    others = sorted((one for one in copies if one != best), key=found.seconds)
    return {
        one: replace(found.candidate(one), roles=tuple(roles.get(one, ())), alike=copies[one])
        for one in (best, *others)
    }


def _likeness(layout: PlannedLayout) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """What near-copies share: the mechanisms and the cuts of the weights (only the batch is cut
    otherwise: dp, cp and what follows from them); of layouts that are as fast, the mechanisms."""
    mechanisms = (
        *(layout.schedule, layout.stages_per_rank > 1, layout.recompute),
        *(layout.zero > 1, layout.dispatcher),
    )
    weights = tuple(getattr(layout, axis) for axis in _WEIGHTS)
    axes = tuple(getattr(layout, axis) > 1 for axis in DEGREES)
    return ("weights", *mechanisms, *weights), ("axes", *mechanisms, *axes)


#: More memory a device that sensitivity is asked for, in GiB.
MORE_MEMORY = (4, 8, 16, 32)
#: Parts of a step that are no waiting.
_WORK = ("total", "compute", "attention")
#: What two layouts are told apart by, in the order of a sentence.
_TOLD = (
    "pp", "schedule", "stages_per_rank", "dp", "cp", "tp", "ep", "etp", "zero", "recompute",
    "microbatch", "attention_exit", "dispatcher",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Sentences about the best layout. `binding`: the constraint that holds it back and its price;
    `sensitivity`: (more bytes a device, seconds then); `why_not`: one line per rival."""

    binding: str
    sensitivity: tuple[tuple[int, float], ...]
    why_not: tuple[str, ...]


def advise(found: SearchSpace, best: int, fastest: int) -> Advice:
    """Explain layout `best`, which is as good as the fastest that fits."""
    seconds, memory = found.seconds(fastest), found.memory(fastest)
    sensitivity: list[tuple[int, float]] = []
    for more in MORE_MEMORY:
        first = found.fitting(found.capacity + more * GIB, 1)[0]
        sensitivity.append((more * GIB, min(found.seconds(first), seconds)))
    whose = "" if best == fastest else f" of the fastest ({seconds:.3f} s)"
    if helps := [(more, then) for more, then in sensitivity if then < seconds * 0.999]:
        more, then = helps[0]
        binding = (
            f"memory of pipeline rank {memory.rank}{whose}: +{more // GIB} GiB a device would make "
            f"a step {1 - then / seconds:.1%} faster"
        )
    else:
        parts = found.breakdown(fastest)
        waits = {name: parts[name] for name in parts if name not in _WORK}
        name = max(waits, key=lambda part: waits[part])
        share = waits[name] / seconds
        binding = f"not memory: {name} takes {share:.1%} of a step besides computing"
    # Layouts that are faster than all that fit, the ones that miss their memory by least.
    why_not: dict[str, str] = {}
    own = found.seconds(best)
    for index in found.faster_that_do_not_fit(seconds, 12):
        layout, memory = found.layout(index), found.memory(index)
        short = format_bytes(round(memory.needed - found.capacity))
        change = difference(found.layout(best), layout)
        why_not.setdefault(
            change,
            f"{change}: {1 - found.seconds(index) / own:.1%} faster, pipeline rank "
            f"{memory.rank} short by {short}",
        )
        if len(why_not) == 5:
            break
    return Advice(binding=binding, sensitivity=tuple(sensitivity), why_not=tuple(why_not.values()))


def difference(old: PlannedLayout, new: PlannedLayout) -> str:
    """The changes from one layout to the other: "tp 4 -> 2, recompute full -> none"."""
    changes = [
        f"{name} {_word(getattr(old, name))} -> {_word(getattr(new, name))}"
        for name in _TOLD
        if getattr(old, name) != getattr(new, name)
    ]
    return ", ".join(changes) or "nothing"


def _word(value: Any) -> str:
    if isinstance(value, frozenset):
        return "+".join(sorted(map(str, value))) or "none"  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return str(value)


def what_would_fit(found: SearchSpace) -> str:
    """The layout that needs least memory when nothing fits, and what it lacks."""
    index = found.smallest()
    layout, needed = found.layout(index), float(found.needed[index]) / found.pricing.usable_share
    lacking = needed - found.cluster.memory_bytes
    shown = replace(layout, ranks_per_node=0).key
    return (
        f"the smallest, {shown}, needs {format_bytes(round(needed))} a device, "
        f"{format_bytes(round(lacking))} more than there is"
    )
