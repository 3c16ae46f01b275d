"""Start `moemesh` as a user does, on a model and data small enough for tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import commands
from tests.waiting import PATIENCE

SMALL = {
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.head_dim": 4,
    "model.intermediate_size": 32,
    "model.expert_intermediate_size": 16,
    "data.seq_len": 16,
    "data.global_batch": 6,
    "train.steps": 4,
    "train.warmup_steps": 2,
    "train.checkpoint_every": 0,
    "train.validation_batches": 1,
}


def text_file(folder: Path) -> Path:
    """A small corpus with some structure."""
    file = folder / "corpus.txt"
    file.write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(400)))
    return file


def arguments(out: Path, **keys: Any) -> list[str]:
    """`moemesh train` arguments; ``plan__tp=2`` sets plan.tp."""
    settings = SMALL | {"data.path": str(text_file(out.parent))}
    settings |= {key.replace("__", "."): value for key, value in keys.items()}
    found = ["train", "--out", str(out)]
    for key, value in settings.items():
        shown = json.dumps(value) if not isinstance(value, str) else value
        found += ["--set", f"{key}={shown}"]
    return found


def start(*args: str, python: str = sys.executable, **options: Any) -> subprocess.Popen[str]:
    """The interpreter itself unless told otherwise: who kills a process wants to hit it."""
    return subprocess.Popen(
        [python, "-m", "moemesh", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def moemesh(
    *args: str, python: str | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run to the end, preloaded (`tests.commands`) by default; never a traceback."""
    process = start(*args, python=python or commands.python(), **options)
    out, err = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in out + err, out + err
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def said(*words: object, code: int = 0, **options: Any) -> str:
    """What the command says, which ends with this code."""
    done = moemesh(*map(str, words), **options)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def train(out: Path, **keys: Any) -> list[dict[str, Any]]:
    """A run that must succeed; its metrics."""
    said(*arguments(out, **keys))
    return metrics(out)


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row["loss"] for row in rows]
