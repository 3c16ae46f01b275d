"""Tokens received by each expert and each rank, per layer and step.

`loads.jsonl` holds one object a line: one layer in one step, or the sum over consecutive steps. If
a run has too many steps, neighbours are summed (:func:`neighbours`), so that the bins cover the
whole run at about one resolution and no token is lost. A layer without any token is legal (an empty
batch, an idle rank); all ratios are then those of a perfect balance.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate, zip_longest
from typing import Any

from moemesh.config.limits import parse_json
from moemesh.trace.strict_json import read_fields

#: Routing has collapsed if the entropy of a layer's loads is below COLLAPSE_ENTROPY for
#: COLLAPSE_STEPS steps.
COLLAPSE_ENTROPY, COLLAPSE_STEPS = 0.5, 20
#: Share of a layer's choices that go to the experts counted by :func:`collapse_text`.
_NEARLY_ALL = 0.9


@dataclass(frozen=True, kw_only=True)
class LayerLoads:
    """Tokens routed by one MoE layer over all ranks, once per chosen expert, summed over the
    `steps` steps up to `step`.

    `tokens_per_expert` [logical experts], `tokens_per_rank` [ranks that hold experts], `dropped`
    assignments that no expert computed. For several steps, `mean_ratios` has the ratio of largest
    to mean load, of experts and of ranks, averaged over the steps, and `highest_ratio` is that of
    the experts in the least balanced step. For one step both are None: the tokens determine them.
    Raises ValueError for a negative number, and for no steps.
    """

    step: int
    layer: int
    tokens_per_expert: tuple[int, ...]
    tokens_per_rank: tuple[int, ...] = ()
    dropped: int = 0
    steps: int = 1
    mean_ratios: tuple[float, float] | None = None
    highest_ratio: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens_per_expert", tuple(self.tokens_per_expert))
        object.__setattr__(self, "tokens_per_rank", tuple(self.tokens_per_rank))
        lowest = min((self.dropped, *self.tokens_per_expert, *self.tokens_per_rank))
        if lowest < 0:
            raise ValueError(f"step {self.step}, layer {self.layer}: a load of {lowest} < 0")
        if self.steps < 1:
            raise ValueError(f"step {self.step}, layer {self.layer}: {self.steps} steps")

    @property
    def first_step(self) -> int:
        """First of the summed steps."""
        return self.step - self.steps + 1

    @cached_property
    def expert_max_over_mean(self) -> float:
        """Load of the fullest expert over the mean load, averaged over the steps: 1.0 if balanced,
        the number of experts if one gets all tokens."""
        return self.mean_ratios[0] if self.mean_ratios else max_over_mean(self.tokens_per_expert)

    @cached_property
    def rank_max_over_mean(self) -> float:
        """Load of the fullest rank over the mean load, averaged over the steps: the slowdown of the
        layer against a balanced one."""
        return self.mean_ratios[1] if self.mean_ratios else max_over_mean(self.tokens_per_rank)

    @property
    def highest_max_over_mean(self) -> float:
        """Load of the fullest expert over the mean load, in the least balanced step."""
        return self.expert_max_over_mean if self.highest_ratio is None else self.highest_ratio

    def plus(self, later: LayerLoads) -> LayerLoads:
        """The sum with the loads of the same layer in later steps.

        Loads of ranks are summed if the number of ranks is the same, else those of `later` count.
        Raises ValueError for another layer.
        """
        if later.layer != self.layer:
            raise ValueError(f"layer {self.layer} and layer {later.layer} have no sum")
        steps = self.steps + later.steps
        expert_ratio, rank_ratio = (
            (getattr(self, name) * self.steps + getattr(later, name) * later.steps) / steps
            for name in ("expert_max_over_mean", "rank_max_over_mean")
        )
        ranks = later.tokens_per_rank
        if len(self.tokens_per_rank) == len(ranks):
            ranks = _sums(self.tokens_per_rank, ranks)
        return LayerLoads(
            step=later.step,
            layer=self.layer,
            tokens_per_expert=_sums(self.tokens_per_expert, later.tokens_per_expert),
            tokens_per_rank=ranks,
            dropped=self.dropped + later.dropped,
            steps=steps,
            mean_ratios=(expert_ratio, rank_ratio),
            highest_ratio=max(self.highest_max_over_mean, later.highest_max_over_mean),
        )

    @cached_property
    def entropy(self) -> float:
        """Shannon entropy of the experts' shares over its maximum: 1 uniform, 0 one expert."""
        values, total = self.tokens_per_expert, sum(self.tokens_per_expert)
        if not total or len(values) == 1:
            return 1.0
        shares = (value / total for value in values if value)
        entropy = -sum(share * math.log(share) for share in shares)
        # Rounding may leave -0.0 or 1 + 1e-16.
        return min(max(entropy / math.log(len(values)), 0.0), 1.0)

    @property
    def dead_experts(self) -> int:
        """Experts that received no token."""
        return sum(tokens == 0 for tokens in self.tokens_per_expert)

    @property
    def dropped_share(self) -> float:
        """Dropped assignments over all assignments; 0 without any."""
        wanted = self.dropped + sum(self.tokens_per_expert)
        return self.dropped / wanted if wanted else 0.0

    def to_json(self) -> dict[str, Any]:
        """The fields, and values derived from them, for readers without this class."""
        of_sum = {"highest_max_over_mean": self.highest_max_over_mean} if self.steps > 1 else {}
        return {
            "step": self.step,
            "steps": self.steps,
            "layer": self.layer,
            "tokens_per_expert": list(self.tokens_per_expert),
            "tokens_per_rank": list(self.tokens_per_rank),
            "dropped": self.dropped,
            "max_over_mean": self.expert_max_over_mean,
            "rank_max_over_mean": self.rank_max_over_mean,
            **of_sum,
            "entropy": self.entropy,
            "dead_experts": self.dead_experts,
        }

    def to_line(self) -> str:
        """The object on one line of `loads.jsonl`, newline included."""
        return json.dumps(self.to_json(), separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LayerLoads:
        """Inverse of :meth:`to_json`; derived values are recomputed from the tokens.

        Raises KeyError, TypeError, ValueError or OverflowError on other data.
        """
        values: dict[str, Any] = {"tokens_per_rank": (), **data}
        for name in ("tokens_per_expert", "tokens_per_rank"):
            values[name] = tuple(map(int, values[name]))
        if int(data.get("steps", 1)) > 1:
            ratios = float(data["max_over_mean"]), float(data["rank_max_over_mean"])
            values |= {"mean_ratios": ratios, "highest_ratio": data["highest_max_over_mean"]}
        return read_fields(cls, values)


def _sums(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Element-wise sum; the shorter one is padded with zeros."""
    return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))


def max_over_mean(loads: Iterable[int]) -> float:
    """Largest over mean; 1.0 if all are 0."""
    values = list(loads)
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def collapse_text(loads: Iterable[LayerLoads]) -> str:
    """A sentence on collapsed routing in the last steps of `loads`, which ascend in each layer; ""
    without any."""
    by_layer: defaultdict[int, list[LayerLoads]] = defaultdict(list)
    for row in loads:
        by_layer[row.layer].append(row)
    collapsed: list[LayerLoads] = []
    for rows in by_layer.values():
        recent = [row for row in rows if row.step > rows[-1].step - COLLAPSE_STEPS]
        is_long = sum(row.steps for row in recent) >= COLLAPSE_STEPS
        if is_long and max(row.entropy for row in recent) < COLLAPSE_ENTROPY:
            collapsed.append(recent[-1])
    if not collapsed:
        return ""
    worst = min(collapsed, key=lambda row: row.entropy)
    sums = list(accumulate(sorted(worst.tokens_per_expert, reverse=True)))
    count = next(n for n, part in enumerate(sums, 1) if part >= _NEARLY_ALL * sums[-1])
    subject = f"{len(collapsed)} routers have collapsed, the worst" if len(collapsed) > 1 else ""
    return (
        f"{subject or 'The router has collapsed'} in layer {worst.layer}: "
        f"{sums[count - 1] / sums[-1]:.0%} of its choices go to {count} of {len(sums)} experts; "
        "raise model.aux_loss_coefficient, or set model.router_selection_bias = true."
    )


def read_loads(lines: Iterable[str]) -> Iterator[LayerLoads]:
    """The loads of `loads.jsonl`, line by line; blank lines are left out.

    Raises ValueError naming the first malformed line.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield LayerLoads.from_json(parse_json(line))
            except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
                raise ValueError(f"line {number} holds no loads: {error!r}") from error


def neighbours(
    widths: Sequence[int], most: int, borders: AbstractSet[int] = frozenset()
) -> list[slice]:
    """Slices of neighbouring bins to sum, so that at most `most` bins of nearly even width remain;
    `widths` are the steps of each bin.

    A slice always ends after each bin at a position in `borders`; each border may add one slice.

    >>> neighbours([1, 1, 1, 1], 2)
    [slice(0, 2, None), slice(2, 4, None)]
    >>> neighbours([2, 2, 1, 1, 1], 2, {0})
    [slice(0, 1, None), slice(1, 4, None), slice(4, 5, None)]
    """
    width = math.ceil(sum(widths) / most)
    while True:
        bins: list[slice] = []
        start = steps = 0
        for position, width_of_bin in enumerate(widths):
            if position > start and (steps + width_of_bin > width or position - 1 in borders):
                bins.append(slice(start, position))
                start, steps = position, 0
            steps += width_of_bin
        if widths:
            bins.append(slice(start, len(widths)))
        if len(bins) <= most + len(borders):
            return bins
        width *= 2  # bins of uneven width fill slices badly


class LoadBins:
    """Loads added step by step: at most `most` bins a layer and, given enough steps, at least a
    fifth of that; fewer if the loads of all bins would be more than `most_numbers` numbers."""

    def __init__(self, most: int = 256, most_numbers: int = 1_600_000) -> None:
        self._most, self._most_numbers = most, most_numbers
        self._layers: dict[int, list[LayerLoads]] = {}
        self._numbers = 0

    def add(self, loads: LayerLoads) -> None:
        """Add the next loads of a layer. A repeated step (of a resumed run) replaces the earlier
        one: bins with it or with later steps are removed."""
        bins = self._layers.setdefault(loads.layer, [])
        while bins and bins[-1].step >= loads.first_step:
            self._numbers -= _numbers(bins.pop())
        bins.append(loads)
        self._numbers += _numbers(loads)
        if len(bins) > self._most:
            self._thin(bins)
        while self._numbers > self._most_numbers and self._most > 1:
            self._most //= 2
            for others in self._layers.values():
                if len(others) > self._most:
                    self._thin(others)

    def _thin(self, bins: list[LayerLoads]) -> None:
        """Sum neighbours of a layer's `bins`, so that at most half of `most` remain."""
        before = sum(map(_numbers, bins))
        slices = neighbours([loads.steps for loads in bins], max(self._most // 2, 1))
        bins[:] = [total(bins[part]) for part in slices]
        self._numbers += sum(map(_numbers, bins)) - before

    def all(self) -> tuple[LayerLoads, ...]:
        """Every bin, by step and layer."""
        rows = (loads for bins in self._layers.values() for loads in bins)
        return tuple(sorted(rows, key=lambda loads: (loads.step, loads.layer)))


def _numbers(loads: LayerLoads) -> int:
    return len(loads.tokens_per_expert) + len(loads.tokens_per_rank)


def total(loads: Iterable[LayerLoads]) -> LayerLoads:
    """The sum of one layer's loads in consecutive steps; at least one bin."""
    return reduce(LayerLoads.plus, loads)
