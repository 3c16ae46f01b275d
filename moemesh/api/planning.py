"""Layouts from Python: `moemesh.plan` and `moemesh.estimate`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moemesh.api.runs import naming
from moemesh.config.cluster import Cluster
from moemesh.config.errors import public
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.shown import Shown
from moemesh.planner.estimate import estimate_named
from moemesh.planner.layout_sources import plan_of
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.requests import PlanRequest, ProductPrecision
from moemesh.planner.search.command import (
    candidate_json,
    not_trained,
    plan_named,
    to_json,
    train_command,
)
from moemesh.planner.shapes.load_shape import Model
from moemesh.trace.memory_profile import format_bytes


@dataclass(frozen=True, kw_only=True, repr=False)
class Answer(Shown):
    """One layout and its price; ``answer[key]`` is a key of `details`.

    ``plan``: a Plan, or the PlannedLayout where no keys of [plan] say it. ``seconds`` of one step,
    with their ``breakdown`` by part; ``memory_bytes`` that the fullest device needs; ``command``
    trains the layout (None where ``not_trained`` names what ``moemesh train`` does not carry out).
    ``details``: the object that the verb prints with ``--json``, for this layout.
    """

    shown = ("plan", "seconds", "memory_bytes", "fits", "command", "not_trained")

    plan: Plan | PlannedLayout
    seconds: float
    memory_bytes: float
    breakdown: dict[str, float]
    command: str | None
    not_trained: tuple[str, ...]
    details: dict[str, Any]

    @property
    def fits(self) -> bool:
        """Whether the devices have the memory; every layout of ``moemesh.plan`` does."""
        return self.details["memory"].get("fits", True)

    def facts(self) -> dict[str, object]:
        return {**super().facts(), "memory_bytes": format_bytes(self.memory_bytes)}

    def __getitem__(self, key: str) -> Any:
        return self.details[key]


class Answers(Shown, list[Answer]):
    """The best layouts, fastest first; ``recommended`` is as fast as the first within the model's
    error, and safer or simpler where one is (``answer["roles"]``). ``details`` is the object that
    ``moemesh plan --json`` prints (certificate, binding limit, sensitivity, ...), ``why`` its
    judgement of each layout that was asked about, in the order of asking."""

    def __init__(
        self, answers: Iterable[Answer], recommended: Answer, details: dict[str, Any]
    ) -> None:
        super().__init__(answers)
        self.recommended, self.details = recommended, details

    def facts(self) -> dict[str, object]:
        return {
            f"{place}": f"{one.seconds:.4g} s, {format_bytes(one.memory_bytes)}, {one.plan!r}"
            for place, one in enumerate(self)
        }

    @property
    def why(self) -> list[dict[str, Any]]:
        """``details["why"]``: ``verdict``, and seconds, bytes and parts or the broken rules."""
        return self.details["why"]


@public
def plan(
    *,
    model: str | Path | ModelConfig | Model,
    cluster: str | Path | Cluster,
    seq_len: int,
    global_batch: int,
    nodes: int | None = None,
    top: int = 5,
    precision: ProductPrecision = "bfloat16",
    anywhere: bool = False,
    trainable: bool = False,
    tokens: str | float | None = None,
    headroom: str | float | None = None,
    why: Sequence[str] = (),
    settings: Sequence[str] = (),
) -> Answers:
    """Returns the `top` best layouts, fastest first; options as of ``moemesh plan``.

    `model` and `cluster`: a configuration, the path of one, or the name of a preset. `tokens` of
    the training (14.8e12, "14.8T") add ``days`` and ``gpu_hours`` to each answer's ``speed``;
    `why` names layouts to be judged ("tp=8,ep=64,data=zero3"). Raises ConfigError with every
    problem, NothingFits (a ValueError) when no layout fits in memory.
    """
    request = PlanRequest(
        model, cluster, seq_len, global_batch, nodes=nodes, top=top, precision=precision,
        anywhere=anywhere, trainable=trainable, tokens=tokens, headroom=headroom,
        why=[why] if isinstance(why, str) else list(why), settings=list(settings),
    )  # fmt: skip
    with naming("settings"):
        found = plan_named(request)
    details = to_json(found)
    recommended, *answers = (
        _answer(
            plan_of(candidate.layout),
            candidate.layout,
            found.model,
            candidate.breakdown,
            candidate.memory.needed,
            candidate_json(found, candidate),
        )
        for candidate in (found.candidates[0], *found.fastest_first)
    )
    return Answers(answers, recommended, details)


@public
def estimate(
    *,
    model: str | Path | ModelConfig | Model,
    cluster: str | Path | Cluster,
    plan: Plan | Mapping[str, Any] | str | Path,
    seq_len: int | None = None,
    global_batch: int | None = None,
    rank: str | int = "worst",
    headroom: str | float | None = None,
) -> Answer:
    """Returns the price of one layout: parameters, flops, memory, traffic and seconds.

    `plan`: a Plan, a dict of keys of [plan], or what ``--plan`` takes. `rank`: the pipeline rank of
    the traffic, a number or "first", "inner", "last", "worst" in memory. `headroom`: memory of a
    device to leave free, "10%" or "6GiB". Raises ConfigError with every problem.
    """
    if isinstance(plan, Plan):
        plan = plan.model_dump(exclude_unset=True)
    source = plan if isinstance(plan, Mapping) else str(plan)
    found = estimate_named(
        model, cluster, source, seq_len, global_batch, rank=rank, headroom=headroom
    )
    return _answer(
        found.plan or found.layout,
        found.layout,
        Model(found.shape, found.config),
        found.seconds,
        found.peak.needed,
        found.to_json(),
    )


def _answer(
    plan: Plan | PlannedLayout,
    layout: PlannedLayout,
    model: Model,
    seconds: Mapping[str, float],
    memory_bytes: float,
    details: dict[str, Any],
) -> Answer:
    refused = not_trained(layout, model)
    return Answer(
        plan=plan,
        seconds=seconds["total"],
        memory_bytes=memory_bytes,
        breakdown={part: value for part, value in seconds.items() if part != "total"},
        command=None if refused else train_command(layout, model),
        not_trained=tuple(refused),
        details=details,
    )
