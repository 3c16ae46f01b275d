"""Trainable parameters: patterns over the names that checkpoints use, and chosen experts.

A name is that of a tensor in a checkpoint, without ``model.`` in front: every expert by itself
(``layers.3.feed_forward.experts.12.gate_up``), and the routers' selection biases, too. Patterns are
those of :mod:`fnmatch`: ``*`` stands for any characters, dots included.

| train_only | freeze | a parameter trains when its name |
|---|---|---|
| none | none | is any |
| none | given | matches no pattern of `freeze` |
| given | none | matches a pattern of `train_only` |
| given | given | matches one of `train_only` and none of `freeze` |

With a table of experts (:mod:`moemesh.config.esft_table`) those of the table train, besides what
matches `train_only`; not what matches `freeze`.

The units of the model, in the order of its forward, are the embedding, the layers, the head with
its norms, and extra prediction layers. The backward ends at the first unit in which anything trains
(:func:`first_unit`): those before it keep nothing, compute no gradient and send none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import translate
from functools import lru_cache
from math import prod
from re import compile as compile_pattern
from re import sub

from moemesh.config.buckets import unit_of
from moemesh.config.errors import Problem
from moemesh.config.layout import shard_range
from moemesh.config.lora import is_adapter
from moemesh.config.model import ModelConfig
from moemesh.config.parameters import ParameterTensor, tensors
from moemesh.config.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The choice of what trains; see the table above. By default everything does."""

    freeze: tuple[str, ...] = ()
    train_only: tuple[str, ...] = ()
    #: (layer, experts of it that train), from a table.
    experts: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def is_full(self) -> bool:
        """Whether everything trains."""
        return not (self.freeze or self.train_only or self.experts)

    def trains(self, name: str) -> bool:
        """Whether the parameter (or bias of a router) of that name in checkpoints trains."""
        if self.freeze and _matcher(self.freeze)(name):
            return False
        if self.experts and self._is_in_table(name):
            return True
        if self.train_only:
            return bool(_matcher(self.train_only)(name))
        return not self.experts

    def _is_in_table(self, name: str) -> bool:
        found = _EXPERT.match(name)
        return found is not None and int(found[2]) in _table(self.experts).get(int(found[1]), ())

    def rows(self, name: str, num_experts: int = 0) -> tuple[int, ...]:
        """The experts that train of the stack `name` of `num_experts`; of a parameter that is no
        stack (0): (0,) where it trains, else ()."""
        return _rows(self, name, num_experts)

    def trains_any(self, tensor: ParameterTensor) -> bool:
        """Whether the parameter trains, or any expert of the stack."""
        return bool(self.rows(tensor.name, tensor.shape[0] if tensor.is_expert else 0))

    def chosen(self, layer: int, num_experts: int) -> tuple[int, ...] | None:
        """The experts of a layer of which any weight trains, where that is not none or all."""
        module = f"layers.{layer}.feed_forward.experts"
        found = {expert for leaf in STACKS for expert in self.rows(f"{module}.{leaf}", num_experts)}
        return tuple(sorted(found)) if 0 < len(found) < num_experts else None


#: (layer, expert) of a name.
_EXPERT = compile_pattern(r"layers\.(\d+)\.feed_forward\.experts\.(\d+)\.")
#: The weights of routed experts.
STACKS = ("gate_up", "down", "gate_up_bias", "down_bias")
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


@lru_cache(maxsize=16)
def _table(experts: tuple[tuple[int, tuple[int, ...]], ...]) -> dict[int, frozenset[int]]:
    return {layer: frozenset(chosen) for layer, chosen in experts}


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


def places(chosen: Sequence[int], num_experts: int, ep: int) -> list[tuple[list[int], list[int]]]:
    """Of every rank of ep, in the order of its places: its experts of `chosen`, and its others."""
    found: list[tuple[list[int], list[int]]] = []
    for index in range(ep):
        own = shard_range(num_experts, ep, index)
        mine = [expert for expert in own if expert in chosen]
        found.append((mine, [expert for expert in own if expert not in chosen]))
    return found


def tuned_tensors(model: ModelConfig, plan: Plan, tuning: Tuning) -> Iterator[ParameterTensor]:
    """The parameters of the whole model, in the order of its list, with what trains.

    Where some experts of a layer train, they are stacks of their own, and the others are stacks
    below ``rest``, behind them.
    """
    behind: list[ParameterTensor] = []
    for tensor in tensors(model, plan):
        module, _, leaf = tensor.name.rpartition(".")
        if behind and not tensor.name.startswith(behind[0].name.partition("rest.")[0]):
            yield from behind
            behind = []
        chosen = None
        if tensor.is_expert and leaf in STACKS:
            chosen = tuning.chosen(int(module.split(".")[1]), tensor.shape[0])
        if chosen is None:
            yield replace(tensor, trains=tuning.trains_any(tensor))
            continue
        shares = places(chosen, tensor.shape[0], plan.ep)
        counts = [tuple(len(part[i]) for part in shares) for i in range(2)]
        rest = f"{module}.rest.{leaf}"
        shapes = [(sum(one), *tensor.shape[1:]) for one in counts]
        yield replace(tensor, shape=shapes[0], per_rank=counts[0], trains=tuning.trains_any(tensor))
        behind.append(replace(tensor, name=rest, shape=shapes[1], per_rank=counts[1], trains=False))
    yield from behind


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
    weights of a layer's experts that train of different ones."""
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
    key = "freeze" if tuning.freeze else "train_only" if tuning.train_only else "esft"
    every = list(tensors(model, plan))
    if not any(map(tuning.trains_any, every)):
        message = f"none of the {len(every)} parameter tensors is left to train"
        return [_problem(key, getattr(tuning, key, None), message, f"choose fewer in train.{key}")]
    for message, fix in _uneven(tuning, every):
        return [_problem(key, getattr(tuning, key, None), message, fix, code="not-available")]
    return []


def _uneven(tuning: Tuning, every: Iterable[ParameterTensor]) -> Iterator[tuple[str, str]]:
    """(what is wrong, a fix) of choices of experts that have no stack of their own."""
    known: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensor in every:
        if not tensor.is_expert:
            continue
        rows, size = tuning.rows(tensor.name, tensor.shape[0]), tensor.shape[0]
        module, _, leaf = tensor.name.rpartition(".")
        if is_adapter(tensor.name) and 0 < len(rows) < size:
            yield (
                f"{len(rows)} of the {size} adapters of {tensor.name} would train",
                "choose the adapters of all experts, or of none",
            )
        elif rows and not is_adapter(tensor.name):
            other, before = known.setdefault(module, (leaf, rows))
            if rows != before:
                yield (
                    f"{len(before)} of the {size} experts of {module} would train their {other}, "
                    f"{len(rows)} their {leaf}: the weights of a layer's experts train of the same "
                    "ones, or of none",
                    f"a pattern like {module}.{rows[0]}.*",
                )


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
    return _problem(key, (pattern,), message, f"names like it: {shown}", code="no-match")


def _problem(key: str, value: object, message: str, fix: str, code: str = "conflict") -> Problem:
    return Problem.of(code, f"train.{key}", value, message, fix)
