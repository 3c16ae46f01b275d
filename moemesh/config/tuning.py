"""Trainable parameters: patterns over the names that checkpoints use, and chosen experts.

A name is that of a tensor in a checkpoint, without the prefix ``model.``: each expert has one
(``layers.3.feed_forward.experts.12.gate_up``), as have the routers' selection biases. Patterns are
those of :mod:`fnmatch`: ``*`` matches any characters, dots included.

| train_only | freeze | a parameter trains when its name |
|---|---|---|
| none | none | is any |
| none | given | matches no pattern of `freeze` |
| given | none | matches a pattern of `train_only` |
| given | given | matches one of `train_only` and none of `freeze` |

With a table of experts (:mod:`moemesh.config.esft_table`), the experts of the table and parameters
that match `train_only` train, except those that match `freeze`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from re import compile as compile_pattern


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The choice of parameters that train; see the table above. By default all do."""

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
        if self.freeze and matcher(self.freeze)(name):
            return False
        if self.experts and (match := _EXPERT.match(name)):
            layer, expert = map(int, match.groups())
            if expert in _table(self.experts).get(layer, ()):
                return True
        if self.train_only:
            return bool(matcher(self.train_only)(name))
        return not self.experts

    def rows(self, name: str, num_experts: int = 0) -> tuple[int, ...]:
        """The experts that train in the stack `name` of `num_experts`; for any other parameter
        (`num_experts` 0): (0,) if it trains, else ()."""
        return _rows(self, name, num_experts)

    def chosen(self, stacks: Iterable[str], num_experts: int) -> tuple[int, ...] | None:
        """Experts of a layer with these `stacks` that train; None if none or all do."""
        experts = {expert for stack in stacks for expert in self.rows(stack, num_experts)}
        return tuple(sorted(experts)) if 0 < len(experts) < num_experts else None


#: (layer, expert) of a name, ours or that of a model of transformers.
_EXPERT = compile_pattern(r"(?:.*\.)?layers\.(\d+)\.(?:\w+\.)*?experts\.(\d+)\.")
#: Ends of the names of the stacks of routed experts in our own models.
STACKS = ("gate_up", "down", "gate_up_bias", "down_bias")
#: The choice of all parameters.
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
def matcher(patterns: tuple[str, ...]) -> Callable[[str], object]:
    """A function that matches a whole name with any of the patterns."""
    return compile_pattern("|".join(f"(?:{translate(pattern)})" for pattern in patterns)).match
