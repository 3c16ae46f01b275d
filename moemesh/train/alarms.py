"""Alarms on expert loads: dead experts, collapse and drops, each shown once per layer.

A run can lose its experts while its loss still falls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from moemesh.trace.loads import LayerLoads


@dataclass(frozen=True, kw_only=True)
class AlarmLimits:
    """An alarm rings when its condition has held for `num_steps` steps in a row.

    `entropy`: of a layer's loads (1 uniform, 0 one expert), collapse below it; `dropped`: share of
    choices for which an expert had no room, an alarm above it.
    """

    num_steps: int = 20
    entropy: float = 0.5
    dropped: float = 0.1


class LoadAlarms:
    """Looks at every layer of every step, in order; ``say(text, "alarm")`` prints one line."""

    def __init__(self, say: Callable[[str, str], None], limits: AlarmLimits | None = None) -> None:
        self._say, self._limits = say, limits or AlarmLimits()
        self._idle: dict[int, list[int]] = {}
        self._held: defaultdict[tuple[int, str], int] = defaultdict(int)
        self._rung: set[tuple[int, str]] = set()

    def look(self, loads: LayerLoads) -> None:
        """Check one layer of one step; a step that routed nothing changes nothing."""
        if not sum(loads.tokens_per_expert) + loads.dropped:
            return
        limits = self._limits
        dead = self._dead_experts(loads)
        self._ring(
            loads,
            "dead",
            bool(dead),
            f"{_experts(dead)} received no token for {limits.num_steps} steps",
        )
        share = max(loads.tokens_per_expert) / max(sum(loads.tokens_per_expert), 1)
        fullest = loads.tokens_per_expert.index(max(loads.tokens_per_expert))
        self._ring(
            loads,
            "collapse",
            self._holds(loads, "collapse", loads.entropy < limits.entropy),
            f"routing collapses: entropy of the loads {loads.entropy:.3f}, below "
            f"{limits.entropy:g} for {limits.num_steps} steps; expert {fullest} holds {share:.0%}",
        )
        self._ring(
            loads,
            "dropped",
            self._holds(loads, "dropped", loads.dropped_share > limits.dropped),
            f"{loads.dropped_share:.1%} of the choices found their expert full ({loads.dropped} in "
            f"this step), above {limits.dropped:.0%} for {limits.num_steps} steps",
        )

    def _dead_experts(self, loads: LayerLoads) -> list[int]:
        idle = self._idle.setdefault(loads.layer, [0] * len(loads.tokens_per_expert))
        for expert, tokens in enumerate(loads.tokens_per_expert):
            idle[expert] = 0 if tokens else idle[expert] + 1
        return [expert for expert, steps in enumerate(idle) if steps >= self._limits.num_steps]

    def _holds(self, loads: LayerLoads, kind: str, condition: bool) -> bool:
        key = loads.layer, kind
        self._held[key] = self._held[key] + 1 if condition else 0
        return self._held[key] >= self._limits.num_steps

    def _ring(self, loads: LayerLoads, kind: str, rings: bool, text: str) -> None:
        if rings and (loads.layer, kind) not in self._rung:
            self._rung.add((loads.layer, kind))
            self._say(f"alarm: step {loads.step}, layer {loads.layer}: {text}", "alarm")


def _experts(ids: list[int]) -> str:
    shown = ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")
    return f"{len(ids)} expert{'s' if len(ids) > 1 else ''} ({shown})"
