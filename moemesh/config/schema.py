"""The keys of the configuration, and suggestions for unknown ones."""

from __future__ import annotations

from collections.abc import Iterable

from moemesh.config.data import DataConfig
from moemesh.config.lora import LoraConfig
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.section import Section
from moemesh.config.suggest import (
    alias_hint,
    aliases,
    close_names,
    same_words,
    spelled_hint,
)
from moemesh.config.train import TrainConfig

SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "plan": Plan,
    "data": DataConfig,
    "train": TrainConfig,
    "lora": LoraConfig,
}

#: Top-level key for the version of a file's keys; by default the current one.
SCHEMA_KEY = "schema_version"
SCHEMA_VERSION = 1
#: Keys of [model] that name the source of its fields; they are not fields of ModelConfig.
PRESET_KEY = "model.preset"
PATH_KEY = "model.path"
#: Largest number of keys of a section that a message lists.
_MOST_LISTED = 20
#: Largest number of keys with all words of an unknown key that a message lists.
_MOST_PARTS = 3


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


def explain_unknown_key(key: str) -> tuple[str, str]:
    """(fault, suggestion) for a dotted key that no section has. The suggestion is the first of: our
    name for a key of another trainer, a key of the section that differs by a letter or two, the
    same key in another section, a key with a weaker resemblance."""
    section, _, leaf = key.rpartition(".")
    # Other trainers have a switch in a section of theirs ("moe.enabled"): look up the section.
    if section and section not in SECTIONS and leaf in ("enable", "enabled"):
        return explain_unknown_key(section)
    if not section and (close := close_names(leaf, SECTIONS)) and not alias_hint(leaf):
        return f"no section is named [{leaf}]", f"did you mean [{close[0]}]?"
    elsewhere = [f"{name}.{leaf}" for name in sections_with(leaf)]
    siblings = keys_of(section) if section in SECTIONS else ()
    words = set(leaf.split("_"))
    wider = [name for name in siblings if words.issubset(name.split("_"))][:_MOST_PARTS]
    if fix := alias_hint(key):
        pass
    elif near := [
        *close_names(leaf, siblings),
        *(wider if "_" in leaf and not elsewhere else ()),
    ]:
        fix = _did_you_mean(f"{section}.{name}" for name in near)
    elif elsewhere:
        homes = " and ".join(f"[{name}]" for name in sections_with(leaf))
        fix = f"`{leaf}` belongs to {homes}: {' or '.join(elsewhere)}"
    else:
        fix = spelled_hint(leaf) or _did_you_mean(resembling_keys(leaf))
    if section and section not in SECTIONS:
        if section in all_keys():
            return f"{section} is a value and has no keys", f"did you mean {section}?"
        fix = fix or _did_you_mean(f"[{name}]" for name in close_names(section, SECTIONS))
        fix = fix or alias_hint(section)
        return f"no section is named [{section}]", fix or f"sections: {', '.join(SECTIONS)}"
    message = f"[{section}] has no key `{leaf}`" if section else f"`{leaf}` is in no section"
    if not siblings:
        return message, fix or f"sections: {', '.join(SECTIONS)}"
    fix = fix or _did_you_mean(f"{section}.{name}" for name in wider)
    every = f"keys of [{section}]: {', '.join(siblings)}"
    if len(siblings) > _MOST_LISTED:
        every = f"none of its keys resembles it; `moemesh config show` lists all of [{section}]"
    return message, fix or every


def resembling_keys(leaf: str) -> list[str]:
    """Keys of any section that resemble `leaf`; if there are none, our keys for keys of other
    trainers that resemble it."""
    every = {name: f"{section}.{name}" for section in SECTIONS for name in keys_of(section)}
    if near := [*same_words(leaf, every), *close_names(leaf, every)]:
        return [every[name] for name in near]
    return [aliases()[name] for name in close_names(leaf, aliases())]


def _did_you_mean(names: Iterable[str]) -> str:
    listed = list(dict.fromkeys(names))
    return f"did you mean {' or '.join(listed)}?" if listed else ""
