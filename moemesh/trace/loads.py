"""Tokens that each expert and each rank received, layer by layer, step by step.

`loads.jsonl` holds one object a line, one line a (step, layer). A layer without any token is legal
(an empty batch, a rank with nothing to do); all ratios are then those of a perfect balance.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LayerLoads:
    """Tokens that one MoE layer routed in one step, over all ranks, once per chosen expert.

    `tokens_per_expert` [logical experts], `tokens_per_rank` [ranks that hold experts],
    `dropped` assignments that no expert computed. Raises ValueError for a negative number.
    """

    step: int
    layer: int
    tokens_per_expert: tuple[int, ...]
    tokens_per_rank: tuple[int, ...] = ()
    dropped: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens_per_expert", tuple(self.tokens_per_expert))
        object.__setattr__(self, "tokens_per_rank", tuple(self.tokens_per_rank))
        lowest = min((self.dropped, *self.tokens_per_expert, *self.tokens_per_rank))
        if lowest < 0:
            raise ValueError(f"step {self.step}, layer {self.layer}: a load of {lowest} < 0")

    @property
    def expert_max_over_mean(self) -> float:
        """Fullest expert over the average: 1.0 = balanced, number of experts = all on one."""
        return max_over_mean(self.tokens_per_expert)

    @property
    def rank_max_over_mean(self) -> float:
        """Fullest rank over the average: how much longer the layer takes than if balanced."""
        return max_over_mean(self.tokens_per_rank)

    @property
    def entropy(self) -> float:
        """Shannon entropy of the experts' shares over its maximum: 1 uniform, 0 one expert."""
        return normalised_entropy(self.tokens_per_expert)

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
        return {
            "step": self.step,
            "layer": self.layer,
            "tokens_per_expert": list(self.tokens_per_expert),
            "tokens_per_rank": list(self.tokens_per_rank),
            "dropped": self.dropped,
            "max_over_mean": self.expert_max_over_mean,
            "rank_max_over_mean": self.rank_max_over_mean,
            "entropy": self.entropy,
            "dead_experts": self.dead_experts,
        }

    def to_line(self) -> str:
        """The object on one line of `loads.jsonl`, newline included."""
        return json.dumps(self.to_json(), separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LayerLoads:
        """Invert :meth:`to_json`; what is derived is derived again.

        Raises KeyError, TypeError or ValueError on other data.
        """
        return cls(
            step=int(data["step"]),
            layer=int(data["layer"]),
            tokens_per_expert=tuple(int(tokens) for tokens in data["tokens_per_expert"]),
            tokens_per_rank=tuple(int(tokens) for tokens in data.get("tokens_per_rank", ())),
            dropped=int(data.get("dropped", 0)),
        )


def max_over_mean(loads: Iterable[int]) -> float:
    """Largest over mean; 1.0 when there is nothing to share out."""
    values = list(loads)
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def normalised_entropy(loads: Iterable[int]) -> float:
    """Entropy of the shares over log(number of loads); 1.0 for one load or none at all."""
    values = list(loads)
    total = sum(values)
    if not total or len(values) == 1:
        return 1.0
    shares = (value / total for value in values if value)
    entropy = -sum(share * math.log(share) for share in shares)
    # Rounding may leave -0.0 or 1 + 1e-16.
    return min(max(entropy / math.log(len(values)), 0.0), 1.0)


def read_loads(lines: Iterable[str]) -> Iterator[LayerLoads]:
    """The loads of `loads.jsonl`, line by line; blank lines are left out.

    Raises ValueError naming the first line that is not such an object.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield LayerLoads.from_json(json.loads(line))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"line {number} holds no loads: {error!r}") from error
