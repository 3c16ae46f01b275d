"""The keys that exist: the sections, their fields, and the two keys that choose a model."""

from __future__ import annotations

from moemesh.config.data import DataConfig
from moemesh.config.lora import LoraConfig
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.section import Section
from moemesh.config.train import TrainConfig

SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "plan": Plan,
    "data": DataConfig,
    "train": TrainConfig,
    "lora": LoraConfig,
}

#: Keys of [model] that name where its fields come from; they are no fields of ModelConfig.
PRESET_KEY = "model.preset"
PATH_KEY = "model.path"


def keys_of(section: str) -> tuple[str, ...]:
    """The keys of one section, without its name."""
    fields = tuple(SECTIONS[section].model_fields)
    return ("preset", "path", *fields) if section == "model" else fields


def sections_with(leaf: str) -> tuple[str, ...]:
    """The sections that have a key of this name."""
    return tuple(section for section in SECTIONS if leaf in keys_of(section))


def all_keys() -> tuple[str, ...]:
    """Every dotted key, in the order of sections and fields."""
    return tuple(f"{section}.{name}" for section in SECTIONS for name in keys_of(section))
