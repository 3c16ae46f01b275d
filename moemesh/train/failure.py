"""Failure reports: failure.json and the message for the user."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_failure(folder: Path, error: BaseException, rank: int) -> None:
    """Write ``failure.json``; of several failing ranks the first one stays."""
    frames = traceback.format_exception(error)[-8:]
    facts = getattr(error, "facts", {})
    temporary = _write(folder, rank, type(error).__name__, str(error), frames, facts)
    with suppress(FileExistsError, OSError):
        os.link(temporary, folder / "failure.json")
    with suppress(OSError):
        temporary.unlink()


def write_kill(folder: Path, rank: int, message: str) -> None:
    """Write ``failure.json`` for a rank that was killed. It replaces the report of another rank,
    which has only lost contact with this one."""
    with suppress(OSError):
        os.replace(_write(folder, rank, "Killed", message, []), folder / "failure.json")


def _write(
    folder: Path,
    rank: int,
    kind: str,
    message: str,
    frames: list[str],
    facts: Mapping[str, Any] | None = None,
) -> Path:
    content: dict[str, Any] = {"rank": rank, "kind": kind, "message": message}
    content |= {**(facts or {}), "frames": frames}
    temporary = folder / f".failure-{rank}-{os.getpid()}.tmp"
    # The message on the console must come out even where nothing can be written any more.
    with suppress(OSError):
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return temporary


def describe(error: BaseException, rank: int, folder: Path) -> str:
    """One message: what failed, where, and what is safe."""
    return f"moemesh: rank {rank} failed: {type(error).__name__}: {error}\n{where_to_look(folder)}"


def where_to_look(folder: Path) -> str:
    """The last line of every message about a failure: the report's own advice, if it has one."""
    advice = "checkpoints are untouched, the same command goes on from the newest"
    with suppress(OSError, ValueError):
        found = json.loads((folder / "failure.json").read_text(encoding="utf-8"))
        advice = str(found.get("advice", advice))
    return f"details in {folder / 'failure.json'}; {advice}"
