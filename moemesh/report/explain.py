"""Explanation of a run in one paragraph: the bound of its speed or the cause of its failure, and
the next command."""

from __future__ import annotations

import itertools
import math
import re
import shlex
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from moemesh.config.changes import compare
from moemesh.config.errors import UserError
from moemesh.config.load import resolved_toml, with_recorded
from moemesh.config.train import usual_rate
from moemesh.monitor.failures import CAUSES, cause_of, culprit_of, is_disk_full
from moemesh.report.bounds import BOUNDS, Evidence, evidence_of
from moemesh.report.document import plural
from moemesh.report.facts import NO_STEP, RunFacts
from moemesh.sharding.load_run import load_run
from moemesh.trace.loads import collapse_text
from moemesh.trace.memory_profile import MEASURED_HELD, PREDICTED_HELD, format_bytes
from moemesh.trace.run import (
    JUMPED,
    LEAST_STEPS,
    Event,
    MetricsRow,
    PlannedStep,
    Run,
    State,
    newest_checkpoint,
    state_of,
)
from moemesh.trace.step_seconds import flop_rate

# Health of a run: losses, skipped steps, survived failures.

#: Relative rise of a loss below which it is noise.
_NOTICEABLE = 0.03
#: Multiple of the noise of a part above which a rise is significant.
_NOISES = 3
#: Least difference of two losses that counts: absolute, and relative (only for the gap between
#: validation and training loss).
_GAP, _GAP_SHARE = 0.1, 0.1
#: Number of parts of the run whose median losses are compared.
_PARTS = 20
#: Number of parts of the losses of which the first and the last are compared.
_THIRDS = 3
#: Ratio of the largest gradient norm to the median above which gradients are uneven.
_UNEVEN = 10
#: Most characters of a text on one line, and most earlier failures that are described.
_LONGEST, _MOST_FAILURES = 160, 3


#: Kinds of events worth a line, the worst first: kind, label of the line, singular, plural.
_KINDS = (
    ("rollback", "returned", "return to a checkpoint", "returns to a checkpoint"),
    ("skipped", "skipped", "step left out", "steps left out"),
    ("copies", "copies", "difference of copies repaired", "differences of copies repaired"),
    ("spike", "spikes", "jump of the loss", "jumps of the loss"),
    ("alarm", "alarms", "alarm", "alarms"),
    ("disk", "disk", "message", "messages"),
    ("damaged", "damaged", "file", "files"),
    ("sink", "sinks", "message", "messages"),
    ("warning", "warnings", "warning", "warnings"),
)
_MOST_KINDS = 3


class Losses(NamedTuple):
    """Losses of a run. `line`: training, validation and unigram loss; `verdict`: a sentence on a
    problem, or ""; `change`: a `--set` argument against it, or ""; `continues`: whether the change
    applies to further steps of the run, or to a new run from the start."""

    line: str = ""
    verdict: str = ""
    change: str = ""
    continues: bool = False


def losses_of(run: Run) -> Losses:
    """The newest losses of `run`, compared with the unigram entropy of its data."""
    rows = [row for row in run.metrics if math.isfinite(row.loss)]
    if not rows:
        verdict = "No step had a finite loss: lower train.lr." if run.metrics else ""
        return Losses("", verdict, lower_rate(run) if run.metrics else "")
    line = f"training {rows[-1].loss:.4f}"
    validated = [(r.step, r.validation_loss) for r in rows if r.validation_loss is not None]
    if validated:
        step, loss = validated[-1]
        line += f", validation {loss:.4f}"
        if step != rows[-1].step:
            line += f" (step {step:,})"
    if (unigram := run.unigram_loss) is not None:
        line += f", unigram model {unigram:.4f}"
    is_bad = (not math.isfinite(row.loss + row.grad_norm) for row in reversed(run.metrics))
    num_bad = sum(itertools.takewhile(bool, is_bad))
    if num_bad > 1 or (num_bad and state_of(run) == "finished"):
        verdict = f"Loss or gradient of the last {plural(num_bad, 'step')} is not finite, so that "
        verdict += "the weights did not change: lower train.lr."
        return Losses(f"{line} {run.loss_unit}", verdict, lower_rate(run))
    return Losses(f"{line} {run.loss_unit}", *_verdict(run, rows, validated, unigram))


def _verdict(
    run: Run,
    rows: Sequence[MetricsRow],
    validated: Sequence[tuple[int, float]],
    unigram: float | None,
) -> tuple[str, str, bool]:
    """`verdict`, `change` and `continues` of :class:`Losses`. `rows`: those with finite losses;
    `validated`: (step, validation loss)."""
    # Parts of the run, or single steps of a short one: (first step, last step, median loss).
    cuts = [index * len(rows) // _PARTS for index in range(_PARTS + 1)]
    parts = [
        (rows[a].step, rows[b - 1].step, statistics.median(row.loss for row in rows[a:b]))
        for a, b in itertools.pairwise(cuts)
        if b > a
    ]
    # The part with the lowest loss, and the newest.
    first, last, lowest = min(parts, key=lambda part: part[2])
    newest, latest = rows[-1].step, parts[-1][2]
    # Noise of the median of a part: usual difference of neighbouring steps over the square root of
    # the number of steps.
    steps = [abs(b.loss - a.loss) for a, b in itertools.pairwise(rows)]
    noise = statistics.median(steps) / math.sqrt(max(1, len(rows) / _PARTS)) if steps else 0.0
    rose = latest > lowest + max(_GAP, _NOTICEABLE * lowest, _NOISES * noise)
    name, loss = "training", latest
    if validated and validated[-1][0] == newest:
        name, loss = "validation", validated[-1][1]
    is_judged = newest >= LEAST_STEPS or newest == run.num_steps
    # The run has not learned.
    if is_judged and unigram is not None and loss >= unigram:
        # Four times the steps so far, unless the run has more configured.
        num_steps = max(4 * newest, LEAST_STEPS)
        more_steps = f"train.steps={num_steps}" if num_steps > (run.num_steps or 0) else ""
        higher = higher_rate(run)
        # A rate below the usual one gains more from a higher one than from more steps.
        is_low = bool(more_steps) and _rate_of(run) * 2 <= _usual_rate_of(run)
        shape = shape_of(rows, rose=rose)
        if newest < LEAST_STEPS and shape != "rises":
            shape, is_low = "falls", False  # too few steps to judge the rate
        # By the shape of the losses: the reason, a change, and whether the run continues with it.
        why, change, continues = {
            "falls": ("", more_steps, True),
            "stays": ("its loss stays where it began: its learning rate is too low", higher, False),
            "falls slowly": (
                "its loss falls steadily, so that a higher train.lr or more steps are needed",
                higher,
                False,
            ),
            "rises": ("its learning rate is too high", lower_rate(run), False),
            "": ("and its losses do not show why", "", False),
        }["falls slowly" if shape == "falls" and is_low else shape]
        why = f"has not learned, {why}" if why else "needs more steps"
        return (
            f"The {name} loss ({loss:.2f}) is not below that of the unigram model "
            f"({unigram:.2f}), which knows only how often each token occurs: the run {why}.",
            change,
            continues,
        )
    if newest < LEAST_STEPS:
        return "", "", False
    if rose:
        return (
            f"The training loss rose after its minimum, from {lowest:.2f} at steps "
            f"{first:,} to {last:,} to {latest:.2f}: lower train.lr or train.clip, or check the "
            "data read since.",
            lower_rate(run),
            False,
        )
    if not validated:
        return "", "", False
    # The run overfits, or its validation differs from its training.
    (step, loss), best = validated[-1], min(validated, key=lambda pair: pair[1])
    if loss > best[1] * (1 + _NOTICEABLE) + 1e-9:
        epoch = rows[-1].epoch
        read = f" after {epoch:.1f} epochs" if epoch is not None and epoch >= 1 else ""
        is_saved = (run.folder / "checkpoints" / f"step-{best[0]}").is_dir()
        more = "; convert, evaluate and generate read that checkpoint with --best" * is_saved
        return (
            f"The validation loss was lowest at step {best[0]:,} ({best[1]:.4f}) and is "
            f"{loss:.4f} now{read}: the run overfits; take more data or fewer steps{more}.",
            f"train.steps={best[0]}",
            False,
        )
    near = [row.loss for row in rows if step - _PARTS < row.step <= step]
    gap = loss - statistics.fmean(near) if near else 0.0
    if gap > max(_GAP, _GAP_SHARE * loss):
        text = (
            f"The validation loss is {gap:.2f} above the training loss: the text that is held "
            "out differs, or the run memorises its samples."
        )
        return text, "", False
    return "", "", False


def shape_of(rows: Sequence[MetricsRow], *, rose: bool = False) -> str:
    """The shape of the losses of a run that has not learned: "falls", "falls slowly", "stays" (near
    its first value), "rises" (also: was far above its first value, or does not fall under uneven
    gradients), or "" if the shape is not clear. `rose`: the losses have risen after their
    lowest."""
    losses = [row.loss for row in rows]
    norms = sorted(row.grad_norm for row in rows if math.isfinite(row.grad_norm))
    is_even = bool(norms) and norms[-1] < _UNEVEN * statistics.median(norms)
    size = max(1, len(losses) // _THIRDS)
    first, last = losses[:size], losses[-size:]
    fall = statistics.fmean(first) - statistics.fmean(last)
    # Noise of the mean of a third, from differences of neighbouring steps.
    pairs = [abs(b - a) for part in (first, last) for a, b in itertools.pairwise(part)]
    noise = statistics.fmean(pairs) / math.sqrt(size) if pairs else 0.0
    parts = [losses[a : a + max(1, size // _THIRDS)] for a in range(0, len(losses), size)]
    highest = max(statistics.median(part) for part in parts)
    if rose or fall < -max(_GAP, _NOISES * noise) or highest > losses[0] + max(1.0, 9 * noise):
        return "rises"
    # A steady fall, unlike noise or a single jump, has its middle between both ends.
    middle = statistics.fmean(losses[size : len(losses) - size] or losses)
    is_steady = min(first) > max(last) or statistics.fmean(first) > middle > statistics.fmean(last)
    if len(losses) < _THIRDS or fall <= _NOISES * noise or not is_steady:
        if not is_even and fall < _GAP:
            return "rises"
        # "stays" only near the first value: with a rate that is too high the loss leaves it early.
        ends = (statistics.fmean(first), statistics.fmean(last))
        is_near = all(abs(mean - losses[0]) < _GAP for mean in ends)
        return "stays" if is_near and len(losses) >= LEAST_STEPS else ""
    return "falls" if fall > _GAP else "falls slowly" if is_even else ""


def _rate_of(run: Run) -> float:
    """The peak learning rate of the run; nan where its configuration has none."""
    rate = run.section("train").get("lr")
    return float(rate) if isinstance(rate, int | float) else math.nan


def _usual_rate_of(run: Run) -> float:
    """The learning rate that suits such a run: from scratch, on loaded weights, or with LoRA."""
    rank = int(run.section("lora").get("rank") or 0)
    return usual_rate(loads_weights="path" in run.section("model"), lora_rank=rank)


def higher_rate(run: Run) -> str:
    """The override for ten times the learning rate, at most the usual rate of such a run, but at
    least twice the present one; "" if the run does not record its rate."""
    rate = _rate_of(run)
    higher = max(min(10 * rate, _usual_rate_of(run)), 2 * rate)
    return "" if math.isnan(rate) else f"train.lr={higher:.3g}"


def lower_rate(run: Run) -> str:
    """The override for a tenth of the learning rate, at most the usual one of such a run; "" if
    the run does not record its rate."""
    rate = _rate_of(run)
    return "" if math.isnan(rate) else f"train.lr={min(rate / 10, _usual_rate_of(run)):.3g}"


def troubles_of(run: Run) -> list[tuple[str, str]]:
    """Lines (label, text) on problems, the worst first: survived failures, skipped steps, jumps of
    the loss, alarms."""
    lines: list[tuple[str, str]] = []
    if failures := run.earlier_failures:
        texts = list[str]()
        for failure in failures[-_MOST_FAILURES:]:
            place = culprit_of(failure, ("step",)) or "place unknown"
            action = f", {failure['action']}" if failure.get("action") else ""
            texts.append(one_line(f"{cause_of(failure).name} ({place}){action}"))
        newest = "" if len(failures) <= _MOST_FAILURES else f", the newest {_MOST_FAILURES}"
        summary = f"{plural(len(failures), 'failure')}{newest}: {'; '.join(texts)} (failures/)"
        lines.append(("survived", summary))
    by_kind: defaultdict[str, list[Event]] = defaultdict(list)
    for event in run.events:
        kind = "spike" if event.kind == "alarm" and JUMPED in event.text else event.kind
        by_kind[kind].append(event)
    for kind, label, single, several in [row for row in _KINDS if by_kind[row[0]]][:_MOST_KINDS]:
        events = by_kind[kind]
        number = f"1 {single}" if len(events) == 1 else f"{len(events):,} {several}"
        last = "" if len(events) == 1 else ", the last"
        text = one_line(events[-1].text.removeprefix("alarm: "))
        lines.append((label, f"{number}{last}: {text}"))
    if run.warnings:
        lines.append(("files", one_line("; ".join(run.warnings))))
    return lines


def one_line(text: str, longest: int = _LONGEST) -> str:
    """The text on one line, without a trailing full stop, cut after `longest` characters."""
    flat = " ".join(text.split()).rstrip(". ")
    return flat if len(flat) <= longest else f"{flat[: longest - 2].rstrip()} …"


#: Most characters of a message of a failure or an event in the paragraph.
_MAX_MESSAGE = 400
#: Most labelled lines below the paragraph, and the width of a label.
_MOST_LINES, _LABEL = 7, 10
#: Smallest share of a step that is listed.
_SHOWN = 0.005
_WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}
_KILLED = "without a record (it was killed, or the machine went down)"
_STATES: dict[State, str] = {
    "finished": "finished {step}",
    "running": "is at {step}",
    "stopped": "was stopped after {step},",
    "interrupted": f"ended after {{step}} {_KILLED},",
    "failed": "failed after {step},",
}
#: Smallest share of a step for which a cause after the largest one is named.
_MINOR = 0.1


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Explanation of a run. `cause`: name in the tables of causes, "unknown" if records are
    missing. `shares` of a step by cause; `facts`: name -> (number, file). `sentences` of the
    paragraph, the answer first; `lines`: (label, text) below it; `command`: the next command, or
    ""."""

    run: str
    state: State
    cause: str
    sentences: tuple[str, ...]
    lines: tuple[tuple[str, str], ...] = ()
    command: str = ""
    shares: Mapping[str, float] = field(default_factory=dict[str, float])
    facts: Mapping[str, tuple[float, str]] = field(default_factory=dict[str, tuple[float, str]])
    of_run: RunFacts
    failure: Mapping[str, Any] | None = None
    planned: PlannedStep | None = None

    @property
    def text(self) -> str:
        """The paragraph, the command and the lines, each on its own line."""
        return self.wrapped(1 << 20)

    def wrapped(self, width: int) -> str:
        """:attr:`text` wrapped to `width` characters; a command is never broken."""
        rows = textwrap.wrap(" ".join(self.sentences), width, **_WHOLE_WORDS)
        if self.command:
            rows += [f"next: {self.command}"]
        if self.lines:
            rows.append("")
        for label, text in self.lines:
            rows += textwrap.wrap(
                text,
                width,
                initial_indent=f"{label:<{_LABEL}}",
                subsequent_indent=" " * _LABEL,
                **_WHOLE_WORDS,
            )
        return "\n".join(rows)

    def to_json(self) -> dict[str, Any]:
        facts = self.facts.items()
        return {
            "run": self.run,
            "state": self.state,
            "cause": self.cause,
            "text": " ".join(self.sentences),
            "lines": dict(self.lines),
            "command": self.command or None,
            "shares": dict(self.shares),
            "evidence": [{"name": name, "value": n, "file": file} for name, (n, file) in facts],
            "failure": None if self.failure is None else dict(self.failure),
            "planned": None if self.planned is None else asdict(self.planned),
        }


def explain(run: Run) -> Explanation:
    """Explains `run` from its records, compared with the planned step if the cluster is known."""
    evidence, losses = evidence_of(run), losses_of(run)
    if run.failure is not None:
        cause, sentences, command = _failed(run, evidence, run.failure)
    else:
        cause, sentences, command = _not_failed(run, evidence, losses)
    # Lines below the paragraph: problems first, then losses, time, speed and memory.
    lines = troubles_of(run)
    if losses.line:
        lines.append(("loss", losses.line))
    shares = [(name, share) for name, share in evidence.shares.items() if share >= _SHOWN]
    if shares:
        shares.sort(key=lambda pair: -pair[1])
        lines.append(("time", ", ".join(f"{name} {share:.0%}" for name, share in shares)))
    if evidence.seconds is not None:
        medians = evidence.of_run.medians
        median = f"{evidence.seconds:.3g} s a step (median{run.of_steps})"
        parts = [f"{medians['tokens_per_second']:,.0f} tokens/s", median]
        mfu, rate = medians.get("mfu"), medians.get("tflops_per_rank")
        if rate is not None:
            parts.append(f"{flop_rate(rate)} a rank")
        if mfu is not None:
            parts.append(f"MFU {mfu:.1%}")
        lines.append(("speed", ", ".join(parts)))
    if run.memory is not None and run.memory.ranks:
        peak = format_bytes(run.memory.peak)
        figures = [f"{run.memory.peak_words}, of the fullest rank: {peak}"]
        for words, name in ((MEASURED_HELD, "measured"), (PREDICTED_HELD, "predicted")):
            if (size := evidence.fact(f"held bytes {name}")) is not None:
                figures.append(f"{words}: {format_bytes(size)}")
        lines.append(("memory", "; ".join(figures)))
    return Explanation(
        run=str(run.folder),
        state=evidence.of_run.state,
        cause=cause,
        sentences=tuple(sentences),
        lines=tuple(lines[:_MOST_LINES]),
        command=command,
        shares=evidence.shares if run.failure is None else {},
        facts=evidence.facts,
        of_run=evidence.of_run,
        failure=run.failure,
        planned=run.planned if run.failure is None else None,
    )


def _not_failed(run: Run, evidence: Evidence, losses: Losses) -> tuple[str, list[str], str]:
    """Cause, sentences and command of a run without the report of a failure."""
    of_run = evidence.of_run
    state = of_run.state
    # Causes with a share of the step, the largest first. Without the share of compute, a small
    # share of another cause does not explain the step.
    shares = evidence.shares
    bounds = sorted((name for name in BOUNDS if name in shares), key=lambda name: -shares[name])
    if bounds and "compute" not in shares and shares[bounds[0]] < 0.5:
        bounds = []
    bounds = [name for name in bounds if name == bounds[0] or shares[name] >= _MINOR]
    cause = bounds[0] if bounds else "unknown"
    has_ended = state in ("finished", "stopped")
    if of_run.last is not None and (of_run.last.step == run.last_step or not has_ended):
        verb = _STATES[state].format(step=f"step {of_run.progress}")
        loss = f"a training loss of {of_run.last.loss:.4f} {run.loss_unit}"
        loss = loss if math.isfinite(of_run.last.loss) else "a training loss that is not finite"
        progress = f"The run {verb} with {loss}."
    elif run.last_step:
        progress = f"The run {_STATES[state].format(step=f'step {run.last_step:,}')}"
        rows = (
            f"the rows after step {of_run.last.step:,}" if of_run.last else "the rows of its steps"
        )
        progress = f"{progress.rstrip(',')}; {rows} are gone (metrics.jsonl)."
    else:
        progress = NO_STEP[state]
    sentences, command = [progress], ""
    if state == "finished" and (reason := run.summary.get("early_stop")):
        sentences.append(f"It ended early: {reason}.")
    if state == "interrupted":
        event = run.events[-1].text if run.events else ""
        cause = "disk full" if is_disk_full(event) else "killed"
        if cause == "disk full":
            sentences[0] = sentences[0].replace(_KILLED, "while a disk was full")
            sentences.append(f"The last event: {one_line(event, _MAX_MESSAGE)}.")
        advice = next(entry.advice for entry in CAUSES if entry.name == cause)
        sentences += [_checkpoint(run), advice]
        command = _resume(run, of_run)
    elif state == "stopped":
        command = _resume(run, of_run)
    if losses.verdict:
        sentences.append(losses.verdict)
        changes = (losses.change,) if losses.change else ()
        command = command or _changed(run, changes, continues=losses.continues)
    if collapse := collapse_text(run.loads):
        sentences.append(collapse)
        raised = 10 * float(run.section("model").get("aux_loss_coefficient", 0)) or 0.01
        change = f"model.aux_loss_coefficient={raised:g}"
        command = command or _changed(run, [change], continues=False)
    if bounds and not losses.verdict and state != "interrupted":
        # Time of compute is not lost: the remedy is for the largest other cause.
        remedy = next((name for name in bounds if name != "compute"), bounds[0])
        text, advice, proposed = BOUNDS[remedy](evidence)
        stated = BOUNDS[cause](evidence)[0]
        sentences.append(f"Its speed is bounded by {cause}: {stated[:1].lower()}{stated[1:]}")
        if remedy != cause:
            sentences.append(f"Next comes {remedy}: {text[:1].lower()}{text[1:]}")
        sentences += [*_plan(evidence, run.planned), advice]
        if not command and (run.folder / "config.toml").is_file():
            profile = shlex.join(["moemesh", "profile", str(run.folder / "config.toml")])
            command = next(filter(None, (_changed(run, change) for change in proposed)), profile)
    elif run.metrics and not bounds:
        reason = "timeline.json, which is written at the end, is missing"
        if state == "running":
            reason = "timeline.json is written at the end of the run"
        sentences += [
            f"The time of a step cannot be explained: {reason}.",
            *_plan(evidence, run.planned),
        ]
    return cause, sentences, command


def _plan(evidence: Evidence, planned: PlannedStep | None) -> list[str]:
    """One sentence on predictions and measurements."""
    parts: list[str] = []
    if planned is not None and evidence.seconds:
        largest = max(planned.parts, key=lambda name: planned.parts[name], default="")
        difference = planned.seconds / evidence.seconds - 1
        parts.append(
            f"{planned.seconds:.4g} s a step on {planned.cluster} (mostly {largest}), "
            f"{evidence.seconds:.4g} s were measured ({difference:+.0%} from the measurement)"
        )
    if (bubble := evidence.fact("simulated bubble")) is not None:
        parts.append(f"a pipeline that is idle in {bubble:.0%} of a step by its schedule alone")
    expected, sent = evidence.fact("bytes predicted"), evidence.fact("bytes measured")
    if expected is not None and sent is not None:
        before, after = format_bytes(expected), format_bytes(sent)
        measured = "as was sent" if before == after else f"{after} were sent"
        parts.append(f"{before} of traffic a step, {measured}")
    return [f"The plan expects {'; '.join(parts)}."] if parts else []


def _changed(run: Run, overrides: Sequence[str], *, continues: bool = True) -> str:
    """The command that trains with `overrides`; "" without any, or if they are illegal.

    With `continues` a finished run is resumed in its folder, with the required --allow-change; to
    twice its steps, unless `overrides` has train.steps. Otherwise, for an unfinished run, and for a
    change of the model, a new run is started in a sibling folder.
    """
    file, folder = run.folder / "config.toml", run.folder
    if not overrides or not file.is_file():
        return ""
    continues = continues and state_of(run) == "finished" and bool(run.metrics)
    if continues and not any(item.startswith("train.steps=") for item in overrides):
        overrides = [*overrides, f"train.steps={2 * run.metrics[-1].step}"]
    try:
        before, after = (
            with_recorded(load_run([file], values, environ={}).config, folder)
            for values in ((), overrides)
        )
        changes = compare(resolved_toml(before), resolved_toml(after))
    except UserError:
        return ""
    arguments = [argument for override in overrides for argument in ("--set", override)]
    if continues and all(change.kind != "model" for change in changes):
        for change in changes:
            arguments += ["--allow-change", change.key] if change.kind == "training" else []
    else:
        if before.train.checkpoint_folder:  # it belongs to the old run
            arguments = ["--set", "train.checkpoint_folder=", *arguments]
        changed = re.sub("[=/.]", "-", overrides[-1])
        folder = folder.with_name(f"{folder.name}-{changed}")
    return shlex.join(["moemesh", "train", str(file), *arguments, "--out", str(folder)])


def _failed(run: Run, evidence: Evidence, failure: Mapping[str, Any]) -> tuple[str, list[str], str]:
    """Cause, sentences and command of a run with the report `failure`."""
    cause = cause_of(failure)
    place = culprit_of(failure)
    kind = str(failure.get("kind", "an error"))
    message = one_line(str(failure.get("message", "")), _MAX_MESSAGE)
    last = f" after step {run.last_step:,}" if run.last_step else " before its first step"
    sentences = [
        f"The run failed{last}: {cause.name}" + (f" ({place})." if place else "."),
        f"{kind}: {message}." if message else f"{kind}.",
    ]
    if action := failure.get("action"):
        sentences.append(f"Action taken: {one_line(str(action), _MAX_MESSAGE)}.")
    arguments: Sequence[str] = cause.arguments
    if cause.name == "diverged" and (lower := lower_rate(run)):
        arguments = ("--set", lower, "--allow-change", "train.lr")
    advised = str(failure.get("advice") or "").splitlines()
    if advice := one_line("; ".join(filter(None, map(str.strip, advised))), _MAX_MESSAGE):
        sentences.append(f"{advice[:1].upper()}{advice[1:]}.")
    else:
        sentences += [cause.advice, _checkpoint(run)]
    command = _resume(run, evidence.of_run, arguments)
    finite, newest = failure.get("finite_step"), newest_checkpoint(run.folder)
    if cause.name == "diverged" and isinstance(finite, int) and newest >= finite:
        # The weights of the newest checkpoint gave no finite step.
        sentences.append(
            f"The checkpoint of step {newest:,} holds the weights that gave no finite step: start "
            "a new run in another folder."
        )
        command = _changed(run, [lower_rate(run)], continues=False) or command
    if cause.name == "damaged checkpoint":
        command = shlex.join(["moemesh", "checkpoint", "verify", str(run.folder)])
    if (bundle := failure.get("bundle")) and str(bundle) not in message:
        sentences.append(f"The step can be replayed from {bundle}.")
    return cause.name, sentences, command


def _checkpoint(run: Run) -> str:
    """A sentence on the checkpoint that the next start resumes from."""
    if place := run.section("train").get("checkpoint_folder"):
        return f"The next start resumes from the newest checkpoint in {place}, if one exists."
    if not (step := newest_checkpoint(run.folder)):
        return "The run has no checkpoint: the next start begins at step 1."
    return f"The next start resumes from the checkpoint of step {step:,}."


def _resume(run: Run, of_run: RunFacts, arguments: Sequence[str] = ()) -> str:
    """The command of the newest start, with `arguments` in place of its options for the same keys.
    If this process runs in another directory, or the run folder was moved, the relative paths of
    that command are wrong; the result is then the command that resumes the folder."""
    words = shlex.split(of_run.command)
    directory = run.starts[-1].get("directory") if run.starts else None
    if isinstance(directory, str) and words:
        outs = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "--out"]
        outs += [word.partition("=")[2] for word in words if word.startswith("--out=")]
        folder = run.folder.resolve()
        is_moved = any((Path(directory) / out).resolve() != folder for out in outs)
        if is_moved or Path(directory).resolve() != Path.cwd():
            words = []
    if not words and (run.folder / "config.toml").is_file():
        words = ["moemesh", "train", str(run.folder)]
    options: dict[tuple[str, str], str] = {}  # (option, key) -> value
    others: list[str] = []
    remaining = iter([*words, *arguments] if words else ())
    for word in remaining:
        option, equals, value = word.partition("=")
        if option in ("--set", "--allow-change"):  # the last value of a repeated key counts
            value = value if equals else next(remaining, "")
            options[option, value.partition("=")[0].strip()] = value
        else:
            others.append(word)
    pairs = (word for (option, _), value in options.items() for word in (option, value))
    return shlex.join([*others, *pairs])
