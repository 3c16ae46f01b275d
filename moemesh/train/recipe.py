"""The recipe of `moemesh convert --upcycle`: which experts a dense model gets."""

from __future__ import annotations

from typing import Any, NamedTuple

from moemesh.config.errors import ConfigError, Problem
from moemesh.config.suggest import nearest_choice


class UpcycleRecipe(NamedTuple):
    """What ``--upcycle`` says: `experts` in every `every`-th layer, of which a token takes `k`, and
    the numbers of :class:`moemesh.checkpoint.huggingface.upcycled.Upcycling`."""

    experts: int = 8
    k: int = 2
    every: int = 1
    noise: float = 0.0
    drop: float = 0.0
    seed: int = 0


def read_recipe(text: str) -> UpcycleRecipe:
    """From ``experts=8,k=2,noise=0.01``. Raises ConfigError for anything else."""
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in UpcycleRecipe._fields:
            fix = nearest_choice(key, UpcycleRecipe._fields)
            raise refused(text, f"there is no {key} in a recipe", fix)
        if key in values:
            raise refused(text, f"{key} is given twice", f"{key}={values[key]}")
        usual = UpcycleRecipe._field_defaults[key]
        kind = type(usual)
        try:
            values[key] = kind(value)
        except ValueError:
            wanted = "an integer" if kind is int else "a number"
            raise refused(
                text, f"{key} must be {wanted}, not {value!r}", f"{key}={usual}"
            ) from None
    recipe = UpcycleRecipe(**values)
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
            raise refused(text, f"{key} must be {range_}, not {value}", f"{key}={nearest}")
    return recipe


def refused(value: str, message: str, fix: str) -> ConfigError:
    """A recipe, or a model under it, that cannot be carried out."""
    return ConfigError(
        [Problem(code="conflict", key="--upcycle", value=value, message=message, fix=fix)]
    )
