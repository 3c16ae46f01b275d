"""All schedules on the same ranks, microbatches and costs, in one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moemesh.config.errors import UserError
from moemesh.schedule.action import Schedule
from moemesh.schedule.answer import ScheduleAnswer, answer, short
from moemesh.schedule.build import RECIPES
from moemesh.schedule.messages import messages
from moemesh.schedule.request import ScheduleRequest

#: Chunks of a rank where a schedule is made for several and the request says nothing.
CHUNKS = 2


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One schedule of the comparison: its `answer`, or in `refused` why it has none."""

    name: str
    answer: ScheduleAnswer | None
    refused: str = ""

    @property
    def peak_activation(self) -> float:
        """Most activation of any rank, in microbatches on a rank's share of the layers."""
        assert self.answer is not None
        return max(self.answer.simulation.peak_activation)

    @property
    def sent(self) -> float:
        """What the busiest rank sends to others, in activations of a microbatch: a slice is its
        share of one."""
        assert self.answer is not None
        return _sent(self.answer.schedule)

    @property
    def gradients(self) -> str:
        """Whether the gradients of a step are all of one version of the weights."""
        assert self.answer is not None
        return "one version" if self.answer.schedule.update is None else "of older weights"

    def to_json(self) -> dict[str, Any]:
        if self.answer is None:
            return {"name": self.name, "refused": self.refused}
        simulation = self.answer.simulation
        return {
            "name": self.name,
            "makespan": simulation.makespan,
            "bubble_rate": simulation.bubble_rate,
            "peak_activation": self.peak_activation,
            "weight_copies": max(self.answer.copies),
            "sent": self.sent,
            "synchronous": self.answer.schedule.update is None,
        }


def compare(request: ScheduleRequest) -> list[Compared]:
    """Every schedule that has a name, as `request` asks for them (its own name is not read). Raises
    UserError when no schedule can be made of the request."""
    found: list[Compared] = []
    for name in RECIPES:
        try:
            found.append(Compared(name=name, answer=answer(_asked(request, name))))
        except UserError as error:
            found.append(Compared(name=name, answer=None, refused=str(error).replace("\n", "; ")))
    if all(one.answer is None for one in found):
        raise UserError(found[0].refused)
    return found


def _asked(request: ScheduleRequest, name: str) -> ScheduleRequest:
    """`request` for one schedule, without the options that it does not have."""
    options = RECIPES[name].options
    chunks = request.stages_per_rank
    if "stages_per_rank" not in options:
        chunks = None
    elif chunks is None and (request.ranks or 0) > 1:
        chunks = CHUNKS
    return replace(
        request,
        name=name,
        stages_per_rank=chunks,
        num_slices=request.num_slices if "num_slices" in options else None,
        window=request.window if "window" in options else None,
        max_in_flight=request.max_in_flight if "max_in_flight" in options else None,
    )


def _sent(schedule: Schedule) -> float:
    count = Counter(message.source for message in messages(schedule).values())
    return max(count.values(), default=0) / schedule.num_slices


def comparison_rows(found: Sequence[Compared]) -> list[tuple[str, ...]]:
    """A row of text for each: name, makespan, bubble rate, activation, weight copies, sent."""
    return [
        (
            one.name,
            short(one.answer.simulation.makespan),
            f"{one.answer.simulation.bubble_rate:.4f}",
            short(one.peak_activation),
            str(max(one.answer.copies)),
            short(one.sent),
            one.gradients,
        )
        for one in found
        if one.answer is not None
    ]
