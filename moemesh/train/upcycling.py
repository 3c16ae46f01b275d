"""`moemesh convert --upcycle`: a dense folder of transformers becomes a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from moemesh.checkpoint.huggingface.convert import write_huggingface
from moemesh.checkpoint.huggingface.upcycled import UpcycledWeights, Upcycling
from moemesh.checkpoint.huggingface.write import carry_along
from moemesh.config.errors import ConfigError
from moemesh.config.huggingface.export import config_json, families_for, family_or_refusal
from moemesh.config.huggingface.folder import CONFIG, read_config
from moemesh.config.load import load_run
from moemesh.config.model import ModelConfig
from moemesh.train.conversion import Target, open_weights, write_run
from moemesh.train.recipe import UpcycleRecipe, refused


def upcycle(
    source: Path,
    out: Path,
    recipe: UpcycleRecipe,
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
        raise refused(str(source), f"{source} holds no {CONFIG}", "a dense folder of transformers")
    config = load_run([], [f"model.path={source.resolve()}"], {}).config
    dense, given = config.model, read_config(source)
    if dense.num_moe_layers:
        message = f"{source} has {dense.num_experts} experts already"
        raise refused(str(source), message, "a dense folder of transformers")
    model = upcycled_model(dense, recipe)
    kind = family_or_refusal(model) if to == "huggingface" else None
    wanted = dtype or str(given.get("dtype") or given.get("torch_dtype") or "float32")
    weights = UpcycledWeights(
        open_weights(config), model, Upcycling(recipe.noise, recipe.drop, recipe.seed)
    )
    if kind is None:
        train = config.train.model_copy(update={"dtype": wanted})
        write_run(weights, replace(config, model=model, train=train, model_path=None), out)
        return
    ids = {key: given[key] for key in given if key.endswith("_token_id")}
    values = {**config_json(model, kind, wanted), **ids}
    torch_dtype = getattr(torch, wanted)
    write_huggingface(weights, model, kind, out, values, dtype=torch_dtype, on_file=on_file)
    carry_along(source, out)


def upcycled_model(dense: ModelConfig, recipe: UpcycleRecipe) -> ModelConfig:
    """The mixture of experts; weights of the experts that a token takes sum to one. Raises
    ConfigError with every rule that it would break."""
    layers = range(recipe.every - 1, dense.num_layers, recipe.every)
    if not layers:
        message = f"every={recipe.every} leaves none of {dense.num_layers} layers"
        raise refused(f"every={recipe.every}", message, f"every={dense.num_layers}")
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
