"""Did you mean: the name, path or number that a wrong one was probably meant to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import get_args

#: Names of values in other trainers.
_VALUE_ALIASES = {"gpu": "cuda", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
#: Choices beside the nearest one.
_MOST_LISTED = 40


def nearest_name(value: str, choices: Sequence[str]) -> str:
    """The name of a list that is probably meant, "" where none is near. Case and hyphens do not
    count as differences."""
    folded = value.strip().lower().replace("-", "_").replace(" ", "_")
    if _VALUE_ALIASES.get(folded) in choices:
        folded = _VALUE_ALIASES[folded]
    return folded if folded in choices else next(iter(close_names(folded, choices, 0.5)), "")


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


def close_names(word: str, names: Iterable[str], cutoff: float) -> list[str]:
    """Up to three names like `word`, best first; the rest only when nearly as good as the best."""
    found = get_close_matches(word.lower().replace("-", "_"), list(names), n=3, cutoff=cutoff)
    if not found:
        return []
    scores = {name: SequenceMatcher(None, name, word).ratio() for name in found}
    best = max(scores.values())
    return [name for name in found if scores[name] > best - 0.05]


def nearest_path(path: Path, accepts: Callable[[Path], bool] = lambda path: True) -> str:
    """Words that name a file or folder of a similar name that `accepts` likes, in the nearest part
    of `path` that exists; else that folder, or the one that a relative path counts from."""
    missing, home = path, path.absolute().parent
    while not home.exists() and home != home.parent:
        missing, home = missing.parent, home.parent
    with suppress(OSError):
        is_whole = missing == path
        names = [one.name for one in home.iterdir() if not is_whole or accepts(one)]
        if close := get_close_matches(missing.name, names, n=1, cutoff=0.7):
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


def nearest_divisors(number: int, wanted: int) -> str:
    """The divisors of `number` next to `wanted`, below and above: "2 or 4"."""
    return nearest(divisors(number), wanted)


def nearest(legal: list[int], wanted: int) -> str:
    """The same of ascending legal numbers."""
    below = [d for d in legal if d <= wanted][-1:]
    above = [d for d in legal if d > wanted][:1]
    return " or ".join(str(d) for d in below + above)
