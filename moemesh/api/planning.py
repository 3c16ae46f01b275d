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

    ``plan``: a Plan, or a PlannedLayout if keys of [plan] cannot express it. ``seconds``: time of
    one step, with its ``breakdown`` by part; ``memory_bytes``: needed by the fullest device;
    ``command``: trains the layout (None if ``not_trained`` lists features that ``moemesh train``
    lacks). ``details``: the object that the verb prints with ``--json``, for this layout.
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
        """Whether the memory of a device suffices; True for every layout of ``moemesh.plan``."""
        return self.details["memory"].get("fits", True)

    def facts(self) -> dict[str, object]:
        return {**super().facts(), "memory_bytes": format_bytes(self.memory_bytes)}

    def __getitem__(self, key: str) -> Any:
        return self.details[key]


class Answers(Shown, list[Answer]):
    """The best layouts, fastest first. ``recommended`` is as fast as the first within the error of
    predicted times, and safer or simpler if such a layout exists (``answer["roles"]``).
    ``details``: the object of ``moemesh plan --json`` (certificate, binding limit, sensitivity,
    ...); ``why``: its verdicts on the layouts given as `why`, in the same order."""

    def __init__(
        self, answers: Iterable[Answer], recommended: Answer, details: dict[str, Any]
    ) -> None:
        super().__init__(answers)
        self.recommended, self.details = recommended, details

    def facts(self) -> dict[str, object]:
        return {
            str(place): f"{item.seconds:.4g} s, {format_bytes(item.memory_bytes)}, {item.plan!r}"
            for place, item in enumerate(self)
        }

    @property
    def why(self) -> list[dict[str, Any]]:
        """``details["why"]``: per layout its ``verdict``, with seconds, bytes and parts, or the
        broken rules."""
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
    price: float | None = None,
    why: str | Sequence[str] = (),
    settings: str | Sequence[str] = (),
) -> Answers:
    """Returns the `top` best layouts, fastest first (`top` = 1: the recommended one); see
    ``moemesh plan --help`` for the options.

    `model` and `cluster`: a configuration, the path of one, or the name of a preset. `tokens`: how
    many are trained in all (14.8e12, "14.8T"), which adds ``days`` and ``gpu_hours`` to each
    answer's ``speed``. `price`: that of a GPU-hour, which adds ``money_per_step`` and, with tokens,
    ``money``. `why`: layouts to compare ("tp=8,ep=64,data=zero3"). Raises ConfigError with every
    problem, NothingFits (a ValueError) if no layout fits in memory.
    """
    request = PlanRequest(
        model, cluster, seq_len, global_batch, nodes=nodes, top=top, precision=precision,
        anywhere=anywhere, trainable=trainable, tokens=tokens, headroom=headroom, price=price,
        why=[why] if isinstance(why, str) else list(why),
        settings=[settings] if isinstance(settings, str) else list(settings),
    )  # fmt: skip
    with naming("settings"):
        planned = plan_named(request)
    details = to_json(planned)
    recommended, *answers = (
        _answer(
            plan_of(candidate.layout),
            candidate.layout,
            planned.model,
            candidate.breakdown,
            candidate.memory.needed,
            candidate_json(planned, candidate),
        )
        for candidate in (planned.candidates[0], *planned.fastest_first)
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
    price: float | None = None,
) -> Answer:
    """Returns the price of one layout: parameters, flops, memory, traffic and seconds.

    `plan`: a Plan, a dict of keys of [plan], or a text as for ``--plan``. `rank`: the pipeline rank
    whose traffic is given: a number, "first", "inner", "last", or "worst" (that with the largest
    memory). `headroom`: memory of a device to leave free, "10%" or "6GiB". `price`: that of a
    GPU-hour. Raises ConfigError with every problem.
    """
    if isinstance(plan, Plan):
        plan = plan.model_dump(exclude_unset=True)
    source = plan if isinstance(plan, Mapping) else str(plan)
    priced = estimate_named(
        model, cluster, source, seq_len, global_batch, rank=rank, headroom=headroom, price=price
    )
    return _answer(
        priced.plan or priced.layout,
        priced.layout,
        Model(priced.shape, priced.config),
        priced.seconds,
        priced.peak.needed,
        priced.to_json(),
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
    if isinstance(plan, Plan):  # in the layout, the stages of a plan are those that a run cuts
        layout = layout.changed(layers_per_stage=plan.layers_per_stage)
    return Answer(
        plan=plan,
        seconds=seconds["total"],
        memory_bytes=memory_bytes,
        breakdown={part: value for part, value in seconds.items() if part != "total"},
        command=None if refused else train_command(layout, model),
        not_trained=tuple(refused),
        details=details,
    )
