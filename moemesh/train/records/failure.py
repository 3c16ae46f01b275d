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
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from moemesh.checkpoint.stored import candidates
from moemesh.config.errors import UserError
from moemesh.config.limits import parse_json
from moemesh.train.records.run_folder import LOGS, Events, checkpoints_of, now
from moemesh.watch.failures import cause_of
from moemesh.watch.progress_words import Collective, Word, own_word
from moemesh.watch.supervisor import Ended, SlowRank
from moemesh.watch.verdict import Verdict

FILE, EARLIER = "failure.json", "failures"
#: Of the layout of the file.
SCHEMA = 1
_FRAMES = 8
#: Seconds in which the place of the checkpoints must say which is the newest, for a message.
_ASK_SECONDS = 2.0


def write_failure(
    folder: Path, error: BaseException, rank: int, *, advice: str = "", epoch: int | None = None
) -> None:
    """Write ``failure.json`` of an exception of this process, which no supervisor sees; of several
    failing ranks the first one stays."""
    facts = getattr(error, "facts", None)
    content = {
        "kind": type(error).__name__,
        "message": str(error),
        "frames": traceback.format_exception(error)[-_FRAMES:],
        **_place(rank, epoch, os.getpid(), own_word()),
        "exit_code": 1,
        "advice": advice,
        **(facts if isinstance(facts, Mapping) else {}),
    }
    _link(folder, content)


def write_verdict(
    folder: Path,
    ended: Ended,
    *,
    epoch: int | None,
    action: str,
    advice: str,
    first_rank: int | None = None,
    earlier: ReportId | None = None,
) -> bool:
    """Write ``failure.json`` of ranks that were supervised, with the last place of every rank. Of
    the node whose first rank is `first_rank`: its own report, and that of the run unless another
    node was faster. Returns whether this one was the first.

    `action`: what the library did about it; `advice`: what the user should do; `earlier`: the
    report that was there when the ranks started. Ranks that failed before one of them had the lease
    have the epoch of the start before.
    """
    content, place = _of_ended(ended, epoch, advice) | {"action": action}, folder / FILE
    with suppress(OSError):
        if first_rank is not None:
            place = kept_in(folder, epoch) / f"node-{first_rank}.json"
            place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(_temporary(folder, content), place)
    if first_rank is None:
        return True
    if _epoch_of(folder / FILE) != epoch or report_id(folder) == earlier:
        keep_failure(folder)
    return _link(folder, content)


def say(text: str) -> None:
    """Print on stderr; a console that is gone ends no run."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def tell_slow(slow: SlowRank, events: Events) -> None:
    """One line on stderr and an event; the run goes on."""
    events.add("slow_rank", str(slow), slow.step)
    say(f"moemesh: {slow}")


#: Of a file: its number on the disk, its size, and when it was written by the clock of the disk.
ReportId = tuple[int, int, int]


def report_id(folder: Path) -> ReportId | None:
    """The identity of the newest report in a run folder; None where there is none."""
    try:
        found = (folder / FILE).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


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
        return int(parse_json(file.read_text(encoding="utf-8"))["epoch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def hint_on(verdict: Verdict) -> str:
    """A hint at where to look for the cause; empty where the message says it."""
    if verdict.kind == "exception":
        return ""
    advice = cause_of({"kind": kind_of(verdict)}).advice
    return f"{advice[:1].lower()}{advice[1:]}".rstrip(".")


def kind_of(verdict: Verdict) -> str:
    """The kind of a failure in ``failure.json``: a class of exceptions, or such as LostContact."""
    told = verdict.seen.told
    if verdict.kind == "exception" and told is not None:
        return told.kind
    return "".join(word.capitalize() for word in verdict.kind.split("-"))


def newest_step(folder: Path, *, seconds: float = _ASK_SECONDS) -> int | None:
    """The step of the newest committed checkpoint; None where there is none, or where the place of
    the checkpoints does not answer within `seconds`."""
    with suppress(OSError, UserError):
        return _ask_newest(folder, seconds)
    return None


def _ask_newest(folder: Path, seconds: float) -> int | None:
    """As :func:`newest_step`; raises OSError or a UserError where the place does not answer."""
    found = Future[int | None]()

    def ask() -> None:
        try:
            found.set_result(next(iter(candidates(checkpoints_of(folder))), None))
        except (OSError, UserError) as error:
            found.set_exception(error)

    # A disk of a network or a store may take forever, and ranks wait for the end of the question.
    threading.Thread(target=ask, name="newest-step", daemon=True).start()
    return found.result(seconds)  # TimeoutError is an OSError


def advice_on(
    verdict: Verdict, folder: Path, command: Sequence[str], *, came_twice: bool = False
) -> str:
    """Advice to the user: the last lines of the message. `came_twice`: at the same place."""
    told = verdict.seen.told
    if told is not None and (advice := told.facts.get("advice")):
        return str(advice)
    if told is not None and told.is_final:
        first_line = told.message.splitlines()[0].rstrip(":") if told.message else ""
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


def details(folder: Path) -> str:
    """A pointer to the report."""
    if (folder / FILE).exists():
        return f"details in {folder / FILE}"
    return f"no report could be written into {folder}"


def _of_ended(ended: Ended, epoch: int | None, advice: str) -> dict[str, Any]:
    verdict = ended.verdict
    assert verdict is not None
    word, code, told = verdict.seen.word, verdict.seen.exit_code, verdict.seen.told
    content: dict[str, Any] = {
        "kind": kind_of(verdict),
        "message": verdict.message,
        "frames": [],
        **_place(verdict.rank, epoch, word.pid if word is not None else None, word),
        "exit_code": verdict.exit_code,
        "advice": advice,
    }
    if code is not None and code < 0:
        content["signal"] = signal.Signals(-code).name
    if told is not None:
        content["exception"] = told.kind
        if not (verdict.calls or verdict.lost):
            content["message"] = told.message
    if verdict.collective is not None:
        ranks = {"entered": list(verdict.entered), "missing": list(verdict.missing)}
        content["collective"] = _collective(verdict.collective) | ranks
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
        lost = [{"host": host.name, "ranks": list(host.ranks)} for host in verdict.lost]
        content["unreachable"] = lost
    if told is not None:
        content |= {"frames": told.trace.splitlines()[-2 * _FRAMES :], **told.facts}
    elif (stack := ended.stacks.get(verdict.rank)) is not None:
        content["frames"] = stack.split("\n\n")[-1].splitlines()[: 2 * _FRAMES]
    return content


def _place(rank: int, epoch: int | None, pid: int | None, word: Word | None) -> dict[str, Any]:
    """Which process failed, when, and where it was by its progress word."""
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "rank": rank,
        "host": socket.gethostname(),
        "pid": pid,
        "epoch": epoch,
        "time": now(),
    }
    if word is None:
        return found
    found |= {"step": word.step, "phase": word.phase}
    found |= {"microbatch": word.microbatch} if word.microbatch >= 0 else {}
    found |= {"layer": word.layer} if word.layer >= 0 else {}
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
