"""Atomic writes of pictures, pages and other texts to files named by the user."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from moemesh.config.errors import UserError


def write_texts(contents: Sequence[tuple[Path, str]], *, replaces: bool = False) -> None:
    """Write each text to its path, each file (not a device) completely or not at all. Raises
    UserError before any write if a path cannot be a file, is given twice, or, without `replaces`,
    is a file of another kind, which the user has written."""
    paths = [path.resolve() for path, _ in contents]
    for path, content in contents:
        count = paths.count(path.resolve())
        if count > 1 and (path.is_file() or not path.exists()):
            raise UserError(f"{path} cannot be written: it is named for {count} outputs")
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
    """Replace a file by a text, completely or not at all; returns the path. Lone surrogates (legal
    in JSON, not in UTF-8) are replaced."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content.encode("utf-8", errors="replace"))
        return unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        # The error of a write has no file name.
        raise OSError(error.errno, error.strerror, str(path)) from error


def kind_of(content: str) -> str:
    """Text that all files of a kind begin with: the first tag, the first key of a JSON object, or
    the first 12 characters."""
    if content.startswith("<"):
        return content.partition(" ")[0].partition(">")[0]
    return content.partition(":")[0] if content.startswith("{") else content[:12]


def check_target(path: Path, kind: str = "") -> None:
    """Raise UserError if `path` cannot be a file, or is a file that does not begin with `kind`
    (:func:`kind_of`), and so was not written by this verb."""
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: the folder {path.parent} does not exist")
    if path.is_dir():
        raise UserError(f"{path} cannot be written: it is a folder")
    if not kind or not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb") as file:
        is_same_kind = file.read(len(kind.encode())) == kind.encode()
    if not is_same_kind:
        raise UserError(f"{path} is not replaced: it was not written by this verb; name another")
