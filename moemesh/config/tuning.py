"""Which parameters train: patterns over the names that checkpoints use, and chosen experts.

A name is that of a tensor in a checkpoint, without ``model.`` in front: every expert by itself
(``layers.3.feed_forward.experts.12.gate_up``), and the routers' selection biases, too. Patterns are
those of :mod:`fnmatch`: ``*`` stands for any characters, dots included.

| train_only | freeze | a parameter trains when its name |
|---|---|---|
| none | none | is any |
| none | given | matches no pattern of `freeze` |
| given | none | matches a pattern of `train_only` |
| given | given | matches one of `train_only` and none of `freeze` |

The units of the model, in the order of its forward, are the embedding, the layers, the head with
its norms, and extra prediction layers. The backward ends at the first unit in which anything trains
(:func:`first_unit`): those before it keep nothing, compute no gradient and send none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import translate
from functools import lru_cache
from math import prod
from re import compile as compile_pattern
from re import sub

from moemesh.config.buckets import unit_of
from moemesh.config.errors import Problem
from moemesh.config.model import ModelConfig
from moemesh.config.parameters import ParameterTensor, tensors
from moemesh.config.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The choice of what trains; see the table above. By default everything does."""

    freeze: tuple[str, ...] = ()
    train_only: tuple[str, ...] = ()

    @property
    def is_full(self) -> bool:
        """Whether everything trains."""
        return not (self.freeze or self.train_only)

    def trains(self, name: str) -> bool:
        """Whether the parameter (or bias of a router) of that name in checkpoints trains."""
        if self.train_only and not _matcher(self.train_only)(name):
            return False
        return not (self.freeze and _matcher(self.freeze)(name))

    def rows(self, name: str, num_experts: int = 0) -> tuple[int, ...]:
        """The experts that train of the stack `name` of `num_experts`; of a parameter that is no
        stack (0): (0,) where it trains, else ()."""
        return _rows(self, name, num_experts)

    def trains_any(self, tensor: ParameterTensor) -> bool:
        """Whether the parameter trains, or any expert of the stack."""
        return bool(self.rows(tensor.name, tensor.shape[0] if tensor.is_expert else 0))


#: Everything trains.
FULL = Tuning()


@lru_cache(maxsize=1 << 16)
def _rows(tuning: Tuning, name: str, num_experts: int) -> tuple[int, ...]:
    if not num_experts:
        return (0,) if tuning.trains(name) else ()
    if tuning.is_full:
        return tuple(range(num_experts))
    module, _, leaf = name.rpartition(".")
    return tuple(i for i in range(num_experts) if tuning.trains(f"{module}.{i}.{leaf}"))


@lru_cache(maxsize=256)
def _matcher(patterns: tuple[str, ...]) -> Callable[[str], object]:
    """Whether any of the patterns matches a name as a whole."""
    return compile_pattern("|".join(f"(?:{translate(one)})" for one in patterns)).match


def logical_names(model: ModelConfig, plan: Plan) -> Iterator[str]:
    """The names that patterns are matched with: of every parameter in a checkpoint, and of the
    routers' selection biases."""
    for tensor in tensors(model, plan):
        module, _, leaf = tensor.name.rpartition(".")
        if tensor.is_expert:
            yield from (f"{module}.{expert}.{leaf}" for expert in range(tensor.shape[0]))
            continue
        yield tensor.name
        if tensor.name.endswith(".router.weight") and model.router_selection_bias:
            yield f"{module}.selection_bias"


def units(model: ModelConfig) -> list[str]:
    """The units in the order of the forward, as :func:`moemesh.config.buckets.unit_of` names them;
    the head comes again behind each extra prediction layer."""
    layers = [f"layers.{index}" for index in range(model.num_layers)]
    return ["embedding", *layers, "head", *(f"layers.{index}" for index in model.mtp_layers)]


def units_without_backward(first: str, model: ModelConfig) -> frozenset[str]:
    """The units before `first`, at whose input the backward ends."""
    order = units(model)
    return frozenset(order[: order.index(first)])


def first_unit(tuning: Tuning, model: ModelConfig, plan: Plan) -> str:
    """The first unit in which any parameter trains; the last one where none does."""
    if tuning.is_full:
        return "embedding"
    found = {unit_of(tensor.name) for tensor in tensors(model, plan) if tuning.trains_any(tensor)}
    return next((unit for unit in units(model) if unit in found), units(model)[-1])


def first_stage(unit: str, layers: Sequence[range]) -> int:
    """The pipeline stage of a unit, of a model whose stages have these `layers`: the backward ends
    there."""
    last = len(layers) - 1
    if unit == "embedding":
        return 0
    if unit == "head":
        return last
    index = int(unit.partition(".")[2])
    return next((stage for stage, part in enumerate(layers) if index in part), last)


def tuning_problems(tuning: Tuning, model: ModelConfig, plan: Plan) -> list[Problem]:
    """Patterns that match nothing, with the nearest names; a choice that leaves nothing to train;
    some experts of a stack, which are not trained alone yet."""
    if tuning.is_full:
        return []
    names = list(logical_names(model, plan))
    found = [
        _unmatched(key, pattern, names)
        for key in ("freeze", "train_only")
        for pattern in getattr(tuning, key)
        if not any(map(_matcher((pattern,)), names))
    ]
    if found:
        return found
    key = "freeze" if tuning.freeze else "train_only"
    every = list(tensors(model, plan))
    if not any(map(tuning.trains_any, every)):
        message = f"none of the {len(every)} parameter tensors is left to train"
        return [_problem(key, getattr(tuning, key), message, f"choose fewer in train.{key}")]
    for tensor in every:
        experts = tensor.shape[0] if tensor.is_expert else 0
        if experts and 0 < (some := len(tuning.rows(tensor.name, experts))) < experts:
            message = f"{some} of the {experts} experts of {tensor.name} would train"
            fix = "patterns with experts.* choose all experts of a layer"
            return [_problem(key, getattr(tuning, key), message, fix, code="not-available")]
    return []


def num_trained(tuning: Tuning, model: ModelConfig, plan: Plan) -> int:
    """How many numbers train, of the whole model."""
    total = 0
    for tensor in tensors(model, plan):
        experts = tensor.shape[0] if tensor.is_expert else 0
        rows = len(tuning.rows(tensor.name, experts))
        total += prod(tensor.shape) * rows // (experts or 1)
    return total


def _unmatched(key: str, pattern: str, names: Sequence[str]) -> Problem:
    """A pattern that matches nothing; layers and experts count as alike for what is near to it."""
    kinds = list(dict.fromkeys(sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
    near = get_close_matches(sub(r"(?<=\.)\d+(?=\.)", "*", pattern), kinds, n=3, cutoff=0.3)
    message = f"the pattern {pattern!r} matches none of the {len(names)} parameters"
    shown = ", ".join(near or kinds[:3])
    return _problem(key, (pattern,), message, f"names like it: {shown}", code="unknown")


def _problem(key: str, value: object, message: str, fix: str, code: str = "conflict") -> Problem:
    return Problem(code=code, key=f"train.{key}", value=value, message=message, fix=fix)
