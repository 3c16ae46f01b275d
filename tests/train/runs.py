"""Start `moemesh` as a user does, on a model and data small enough for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from moemesh.config.run import RunConfig
from moemesh.sharding.load_run import load_run
from tests import commands
from tests.waiting import PATIENCE, until

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


def shared_file(folder: Path) -> Path:
    """The same, written once: ranks read it at the same time."""
    file = folder / "corpus.txt"
    return file if file.exists() else text_file(folder)


def settings(keys: Mapping[str, Any]) -> list[str]:
    """``plan.tp=2`` of every key; ``plan__tp`` is plan.tp."""
    return [
        f"{key.replace('__', '.')}={value if isinstance(value, (str, Path)) else json.dumps(value)}"
        for key, value in keys.items()
    ]


def sets(*given: str) -> list[str]:
    """The words of a command that sets all of these."""
    return [word for one in given for word in ("--set", one)]


def small(**keys: Any) -> dict[str, Any]:
    """The settings of a small run with these keys."""
    return SMALL | {key.replace("__", "."): value for key, value in keys.items()}


def config_of(folder: Path, **keys: Any) -> RunConfig:
    """The configuration of a small run on a corpus in `folder`, as a rank has it."""
    given = {"data.path": str(shared_file(folder))} | small(**keys)
    return load_run([], settings(given)).config


def arguments(out: Path, **keys: Any) -> list[str]:
    """`moemesh train` arguments; ``plan__tp=2`` sets plan.tp."""
    given = {"data.path": str(text_file(out.parent))} | small(**keys)
    return ["train", "--out", str(out), *sets(*settings(given))]


def start(
    *args: str, python: str = sys.executable, module: str = "moemesh", **options: Any
) -> subprocess.Popen[str]:
    """A process of the interpreter itself by default, so that a kill hits the right process."""
    return subprocess.Popen(
        [python, "-m", module, *args],
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
    """Output of the command, which must end with this exit code."""
    done = moemesh(*map(str, words), **options)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def torchrun(
    *words: str, options: Sequence[str] = ("--nproc-per-node=2",), python: str | None = None
) -> subprocess.CompletedProcess[str]:
    """A module and its arguments under torchrun, on this machine alone."""
    command = [python or commands.python(), "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, *options, "-m", *words], capture_output=True, text=True, timeout=PATIENCE
    )


def killed(out: Path, is_so: Callable[[], object], **keys: Any) -> None:
    """A run that is killed, with its ranks, when `is_so()`."""
    process = start(*arguments(out, **keys), python=commands.python())
    until(is_so, process)
    process.kill()
    process.wait()
    for number in processes_of(out):
        with suppress(ProcessLookupError):  # it has ended with its launcher
            os.kill(number, signal.SIGKILL)
    process.communicate()  # until no process has its streams


def processes_of(out: Path) -> dict[int, list[str]]:
    """Processes of the run in `out`, with their environments; empty without a /proc."""
    processes: dict[int, list[str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(out) in (folder / "cmdline").read_bytes().decode().split("\0"):
                variables = (folder / "environ").read_bytes().decode().split("\0")
                processes[int(folder.name)] = variables
    return processes


def interrupted(out: Path, number: int, code: int, **keys: Any) -> tuple[str, str]:
    """Output of a run that gets the signal after its first step and ends with this exit code."""
    process = start(*arguments(out, **keys), python=commands.python())
    until((out / "metrics.jsonl").exists, process)
    process.send_signal(number)
    output, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, output + err
    return output, err


def train(out: Path, **keys: Any) -> list[dict[str, Any]]:
    """A run that must succeed; its metrics."""
    said(*arguments(out, **keys))
    return metrics(out)


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The rows of a file with one JSON object a line."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def metrics(out: Path) -> list[dict[str, Any]]:
    return rows_of(out / "metrics.jsonl")


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row["loss"] for row in rows]
