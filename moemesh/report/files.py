"""Pictures and traces into files that a user names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moemesh.config.errors import UserError


def write_texts(contents: Sequence[tuple[Path, str]]) -> None:
    """Write each text to its path. Raises UserError, with nothing written, when a path cannot be
    one of a file."""
    for path, _ in contents:
        if not path.parent.is_dir():
            raise UserError(f"{path} cannot be written: there is no folder {path.parent}")
        if path.is_dir():
            raise UserError(f"{path} cannot be written: it is a folder")
    for path, content in contents:
        try:
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from error
