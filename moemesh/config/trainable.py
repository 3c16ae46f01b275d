"""What this version trains of what it can plan: values of plan keys, kinds of models."""

from __future__ import annotations

from collections.abc import Mapping

from moemesh.config.model import ModelConfig

#: Values of plan keys that `moemesh train` carries out; the others are planned, not trained.
TRAINABLE: dict[str, tuple[object, ...]] = {
    "cp": (1,),
    "data": ("replicate",),
}


def untrained_keys(plan: Mapping[str, object]) -> list[str]:
    """``key = value`` of each value of `plan` (some or all of its keys) that is not trained."""
    return [
        f"{key} = {plan[key]}"
        for key, values in TRAINABLE.items()
        if key in plan and plan[key] not in values
    ]


def untrained_model(model: ModelConfig) -> list[str]:
    """The same of a model's keys."""
    found: list[str] = []
    if model.attention != "gqa":
        found.append(f"attention = {model.attention}")
    if model.num_mtp_layers:
        found.append(f"num_mtp_layers = {model.num_mtp_layers}")
    return found
