"""The plan that a partition implies: degrees of `moemesh train` nearest to the operator strategies.

An operator program may lay out every operator in its own way; a plan has one way for each axis. An
axis of a stage's mesh carries data or tensor parallelism in dense operators and expert, expert
tensor or expert data parallelism in experts. Of all such plans that pass `Plan.check` and fit by
the planner's own memory law the one is taken that agrees with the most operator time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

from moemesh.config.cluster import Cluster
from moemesh.config.plan import Plan
from moemesh.config.sources import preset_names
from moemesh.config.toml import format_value
from moemesh.config.trainable import untrained_keys, untrained_model
from moemesh.planner.layout_sources import from_plan
from moemesh.planner.operators.strategies import RECOMPUTE, WHOLE
from moemesh.planner.plan_text import check_against
from moemesh.planner.shapes.load import Model
from moemesh.planner.stages.answer import ImpliedPlan, OperatorChoice
from moemesh.planner.timing.price import price

#: What an axis does to dense operators and to experts, by plan key ("" is expert data parallelism).
_DENSE = {"dp": "batch", "cp": "sequence", "tp": ""}
_EXPERTS = {"ep": "experts", "etp": "expert_width", "": ""}
#: The dims that tensor parallelism cuts, by operator; all others are cut along the sequence.
_TENSOR = {
    **dict.fromkeys(("qkv", "attention core", "output"), "heads"),
    **dict.fromkeys(("up", "activation", "down"), "width"),
    **dict.fromkeys(("shared up", "shared activation", "shared down"), "shared_width"),
    **dict.fromkeys(("embedding", "logits", "loss"), "vocabulary"),
}
#: Operators that `recompute = "selective"` computes again.
_SELECTIVE = ("attention core", "activation", "shared activation", "expert activation")
_RECOMPUTES = ("none", "selective", "full")


def imply(
    model: Model,
    source: str,
    cluster: Cluster,
    *,
    seq_len: int,
    global_batch: int,
    microbatches: int,
    schedule: str,
    layers_per_stage: Sequence[int],
    mesh: Mapping[str, int],
    operators: Sequence[OperatorChoice],
) -> ImpliedPlan | None:
    """The plan nearest to `operators` that fits; None if none is legal.

    Where none fits, the one that needs the least memory, marked as such. Of a model that
    `moemesh train` trains only plans that it carries out are considered.
    """
    best: ImpliedPlan | None = None
    trained = model.config is not None and not untrained_model(model.config)
    for agreement, differing, keys in _ranked(mesh, operators, model.shape.is_moe):
        plan = Plan.model_validate({
            "pp": len(layers_per_stage),
            "microbatches": microbatches,
            "schedule": schedule,
            "layers_per_stage": tuple(layers_per_stage) if len(layers_per_stage) > 1 else None,
            **keys,
        })  # fmt: skip
        problems = plan.check(model.config, seq_len=seq_len, global_batch=global_batch)
        if problems or (trained and untrained_keys(plan.model_dump())):
            continue
        layout = from_plan(plan, model.config, seq_len=seq_len, global_batch=global_batch)
        if check_against(model.shape, layout):
            continue
        memory, usable, seconds = price(model.shape, layout, cluster)
        found = ImpliedPlan(
            plan=plan,
            agreement=agreement,
            differing=differing,
            seconds=seconds["total"],
            memory_bytes=memory.needed,
            fits=memory.fits(cluster.memory_bytes, usable),
        )
        if found.fits or best is None or found.memory_bytes < best.memory_bytes:
            best = found
        if found.fits:
            break
    if best is None or not best.fits:
        return best
    refused = ["a model of another library's file"] if model.config is None else []
    refused += untrained_model(model.config) if model.config else []
    refused += untrained_keys(best.plan.model_dump())
    command = "" if refused else train_command(model, source, best, seq_len, global_batch)
    return replace(best, command=command, not_trained=tuple(refused))


def train_command(
    model: Model, source: str, implied: ImpliedPlan, seq_len: int, global_batch: int
) -> str:
    """The `moemesh train` call of a plan; "" where the model's source is no configuration."""
    if model.config is None:
        return ""
    words = ["moemesh train"]
    if source in preset_names():
        words.append(f"--set model.preset={source}")
    elif Path(source).suffix == ".toml":
        words.append(source)
    else:
        return ""
    for key, value in implied.keys().items():
        text = value if isinstance(value, str) else format_value(value).replace(" ", "")
        words.append(f"--set plan.{key}={text}")
    words += [f"--set data.seq_len={seq_len}", f"--set data.global_batch={global_batch}"]
    return " ".join([*words, "--set train.dtype=bfloat16"])


def _ranked(
    mesh: Mapping[str, int], operators: Sequence[OperatorChoice], is_moe: bool
) -> list[tuple[float, tuple[str, ...], dict[str, object]]]:
    """(share of operator time that agrees, operators that differ, keys of the plan), best first."""
    timed = [operator for operator in operators if operator.seconds > 0]
    total = sum(operator.count * operator.seconds for operator in timed)
    found: list[tuple[float, tuple[str, ...], dict[str, object]]] = []
    for dense in product(_DENSE, repeat=len(mesh)):
        for experts in product(_EXPERTS if is_moe else ("",), repeat=len(mesh)):
            for recompute in _RECOMPUTES:
                keys: dict[str, object] = {"recompute": recompute}
                for names, legal in ((dense, _DENSE), (experts, _EXPERTS)):
                    for key in filter(None, legal):
                        sizes = zip(names, mesh.values(), strict=True)
                        keys[key] = prod(size for name, size in sizes if name == key)
                agreed, differing = 0.0, dict[str, None]()
                for operator in timed:
                    layout = _wanted(operator.operator, mesh, dense, experts)
                    as_planned = operator.strategy.removesuffix(RECOMPUTE) == layout
                    again = operator.strategy.endswith(RECOMPUTE)
                    as_kept = again == _recomputed(operator.operator, recompute)
                    agreed += operator.count * operator.seconds * (as_planned + as_kept) / 2
                    if not as_planned:
                        differing[f"{operator.group}: {operator.operator}"] = None
                found.append((agreed / (total or 1.0), tuple(differing), keys))
    return sorted(found, key=lambda item: -item[0])


def _wanted(
    operator: str, mesh: Mapping[str, int], dense: Sequence[str], experts: Sequence[str]
) -> str:
    """The name of the strategy that a plan carries out."""
    ways: list[str] = []
    for (axis, size), role, expert_role in zip(mesh.items(), dense, experts, strict=True):
        tokens = _DENSE[role] or "sequence"
        if operator.startswith("expert "):
            way = _EXPERTS[expert_role] or tokens
        else:
            way = _DENSE[role] or _TENSOR.get(operator, tokens)
        ways += [f"{axis}={way}"] * (size > 1)
    return ",".join(ways) or WHOLE


def _recomputed(operator: str, recompute: str) -> bool:
    return recompute == "full" or (recompute == "selective" and operator in _SELECTIVE)
