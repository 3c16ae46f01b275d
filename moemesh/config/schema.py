"""The keys that exist, their names in other trainers, and what a wrong one was meant to be."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from moemesh.config.data import DataConfig
from moemesh.config.lora import LoraConfig
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.section import Section
from moemesh.config.suggest import close_names
from moemesh.config.train import TrainConfig

SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "plan": Plan,
    "data": DataConfig,
    "train": TrainConfig,
    "lora": LoraConfig,
}

#: The top-level key of a file that names the version of its keys; without it the file is read as
#: one of this version.
SCHEMA_KEY = "schema_version"
SCHEMA_VERSION = 1
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


@cache
def _alias_file() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("aliases.toml").read_text(encoding="utf-8"))


@cache
def aliases() -> dict[str, str]:
    """Name in another trainer or model file -> dotted key here."""
    return {
        name: f"{section}.{leaf}"
        for section in SECTIONS
        for leaf, names in _alias_file()[section].items()
        for name in names
    }


def hints() -> list[tuple[tuple[str, ...], str]]:
    """Names whose value means another thing here, or nothing, and what to write instead."""
    return [(tuple(entry["names"]), str(entry["hint"])) for entry in _alias_file()["other"]]


def alias_hint(name: str) -> str:
    """The fix for a name that other trainers use: its key here, or what there is in its place."""
    if name in aliases():
        return f"here it is called {aliases()[name]}"
    return next((hint for names, hint in hints() if name in names), "")


def explain_unknown_key(key: str) -> tuple[str, str]:
    """(what is wrong, what was probably meant) for a dotted key that no section has.

    Order: the same thing's name in another trainer, a sibling that differs by a letter or two, the
    same leaf in another section, then ever weaker resemblances.
    """
    section, _, leaf = key.rpartition(".")
    if not section and (close := close_names(leaf, SECTIONS, 0.6)) and not alias_hint(leaf):
        return f"there is no section [{leaf}]", f"did you mean [{close[0]}]?"
    elsewhere = [f"{name}.{leaf}" for name in sections_with(leaf)]
    siblings = keys_of(section) if section in SECTIONS else ()
    if fix := alias_hint(leaf):
        pass
    elif near := close_names(leaf, siblings, 0.8):
        fix = _did_you_mean(f"{section}.{name}" for name in near)
    elif elsewhere:
        homes = " and ".join(f"[{name}]" for name in sections_with(leaf))
        fix = f"`{leaf}` belongs to {homes}: {' or '.join(elsewhere)}"
    elif near := close_names(leaf, siblings, 0.45 if len(leaf) <= 4 else 0.6):
        fix = _did_you_mean(f"{section}.{name}" for name in near)
    else:
        fix = _did_you_mean(resembling_keys(leaf))
    if section and section not in SECTIONS:
        if section in all_keys():
            return f"{section} is a value and has no keys", f"did you mean {section}?"
        fix = fix or _did_you_mean(f"[{name}]" for name in close_names(section, SECTIONS, 0.6))
        return f"there is no section [{section}]", fix or f"sections: {', '.join(SECTIONS)}"
    message = f"[{section}] has no key `{leaf}`" if section else f"`{leaf}` stands in no section"
    known = f"keys of [{section}]: {', '.join(siblings)}" if siblings else ""
    return message, fix or known or f"sections: {', '.join(SECTIONS)}"


def resembling_keys(leaf: str) -> list[str]:
    """Keys of any section that resemble `leaf`, or else whose name in another trainer does."""
    every = {name: f"{section}.{name}" for section in SECTIONS for name in keys_of(section)}
    if near := close_names(leaf, every, 0.75):
        return [every[name] for name in near]
    return [aliases()[name] for name in close_names(leaf, aliases(), 0.85)]


def _did_you_mean(names: Iterable[str]) -> str:
    listed = list(dict.fromkeys(names))
    return f"did you mean {' or '.join(listed)}?" if listed else ""
