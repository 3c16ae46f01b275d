"""Suggestions for wrong values: keys for words of other trainers, similar names, paths, numbers."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import SequenceMatcher, get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, get_args
from urllib.parse import unquote

from moemesh.config.learning_rate import SCHEDULES
from moemesh.config.names import Names
from moemesh.config.optimizer_table import OPTIMIZERS

#: Largest number of choices that a message lists beside the nearest one.
_MOST_LISTED = 40
#: Keys whose names a hint lists, as {KEY}. The tables are read at every use: programs add rows.
_TABLES: dict[str, Mapping[str, object]] = {
    "train.optimizer": OPTIMIZERS,
    "train.lr_schedule": SCHEDULES,
}


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("aliases.toml").read_text(encoding="utf-8"))


@cache
def aliases() -> dict[str, str]:
    """Name in another trainer or model file -> dotted key of this package."""
    sections = {
        name: keys
        for name, keys in _table().items()
        if name not in ("other", "values", "spellings")
    }
    return {
        name: f"{section}.{leaf}"
        for section, keys in sections.items()
        for leaf, names in keys.items()
        for name in names
    }


def hints() -> list[tuple[tuple[str, ...], str]]:
    """(names of other trainers without a key here, or patterns of them; a sentence on the
    alternative)."""
    return [(tuple(entry["names"]), _with_names(entry["hint"])) for entry in _table()["other"]]


def _with_names(hint: str) -> str:
    """`hint` with the names of a table in place of its {KEY}."""
    for key, table in _TABLES.items():
        *names, last = table
        hint = hint.replace(f"{{{key}}}", f"{', '.join(names)} and {last}")
    return hint


def alias_hint(name: str) -> str:
    """The fix for a word of other trainers: our key for it, or an alternative; "" for other words.
    `name`: a key with or without section, an option ("--data"), or "key=value"."""
    return _with_names(_alias_hint(name))


@cache
def _alias_hint(name: str) -> str:
    name = name.lower() if name.startswith("--") else name.lower().replace("-", "_")
    forms = (name,) if "=" in name else (name, name.rpartition(".")[2])
    words = _answers()
    exact = (words[form] for form in forms if form in words)
    patterns = [(word, hint) for word, hint in words.items() if "*" in word]
    # A pattern without "=" matches keys only, not "key=value".
    matching = (
        hint
        for form in forms
        for word, hint in patterns
        if ("=" in word) == ("=" in form) and fnmatchcase(form, word)
    )
    return next(chain(exact, matching), "")


def spelled_hint(name: str) -> str:
    """:func:`alias_hint` for other spellings of such a word: grad_accumulation."""
    return _with_names(next((_answers()[word] for word in same_words(name, _answers())), ""))


@cache
def _answers() -> dict[str, str]:
    """Word, or pattern of words -> the fix, with {KEY} in place of names."""
    words = {word: entry["hint"] for entry in _table()["other"] for word in entry["names"]}
    return {word: f"here it is called {key}" for word, key in aliases().items()} | words


def same_words(name: str, names: Iterable[str]) -> list[str]:
    """The `names` that differ from `name` only in the order and spelling of their words, and in the
    word "number"."""
    words = _spelled(name)
    return [other for other in names if words and _spelled(other) == words]


@cache
def _spelled(name: str) -> frozenset[str]:
    """The words of a name, written out (num -> number), without "number"."""
    table = _table()["spellings"]
    spellings = {spelling: word for word, others in table.items() for spelling in others}
    words = (spellings.get(part, part) for part in name.lower().split("_"))
    return frozenset(words) - {"number", ""}


def nearest_name(value: str, choices: Sequence[str], *, any_number: bool = False) -> str:
    """The most similar of `choices`, "" if none is similar. Case and hyphens are ignored, and a
    part of a name is enough."""
    folded = value.strip().lower().replace("-", "_").replace(" ", "_")
    parts = [name for name in choices if len(folded) > 3 and folded in name]
    meant = [name for name in (folded, _table()["values"].get(folded)) if name in choices]
    close = close_names(folded, choices, any_number=any_number)
    return next(iter([*meant, *close, *parts]), "")


def nearest_choice(
    value: str, choices: Sequence[str], key: str = "", *, any_number: bool = False
) -> str:
    """The fix for a wrong `value` of `key`, whose legal ones are `choices`: the one with the same
    meaning, or the nearest and, unless they are too many, all of them."""
    # A hint that a name does not exist is wrong for a legal name with one wrong letter.
    is_edit = any(_is_edit(value.lower().replace("-", "_"), name) for name in choices)
    hint = alias_hint(f"{key}={value}") if key else ""
    if hint and not (is_edit and "does not exist here" in hint):
        return hint
    near, listed = nearest_name(value, choices, any_number=any_number), ", ".join(choices)
    if near and len(choices) > _MOST_LISTED:
        return f"did you mean {near}?"
    return f"did you mean {near}? (choices: {listed})" if near else f"choices: {listed}"


def choices_of(annotation: object) -> tuple[str, ...]:
    """The names that a Literal, :class:`Names`, or a union with one allows."""
    names: list[str] = []
    for choice in get_args(getattr(annotation, "__value__", annotation)):  # also of a type alias
        if isinstance(choice, Names):
            names += choice
        else:
            names += [choice] if isinstance(choice, str) else choices_of(choice)
    return tuple(names)


def close_names(word: str, names: Iterable[str], *, any_number: bool = False) -> list[str]:
    """Up to three names that `word` may be a typing error of, best first; others only if nearly as
    good as the best. A name with another number is another name (gemma4, gemma3), unless
    `any_number`: then, of equally similar names, the one with the nearest number comes first."""
    folded = word.lower().replace("-", "_")
    numbers = _numbers(folded)
    near: dict[str, tuple[float, int]] = {}
    for name in names:
        ratio, others = SequenceMatcher(None, name, folded).ratio(), _numbers(name)
        if (ratio >= 0.75 or _is_edit(folded, name)) and (any_number or others == numbers):
            distance = sum(abs(a - b) for a, b in zip(others, numbers, strict=False))
            near[name] = -ratio, distance
    best = sorted(near, key=lambda name: near[name])[:3]
    return [name for name in best if near[name][0] < near[best[0]][0] + 0.05]


def _is_edit(word: str, name: str) -> bool:
    """Whether `word` is `name` with one letter removed, added or changed, or two neighbours
    swapped."""
    ends = ((word[i:], name[i:]) for i in range(len(word) + 1) if word[:i] == name[:i])
    return len(word) > 1 and any(
        to in (a[1:], to[:1] + a, to[:1] + a[1:], a[1:2] + a[:1] + a[2:]) for a, to in ends
    )


def _numbers(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]


def nearest_path(path: Path, accepts: Callable[[Path], bool] = lambda path: True) -> str:
    """A suggestion for the missing `path`: a similar name in its deepest existing folder, of a file
    that `accepts`; or that folder, or the directory where relative paths begin. For a ``file://``
    URL its path, for other URLs a copy."""
    if (url := re.match(r"(\w+):/+(.*)", str(path))) is not None:
        if url[1] != "file":
            return f"{url[1]}:// is not read here, so copy it to this machine first"
        places = Path(f"/{unquote(url[2])}"), Path(unquote(url[2]))
        place = next((place for place in places if place.exists()), places[0])
        return f"did you mean {place}?" if place.exists() else nearest_path(place, accepts)
    if path.is_symlink() and not path.exists():
        return f"it is a symbolic link to {path.readlink()}, which does not exist"
    missing, home = path, path.absolute().parent
    while not home.exists() and home != home.parent:
        missing, home = missing.parent, home.parent
    with suppress(OSError):
        is_whole = missing == path
        names = [file.name for file in home.iterdir() if not is_whole or accepts(file)]
        whole = [name for name in names if Path(name).stem == missing.name]  # without its ending
        edits = [name for name in names if _is_edit(missing.name, name)]
        if close := [*whole, *get_close_matches(missing.name, names, n=1, cutoff=0.7), *edits]:
            near = missing.with_name(close[0])
            # A wrong folder in the middle: the rest of the path may be right.
            rest = near / path.relative_to(missing)
            return f"did you mean {rest if rest.exists() else near}?"
    if not path.is_absolute() and len(path.parts) == 1:
        return f"relative paths count from the folder of the call, {Path.cwd()}"
    return f"the nearest existing folder is {home}"


def divisors(number: int) -> list[int]:
    """All divisors of a positive integer, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest_run(path: Path) -> str:
    """A suggestion for a `path` in the folder of a run, or for a folder of runs; "" for others."""

    def is_run(folder: Path) -> bool:
        return all((folder / name).is_file() for name in ("config.toml", "metrics.jsonl"))

    if not path.exists() or is_run(path):
        return ""
    if (run := next(filter(is_run, path.parents), None)) is not None:
        return f"did you mean the run {run}?"
    with suppress(OSError):
        runs = sorted(filter(is_run, path.iterdir()), key=lambda run: run.stat().st_mtime)
        if runs:
            newest = f", the newest of {len(runs)} runs in it" if len(runs) > 1 else ""
            return f"did you mean {runs[-1]}{newest}?"
    return ""


def nearest_divisors(number: int, wanted: int) -> str:
    """The divisors of `number` next to `wanted`, below and above: "2 or 4"."""
    return nearest(divisors(number), wanted)


def nearest(legal: list[int], wanted: int) -> str:
    """The legal numbers next to `wanted`; `legal` ascends."""
    below = [d for d in legal if d <= wanted][-1:]
    above = [d for d in legal if d > wanted][:1]
    return " or ".join(str(d) for d in below + above)
