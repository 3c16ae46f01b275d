"""Schedules in files: text or CSV, read with care and written."""

from __future__ import annotations

from pathlib import Path

from moemesh.config.errors import UserError
from moemesh.config.paths import nearest_path
from moemesh.schedule import text
from moemesh.schedule.action import Schedule

#: Sizes from which on a file is no schedule that a person wrote.
_LARGEST_FILE = 100_000_000


def load(path: Path) -> Schedule:
    """The schedule of a text or CSV file. Raises UserError for one that cannot be read."""
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise UserError(f"{path} has {path.stat().st_size} bytes, more than {_LARGEST_FILE}")
        content = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        near = "" if path.exists() else f" ({nearest_path(path)})"
        raise UserError(f"{path} cannot be read: {error.strerror}{near}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text: byte {error.start} is not UTF-8") from error
    try:
        reader = text.from_csv if path.suffix == ".csv" else text.from_text
        return reader(content)
    except text.TextError as error:
        raise UserError(f"{path}: {error}") from error


def save(schedule: Schedule, path: Path) -> None:
    """Write `schedule` as a table when `path` ends in .csv, as text otherwise; both can be edited
    and given to the command again. Raises UserError when the file cannot be written."""
    content = text.to_csv(schedule) if path.suffix == ".csv" else text.to_text(schedule)
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
