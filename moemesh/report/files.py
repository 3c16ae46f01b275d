"""Pictures and traces into files that a user names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from moemesh.config.errors import UserError


def write_texts(contents: Sequence[tuple[Path, str]], *, replaces: bool = False) -> None:
    """Write each text to its path, a file at once or not at all. Raises UserError, with nothing
    written, when a path cannot be one of a file, or is one of another kind: a file of the user's
    own. `replaces`: the user has said that it goes."""
    for path, content in contents:
        check_target(path, "" if replaces else kind_of(content))
    for path, content in contents:
        try:
            if path.is_file() or not path.exists():
                replace_file(path.resolve(), content)
            else:  # a device such as /dev/stdout
                path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from error


def replace_file(path: Path, content: str) -> Path:
    """Write a text whole or not at all, in place of what was there; returns the path. A lone
    surrogate (legal in JSON, not in UTF-8) does not lose it."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content.encode("utf-8", errors="replace"))
        return unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def kind_of(content: str) -> str:
    """The begin that all files of a kind share: the first tag, the first key of JSON, a few
    letters of anything else."""
    if content.startswith("<"):
        return content.partition(" ")[0].partition(">")[0]
    return content.partition(":")[0] if content.startswith("{") else content[:12]


def check_target(path: Path, kind: str = "") -> None:
    """Raise UserError when `path` cannot be that of a file, or is one that does not begin with
    `kind` (:func:`kind_of`), and so is not from the verb that would replace it."""
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir():
        raise UserError(f"{path} cannot be written: it is a folder")
    if not kind or not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb") as file:
        own = file.read(len(kind.encode())) == kind.encode()
    if not own:
        raise UserError(f"{path} is not replaced: it was not written by this verb; name another")
