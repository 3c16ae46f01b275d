"""The rules of asynchronous schedules: which keys they have, update windows, what stages share."""

from __future__ import annotations

from typing import Protocol

from moemesh.config.errors import Problem
from moemesh.config.model import ModelConfig
from moemesh.config.suggest import divisors, nearest_divisors

#: Schedules that update weights while microbatches are under way.
ASYNCHRONOUS_SCHEDULES = ("pipedream", "pipedream_2bw", "ampnet")

#: Key of the plan -> its default, the schedules that have it.
OPTIONS: dict[str, tuple[object, tuple[str, ...]]] = {
    "update_window": (None, ("pipedream_2bw", "ampnet")),
    "max_in_flight": (None, ("ampnet",)),
    "ampnet_backward": ("recompute", ("ampnet",)),
    "replay": (None, ("ampnet",)),
}


class AsynchronousPlan(Protocol):
    """Values of a plan that the rules read."""

    @property
    def schedule(self) -> str: ...
    @property
    def pp(self) -> int: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def update_window(self) -> int | None: ...
    @property
    def ampnet_backward(self) -> str: ...
    @property
    def recompute(self) -> str: ...


def asynchronous_problems(plan: AsynchronousPlan, model: ModelConfig | None) -> list[Problem]:
    """Everything that is wrong with them; nothing to say about a synchronous plan."""
    problems: list[Problem] = []
    for name, (default, schedules) in OPTIONS.items():
        value: object = getattr(plan, name)
        if value == default or plan.schedule in schedules:
            continue
        owners = " or ".join(schedules)
        problems.append(
            Problem(
                code="conflict",
                key=f"plan.{name}",
                value=value,
                message=f"{name} is a key of schedule {owners}, the schedule is {plan.schedule}",
                fix=f"leave {name} out, or schedule = {owners}",
                related=("plan.schedule",),
            )
        )
    window = plan.update_window
    if window is not None and window > 0 and not problems:
        problems += _window_rules(plan, window)
    if plan.ampnet_backward == "live" and plan.recompute != "none":
        problems.append(
            Problem(
                code="conflict",
                key="plan.ampnet_backward",
                value="live",
                message="ampnet_backward = live keeps the activations of the forward, recompute = "
                f"{plan.recompute} does not",
                fix='ampnet_backward = "recompute", or recompute = "none"',
                related=("plan.recompute",),
            )
        )
    if plan.schedule in ASYNCHRONOUS_SCHEDULES and model is not None:
        problems += _model_rules(plan, model)
    return problems


def _window_rules(plan: AsynchronousPlan, window: int) -> list[Problem]:
    """Windows fill steps; 2BW's two versions are enough when a window fills the pipeline."""
    if plan.microbatches % window:
        message = f"update_window ({window}) must divide microbatches ({plan.microbatches})"
        fix, related = nearest_divisors(plan.microbatches, window), "plan.microbatches"
        code = "not-divisible"
    elif plan.schedule == "pipedream_2bw" and window < plan.pp:
        message = f"pipedream_2bw needs update_window ({window}) >= pp ({plan.pp})"
        enough = [number for number in divisors(plan.microbatches) if number >= plan.pp]
        fix, related, code = str(enough[0] if enough else plan.pp), "plan.pp", "too-small"
        if not enough:
            fix += f", microbatches = {plan.pp}"
    else:
        return []
    return [
        Problem(
            code=code,
            key="plan.update_window",
            value=window,
            message=message,
            fix=f"update_window = {fix}",
            related=(related, "plan.schedule"),
        )
    ]


def _model_rules(plan: AsynchronousPlan, model: ModelConfig) -> list[Problem]:
    problems: list[Problem] = []
    if plan.pp > 1 and model.ends_share_a_table:
        what, key = "tied embeddings put a weight", "tied_embeddings"
        fix = "tied_embeddings = false"
        if model.num_mtp_layers:
            what, key = "extra prediction layers put the embedding", "num_mtp_layers"
            fix = "num_mtp_layers = 0"
        problems.append(
            Problem(
                code="conflict",
                key="plan.schedule",
                value=plan.schedule,
                message=f"{plan.schedule} updates every stage by itself, but {what} "
                f"on the first and the last of pp = {plan.pp} stages",
                fix=f"{fix}, pp = 1, or a synchronous schedule such as 1f1b",
                related=("plan.pp", f"model.{key}"),
            )
        )
    if plan.ampnet_backward == "live" and model.router_dtype == "model":
        problems.append(
            Problem(
                code="conflict",
                key="plan.ampnet_backward",
                value="live",
                message="ampnet_backward = live reads weights where they are, "
                "router_dtype = model works on a rounded copy",
                fix='ampnet_backward = "recompute"',
                related=("model.router_dtype",),
            )
        )
    return problems
