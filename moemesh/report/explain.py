"""One paragraph on a run: what bounds its speed, or why it failed, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moemesh.config.errors import ConfigError
from moemesh.config.load import load_run
from moemesh.report.bounds import BOUNDS, Bound
from moemesh.report.evidence import Evidence, evidence_of
from moemesh.report.failures import cause_of, culprit_of
from moemesh.report.page import command_of
from moemesh.trace.memory import format_bytes
from moemesh.trace.run import Run
from moemesh.trace.state import State, state_of

_MAX_MESSAGE = 400
#: Causes that take less than this share of a step are not spoken of beside the first one.
_MINOR = 0.1


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The planner's price of a run's step on a cluster: seconds by part, and their sum."""

    cluster: str
    seconds: float
    parts: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """`cause`: a name of the tables of causes, "unknown" where the files say too little. `shares`
    of a step by cause, `facts`: name -> (number, file). `sentences` in the order of the paragraph;
    `command`: what to run next, "" where nothing follows."""

    run: str
    state: State
    cause: str
    sentences: tuple[str, ...]
    command: str = ""
    shares: Mapping[str, float] = field(default_factory=dict[str, float])
    facts: Mapping[str, tuple[float, str]] = field(default_factory=dict[str, tuple[float, str]])
    failure: Mapping[str, Any] | None = None
    planned: Planned | None = None

    @property
    def text(self) -> str:
        """The paragraph, and the command on a line of its own."""
        paragraph = " ".join(self.sentences)
        return f"{paragraph}\nnext: {self.command}" if self.command else paragraph

    def to_json(self) -> dict[str, Any]:
        planned = self.planned
        return {
            "run": self.run,
            "state": self.state,
            "cause": self.cause,
            "text": " ".join(self.sentences),
            "command": self.command or None,
            "shares": dict(self.shares),
            "evidence": [
                {"name": name, "value": value, "file": file}
                for name, (value, file) in self.facts.items()
            ],
            "failure": None if self.failure is None else dict(self.failure),
            "planned": None
            if planned is None
            else {
                "cluster": planned.cluster,
                "seconds": planned.seconds,
                "parts": dict(planned.parts),
            },
        }


def explain(run: Run, planned: Planned | None = None) -> Explanation:
    """What the folder of `run` says, and `planned` beside it where a cluster was named."""
    state = state_of(run)
    if run.failure is not None:
        return _failed(run, run.failure)
    evidence = evidence_of(run)
    sentences, command = [_progress(run, state)], ""
    bounds = _ranked(evidence)
    cause = bounds[0].name if bounds else "unknown"
    if state == "interrupted":
        sentences.append(
            "It ended without a word: it was killed, or the machine went down. "
            + _checkpoint(run.folder)
        )
        command, cause = _resume(run), "killed"
    if bounds:
        sentences.append(f"Its speed is bounded by {bounds[0].name}.")
        sentences += [bound.say(evidence) for bound in bounds]
        # What computes is not lost: the largest of the other parts is what a change can remove.
        remedy = next((bound for bound in bounds if bound.name != "compute"), bounds[0])
        sentences.append(remedy.advice)
        command = command or _next(run, remedy, evidence)
    elif run.metrics:
        sentences.append(_unknown(run, state))
    sentences += _plan(run, evidence, planned)
    sentences += _alarms(run)
    return Explanation(
        run=str(run.folder),
        state=state,
        cause=cause,
        sentences=tuple(sentences),
        command=command,
        shares=evidence.shares,
        facts=evidence.facts,
        planned=planned,
    )


def _progress(run: Run, state: State) -> str:
    if not run.metrics:
        return f"The run is {state} and has finished no step."
    row = run.metrics[-1]
    wanted = f" of {run.num_steps:,}" if run.num_steps is not None else ""
    return (
        f"The run is {state} at step {row.step:,}{wanted}, with a loss of {row.loss:.4f} "
        f"{run.loss_unit} and {row.tokens_per_second:,.0f} tokens a second."
    )


def _ranked(evidence: Evidence) -> list[Bound]:
    """Causes with a share of the step, the largest first; none unless compute is known, too: a
    small share of the known ones would say nothing about the rest."""
    known = [bound for bound in BOUNDS if bound.name in evidence.shares]
    known.sort(key=lambda bound: -evidence.shares[bound.name])
    if not known:
        return []
    first = known[0]
    if "compute" not in evidence.shares and evidence.shares[first.name] < 0.5:
        return []
    return [first, *(b for b in known[1:] if evidence.shares[b.name] >= _MINOR)]


def _unknown(run: Run, state: State) -> str:
    rest = "timeline.json, which is written at the end, is missing"
    if state == "running":
        rest = "timeline.json is written at the end of the run"
    return f"Where the time of a step goes cannot be said: {rest}."


def _plan(run: Run, evidence: Evidence, planned: Planned | None) -> list[str]:
    """The predictions beside what was measured."""
    sentences: list[str] = []
    if planned is not None and evidence.seconds:
        largest = max(planned.parts, key=lambda name: planned.parts[name], default="")
        difference = planned.seconds / evidence.seconds - 1
        sentences.append(
            f"The planner expects {planned.seconds:.4g} s a step on {planned.cluster} "
            f"(mostly {largest}), {evidence.seconds:.4g} s were measured "
            f"({difference:+.0%} from the measurement)."
        )
    bubble = evidence.fact("simulated bubble")
    if bubble is not None:
        sentences.append(f"The schedule alone would leave {bubble:.0%} of the pipeline idle.")
    for what, verb, before, after in (
        ("of traffic a step", "sent", "bytes predicted", "bytes measured"),
        ("on the fullest rank", "held", "held bytes predicted", "held bytes measured"),
    ):
        expected, found = evidence.fact(before), evidence.fact(after)
        if expected is not None and found is not None:
            sentences.append(
                f"The plan foresaw {format_bytes(expected)} {what}, {format_bytes(found)} were "
                f"{verb}."
            )
    return sentences


def _alarms(run: Run) -> list[str]:
    alarms = [event for event in run.events if event.kind == "alarm"]
    if not alarms:
        return []
    more = f" (and {len(alarms) - 1} more)" if len(alarms) > 1 else ""
    return [f"{_sentence(alarms[-1].text)}{more}."]


def _next(run: Run, bound: Bound, evidence: Evidence) -> str:
    """The first change of the bound that is legal, as the command that trains with it."""
    file = run.folder / "config.toml"
    if not file.is_file():
        return ""
    for overrides in bound.changes(evidence):
        try:
            load_run([file], overrides, environ={})
        except ConfigError:
            continue
        changed = overrides[-1].replace("=", "-").replace("/", "-").replace(".", "-")
        out = run.folder.with_name(f"{run.folder.name}-{changed}")
        arguments = [argument for override in overrides for argument in ("--set", override)]
        return shlex.join(["moemesh", "train", str(file), *arguments, "--out", str(out)])
    return shlex.join(["moemesh", "profile", str(file)])


def _failed(run: Run, failure: Mapping[str, Any]) -> Explanation:
    cause = cause_of(failure)
    place = culprit_of(failure)
    kind = str(failure.get("kind", "an error"))
    message = str(failure.get("message", "")).strip()
    if len(message) > _MAX_MESSAGE:
        message = f"{message[:_MAX_MESSAGE]} …"
    last = f" after step {run.metrics[-1].step:,}" if run.metrics else " before its first step"
    sentences = [
        f"The run failed{last}: {cause.name}" + (f" ({place})." if place else "."),
        f"{kind}: {_sentence(message)}." if message else f"{kind}.",
    ]
    if action := failure.get("action"):
        sentences.append(f"What was done: {_sentence(str(action))}.")
    arguments: Sequence[str] = cause.arguments
    if advice := str(failure.get("advice") or ""):
        sentences.append(f"{_sentence(advice)}.")
    else:
        sentences += [cause.advice, _checkpoint(run.folder)]
    command = _resume(run, arguments)
    if cause.name == "damaged checkpoint":
        command = shlex.join(["moemesh", "checkpoint", "verify", str(run.folder)])
    if bundle := failure.get("bundle"):
        sentences.append(f"The step can be replayed from {bundle}.")
    alarms = _alarms(run)
    return Explanation(
        run=str(run.folder),
        state="failed",
        cause=cause.name,
        sentences=(*sentences, *alarms),
        command=command,
        failure=failure,
    )


def _sentence(text: str) -> str:
    """On one line, without the full stop that follows anyway."""
    return " ".join(text.split()).rstrip(".")


def _checkpoint(folder: Path) -> str:
    steps = [
        int(path.name.removeprefix("step-"))
        for path in folder.glob("checkpoints/step-*")
        if path.name.removeprefix("step-").isdecimal()
    ]
    if not steps:
        return "There is no checkpoint: the next start begins again."
    return f"The next start goes on from the checkpoint of step {max(steps):,}."


def _resume(run: Run, arguments: Sequence[str] = ()) -> str:
    """The command of the newest start, or one that does the same, with `arguments`."""
    command = command_of(run)
    if not command and (run.folder / "config.toml").is_file():
        parts = ["moemesh", "train", str(run.folder / "config.toml"), "--out", str(run.folder)]
        command = shlex.join(parts)
    return " ".join([command, shlex.join(arguments)]).strip() if command else ""
