"""Pictures and traces into files that a user names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from moemesh.config.errors import UserError


def write_texts(contents: Sequence[tuple[Path, str]]) -> None:
    """Write each text to its path, a file at once or not at all. Raises UserError, with nothing
    written, when a path cannot be one of a file."""
    for path, _ in contents:
        check_target(path)
    for path, content in contents:
        # A device such as /dev/stdout is written to, not replaced.
        is_file = path.is_file() or not path.exists()
        target = path.resolve()
        written = target.with_name(f".{target.name}.{os.getpid()}") if is_file else path
        try:
            written.write_text(content, encoding="utf-8")
            if is_file:
                os.replace(written, target)
        except OSError as error:
            if is_file:
                written.unlink(missing_ok=True)
            raise UserError(f"{path} cannot be written: {error.strerror}") from error


def check_target(path: Path, kind: str = "") -> None:
    """Raise UserError when `path` cannot be that of a file, or is one of those that does not begin
    with `kind`."""
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir():
        raise UserError(f"{path} cannot be written: it is a folder")
    if kind and path.is_file() and not path.read_bytes().startswith(kind.encode()):
        raise UserError(f"{path} is not replaced: it was not written by this verb; name another")
