"""Keys of [model] that a user set beside ``model.path`` and that the weights there do not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from pydantic import ValidationError

from moemesh.config.errors import Problem
from moemesh.config.model import ModelConfig
from moemesh.config.parameters import tensors
from moemesh.config.plan import Plan
from moemesh.config.sources import ConfigSource, Leaf
from moemesh.config.toml import format_value

#: How many of the extra prediction layers of a folder are trained is the user's to say.
_FREE = frozenset({"num_mtp_layers"})


def contradictions(
    folder: ConfigSource, chosen: Mapping[str, Leaf], broken: Collection[str]
) -> Iterator[Problem]:
    """A problem for each key of `chosen` whose value gives the model other tensors than those of
    the `folder`. Keys that are `broken` are told already."""
    values = {
        key.removeprefix("model."): leaf.value
        for key, leaf in folder.leaves.items()
        if key.startswith("model.")
    }
    shapes = _shapes(values)
    if shapes is None:
        return
    for key, leaf in chosen.items():
        name = key.removeprefix("model.")
        if key in broken or name == key or name not in ModelConfig.model_fields or name in _FREE:
            continue
        found = _shapes({**values, name: leaf.value})
        if found is None or found == shapes:
            continue
        default = ModelConfig.model_fields[name].default
        there = values.get(name, default)
        origin = folder.leaves[key].origin if key in folder.leaves else "the default"
        yield Problem(
            code="conflict",
            key=key,
            value=leaf.value,
            origin=leaf.origin,
            message=f"the weights of model.path have {name} = {format_value(there)} ({origin}), "
            "and fit no other",
            fix=f"leave {key} out, or choose another folder",
        )


def _shapes(values: Mapping[str, object]) -> dict[str, tuple[int, ...]] | None:
    """Name -> shape of every parameter; None of values that make no model."""
    try:
        model = ModelConfig.model_validate(dict(values))
    except ValidationError:
        return None
    if model.check():
        return None
    found = {tensor.name: tensor.shape for tensor in tensors(model, Plan())}
    if model.router_selection_bias:
        found["selection_bias"] = (model.num_experts,)
    return found
