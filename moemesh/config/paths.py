"""Paths that do not exist: the nearest name that does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path


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
