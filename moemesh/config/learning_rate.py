"""The learning rate of a step: a linear warm-up, then one of the schedules of a table.

A schedule is a name and a function in :data:`SCHEDULES` of the progress after the warm-up (0 after
its last step, 1 at the last step of the run), of the share of those steps that the decay takes, and
of the shape of the decay. It returns the height between the lowest rate (0) and the peak (1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

from typing_extensions import TypeAliasType

from moemesh.config.names import Names

DecayShape = Literal["linear", "sqrt"]


def _stable_then_decay(progress: float, share: float, shape: DecayShape) -> float:
    """Warm-up, stable, decay (MiniCPM, arXiv:2404.06395): constant until the decay, which falls
    linearly or as 1 - sqrt (Hägele et al., 2024, arXiv:2405.18392)."""
    decayed = max(progress - (1 - share), 0.0) / share if share else 0.0
    return 1 - (math.sqrt(decayed) if shape == "sqrt" else decayed)


#: (progress, share of the decay, its shape) -> height.
SCHEDULES: dict[str, Callable[[float, float, DecayShape], float]] = {
    "cosine": lambda progress, share, shape: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress, share, shape: 1 - progress,
    "constant": lambda progress, share, shape: 1.0,
    "wsd": _stable_then_decay,
}
LrSchedule = TypeAliasType("LrSchedule", Annotated[str, Names(SCHEDULES)])
#: Schedules that end below the peak.
FALLING = Names(SCHEDULES, where=lambda height: height(1.0, 1.0, "linear") < 1)


def scheduled_rate(
    step: int,
    *,
    schedule: LrSchedule,
    peak: float,
    lowest: float,
    warmup_steps: int,
    decay_steps: int,
    decay_shape: DecayShape,
    steps: int,
) -> float:
    """The rate of `step`, which counts from 1, in a run of `steps`."""
    if step <= warmup_steps:
        return peak * step / warmup_steps
    rest = max(steps - warmup_steps, 1)
    progress = min((step - warmup_steps) / rest, 1.0)
    height = SCHEDULES[schedule](progress, min(decay_steps / rest, 1.0), decay_shape)
    return lowest + (peak - lowest) * height
