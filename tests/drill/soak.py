"""The soak of the drill: one run of `moemesh train` for minutes or hours, with or without faults.

With faults it measures the share of the time in which steps were computed that counted, and the
seconds from a fault to the verdict and on to the next step. Without, it counts false alarms.
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moemesh.config.python import python_command
from tests.drill.rank import ORDER, SOAK, Spec, environment, read_notes

#: Two ranks, small enough for two cores; all else is the default of `moemesh train`.
SETTINGS = {
    "plan.dp": "2",
    "plan.ep": "2",
    "train.steps": "1000000",
    "train.checkpoint_every": "20",
    "train.validate_every": "1000000",
    "train.device": "cpu",
}
#: Action of a fault -> kind of the verdict that is right.
KINDS = {"kill": "killed", "stop": "stopped", "loop": "busy", "raise": "exception"}
_END_SECONDS = 300.0
_LOOK_SECONDS = 0.2


def soak(
    seconds: float,
    *,
    every: float,
    out: Path,
    overrides: Sequence[str] = (),
    seed: int = 0,
    python: str = sys.executable,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train in `out` (a new folder) for `seconds`, with a fault on a random rank every `every`
    seconds (0: none), and report what came of it, as numbers for JSON.

    The last fault comes half of `every` before the end, so that the run recovers from it.
    """
    folder = out.parent / f"{out.name}.soak"
    folder.mkdir(parents=True)
    spec = Spec(action=SOAK, rank=0, step=0, place="", folder=str(folder))
    module = ("tests.drill.rank", spec.text())
    command = python_command(*module, "train", "--out", str(out), python=python)
    settings = SETTINGS | dict(one.split("=", 1) for one in overrides)
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    draw, actions = random.Random(seed), list[str]()
    start = time.monotonic()
    with (folder / "console").open("w") as console:
        run = subprocess.Popen(command, env=environment(), stdout=console, stderr=subprocess.STDOUT)
        due = start + every
        while run.poll() is None and (now := time.monotonic()) < start + seconds:
            if every and now >= due and due <= start + seconds - every / 2:
                actions = actions or draw.sample(sorted(KINDS), len(KINDS))
                order = {"action": actions.pop(), "rank": draw.randrange(2)}
                log(f"{now - start:.0f} s: {order['action']} on rank {order['rank']}")
                temporary = folder / f"{ORDER}.tmp"
                temporary.write_text(json.dumps(order))
                temporary.replace(folder / ORDER)
                due += every
            time.sleep(_LOOK_SECONDS)
        if run.poll() is None:
            run.send_signal(signal.SIGTERM)
        try:
            code = run.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            run.kill()
            code = run.wait()
    wall = time.monotonic() - start
    return {"exit_code": code, **report(out, read_notes(folder), start, wall)}


def report(out: Path, notes: Sequence[dict[str, Any]], start: float, wall: float) -> dict[str, Any]:
    """The figures of a soak that began at `start` (monotonic) and took `wall` seconds."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    step_seconds = [json.loads(line)["seconds"] for line in lines]
    events = [json.loads(line)["kind"] for line in (out / "events.jsonl").open(encoding="utf-8")]
    faults, num_verdicts = list[dict[str, Any]](), 0
    started: float | None = None
    for note in notes:
        newest = faults[-1] if faults else None
        if note["event"] == "fault":
            keys = ("action", "rank", "step", "time")
            fault: dict[str, Any] = {key: note[key] for key in keys}
            faults.append(fault | {"kind": None, "detected": None, "resumed": None, "good": False})
        elif note["event"] == "verdict":
            num_verdicts += 1
            if newest is not None and newest["kind"] is None:
                newest["kind"] = note["kind"]
                newest["detected"] = note["time"] - newest["time"]
                is_kind = note["kind"] == KINDS[newest["action"]]
                newest["good"] = is_kind and note["rank"] == newest["rank"]
        elif started is None:
            started = note["time"] - start
        elif newest is not None and newest["detected"] is not None and newest["resumed"] is None:
            newest["resumed"] = note["time"] - newest["time"] - newest["detected"]
    for one in faults:
        one["at"] = one.pop("time") - start
    effective = sum(step_seconds)
    num_matched = sum(one["kind"] is not None for one in faults)
    return {
        "wall_seconds": wall,
        "effective_seconds": effective,
        "effective_share": effective / wall,
        "steps": len(step_seconds),
        "step_seconds": statistics.median(step_seconds) if step_seconds else None,
        "start_seconds": started,
        "detection_seconds": sum(one["detected"] or 0.0 for one in faults),
        "restart_seconds": sum(one["resumed"] or 0.0 for one in faults),
        "false_alarms": num_verdicts - num_matched,
        "slow_ranks": events.count("slow_rank"),
        "faults": faults,
    }


def is_good(report: dict[str, Any]) -> bool:
    """Whether every fault was reported correctly and survived, without another report."""
    survived = all(one["good"] and one["resumed"] is not None for one in report["faults"])
    code = report["exit_code"] == 128 + signal.SIGTERM
    return survived and code and not report["false_alarms"]
