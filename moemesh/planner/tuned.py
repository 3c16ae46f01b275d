"""Runs in which some weights do not train: the settings that say so, and the shares that do."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from moemesh.config.errors import ConfigError, Problem
from moemesh.config.load import load_run
from moemesh.config.lora import is_adapter
from moemesh.config.parameters import tensors
from moemesh.config.plan import Plan
from moemesh.config.run import RunConfig

#: What may be set beside a plan: what trains.
KEYS = ("lora.", "train.freeze", "train.train_only", "train.esft")


class Tuned(NamedTuple):
    """A run's choice of what trains: `settings` as ``--set`` takes them, the `config` that they
    make with the model, and `layout`, the fields of a PlannedLayout that say it."""

    settings: tuple[str, ...]
    config: RunConfig
    layout: dict[str, float | bool]


def read_tuned(model_words: Sequence[str], settings: Sequence[str]) -> Tuned:
    """The choice that `settings` ("lora.rank=8") make for the model that `model_words` name
    ("model.preset=tiny"). Raises ConfigError with every problem found."""
    for setting in settings:
        key = setting.partition("=")[0].strip()
        if not key.startswith(KEYS):
            message = "a search takes from --set what trains, and chooses the rest itself"
            fix = "keys such as lora.rank, train.freeze or train.train_only"
            raise ConfigError([Problem.of("conflict", key, None, message, fix)])
    config = load_run([], [*model_words, *settings], environ={}).config
    return Tuned(tuple(settings), config, trained_shares(config))


def trained_shares(config: RunConfig) -> dict[str, float | bool]:
    """Whether adapters alone train in a run, and how many numbers train for each of the model's
    own, dense ones and those of experts."""
    tuning = config.tuning
    if tuning.is_full:
        return {}
    own, trained = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    only_adapters = True
    for tensor in tensors(config.model, Plan()):
        experts = tensor.shape[0] if tensor.is_expert else 0
        share = len(tuning.rows(tensor.name, experts)) / (experts or 1)
        numbers, is_new = prod(tensor.shape), is_adapter(tensor.name)
        trained[tensor.is_expert] += share * numbers
        if not is_new:
            own[tensor.is_expert] += numbers
            only_adapters = only_adapters and not share
    return {
        "adapters": only_adapters and bool(config.lora.rank),
        "trained_dense": trained[False] / max(own[False], 1),
        "trained_experts": trained[True] / max(own[True], 1),
    }
