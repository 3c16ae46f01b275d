"""Did you mean: the key or value that a wrong one was probably meant to be."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, get_args

from moemesh.config.migration import renamed
from moemesh.config.schema import SECTIONS, all_keys, keys_of, sections_with

#: Names of values in other trainers.
_VALUE_ALIASES = {"gpu": "cuda", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}

#: Choices beside the nearest one.
_MOST_LISTED = 40


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
    if not section and (close := _close(leaf, SECTIONS, 0.6)) and not alias_hint(leaf):
        return f"there is no section [{leaf}]", f"did you mean [{close[0]}]?"
    elsewhere = [f"{name}.{leaf}" for name in sections_with(leaf)]
    siblings = keys_of(section) if section in SECTIONS else ()
    if (now := renamed().get(key)) is not None:
        return f"{key} is {now} now", f"{now}; `moemesh config migrate FILE` renames it in a file"
    if fix := alias_hint(leaf):
        pass
    elif near := _close(leaf, siblings, 0.8):
        fix = _did_you_mean(f"{section}.{name}" for name in near)
    elif elsewhere:
        homes = " and ".join(f"[{name}]" for name in sections_with(leaf))
        fix = f"`{leaf}` belongs to {homes}: {' or '.join(elsewhere)}"
    elif near := _close(leaf, siblings, 0.45 if len(leaf) <= 4 else 0.6):
        fix = _did_you_mean(f"{section}.{name}" for name in near)
    else:
        fix = _did_you_mean(resembling_keys(leaf))
    if section and section not in SECTIONS:
        if section in all_keys():
            return f"{section} is a value and has no keys", f"did you mean {section}?"
        fix = fix or _did_you_mean(f"[{name}]" for name in _close(section, SECTIONS, 0.6))
        return f"there is no section [{section}]", fix or f"sections: {', '.join(SECTIONS)}"
    message = f"[{section}] has no key `{leaf}`" if section else f"`{leaf}` stands in no section"
    known = f"keys of [{section}]: {', '.join(siblings)}" if siblings else ""
    return message, fix or known or f"sections: {', '.join(SECTIONS)}"


def nearest_name(value: str, choices: Sequence[str]) -> str:
    """The name of a list that is probably meant, "" where none is near. Case and hyphens do not
    count as differences."""
    folded = value.strip().lower().replace("-", "_").replace(" ", "_")
    folded = _VALUE_ALIASES.get(folded, folded)
    return folded if folded in choices else next(iter(_close(folded, choices, 0.5)), "")


def nearest_choice(value: str, choices: Sequence[str]) -> str:
    """The fix for a value outside a list of names: the nearest one, then all of them, unless they
    are so many that they would hide it."""
    near, listed = nearest_name(value, choices), ", ".join(choices)
    if near and len(choices) > _MOST_LISTED:
        return f"did you mean {near}?"
    return f"did you mean {near}? (choices: {listed})" if near else f"choices: {listed}"


def choices_of(annotation: object) -> tuple[str, ...]:
    """The names that a Literal, or a union with one, allows; empty for any other type."""
    names: list[str] = []
    for choice in get_args(annotation):
        names += [choice] if isinstance(choice, str) else choices_of(choice)
    return tuple(names)


def _close(word: str, names: Iterable[str], cutoff: float) -> list[str]:
    """Up to three names like `word`, best first; the rest only when nearly as good as the best."""
    found = get_close_matches(word.lower().replace("-", "_"), list(names), n=3, cutoff=cutoff)
    if not found:
        return []
    scores = {name: SequenceMatcher(None, name, word).ratio() for name in found}
    best = max(scores.values())
    return [name for name in found if scores[name] > best - 0.05]


def resembling_keys(leaf: str) -> list[str]:
    """Keys of any section that resemble `leaf`, or else whose name in another trainer does."""
    every = {name: f"{section}.{name}" for section in SECTIONS for name in keys_of(section)}
    if near := _close(leaf, every, 0.75):
        return [every[name] for name in near]
    return [aliases()[name] for name in _close(leaf, aliases(), 0.85)]


def _did_you_mean(names: Iterable[str]) -> str:
    listed = list(dict.fromkeys(names))
    return f"did you mean {' or '.join(listed)}?" if listed else ""
