"""Plans that `moemesh train` carries out as they stand: their ledger is known to the byte.

Others are planned all the same: their traffic comes from the closed forms of `volumes`.
"""

from __future__ import annotations

from collections.abc import Iterator

from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.run import RunConfig
from moemesh.config.trainable import refusals

#: Values of plan keys with which a run enters all that it sends into its ledger.
_ENTERED: dict[str, tuple[object, ...]] = {
    "dispatcher": ("all_to_all", "all_gather", "hierarchical", "low_latency", "auto"),
    "replay": (None,),
}
#: More forwards than this would take longer to list than anyone waits.
LARGEST_LEDGER = 20_000


def why_not_exact(model: ModelConfig, plan: Plan) -> str:
    """Why the ledger of a plan is not known to the byte; "" where it is."""
    return next(_reasons(model, plan), "")


def _reasons(model: ModelConfig, plan: Plan) -> Iterator[str]:
    for problem in refusals(RunConfig(model=model, plan=plan)):
        setting = f"{problem.key.partition('.')[2]} = {problem.value}"
        is_planned = problem.code == "not-available"
        yield f"`moemesh train` does not carry out {setting} yet" if is_planned else problem.message
    for key, values in _ENTERED.items():
        if (value := getattr(plan, key)) not in values:
            yield f"{key} = {value} does not say what it sends"
    if resolved(plan) is None:
        yield "dispatcher = auto is chosen on the ranks themselves"
    forwards = plan.microbatches * plan.num_stages * plan.num_slices
    if forwards > LARGEST_LEDGER:
        yield f"{forwards} forwards of stages a step are too many to list ({LARGEST_LEDGER})"
    yield from (problem.message for problem in plan.check(model))


def resolved(plan: Plan) -> Plan | None:
    """The plan with the dispatcher that `auto` stands for; None where only a run can tell."""
    if plan.dispatcher != "auto":
        return plan
    if plan.ep * plan.etp == 1 or (plan.spare_slots and plan.ep > 1):
        return plan.model_copy(update={"dispatcher": "all_to_all"})
    return None
