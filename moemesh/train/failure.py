"""What is said and kept when a run breaks: failure.json, and one message for a person."""

from __future__ import annotations

import json
import os
import traceback
from contextlib import suppress
from pathlib import Path


def write_failure(folder: Path, error: BaseException, rank: int) -> None:
    """Write ``failure.json``; of several failing ranks the first one stays."""
    content = {
        "rank": rank,
        "kind": type(error).__name__,
        "message": str(error),
        "frames": traceback.format_exception(error)[-8:],
    }
    temporary = folder / f".failure-{rank}-{os.getpid()}.tmp"
    # The message on the console must come out even where nothing can be written any more.
    with suppress(OSError):
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        with suppress(FileExistsError):
            os.link(temporary, folder / "failure.json")
    with suppress(OSError):
        temporary.unlink()


def describe(error: BaseException, rank: int, folder: Path) -> str:
    """One message: what failed, where, and what is safe."""
    return (
        f"moemesh: rank {rank} failed: {type(error).__name__}: {error}\n"
        f"details in {folder / 'failure.json'}; checkpoints are untouched, the same command goes "
        "on from the newest"
    )
