"""Causes of failed runs: one table of kinds and advice, for the console and for reports.

The failure detector (:mod:`moemesh.monitor.detector`) and exceptions give a kind, the table the
advice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast


class FailureCause(NamedTuple):
    """A cause: its name, advice, patterns of kinds and of messages ("": none) that identify it,
    and arguments to add to the command of the next attempt."""

    name: str
    advice: str
    kind: str = ""
    message: str = ""
    arguments: tuple[str, ...] = ()


#: Causes in order of precedence: the first match counts.
CAUSES: tuple[FailureCause, ...] = (
    FailureCause(
        "out of memory",
        "Recompute activations in the backward, or take smaller microbatches.",
        kind=r"OutOfMemory|MemoryError|TooLarge",
        message=r"out of memory|can't allocate memory|cannot allocate memory",
        arguments=("--set", "plan.recompute=full", "--allow-change", "plan.recompute"),
    ),
    FailureCause(
        "disk full",
        "Free space on the disk of the run folder: older checkpoints are the largest files there.",
        message=r"no space left|disk quota|errno 28|errno 122",
    ),
    FailureCause(
        "diverged",
        "Lower the learning rate, or clip gradients harder.",
        kind=r"Diverged|NonFinite|Spike|RoutingFault",
        message=r"gradient.* finite|is not finite|not a number|\bnan\b",
    ),
    FailureCause(
        "replicas differ",
        "Take the host of the culprit out of service and test its device and memory.",
        kind=r"CopiesDiffer|Replica",
        message=r"replicas? .*differ|digests? differ",
    ),
    FailureCause(
        "mismatched operations",
        "Look for code that only some ranks run, or for sizes that differ between them.",
        kind=r"^Mismatch",
    ),
    FailureCause(
        "network cut",
        "The network between the hosts was cut, or the other host died or froze: the two look the "
        "same from here; look at that host first, then at the links and switches between.",
        kind=r"^NetworkCut",
    ),
    FailureCause(
        "hang",
        "Find out what the rank that did not come was doing: see its log, and rank-*.stacks for "
        "the position of every rank (in logs/; in failures/EPOCH/ once the run has continued).",
        kind=r"Hung|Busy|Timeout|DistBackend|DistStore",
        message=r"timed out|timeout|waited longer",
    ),
    FailureCause(
        "stopped from outside",
        "A debugger or a scheduler stopped the rank: let it continue, or restart the run.",
        kind=r"^Stopped",
        message=r"sigstop",
    ),
    FailureCause(
        "killed",
        "Look into the kernel's log for an out-of-memory kill (dmesg -T | grep -i oom), and into "
        "that of the scheduler.",
        kind=r"Killed",
        message=r"killed by signal|signal 9|sigkill",
    ),
    FailureCause(
        "lost contact",
        "Another rank went first: look into the logs of the others, and at the network.",
        kind=r"LostContact|ConnectionError|ConnectionReset",
        message=r"closed by peer|reset by peer|broken pipe|lost contact",
    ),
    FailureCause(
        "damaged checkpoint",
        "Verify the checkpoints; the run can resume from an older one.",
        kind=r"Checkpoint",
        message=r"checkpoint .*(damaged|digest|cannot be read)",
    ),
    FailureCause(
        "data",
        "Correct the record that the message names, or leave bad records out.",
        kind=r"DataError|BadRecord|TokenCache|UnicodeDecode",
        arguments=("--set", "data.bad_records=skip", "--allow-change", "data"),
    ),
    FailureCause(
        "configuration",
        "Change the configuration as described in the message.",
        kind=r"ConfigError|WorldSize|UserError|RunFolder|DeviceError",
    ),
    FailureCause(
        "exit",
        "Look for a call of exit in code of your own, and into the log of the rank.",
        kind=r"Exited|SystemExit",
    ),
)
#: Cause of any other exception.
OTHER = FailureCause(
    "exception", "The last frames are those of the exception; a restart may fail in the same way."
)

#: Keys of the report that locate the failure, in the order of a sentence.
_WHERE = ("host", "pid", "step", "phase", "microbatch", "layer", "expert", "parameter", "file")


def cause_of(failure: Mapping[str, Any]) -> FailureCause:
    """The first cause of the table that fits the kind, else the first that fits the message."""
    kind, message = (str(failure.get(key, "")) for key in ("kind", "message"))
    kinds = f"{kind} {failure.get('exception', '')}".strip()
    for cause in CAUSES:
        if cause.kind and re.search(cause.kind, kinds):
            # Backends give out-of-memory and lost peers the kind of a timeout: only the message
            # has the cause.
            specific = _by_message(message) if cause.name == "hang" else None
            return specific or cause
    return _by_message(message) or OTHER


def is_disk_full(message: str) -> bool:
    """Whether a message is about a full disk or an exhausted quota."""
    return cause_of({"message": message}).name == "disk full"


def _by_message(message: str) -> FailureCause | None:
    """The first cause of the table that fits a message."""
    text = message.lower()
    return next((c for c in CAUSES if c.message and re.search(c.message, text)), None)


def culprit_of(failure: Mapping[str, Any], keys: Sequence[str] = _WHERE) -> str:
    """Rank and place of the failure, from the `keys` that its report has; "" if it has none."""
    parts = [f"rank {failure['rank']}"] if failure.get("rank") is not None else []
    parts += [
        f"{name} {failure[name]}"
        for name in keys
        if failure.get(name) is not None and failure[name] != -1
    ]
    collective = failure.get("collective")
    if isinstance(collective, dict):
        operation = cast("dict[str, Any]", collective)
        text = f"in {operation.get('operation', 'a collective')}"
        if operation.get("group"):
            text += f" over {operation['group']}"
        if operation.get("missing"):
            text += f" without rank {', '.join(map(str, operation['missing']))}"
        parts.append(text)
    elif collective:
        parts.append(f"in {collective}")
    return ", ".join(parts)
