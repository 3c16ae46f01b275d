"""Which plans `moemesh train` carries out as they stand, so that their ledger is known to the byte.

Others are planned all the same: their traffic comes from the closed forms of `volumes`.
"""

from __future__ import annotations

from collections.abc import Iterator

from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan

#: Values of plan keys that a run carries out; the others cannot be trained (context parallelism,
#: ZeRO), or do not enter what they send (DeepEP).
_CARRIED_OUT: dict[str, tuple[object, ...]] = {
    "cp": (1,),
    "data": ("replicate",),
    "dispatcher": ("all_to_all", "all_gather", "hierarchical", "low_latency", "auto"),
    "replay": (None,),
}
#: More forwards than this would take longer to list than anyone waits.
LARGEST_LEDGER = 20_000


def why_not_exact(model: ModelConfig, plan: Plan) -> str:
    """Why the ledger of a plan is not known to the byte; "" where it is."""
    return next(_reasons(model, plan), "")


def _reasons(model: ModelConfig, plan: Plan) -> Iterator[str]:
    for key, values in _CARRIED_OUT.items():
        value = getattr(plan, key)
        if value not in values:
            yield f"`moemesh train` does not carry out {key} = {value} yet"
    if resolved(plan) is None:
        yield "dispatcher = auto is chosen on the ranks themselves"
    if model.attention != "gqa":
        yield f"`moemesh train` has no {model.attention} attention yet"
    if model.num_mtp_layers:
        yield "`moemesh train` has no extra prediction layers yet"
    forwards = plan.microbatches * plan.num_stages * plan.num_slices
    if forwards > LARGEST_LEDGER:
        yield f"{forwards} forwards of stages a step are too many to list ({LARGEST_LEDGER})"
    if plan.spare_slots and plan.ep > 1:
        if plan.dispatcher not in ("all_to_all", "auto"):
            yield f"dispatcher = {plan.dispatcher} cannot be trained with spare_slots"
        if plan.combine == "exact":
            yield "combine = exact cannot be trained with spare_slots"
    yield from (problem.message for problem in plan.check(model))


def resolved(plan: Plan) -> Plan | None:
    """The plan with the dispatcher that `auto` stands for; None where only a run can tell."""
    if plan.dispatcher != "auto":
        return plan
    if plan.ep * plan.etp == 1 or (plan.spare_slots and plan.ep > 1):
        return plan.model_copy(update={"dispatcher": "all_to_all"})
    return None
