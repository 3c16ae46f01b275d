"""`moemesh convert --upcycle`: a dense folder of transformers becomes a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moemesh.checkpoint.huggingface.convert import write_checkpoint, write_huggingface
from moemesh.checkpoint.huggingface.upcycled import UpcycledWeights, Upcycling
from moemesh.checkpoint.huggingface.write import carry_along
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.huggingface.export import config_json, families_for, family_or_refusal
from moemesh.config.huggingface.folder import CONFIG, read_config
from moemesh.config.load import load_run, resolved_toml
from moemesh.config.model import ModelConfig
from moemesh.config.suggest import nearest_choice
from moemesh.train.conversion import Target, open_weights
from moemesh.train.folder import RunFolder


class Recipe(NamedTuple):
    """What ``--upcycle`` says: `experts` in every `every`-th layer, of which a token takes `k`, and
    the numbers of :class:`Upcycling`."""

    experts: int = 8
    k: int = 2
    every: int = 1
    noise: float = 0.0
    drop: float = 0.0
    seed: int = 0


def read_recipe(text: str) -> Recipe:
    """From ``experts=8,k=2,noise=0.01``. Raises ConfigError for anything else."""
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in Recipe._fields:
            fix = nearest_choice(key, Recipe._fields)
            raise _refused(text, f"there is no {key} in a recipe", fix)
        kind = type(Recipe._field_defaults[key])
        try:
            values[key] = kind(value)
        except ValueError:
            wanted = "an integer" if kind is int else "a number"
            raise _refused(text, f"{key} must be {wanted}, not {value!r}", f"{key}=1") from None
    recipe = Recipe(**values)
    for key, low, high in (
        ("experts", 2, None),
        ("k", 1, recipe.experts),
        ("every", 1, None),
        ("noise", 0, None),
        ("drop", 0, 1),
        ("seed", 0, None),
    ):
        value = getattr(recipe, key)
        if not (low <= value and (high is None or value <= high)):
            range_ = f"at least {low}" if high is None else f"from {low} to {high}"
            nearest = low if not low <= value else high
            raise _refused(text, f"{key} must be {range_}, not {value}", f"{key}={nearest}")
    return recipe


def upcycle(
    source: Path,
    out: Path,
    recipe: Recipe,
    to: Target = "huggingface",
    *,
    dtype: str | None = None,
    on_file: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the dense folder `source` as a mixture of experts: a folder of transformers of the
    family that computes it, or a run before its first step.

    Raises ConfigError for a model that has experts already, or that no family computes.
    """
    if not (source / CONFIG).exists():
        raise _refused(str(source), f"{source} holds no {CONFIG}", "a dense folder of transformers")
    config = load_run([], [f"model.path={source.resolve()}"], {}).config
    dense, given = config.model, read_config(source)
    if dense.num_moe_layers:
        message = f"{source} has {dense.num_experts} experts already"
        raise _refused(str(source), message, "a dense folder of transformers")
    model = upcycled_model(dense, recipe)
    kind = family_or_refusal(model) if to == "huggingface" else None
    wanted = dtype or str(given.get("dtype") or given.get("torch_dtype") or "float32")
    weights = UpcycledWeights(
        open_weights(config), model, Upcycling(recipe.noise, recipe.drop, recipe.seed)
    )
    if kind is None:
        kept = "float32" if wanted == "bfloat16" else wanted
        folder = RunFolder.open(out, "never")
        state: dict[str, Any] = {"step": 0, "position": 0, "moments": [], "updates": 0}
        write_checkpoint(weights, folder.checkpoints, state, getattr(torch, kept))
        train = config.train.model_copy(update={"dtype": wanted})
        made = replace(config, model=model, train=train, model_path=None)
        (out / "config.toml").write_text(resolved_toml(made), encoding="utf-8")
        return
    ids = {key: given[key] for key in given if key.endswith("_token_id")}
    carry_along(source, out)
    values = {**config_json(model, kind, wanted), **ids}
    torch_dtype = getattr(torch, wanted)
    write_huggingface(weights, model, kind, out, values, dtype=torch_dtype, on_file=on_file)


def upcycled_model(dense: ModelConfig, recipe: Recipe) -> ModelConfig:
    """The mixture of experts; weights of the experts that a token takes sum to one. Raises
    ConfigError with every rule that it would break."""
    layers = range(recipe.every - 1, dense.num_layers, recipe.every)
    if not layers:
        message = f"every={recipe.every} leaves none of {dense.num_layers} layers"
        raise _refused(f"every={recipe.every}", message, f"every={dense.num_layers}")
    values = {name: getattr(dense, name) for name in type(dense).model_fields}
    values |= {
        "num_experts": recipe.experts,
        "experts_per_token": recipe.k,
        "expert_intermediate_size": dense.intermediate_size,
        "first_dense_layers": 0 if recipe.every == 1 else ModelConfig().first_dense_layers,
        "moe_layers": None if recipe.every == 1 else tuple(layers),
        "num_shared_experts": 0,
        "router_score": "softmax",
    }
    # Two ways to say the same; families know one of them.
    models = [
        ModelConfig.model_validate({**values, "router_when": when, "router_normalize": normalizes})
        for when, normalizes in (("before", True), ("after", False))
    ]
    if problems := models[0].check():
        raise ConfigError(problems)
    return next((model for model in models if families_for(model)), models[0])


def _refused(value: str, message: str, fix: str) -> ConfigError:
    return ConfigError(
        [Problem(code="conflict", key="--upcycle", value=value, message=message, fix=fix)]
    )
