"""The plan that a partition implies: degrees of `moemesh train` nearest to the operator strategies.

An operator program may lay out every operator in its own way; a plan has one way for each axis. An
axis of a stage's mesh carries data or tensor parallelism in dense operators and expert, expert
tensor or expert data parallelism in experts. Of all such plans that pass `Plan.check` and fit by
the planner's own memory law the one is taken that agrees with the most operator time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

from moemesh.config.cluster import Cluster
from moemesh.config.plan import Plan
from moemesh.planner.layout import PlannedLayout
from moemesh.planner.layout_sources import from_plan, untrained
from moemesh.planner.operators.strategies import RECOMPUTE, WHOLE
from moemesh.planner.search.command import not_trained, train_command
from moemesh.planner.shapes.load import Model
from moemesh.planner.stages.answer import ImpliedPlan, OperatorChoice
from moemesh.planner.timing.price import pricing

#: What an axis does to dense operators and to experts, by plan key ("" is expert data parallelism).
_DENSE = {"dp": "batch", "cp": "sequence", "tp": ""}
_EXPERTS = {"": "", "ep": "experts", "etp": "expert_width"}
#: The dims that tensor parallelism cuts, by operator; all others are cut along the sequence.
_TENSOR = {
    **dict.fromkeys(("qkv", "attention core", "output"), "heads"),
    **dict.fromkeys(("up", "activation", "down"), "width"),
    **dict.fromkeys(("shared up", "shared activation", "shared down"), "shared_width"),
    **dict.fromkeys(("embedding", "logits", "loss"), "vocabulary"),
}
#: Operators that `recompute = "selective"` computes again.
_SELECTIVE = (
    "attention core", "activation", "shared activation", "expert up", "expert activation",
)  # fmt: skip
_RECOMPUTES = ("none", "selective", "full")


def imply(
    model: Model,
    cluster: Cluster,
    base: Plan,
    *,
    seq_len: int,
    global_batch: int,
    mesh: Mapping[str, int],
    operators: Sequence[OperatorChoice],
) -> ImpliedPlan | None:
    """`base` with the degrees nearest to `operators` that fit; None if no degrees are legal.

    Where none fits, those that need the least memory, marked as such. Of a model that
    `moemesh train` trains only plans that it carries out are considered.
    """
    trained = not untrained(PlannedLayout(seq_len=seq_len, global_batch=1), model)
    best: ImpliedPlan | None = None
    for agreement, differing, keys in _ranked(mesh, operators, model.shape.is_moe):
        plan = base.model_copy(update=keys)
        if plan.check(seq_len=seq_len, global_batch=global_batch):
            continue
        layout = from_plan(plan, model.config, seq_len=seq_len, global_batch=global_batch)
        if layout.check(model.shape.sizes) or (trained and untrained(layout, model)):
            continue
        known = pricing(cluster)
        memory, seconds = known.price(model.shape, layout)
        refused = tuple(not_trained(layout, model))
        fits = memory.fits(cluster.memory_bytes, known.usable_share)
        found = ImpliedPlan(
            plan=plan,
            agreement=agreement,
            differing=differing,
            seconds=seconds["total"],
            memory_bytes=memory.needed,
            fits=fits,
            command=train_command(layout, model) if fits and not refused else "",
            not_trained=refused,
        )
        if fits:
            return found
        if best is None or found.memory_bytes < best.memory_bytes:
            best = found
    return best


def _ranked(
    mesh: Mapping[str, int], operators: Sequence[OperatorChoice], is_moe: bool
) -> list[tuple[float, tuple[str, ...], dict[str, object]]]:
    """(share of operator time that agrees, operators that differ, keys of the plan), best first.

    Of equal shares first those that recompute what the operators recompute.
    """
    timed = [operator for operator in operators if operator.seconds > 0]
    total = sum(operator.count * operator.seconds for operator in timed)
    found: list[tuple[float, tuple[float, tuple[str, ...], dict[str, object]]]] = []
    for dense in product(_DENSE, repeat=len(mesh)):
        for experts in product(_EXPERTS if is_moe else ("",), repeat=len(mesh)):
            for recompute in _RECOMPUTES:
                keys: dict[str, object] = {"recompute": recompute}
                for names, legal in ((dense, _DENSE), (experts, _EXPERTS)):
                    for key in filter(None, legal):
                        sizes = zip(names, mesh.values(), strict=True)
                        keys[key] = prod(size for name, size in sizes if name == key)
                agreed = kept = 0.0
                differing: dict[str, None] = {}
                for operator in timed:
                    seconds = operator.count * operator.seconds
                    if _agrees(operator, mesh, dense, experts):
                        agreed += seconds
                    else:
                        differing[f"{operator.group}: {operator.operator}"] = None
                    again = operator.strategy.endswith(RECOMPUTE)
                    kept += seconds * (again == _recomputed(operator.operator, recompute))
                found.append((kept, (agreed / (total or 1.0), tuple(differing), keys)))
    # Sorting is stable: of equals the one with the fewest kinds of parallelism comes first.
    found.sort(key=lambda item: (-item[1][0], -item[0]))
    return [item for _, item in found]


def _agrees(
    choice: OperatorChoice, mesh: Mapping[str, int], dense: Sequence[str], experts: Sequence[str]
) -> bool:
    """Whether a plan cuts an operator along the same dims."""
    cuts = choice.strategy.removesuffix(RECOMPUTE).split(",")
    taken = dict(cut.split("=") for cut in cuts if cut != WHOLE)
    for (axis, size), role, expert_role in zip(mesh.items(), dense, experts, strict=True):
        wanted: tuple[str, ...] = (_DENSE[role] or _TENSOR.get(choice.operator, "sequence"),)
        if choice.operator.startswith("expert "):
            # Expert data parallelism cuts tokens, whichever of their two dims that is.
            wanted = (_EXPERTS[expert_role],) if expert_role else ("batch", "sequence")
        if size > 1 and taken.get(axis) not in wanted:
            return False
    return True


def _recomputed(operator: str, recompute: str) -> bool:
    return recompute == "full" or (recompute == "selective" and operator in _SELECTIVE)
