"""The learning rate of a step: a linear warm-up, then one of the schedules of a table.

A schedule is a name and a function in :data:`SCHEDULES`. The function takes a
:class:`DecayPosition` and returns the height between the lowest rate (0) and the peak (1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

from typing_extensions import TypeAliasType

from moemesh.config.names import Names

DecayShape = Literal["linear", "sqrt"]


class DecayPosition(NamedTuple):
    """A step after the warm-up. `progress`, `warmup` and `decay` are fractions of the number of
    steps from the end of the warm-up to the last step of the run."""

    #: 0 at the last step of the warm-up, 1 at the last step of the run.
    progress: float
    #: Length of the warm-up.
    warmup: float
    #: Length of the decay at the end of the run, and its shape: train.decay_steps, decay_shape.
    decay: float
    shape: DecayShape


def _stable_then_decay(at: DecayPosition) -> float:
    """Warm-up, stable, decay (MiniCPM, arXiv:2404.06395): constant until the decay, which falls
    linearly or as 1 - sqrt (Hägele et al., 2024, arXiv:2405.18392)."""
    decayed = max(at.progress - (1 - at.decay), 0.0) / at.decay if at.decay else 0.0
    return 1 - (math.sqrt(decayed) if at.shape == "sqrt" else decayed)


SCHEDULES: dict[str, Callable[[DecayPosition], float]] = {
    "cosine": lambda at: 0.5 * (1 + math.cos(math.pi * at.progress)),
    "linear": lambda at: 1 - at.progress,
    "constant": lambda at: 1.0,
    "wsd": _stable_then_decay,
}
#: Names of the rows that every rank has; a program may add others.
PACKAGED = frozenset(SCHEDULES)
LrSchedule = TypeAliasType("LrSchedule", Annotated[str, Names(SCHEDULES)])
#: Schedules that end below the peak, and schedules that read the length of the decay: both follow
#: from values of their functions.
FALLING = Names(SCHEDULES, where=lambda height: height(DecayPosition(1, 1, 1, "linear")) < 1)
DECAYING = Names(
    SCHEDULES,
    where=lambda height: len({height(DecayPosition(0.5, 1, d, "linear")) for d in (0.5, 1)}) > 1,
)


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
    """The learning rate of `step`, which counts from 1, in a run of `steps`."""
    if step <= warmup_steps:
        return peak * step / warmup_steps
    rest = max(steps - warmup_steps, 1)
    position = DecayPosition(
        progress=min((step - warmup_steps) / rest, 1.0),
        warmup=warmup_steps / rest,
        decay=min(decay_steps / rest, 1.0),
        shape=decay_shape,
    )
    return lowest + (peak - lowest) * SCHEDULES[schedule](position)
