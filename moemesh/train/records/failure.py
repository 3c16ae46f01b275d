"""Failure reports: ``failure.json``, the message for the user, and the advice on a restart."""

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
from moemesh.monitor.detector import Verdict
from moemesh.monitor.failures import cause_of
from moemesh.monitor.progress import Collective, ProgressRecord, own_record
from moemesh.monitor.supervisor import Straggler, SupervisorResult
from moemesh.trace.run import FAILURE, FAILURES, read_failure
from moemesh.train.records.run_folder import LOGS, Events, checkpoints_of, now

#: Version of the layout of ``failure.json``.
SCHEMA = 1
#: Largest number of innermost frames of a traceback that a report has; in a text, a frame has at
#: least two lines.
_FRAMES = 8
#: Seconds in which the checkpoint store must return the newest step, for a message.
_READ_SECONDS = 2.0
#: Longest time in seconds that the page of a failed run may delay the exit.
_PAGE_SECONDS = 5.0


def write_failure(
    folder: Path, error: BaseException, rank: int, *, advice: str = "", epoch: int | None = None
) -> None:
    """Write ``failure.json`` for an exception of this process, which has no supervisor, unless
    another rank has written it."""
    facts = getattr(error, "facts", None)
    content = {
        "kind": type(error).__name__,
        "message": str(error),
        "frames": traceback.format_exception(error)[-_FRAMES:],
        **_position(rank, epoch, os.getpid(), own_record()),
        "exit_code": 1,
        "advice": advice,
        **(facts if isinstance(facts, Mapping) else {}),
    }
    _link(folder, content)


def write_verdict(
    folder: Path,
    ended: SupervisorResult,
    *,
    epoch: int | None,
    action: str,
    advice: str,
    first_rank: int | None = None,
    earlier: ReportId | None = None,
) -> bool:
    """Write ``failure.json`` of supervised ranks, with the last position of the rank at fault.
    Returns whether this report was the first.

    `first_rank`: the first rank of the node, for a watcher: it writes a report of its node, and
    that of the run unless another node was faster. `action`: the reaction of the library; `advice`:
    advice to the user. `earlier`: the report that existed when the ranks started; it is moved away
    even if it has the same `epoch`, which is that of the previous start if the ranks failed before
    one of them had the lease.
    """
    verdict = ended.verdict
    assert verdict is not None
    record, code, error = verdict.status.record, verdict.status.exit_code, verdict.status.error
    content: dict[str, Any] = {
        "kind": kind_of(verdict),
        "message": verdict.message,
        "frames": [],
        **_position(verdict.rank, epoch, record.pid if record is not None else None, record),
        "exit_code": verdict.exit_code,
        "advice": advice,
    }
    if code is not None and code < 0:
        content["signal"] = signal.Signals(-code).name
    if error is not None:
        content["exception"] = error.kind
        if not (verdict.calls or verdict.lost):
            content["message"] = error.message
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
    if error is not None:
        content |= {"frames": error.trace.splitlines()[-2 * _FRAMES :], **error.facts}
    elif (stack := ended.stacks.get(verdict.rank)) is not None:
        # faulthandler prints the main thread last, with its innermost frame first.
        content["frames"] = stack.split("\n\n")[-1].splitlines()[: 2 * _FRAMES]
    content["action"] = action
    file = folder / FAILURE
    with suppress(OSError):
        if first_rank is not None:
            file = kept_in(folder, epoch) / f"node-{first_rank}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
        os.replace(_temporary(folder, content), file)
    if first_rank is None:
        return True
    if _epoch_of(folder) != epoch or report_id(folder) == earlier:
        keep_failure(folder)
    return _link(folder, content)


def write_page(folder: Path) -> None:
    """Write `report.html` of a run that failed. An error, or a disk that does not answer within
    `_PAGE_SECONDS`, leaves the folder without a new page and the failure as it is."""

    def write() -> None:
        with suppress(Exception):
            # Late: a run that does not fail needs no page in this process.
            from moemesh.report import page

            page.write(folder)

    thread = threading.Thread(target=write, name="report", daemon=True)
    thread.start()
    thread.join(_PAGE_SECONDS)


def log(text: str) -> None:
    """Print on stderr; a lost console is ignored."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def report_straggler(slow: Straggler, events: Events) -> None:
    """Print a line on stderr and record an event; the run continues."""
    events.add("slow_rank", str(slow), slow.step)
    log(f"moemesh: {slow}")


#: Identity of a file: inode, size in bytes, and modification time in nanoseconds.
ReportId = tuple[int, int, int]


def report_id(folder: Path) -> ReportId | None:
    """The identity of the newest report in a run folder; None without a report."""
    try:
        stat = (folder / FAILURE).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def kept_in(folder: Path, epoch: int | None) -> Path:
    """The folder that gets the report and the logs of this epoch's failure at the next start."""
    return folder / FAILURES / str(epoch or 0)


def keep_failure(folder: Path, *, have_ended: bool = False) -> Path | None:
    """Move the report of an earlier failure to ``failures/<epoch>/failure.json``, with the stacks
    of its ranks. Returns the folder; None without a failure.

    `have_ended`: no rank is running, so that their stderr also belongs to that failure.
    """
    file = folder / FAILURE
    with suppress(OSError, ValueError):
        if not file.exists():
            return None
        place = kept_in(folder, _epoch_of(folder))
        place.mkdir(parents=True, exist_ok=True)
        report = place / FAILURE
        if report.exists():
            numbers = (report.with_stem(f"{report.stem}-{number}") for number in itertools.count(1))
            os.replace(report, next(other for other in numbers if not other.exists()))
        os.replace(file, place / FAILURE)
        for stacks in (folder / LOGS).glob("rank-*.stacks"):
            os.replace(stacks, place / stacks.name)
        for errors in (folder / LOGS).glob("rank-*.err") if have_ended else ():
            if errors.stat().st_size:
                os.replace(errors, place / errors.name)
        return place
    return None


def _epoch_of(folder: Path) -> int | None:
    with suppress(ValueError, KeyError, TypeError):
        return int(read_failure(folder)["epoch"])
    return None


def hint_on(verdict: Verdict) -> str:
    """A hint at the cause, as a clause without a full stop; empty if the message is sufficient."""
    if verdict.kind == "exception":
        return ""
    advice = cause_of({"kind": kind_of(verdict)}).advice
    return f"{advice[:1].lower()}{advice[1:]}".rstrip(".")


def kind_of(verdict: Verdict) -> str:
    """The kind of a failure in ``failure.json``: the class of an exception, or the kind of the
    verdict in the same form, such as LostContact."""
    error = verdict.status.error
    if verdict.kind == "exception" and error is not None:
        return error.kind
    return "".join(word.capitalize() for word in verdict.kind.split("-"))


def newest_step(folder: Path, *, seconds: float = _READ_SECONDS) -> int | None:
    """The step of the newest committed checkpoint; None without any, or if the checkpoint store
    does not answer within `seconds`."""
    with suppress(OSError, UserError):
        return _read_newest(folder, seconds)
    return None


def _read_newest(folder: Path, seconds: float) -> int | None:
    """Same as :func:`newest_step`; raises OSError or a UserError if the store does not answer."""
    future = Future[int | None]()

    def read() -> None:
        try:
            future.set_result(next(iter(candidates(checkpoints_of(folder))), None))
        except (OSError, UserError) as error:
            future.set_exception(error)

    # A network disk or a store may hang, and ranks wait for this call.
    threading.Thread(target=read, name="newest-step", daemon=True).start()
    return future.result(seconds)  # TimeoutError is an OSError


def advice_on(
    verdict: Verdict, folder: Path, command: Sequence[str], *, came_twice: bool = False
) -> str:
    """Advice to the user: the last lines of the message. `came_twice`: a repeated failure."""
    error = verdict.status.error
    if error is not None and (advice := error.facts.get("advice")):
        return str(advice)
    if error is not None and error.is_final:
        first_line = error.message.splitlines()[0].rstrip(":") if error.message else ""
        return (
            f"the same command would fail in the same way: {first_line}\n"
            "checkpoints are untouched; change the configuration first"
        )
    hint = hint_on(verdict)
    if came_twice:
        hint = "the same command would fail at the same place: remove the cause first"
    return "\n".join([*([hint] if hint else []), go_on(folder, command)])


def go_on(folder: Path, command: Sequence[str]) -> str:
    """A line that describes how to resume and ends with the command."""
    shown = shlex.join(command)
    try:
        step = _read_newest(folder, _READ_SECONDS)
    except (OSError, UserError):
        return f"the same command resumes from the newest checkpoint, if there is one: {shown}"
    if step is None:
        return f"no checkpoint was written yet; the same command starts from the beginning: {shown}"
    return f"checkpoints are untouched; the same command resumes from step {step}: {shown}"


def details(folder: Path) -> str:
    """A reference to the report."""
    if (folder / FAILURE).exists():
        return f"details in {folder / FAILURE}"
    return f"no report could be written into {folder}"


def _position(
    rank: int, epoch: int | None, pid: int | None, record: ProgressRecord | None
) -> dict[str, Any]:
    """Keys of ``failure.json``: the process that failed, the time, and the position in the step by
    its progress record."""
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "rank": rank,
        "host": socket.gethostname(),
        "pid": pid,
        "epoch": epoch,
        "time": now(),
    }
    if record is None:
        return content
    content |= {"step": record.step, "phase": record.phase}
    content |= {"microbatch": record.microbatch} if record.microbatch >= 0 else {}
    content |= {"layer": record.layer} if record.layer >= 0 else {}
    if record.inside and record.collective is not None:
        content["collective"] = _collective(record.collective)
    return content


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
    except OSError:  # a full disk may leave a part of the file
        with suppress(OSError):
            temporary.unlink()
        raise
    return temporary


def _link(folder: Path, content: dict[str, Any]) -> bool:
    """Write the report of the run, unless one exists: a hard link replaces no file. Returns whether
    it was written."""
    is_first = False
    # The message on the console must be printed even if no file can be written.
    with suppress(OSError):
        temporary = _temporary(folder, content)
        with suppress(OSError):
            os.link(temporary, folder / FAILURE)
            is_first = True
        temporary.unlink()
    return is_first
