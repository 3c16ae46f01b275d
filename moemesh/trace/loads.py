"""Tokens that each expert and each rank received, layer by layer, step by step.

`loads.jsonl` holds one object a line: one layer in one step, or in several steps that follow one
another, summed: where a run has too many steps, neighbours are (:class:`LoadBins`), so that what is
kept covers the whole run at one resolution and no token is lost. A layer without any token is legal
(an empty batch, a rank with nothing to do); all ratios are then those of a perfect balance.
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

#: Routing has collapsed where the entropy of a layer's loads was below this for so many steps.
COLLAPSE_ENTROPY, COLLAPSE_STEPS = 0.5, 20
#: "Nearly all" choices of a layer.
_NEARLY_ALL = 0.9


@dataclass(frozen=True, kw_only=True)
class LayerLoads:
    """Tokens that one MoE layer routed, over all ranks, once per chosen expert: in step `step`, or
    in the `steps` steps up to it, summed.

    `tokens_per_expert` [logical experts], `tokens_per_rank` [ranks that hold experts],
    `dropped` assignments that no expert computed. Of several steps `mean_ratios` are the means over
    the steps of the fullest expert and of the fullest rank over the average, and `highest_ratio`
    is the highest of the experts in a single step; None where they follow from the tokens. Raises
    ValueError for a negative number.
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
        """The first of the steps that are summed here."""
        return self.step - self.steps + 1

    @cached_property
    def expert_max_over_mean(self) -> float:
        """Fullest expert over the average, mean over the steps: 1.0 = balanced, number of experts
        = all on one."""
        return self.mean_ratios[0] if self.mean_ratios else max_over_mean(self.tokens_per_expert)

    @cached_property
    def rank_max_over_mean(self) -> float:
        """Fullest rank over the average, mean over the steps: how much longer the layer takes than
        if balanced."""
        return self.mean_ratios[1] if self.mean_ratios else max_over_mean(self.tokens_per_rank)

    @property
    def highest_max_over_mean(self) -> float:
        """Fullest expert over the average in the least balanced step."""
        return self.expert_max_over_mean if self.highest_ratio is None else self.highest_ratio

    def plus(self, later: LayerLoads) -> LayerLoads:
        """The sum with the loads of the same layer in later steps.

        Ranks are summed where there are as many. Raises ValueError for another layer.
        """
        if later.layer != self.layer:
            raise ValueError(f"layer {self.layer} and layer {later.layer} have no sum")
        steps = self.steps + later.steps
        of_experts = (
            self.expert_max_over_mean * self.steps + later.expert_max_over_mean * later.steps
        )
        of_ranks = self.rank_max_over_mean * self.steps + later.rank_max_over_mean * later.steps
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
            mean_ratios=(of_experts / steps, of_ranks / steps),
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
        """Dropped assignments over all that were wanted; 0 when nothing was."""
        wanted = self.dropped + sum(self.tokens_per_expert)
        return self.dropped / wanted if wanted else 0.0

    def to_json(self) -> dict[str, Any]:
        """The fields, and behind them what is derived from them, for readers without this class."""
        several = {"highest_max_over_mean": self.highest_max_over_mean} if self.steps > 1 else {}
        return {
            "step": self.step,
            "steps": self.steps,
            "layer": self.layer,
            "tokens_per_expert": list(self.tokens_per_expert),
            "tokens_per_rank": list(self.tokens_per_rank),
            "dropped": self.dropped,
            "max_over_mean": self.expert_max_over_mean,
            "rank_max_over_mean": self.rank_max_over_mean,
            **several,
            "entropy": self.entropy,
            "dead_experts": self.dead_experts,
        }

    def to_line(self) -> str:
        """The object on one line of `loads.jsonl`, newline included."""
        return json.dumps(self.to_json(), separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LayerLoads:
        """Invert :meth:`to_json`; what follows from the tokens is derived again.

        Raises KeyError, TypeError or ValueError on other data.
        """
        known: dict[str, Any] = {"tokens_per_rank": (), **data}
        for name in ("tokens_per_expert", "tokens_per_rank"):
            known[name] = tuple(map(int, known[name]))
        if int(data.get("steps", 1)) > 1:
            ratios = float(data["max_over_mean"]), float(data["rank_max_over_mean"])
            known |= {"mean_ratios": ratios, "highest_ratio": data["highest_max_over_mean"]}
        return read_fields(cls, known)


def _sums(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Element-wise sum; the shorter one is padded with zeros."""
    return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))


def max_over_mean(loads: Iterable[int]) -> float:
    """Largest over mean; 1.0 when there is nothing to share out."""
    values = list(loads)
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def collapse_text(loads: Iterable[LayerLoads]) -> str:
    """A sentence on the routing that has collapsed in the last steps of `loads`; "" for none."""
    by_layer: defaultdict[int, list[LayerLoads]] = defaultdict(list)
    for one in loads:
        by_layer[one.layer].append(one)
    collapsed: list[LayerLoads] = []
    for rows in by_layer.values():
        recent = [one for one in rows if one.step > rows[-1].step - COLLAPSE_STEPS]
        is_long = sum(one.steps for one in recent) >= COLLAPSE_STEPS
        if is_long and max(one.entropy for one in recent) < COLLAPSE_ENTROPY:
            collapsed.append(recent[-1])
    if not collapsed:
        return ""
    worst = min(collapsed, key=lambda one: one.entropy)
    sums = list(accumulate(sorted(worst.tokens_per_expert, reverse=True)))
    few = next(n for n, held in enumerate(sums, 1) if held >= _NEARLY_ALL * sums[-1])
    several = f"{len(collapsed)} routers have collapsed, the worst" if len(collapsed) > 1 else ""
    return (
        f"{several or 'The router has collapsed'} in layer {worst.layer}: "
        f"{sums[few - 1] / sums[-1]:.0%} of its choices go to {few} of {len(sums)} experts; raise "
        "model.aux_loss_coefficient, or set model.router_selection_bias = true."
    )


def read_loads(lines: Iterable[str]) -> Iterator[LayerLoads]:
    """The loads of `loads.jsonl`, line by line; blank lines are left out.

    Raises ValueError naming the first line that is not such an object.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield LayerLoads.from_json(parse_json(line))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"line {number} holds no loads: {error!r}") from error


def neighbours(
    widths: Sequence[int], most: int, borders: AbstractSet[int] = frozenset()
) -> list[slice]:
    """Bins of `widths` steps to sum, so that at most `most` remain, of widths as even as may be:
    slices that cover all of them, in order.

    Behind the bins at the positions `borders` a slice always ends; so many more may remain.

    >>> neighbours([1, 1, 1, 1], 2)
    [slice(0, 2, None), slice(2, 4, None)]
    >>> neighbours([2, 2, 1, 1, 1], 2, {0})
    [slice(0, 1, None), slice(1, 4, None), slice(4, 5, None)]
    """
    width = math.ceil(sum(widths) / most)
    while True:
        found: list[slice] = []
        start = steps = 0
        for position, own in enumerate(widths):
            if position > start and (steps + own > width or position - 1 in borders):
                found.append(slice(start, position))
                start, steps = position, 0
            steps += own
        if widths:
            found.append(slice(start, len(widths)))
        if len(found) <= most + len(borders):
            return found
        width *= 2


class LoadBins:
    """Loads that are read step by step: at most `most` bins a layer are kept, and at least a third
    of them where there were as many steps; fewer where they would hold more than `most_numbers`."""

    def __init__(self, most: int = 256, most_numbers: int = 1_600_000) -> None:
        self._most, self._most_numbers = most, most_numbers
        self._layers: dict[int, list[LayerLoads]] = {}
        self._numbers = 0

    def add(self, loads: LayerLoads) -> None:
        """The next loads of a layer. A step that was done before (a run that was resumed) counts as
        done now: bins that hold it or later ones go."""
        kept = self._layers.setdefault(loads.layer, [])
        while kept and kept[-1].step >= loads.first_step:
            self._numbers -= _numbers(kept.pop())
        kept.append(loads)
        self._numbers += _numbers(loads)
        if len(kept) > self._most:
            self._thin(kept)
        while self._numbers > self._most_numbers and self._most > 1:
            self._most //= 2
            for others in self._layers.values():
                if len(others) > self._most:
                    self._thin(others)

    def _thin(self, kept: list[LayerLoads]) -> None:
        before = sum(map(_numbers, kept))
        halves = neighbours([one.steps for one in kept], max(self._most // 2, 1))
        kept[:] = [total(kept[part]) for part in halves]
        self._numbers += sum(map(_numbers, kept)) - before

    def all(self) -> tuple[LayerLoads, ...]:
        """Every bin, by step and layer."""
        rows = (loads for kept in self._layers.values() for loads in kept)
        return tuple(sorted(rows, key=lambda loads: (loads.step, loads.layer)))


def _numbers(loads: LayerLoads) -> int:
    return len(loads.tokens_per_expert) + len(loads.tokens_per_rank)


def total(loads: Iterable[LayerLoads]) -> LayerLoads:
    """The sum of one layer's loads in steps that follow one another, one bin at least."""
    return reduce(LayerLoads.plus, loads)
