"""Arguments of a `MoELayer`, checked: sizes, options of routing, names of choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from moemesh.config import experts as keys
from moemesh.config.load import load_run
from moemesh.config.model import ModelConfig
from moemesh.config.suggest import nearest_choice
from moemesh.config.toml import format_value
from moemesh.parallel.expert.spread import LayerError


class RoutingOptions(TypedDict, total=False):
    """Keys of :class:`~moemesh.config.model.ModelConfig` that a layer takes, with its defaults
    (but for ``num_shared_experts``, which is 0)."""

    num_shared_experts: int
    shared_intermediate_size: int
    shared_combine: keys.SharedCombine
    shared_gate: bool
    expert_bias: bool
    swiglu_limit: float
    swiglu_alpha: float
    swiglu_offset: float
    init_std: float
    router_score: keys.RouterScore
    router_when: keys.RouterWhen
    router_selection: keys.RouterSelection
    router_logit_bias: bool
    router_dtype: keys.RouterDtype
    router_jitter: float
    router_selection_bias: bool
    router_bias_rate: float
    router_groups: int
    router_groups_kept: int
    router_group_score: keys.GroupScore
    router_normalize: bool
    router_normalize_eps: float
    router_normalize_min: float
    router_scale: float
    router_scale_on: keys.RouterScaleOn
    capacity_factor: float
    capacity_policy: keys.CapacityPolicy
    capacity_renormalize: bool
    aux_loss_scope: keys.AuxLossScope
    aux_loss_coefficient: float
    z_loss_coefficient: float


def model_config(
    hidden_size: int, expert_size: int, num_experts: int, top_k: int, options: Mapping[str, Any]
) -> ModelConfig:
    """The options as a checked ModelConfig."""
    known = RoutingOptions.__annotations__
    for name in options.keys() - known.keys():
        raise TypeError(f"MoELayer has no option {name!r}: {nearest_choice(name, sorted(known))}")
    numbers = {
        "hidden_size": hidden_size,
        "expert_size": expert_size,
        "num_experts": num_experts,
        "top_k": top_k,
    }
    for name, number in numbers.items():
        check_count(name, number)
    if top_k > num_experts:
        raise LayerError(
            f"top_k ({top_k}) exceeds num_experts ({num_experts}): top_k = 1 to {num_experts}"
        )
    values = {
        "hidden_size": hidden_size,
        "expert_intermediate_size": expert_size,
        "num_experts": num_experts,
        "experts_per_token": top_k,
        "num_shared_experts": 0,
        **options,
    }
    overrides = [f"model.{name}={format_value(value)}" for name, value in values.items()]
    return load_run([], overrides, environ={}).config.model


def check_count(name: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise LayerError(f"{name} must be an integer of at least 1, not {number!r}")


def check_choice(name: str, choice: str, choices: tuple[str, ...]) -> None:
    if choice not in choices:
        raise LayerError(f"{name} cannot be {choice!r}: {nearest_choice(str(choice), choices)}")
