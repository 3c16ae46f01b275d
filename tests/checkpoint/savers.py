"""Savers in one process: of one rank, and of several on threads, over small shards."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moemesh.checkpoint import files
from moemesh.checkpoint.remote import Place
from moemesh.checkpoint.saver import SaveOutcome, Saver
from moemesh.checkpoint.store import Shard
from tests.checkpoint.simulate import Ranks, cut, on_threads, save_as_ranks
from tests.checkpoint.test_faults import FaultyOs, Killed

TENSOR = torch.arange(60.0).reshape(20, 3)


def one_rank(folder: Place, *, keep: int = 2) -> Saver:
    return Saver(
        folder,
        rank=0,
        world_size=1,
        gather=lambda value: [value],
        keep=keep,
        in_background=True,
    )


def on_ranks(size: int, folder: Place, work: Callable[[int, Saver], Any]) -> list[Any]:
    """`work` with the saver of each of `size` ranks, on a thread a rank."""
    ranks = Ranks(size)

    def run(rank: int) -> Any:
        own = Saver(
            folder,
            rank=rank,
            world_size=size,
            gather=ranks.gather(rank),
            keep=2,
            in_background=True,
        )
        return work(rank, own)

    return on_threads(size, run)


def shards(value: float = 0.0) -> list[Shard]:
    return cut("w", TENSOR + value, [4, 1])


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "verified.json"
    }


def count(folder: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[Path], Any]) -> int:
    with monkeypatch.context() as patch:
        faulty = FaultyOs(-1, Killed)
        patch.setattr(files, "os", faulty)
        work(folder)
        return faulty.count


def save_third(folder: Path) -> SaveOutcome | None:
    """A save with retention, over two older checkpoints."""
    own = one_rank(folder, keep=1)
    own.start(3, shards(3), {})
    return own.finish()


def prepared(folder: Path) -> Path:
    """Two older checkpoints, those of a folder beside it where there is one."""
    template = folder.parent / "template"
    if not template.exists():
        for step in (1, 2):
            save_as_ranks(template, step, [shards(step)])
    shutil.copytree(template, folder)
    return folder
