"""The shape of a model that only its modelling code describes, from counts taken in that code.

Sizes are those of the attention layers with the highest cost per key; layers whose cost per key is
much smaller have a window of one token. Parameters, FLOPs and kept bytes of a layer are the means
of counts over the layers with experts, or without.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from moemesh.config.architecture import Architecture
from moemesh.config.errors import ConfigError
from moemesh.config.huggingface.architecture import hub_values, read_refused
from moemesh.config.lora import NO_ADAPTERS
from moemesh.config.model import ModelConfig
from moemesh.config.suggest import divisors
from moemesh.planner.shapes.shape import Counted, ModelShape, from_huggingface, from_model_config

#: Head size, in channels, of a model whose configuration lacks it.
_HEAD = 128
#: Share of the costliest layer's cost per key below which a layer is linear in the length.
_LINEAR = 0.05


def counted_shape(architecture: Architecture, name: str) -> ModelShape:
    """The shape of a model of transformers, exact in its parameters."""
    costs, values = architecture.costs, architecture.values
    text: dict[str, Any] = {**values, **dict(values.get("text_config") or {})}
    architecture = architecture.with_adapters(NO_ADAPTERS)
    per_key: Sequence[float] = costs["flops_per_key"]
    head = text.get("head_dim") if isinstance(text.get("head_dim"), int) else _HEAD
    # QK^T and PV are 4 FLOPs for each channel of a head and key.
    heads = max(1, round(max(per_key) / (4 * (head or _HEAD))))
    configured = text.get("num_key_value_heads")
    wanted_kv_heads = configured if isinstance(configured, int) else heads
    window = text.get("sliding_window")
    kinds = text.get("layer_types") or [""] * architecture.num_layers
    windowed = ["sliding" in str(kind) and isinstance(window, int) for kind in kinds]
    is_gated = any(
        "gate" in parameter.name.rpartition(".")[2]
        for parameter in architecture.parameters
        if parameter.is_expert
    )
    shape = ModelShape(
        name=name,
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        vocab_size=architecture.vocab_size,
        num_heads=heads,
        num_kv_heads=min(divisors(heads), key=lambda number: abs(number - wanted_kv_heads)),
        head_dim=head or _HEAD,
        intermediate_size=architecture.expert_width,
        activation="swiglu" if is_gated else "gelu",
        windows=tuple(
            1 if cost < _LINEAR * max(per_key) else window if is_windowed else 0
            for cost, is_windowed in zip(per_key, windowed, strict=True)
        ),
        moe_layers=architecture.routed_layers,
        num_experts=architecture.num_experts,
        experts_per_token=architecture.experts_per_token,
        expert_intermediate_size=architecture.expert_width,
        tied_embeddings=architecture.tied_embeddings,
        notes=(
            f"{architecture.model_type}: parameters and FLOPs are counted in the code of "
            f"transformers {architecture.transformers}; seconds take its mixers for products",
        ),
    )
    return shape.changed(counted=_counted(shape, architecture))


def shape_of(config: ModelConfig, name: str = "model") -> ModelShape:
    """The shape of a model that `moemesh train` builds, from our code or from transformers'."""
    if config.architecture is not None:
        return counted_shape(config.architecture, name)
    return from_model_config(config, name)


def shape_of_folder(values: dict[str, Any], name: str) -> tuple[ModelShape, ModelConfig | None]:
    """The shape of a parsed ``config.json``: from our formulas, else counted in the code of
    transformers, with the configuration that trains the counted model.

    Raises ConfigError with the formulas' problems if transformers does not have the model either.
    """
    try:
        return from_huggingface(values, name), None
    except ConfigError as error:
        architecture = read_refused(values, error)
    config = ModelConfig(**hub_values(architecture)).with_architecture(architecture)  # type: ignore[arg-type]
    return counted_shape(architecture, name), config


def _counted(shape: ModelShape, architecture: Architecture) -> tuple[Counted, Counted, Counted]:
    """The field `counted` of a shape."""
    costs = architecture.costs
    # Parameters per layer, outside of and in routed experts; and parameters outside of layers.
    weights, experts = [0] * shape.num_layers, [0] * shape.num_layers
    rest = 0
    for parameter in architecture.parameters:
        kind, _, index = parameter.unit.partition(".")
        rest += prod(parameter.shape)
        if kind == "layers":
            (experts if parameter.is_expert else weights)[int(index)] += prod(parameter.shape)

    def mean(moe: bool) -> Counted:
        """Means over the layers with experts, or without."""
        layers = [index for index, kind in enumerate(shape.kinds) if kind.moe == moe]
        columns = (weights, experts, costs["flops"], costs["kept_bytes"])
        count = max(len(layers), 1)
        means = [sum(column[i] for i in layers) / count for column in columns]
        return Counted(*map(round, means[:2]), *means[2:])

    dense, moe = mean(False), mean(True)
    for kind in shape.kinds:
        rest -= round(sum((moe if kind.moe else dense)[:2]))
    # Parameters outside of layers, and the rounding errors of the means: the sum is exact.
    return dense, moe, Counted(weights=rest)
