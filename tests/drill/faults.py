"""The faults of the drill besides ranks that end or hang: storage, signals, numbers, data.

Importing this module adds its rows to :data:`tests.drill.trials.FAULTS`, after those of ranks.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.drill.rank import FOUND, Spec
from tests.drill.results import Outcome
from tests.drill.trials import PLANS, Drill, alarms, ending, fault, losses
from tests.train.runs import rows_of

#: Exit codes of the launcher after a stop request, by signal.
_CODES = {"TERM": 143, "USR1": 143, "INT": 130, "HUP": 129}


def _events(out: Path) -> list[tuple[str, str]]:
    return [(event["kind"], event["text"]) for event in rows_of(out / "events.jsonl")]


def _told(done: subprocess.CompletedProcess[str]) -> str:
    return f"exit code {done.returncode}\n{done.stderr[-2000:]}"


def _ended(
    done: subprocess.CompletedProcess[str],
    out: Path,
    *,
    verdict: bool,
    recovered: bool,
    named: bool | None = None,
    failures: int = 0,
) -> Outcome:
    """A trial without times; where something was wrong, with the words of the command.
    `failures`: how many the run in `out` ought to have had."""
    problem = "" if verdict and recovered and named is not False else _told(done)
    outcome = Outcome(verdict=verdict, recovered=recovered, named=named, problem=problem)
    return replace(outcome, alarms=max(alarms(out) - failures, 0))


# Storage: a run of eight steps is killed in the seventh, its newest checkpoint is damaged, and the
# same command must resume from an older one and name the damaged file.


def _damaged(drill: Drill, damage: Callable[[Drill, Path], Path]) -> Outcome:
    plan, whole, folder, out = drill.begin()
    arguments = drill.arguments(
        out, plan, train__restarts=0, train__checkpoint_async=False, train__checkpoints_kept=3
    )
    drill.moemesh(
        arguments, Spec(action="kill", rank=0, step=7, place="forward", folder=str(folder))
    )
    file = damage(drill, out / "checkpoints" / "step-6")
    done = drill.moemesh(arguments)
    warnings = [text for kind, text in _events(out) if kind == "warning"]
    is_told = any(file.name in text for text in warnings) and file.name in done.stdout + done.stderr
    recovered = done.returncode == 0 and ending(out) == whole
    return _ended(done, out, verdict=is_told, recovered=recovered, named=is_told, failures=1)


def _shards(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("*.safetensors"))


@fault("a flipped bit in a checkpoint", "R1 R3")
def _flipped_bit(drill: Drill) -> Outcome:
    def damage(drill: Drill, checkpoint: Path) -> Path:
        file = drill.random.choice(sorted(checkpoint.iterdir()))
        content = bytearray(file.read_bytes())
        content[drill.random.randrange(len(content))] ^= 1 << drill.random.randrange(8)
        file.write_bytes(content)
        return file

    return _damaged(drill, damage)


@fault("a truncated or an empty file in a checkpoint", "R1 R3")
def _truncated(drill: Drill) -> Outcome:
    def damage(drill: Drill, checkpoint: Path) -> Path:
        file = drill.random.choice(sorted(checkpoint.iterdir()))
        os.truncate(file, drill.random.choice((0, drill.random.randrange(file.stat().st_size))))
        return file

    return _damaged(drill, damage)


@fault("a missing, extra or exchanged file in a checkpoint", "R1 R3")
def _wrong_files(drill: Drill) -> Outcome:
    def damage(drill: Drill, checkpoint: Path) -> Path:
        shards = _shards(checkpoint)
        file = drill.random.choice(shards)
        match drill.random.choice(("missing", "extra", "exchanged", "link")):
            case "missing":
                file.unlink()
            case "extra":
                file = checkpoint / "rank-00099.safetensors"
                shutil.copy(shards[0], file)
            case "exchanged":
                file = shards[0]
                older = checkpoint.parent / "step-4" / file.name
                shutil.copy(older, file)
            case _:
                kept = checkpoint.parent.parent / "elsewhere.safetensors"
                file.rename(kept)
                file.symlink_to(kept)
        return file

    return _damaged(drill, damage)


@fault("a disk that is full for two steps", "R2", is_short=True)
def _full_disk(drill: Drill) -> Outcome:
    plan, whole, folder, out = drill.begin()
    spec = Spec(action="full disk", rank=0, step=4, place="save", folder=str(folder))
    done = drill.moemesh(drill.arguments(out, plan), spec)
    texts = [text for kind, text in _events(out) if kind in ("warning", "disk", "checkpoint")]
    is_told = any("File too large" in text or "EFBIG" in text for text in texts)
    is_named = any(".safetensors" in text or "manifest.json" in text for text in texts)
    is_saved = (out / "checkpoints" / "step-8" / "manifest.json").exists()
    recovered = done.returncode == 0 and ending(out) == whole
    return _ended(done, out, verdict=is_told and is_saved, recovered=recovered, named=is_named)


# Signals: the run stops after the step, with the exit code of the signal, and the same command
# resumes and ends with the losses of a run without a stop.


def _signalled(drill: Drill, target: str, name: str) -> Outcome:
    plan, whole, folder, out = drill.begin()
    step = drill.random.randint(3, 6)
    rank = drill.random.randrange(2)
    action = f"SIG{name} to the {target}"
    spec = Spec(action=action, rank=rank, step=step, place="forward", folder=str(folder))
    stopped = drill.moemesh(drill.arguments(out, plan), spec)
    code = _CODES[name] if target == "launcher" or name != "HUP" else 143
    steps = len(losses(out))
    is_right = stopped.returncode == code and step - 1 <= steps < 8
    done = drill.moemesh(drill.arguments(out, plan))
    whole_again = done.returncode == 0 and ending(out) == whole
    problem = "" if is_right and whole_again else f"{spec}: {steps} steps; {_told(stopped)}"
    return Outcome(verdict=is_right, recovered=whole_again, alarms=alarms(out), problem=problem)


@fault("a signal to the launcher", "R3")
def _signal_to_launcher(drill: Drill) -> Outcome:
    return _signalled(drill, "launcher", drill.random.choice(sorted(_CODES)))


@fault("a signal to a rank", "R3")
def _signal_to_rank(drill: Drill) -> Outcome:
    return _signalled(drill, "rank", drill.random.choice(("TERM", "USR1", "INT")))


# Numbers: a weight of one rank changes in the middle of a step.


def _changed_weight(
    drill: Drill, action: str, plan: str, kind: str, names: str, **more: object
) -> Outcome:
    """`kind`: of the event that has to come; `names`: how an event names the rank "RANK"."""
    folder = drill.new_folder()
    out, rank = folder / "run", drill.random.randrange(4 if plan.startswith("tp") else 2)
    step = drill.random.randint(3, 6)
    spec = Spec(action=action, rank=rank, step=step, place="forward", folder=str(folder))
    done = drill.moemesh(drill.arguments(out, plan, **more), spec)
    events = _events(out)
    is_reported = kind in dict(events)
    is_named = any(names.replace("RANK", str(rank)) in text for _, text in events)
    is_clean = done.returncode == 0 and all(map(math.isfinite, losses(out)))
    problem = "" if is_reported and is_named and is_clean else f"{spec}: {events}; {_told(done)}"
    named: dict[str, bool] = {"rank": is_named, "named": is_named}
    verdict, number = is_reported and is_clean, alarms(out)
    return Outcome(verdict=verdict, **named, alarms=number, problem=problem)


@fault("a weight becomes NaN; the run goes back", "R9")
def _nan(drill: Drill) -> Outcome:
    plan = drill.random.choice(list(PLANS))
    more = {"train__on_nonfinite": "rollback"}
    return _changed_weight(drill, "NaN", plan, "rollback", "is NaN first (rank RANK", **more)


@fault("a copy of a weight differs; most ranks decide", "R9")
def _differing_copy(drill: Drill) -> Outcome:
    more = {"train__vote_every": 1, "train__on_mismatch": "majority"}
    plan = "tp=2 dp=2 ep=4"
    return _changed_weight(drill, "flip", plan, "copies", "the copy of RANK differs", **more)


# Things that must not matter: the run ends as if they had not been.


def _unharmed(drill: Drill, action: str, step: int = 4, **more: object) -> Outcome:
    plan, whole, folder, out = drill.begin()
    spec = Spec(action=action, rank=0, step=step, place="forward", folder=str(folder))
    done = drill.moemesh(drill.arguments(out, plan, **more), spec)
    is_calm = not (out / "failure.json").exists() and not (out / "failures").exists()
    file = folder / FOUND
    findings = file.read_text() if file.exists() else "(nothing was looked at)"
    is_harmless = is_calm and not findings
    recovered = done.returncode == 0 and ending(out) == whole
    outcome = _ended(done, out, verdict=is_harmless, recovered=recovered)
    return replace(outcome, problem=outcome.problem and f"{findings}\n{outcome.problem}")


@fault("the clock jumps by an hour, forward or back", "R4")
def _clock(drill: Drill) -> Outcome:
    return _unharmed(drill, drill.random.choice(("clock forward", "clock back")))


@fault("listening sockets beyond loopback", "R11")
def _sockets(drill: Drill) -> Outcome:
    return _unharmed(drill, "sockets")


@fault("a second run in the same folder", "R3")
def _second_run(drill: Drill) -> Outcome:
    # In the first step: there a rank has time to wait for the second run.
    return _unharmed(drill, "second run", step=1)


@fault("a sink whose disk is full", "R6")
def _sink(drill: Drill) -> Outcome:
    plan, whole, folder, out = drill.begin()
    arguments = drill.arguments(out, plan, train__sinks='["csv"]', train__restarts=0)
    spec = Spec(action="kill", rank=0, step=4, place="forward", folder=str(folder))
    drill.moemesh(arguments, spec)
    (out / "metrics.csv").unlink()
    (out / "metrics.csv").symlink_to("/dev/full")
    done = drill.moemesh(arguments)
    is_reported = any(kind == "sink" for kind, _ in _events(out))
    recovered = done.returncode == 0 and ending(out) == whole
    return _ended(done, out, verdict=is_reported, recovered=recovered, failures=1)


@fault("resume under another plan", "R7")
def _other_plan(drill: Drill) -> Outcome:
    before, after = drill.random.sample(list(PLANS), 2)
    _, whole, folder, out = drill.begin(before)
    spec = Spec(action="kill", rank=0, step=5, place="forward", folder=str(folder))
    drill.moemesh(drill.arguments(out, before, train__restarts=0), spec)
    done = drill.moemesh(drill.arguments(out, after, train__restarts=0))
    reached = losses(out)
    is_equal = len(reached) == len(whole.losses) and all(
        abs(one - other) <= 1e-6 * abs(other)
        for one, other in zip(reached, whole.losses, strict=True)
    )
    resumed, recovered = "resumed" in dict(_events(out)), done.returncode == 0 and is_equal
    return _ended(done, out, verdict=resumed, recovered=recovered, failures=1)


@fault("a broken line of data", "R5", is_short=True)
def _broken_line(drill: Drill) -> Outcome:
    folder = drill.new_folder()
    lines = [json.dumps({"text": f"line {i}: {i * i} is the square of {i}"}) for i in range(400)]
    number = drill.random.randrange(len(lines))
    lines[number] = lines[number][: drill.random.randrange(1, 12)]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    arguments = drill.arguments(folder / "run", drill.random.choice(list(PLANS)))
    arguments += ["--set", f"data.path={folder / 'text.jsonl'}", "--set", "data.format=jsonl"]
    done = drill.moemesh(arguments)
    is_named = done.returncode == 2 and all(
        x in done.stderr for x in ("text.jsonl", f"{number + 1}")
    )
    problem = "" if is_named else f"line {number + 1}: {_told(done)}"
    return Outcome(verdict=is_named, named=is_named, problem=problem)
