"""Failure reports: ``failure.json``, the message for the user, and whether to start again."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moemesh.checkpoint.stored import candidates
from moemesh.config.errors import UserError
from moemesh.train.records.run_folder import LOGS, checkpoints_of
from moemesh.watch.observer import Ended
from moemesh.watch.progress_words import own_word
from moemesh.watch.verdict import Verdict
from moemesh.watch.word_file import Collective, Word

FILE, EARLIER = "failure.json", "failures"
#: Of the layout of the file.
SCHEMA = 1
_FRAMES = 8
#: Seconds in which the place of the checkpoints must say which is the newest, for a message.
_ASK_SECONDS = 2.0
_STACKS = (
    "rank-*.stacks say where every rank was (in logs/; in failures/EPOCH/ once the run has gone on)"
)
#: Kinds of failures that no exception named: the word in the file, and where to look for the cause.
_KINDS = {
    "killed": (
        "Killed",
        "look into the kernel's log (dmesg) for an out-of-memory kill, and into the scheduler's",
    ),
    "exited": (
        "Exited",
        "look for a call of exit in code of your own, and into the logs of the rank",
    ),
    "stopped": (
        "Stopped",
        "somebody or something sent SIGSTOP to the rank (a debugger, a scheduler)",
    ),
    "mismatch": (
        "Mismatch",
        "look for code that only some ranks run, or for sizes that differ between them",
    ),
    "hung": ("Hung", _STACKS),
    "busy": ("Busy", _STACKS),
    "lost-contact": ("LostContact", "look at the network, and at the hosts of the other ranks"),
    "network-cut": (
        "NetworkCut",
        "the network between the hosts was cut, or the other host died or froze: nobody here can "
        "tell which; look at that host first, then at the links and switches between",
    ),
}


def write_failure(
    folder: Path, error: BaseException, rank: int, *, advice: str = "", epoch: int | None = None
) -> None:
    """Write ``failure.json`` of an exception of this process, which no supervisor sees; of several
    failing ranks the first one stays."""
    frames, facts = traceback.format_exception(error)[-_FRAMES:], getattr(error, "facts", None)
    content = {
        "kind": type(error).__name__,
        "message": str(error),
        "frames": frames,
        **_head(rank, epoch, os.getpid()),
        **_where(own_word()),
        "exit_code": 1,
        "advice": advice,
        **(facts if isinstance(facts, Mapping) else {}),
    }
    _link(folder, content)


def write_verdict(
    folder: Path, ended: Ended, *, epoch: int | None, action: str, advice: str
) -> None:
    """Write ``failure.json`` of ranks that were supervised, with the last place of every rank.

    `action`: what the library did about it; `advice`: what the user should do.
    """
    content = _of_ended(ended, epoch, advice) | {"action": action}
    with suppress(OSError):
        os.replace(_temporary(folder, content), folder / FILE)


def write_node_verdict(
    folder: Path,
    ended: Ended,
    first_rank: int,
    *,
    epoch: int | None,
    earlier: ReportId | None,
    action: str,
    advice: str,
) -> bool:
    """As :func:`write_verdict`, of the node whose first rank is `first_rank`: its own report, and
    that of the run unless another node was faster; returns whether this one was the first.

    `earlier`: the report that was there when the ranks started. Ranks that failed before one of
    them had the lease have the epoch of the start before.
    """
    content = _of_ended(ended, epoch, advice) | {"action": action}
    place = kept_in(folder, epoch)
    with suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        os.replace(_temporary(folder, content), place / f"node-{first_rank}.json")
    if _epoch_of(folder / FILE) != epoch or report_id(folder) == earlier:
        keep_failure(folder)
    return _link(folder, content)


def say(text: str) -> None:
    """Print on stderr; a console that is gone ends no run."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


#: Of a file: its number on the disk, its size, and when it was written by the clock of the disk.
ReportId = tuple[int, int, int]


def report_id(folder: Path) -> ReportId | None:
    """The identity of the newest report in a run folder; None where there is none."""
    with suppress(OSError):
        found = (folder / FILE).stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    return None


def kept_in(folder: Path, epoch: int | None) -> Path:
    """The folder that keeps the files of this epoch's failure once the run goes on."""
    return folder / EARLIER / str(epoch or 0)


def keep_failure(folder: Path, *, have_ended: bool = False) -> Path | None:
    """Put the report of an earlier failure aside, as ``failures/<epoch>/failure.json``, and the
    stacks of its ranks beside it. Returns where they are; None where there was no failure.

    `have_ended`: no rank runs now, so that what they wrote to stderr is of that failure as well.
    """
    file = folder / FILE
    with suppress(OSError, ValueError):
        if not file.exists():
            return None
        place = kept_in(folder, _epoch_of(file))
        place.mkdir(parents=True, exist_ok=True)
        report = place / FILE
        if report.exists():
            numbers = (report.with_stem(f"{report.stem}-{number}") for number in itertools.count(1))
            os.replace(report, next(other for other in numbers if not other.exists()))
        os.replace(file, place / FILE)
        for stacks in (folder / LOGS).glob("rank-*.stacks"):
            os.replace(stacks, place / stacks.name)
        for errors in (folder / LOGS).glob("rank-*.err") if have_ended else ():
            if errors.stat().st_size:
                os.replace(errors, place / errors.name)
        return place
    return None


def _epoch_of(file: Path) -> int | None:
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["epoch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def hint_on(verdict: Verdict) -> str:
    """A hint at where to look for the cause; empty where the message says it."""
    return _KINDS[verdict.kind][1] if verdict.kind in _KINDS else ""


def kind_of(verdict: Verdict) -> str:
    """The kind of a failure in ``failure.json``: a class of exceptions, or a word of its own."""
    told = verdict.seen.told
    if verdict.kind == "exception" and told is not None:
        return told.kind
    return _KINDS[verdict.kind][0]


def newest_step(folder: Path, *, seconds: float = _ASK_SECONDS) -> int | None:
    """The step of the newest committed checkpoint; None where there is none, or where the place of
    the checkpoints does not answer within `seconds`."""
    with suppress(OSError, UserError):
        return _ask_newest(folder, seconds)
    return None


def _ask_newest(folder: Path, seconds: float) -> int | None:
    """As :func:`newest_step`; raises OSError or a UserError where the place does not answer."""
    found: list[int | Exception | None] = []

    def ask() -> None:
        try:
            found.append(next(iter(candidates(checkpoints_of(folder))), None))
        except (OSError, UserError) as error:
            found.append(error)

    # A disk of a network or a store may take forever, and ranks wait for the end of the question.
    thread = threading.Thread(target=ask, name="newest-step", daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise TimeoutError(f"no answer in {seconds:g} s")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def advice_on(
    verdict: Verdict, folder: Path, command: Sequence[str], *, came_twice: bool = False
) -> str:
    """Advice to the user: the last lines of the message. `came_twice`: at the same place."""
    told = verdict.seen.told
    if told is not None and (advice := told.facts.get("advice")):
        return str(advice)
    if told is not None and told.is_final:
        first_line = told.message.splitlines()[0] if told.message else ""
        return (
            f"the same command would fail again: {first_line}\n"
            "checkpoints are untouched; change the configuration first"
        )
    hint = hint_on(verdict)
    if came_twice:
        hint = "the same command would fail there again: remove the cause first"
    return "\n".join([*([hint] if hint else []), go_on(folder, command)])


def go_on(folder: Path, command: Sequence[str]) -> str:
    """One line that says how the run goes on and ends with the command."""
    shown = shlex.join(command)
    try:
        step = _ask_newest(folder, _ASK_SECONDS)
    except (OSError, UserError):
        return f"the same command goes on from the newest checkpoint, if there is one: {shown}"
    if step is None:
        return f"no checkpoint was written yet; the same command starts again: {shown}"
    return f"checkpoints are untouched; the same command goes on from step {step}: {shown}"


def same_failure(one: Verdict, other: Verdict) -> bool:
    """Whether an exception, an exit or a mismatch came again at the same place: a third would."""
    if one.kind not in ("exception", "exited", "mismatch") or kind_of(one) != kind_of(other):
        return False
    # A rank that told of its exception may or may not have ended when it was looked at.
    codes = [verdict.kind == "exited" and verdict.seen.exit_code for verdict in (one, other)]
    words = [verdict.seen.word for verdict in (one, other)]
    steps = [word.step if word is not None else None for word in words]
    return one.rank == other.rank and steps[0] == steps[1] and codes[0] == codes[1]


def details(folder: Path) -> str:
    """A pointer to the report."""
    if (folder / FILE).exists():
        return f"details in {folder / FILE}"
    return f"no report could be written into {folder}"


def _of_ended(ended: Ended, epoch: int | None, advice: str) -> dict[str, Any]:
    verdict = ended.verdict
    assert verdict is not None
    seen = verdict.seen
    word, code = seen.word, seen.exit_code
    content: dict[str, Any] = {
        "kind": kind_of(verdict),
        "message": verdict.message,
        "frames": [],
        **_head(verdict.rank, epoch, word.pid if word is not None else None),
        **_where(word),
        "exit_code": verdict.exit_code,
        "advice": advice,
    }
    if code is not None and code < 0:
        content["signal"] = signal.Signals(-code).name
    if seen.told is not None:
        content["exception"] = seen.told.kind
        if not (verdict.calls or verdict.lost):
            content["message"] = seen.told.message
    if verdict.collective is not None:
        content["collective"] = _collective(verdict.collective) | {
            "entered": list(verdict.entered),
            "missing": list(verdict.missing),
        }
    if verdict.calls:
        content["calls"] = [
            {
                "operation": call.collective.op,
                "bytes": call.collective.num_bytes,
                "caller": call.collective.caller,
                "ranks": list(call.ranks),
            }
            for call in verdict.calls
        ]
    if verdict.lost:
        content["unreachable"] = [
            {"host": host.name, "ranks": list(host.ranks)} for host in verdict.lost
        ]
    told, stack = verdict.seen.told, ended.stacks.get(verdict.rank)
    if told is not None:
        content |= {"frames": told.trace.splitlines()[-2 * _FRAMES :], **told.facts}
    elif stack is not None:
        content["frames"] = stack.split("\n\n")[-1].splitlines()[: 2 * _FRAMES]
    return content


def _head(rank: int, epoch: int | None, pid: int | None) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "rank": rank,
        "host": socket.gethostname(),
        "pid": pid,
        "epoch": epoch,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _where(word: Word | None) -> dict[str, Any]:
    if word is None:
        return {}
    found: dict[str, Any] = {"step": word.step, "phase": word.phase}
    if word.microbatch >= 0:
        found["microbatch"] = word.microbatch
    if word.layer >= 0:
        found["layer"] = word.layer
    if word.inside and word.collective is not None:
        found["collective"] = _collective(word.collective)
    return found


def _collective(collective: Collective) -> dict[str, Any]:
    return {
        "operation": collective.op,
        "group": collective.axis,
        "ranks": list(collective.members),
        "number": collective.number,
        "caller": collective.caller,
        "bytes": collective.num_bytes,
    }


def _temporary(folder: Path, content: dict[str, Any]) -> Path:
    temporary = folder / f".failure-{content['rank']}-{os.getpid()}.tmp"
    text = json.dumps(content, indent=1, default=str)
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
    except OSError:  # a full disk takes the half of it
        with suppress(OSError):
            temporary.unlink()
        raise
    return temporary


def _link(folder: Path, content: dict[str, Any]) -> bool:
    """Write the report of the run; False where there is one."""
    is_first = False
    # The message on the console must come out even where nothing can be written any more.
    with suppress(OSError):
        temporary = _temporary(folder, content)
        with suppress(OSError):
            os.link(temporary, folder / FILE)
            is_first = True
        temporary.unlink()
    return is_first
