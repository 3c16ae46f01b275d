"""The health of a run: losses beside each other, steps that were left out, failures it survived."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from moemesh.config.train import usual_rate
from moemesh.report.failures import cause_of, culprit_of
from moemesh.trace.events import JUMPED, Event
from moemesh.trace.run import MetricsRow, Run

#: A loss that rose by less than this share is noise.
_NOTICEABLE = 0.03
#: A rise is no chance from so many times the noise of a part on.
_NOISES = 3
#: Validation this much above training, and by this share of it, is a gap worth a word.
_GAP, _GAP_SHARE = 0.1, 0.1
#: A run is judged by its losses from so many steps on; they are taken in so many parts.
_LEAST_STEPS, _PARTS = 40, 20
_LONGEST = 160
_MOST_FAILURES = 3


class _Kind(NamedTuple):
    """Events of a kind: the label of their line, and how one and several of them are called."""

    kind: str
    label: str
    one: str
    several: str


#: Kinds of events that a reader of a run should know, the worst first.
_KINDS: tuple[_Kind, ...] = (
    _Kind("rollback", "returned", "return to a checkpoint", "returns to a checkpoint"),
    _Kind("skipped", "skipped", "step left out", "steps left out"),
    _Kind("copies", "copies", "difference of copies repaired", "differences of copies repaired"),
    _Kind("spike", "spikes", "jump of the loss", "jumps of the loss"),
    _Kind("alarm", "alarms", "alarm", "alarms"),
    _Kind("disk", "disk", "message", "messages"),
    _Kind("damaged", "damaged", "file", "files"),
    _Kind("sink", "sinks", "message", "messages"),
    _Kind("warning", "warnings", "warning", "warnings"),
)
_MOST_KINDS = 3


class Losses(NamedTuple):
    """`line`: training and validation with what they are judged by; `verdict`: a sentence where
    they are not as they should be, else ""; `change`: a `--set` argument against it, or "";
    `goes_on`: whether the change is for the steps ahead, rather than for a run from the start."""

    line: str = ""
    verdict: str = ""
    change: str = ""
    goes_on: bool = False


def losses_of(run: Run) -> Losses:
    """The newest losses of `run`, beside the unigram entropy of its data."""
    rows = [row for row in run.metrics if math.isfinite(row.loss)]
    if not rows:
        return Losses()
    line = f"training {rows[-1].loss:.4f}"
    validated = [(row.step, row.validation_loss) for row in rows
                 if row.validation_loss is not None]  # fmt: skip
    if validated:
        step, loss = validated[-1]
        line += f", validation {loss:.4f}"
        if step != rows[-1].step:
            line += f" (step {step:,})"
    unigram = run.summary.get("unigram_loss")
    if isinstance(unigram, int | float):
        line += f", unigram model {unigram:.4f}"
    else:
        unigram = None
    return Losses(f"{line} {run.loss_unit}", *_verdict(run, rows, validated, unigram))


def _verdict(
    run: Run,
    rows: Sequence[MetricsRow],
    validated: Sequence[tuple[int, float]],
    unigram: float | None,
) -> tuple[str, str, bool]:
    newest, parts = rows[-1].step, _parts(rows)
    lowest = min(parts, key=lambda part: part.median)
    least_rise = max(_GAP, _NOTICEABLE * lowest.median, _NOISES * _noise(rows))
    rose = parts[-1].median > lowest.median + least_rise
    name, loss = "training", parts[-1].median
    if validated and validated[-1][0] == newest:
        name, loss = "validation", validated[-1][1]
    is_judged = newest >= _LEAST_STEPS or newest == run.num_steps
    if is_judged and unigram is not None and loss >= unigram:
        # A loss that still falls only needs time.
        is_early = not rose and rows[0].loss - parts[-1].median > _GAP
        why = "it needs more steps" if is_early else "its learning rate is probably wrong"
        return (
            f"The {name} loss ({loss:.2f}) is not below that of the unigram model "
            f"({unigram:.2f}), which knows only how often each token occurs: the run has not "
            f"learned, {why}.",
            _more_steps(run, newest) if is_early else lower_rate(run),
            is_early,
        )
    if newest < _LEAST_STEPS:
        return "", "", False
    if rose:
        return (
            f"The training loss rose again, from {lowest.median:.2f} at steps {lowest.first:,} to "
            f"{lowest.last:,} to {parts[-1].median:.2f}: lower train.lr or train.clip, or look at "
            "the data read since.",
            lower_rate(run),
            False,
        )
    loss = validated[-1][1] if validated else loss
    best = min(validated, key=lambda one: one[1], default=(newest, 0.0))
    if validated and loss > best[1] * (1 + _NOTICEABLE) + 1e-9:
        epoch = rows[-1].epoch
        read = f" after {epoch:.1f} epochs" if epoch is not None and epoch >= 1 else ""
        return (
            f"The validation loss was lowest at step {best[0]:,} ({best[1]:.4f}) and is "
            f"{loss:.4f} now{read}: the run overfits; take more data or fewer steps.",
            f"train.steps={best[0]}",
            False,
        )
    if validated:
        step = validated[-1][0]
        near = [row.loss for row in rows if step - _PARTS < row.step <= step]
        gap = loss - statistics.fmean(near) if near else 0.0
        if gap > max(_GAP, _GAP_SHARE * loss):
            return (
                f"The validation loss is {gap:.2f} above the training loss: the text that is held "
                "out differs, or the run learns its samples by heart.",
                "",
                False,
            )
    return "", "", False


def _more_steps(run: Run, newest: int) -> str:
    """The override for four times the steps so far; "" where as many are ahead already."""
    steps = 4 * newest
    return f"train.steps={steps}" if steps > (run.num_steps or 0) else ""


def lower_rate(run: Run) -> str:
    """The override for a tenth of the learning rate, at most the usual one of such a run; "" where
    the run does not say its own."""
    rate, rank = run.section("train").get("lr"), run.section("lora").get("rank")
    usual = usual_rate(loads_weights="path" in run.section("model"), lora_rank=int(rank or 0))
    return f"train.lr={min(rate / 10, usual):.3g}" if isinstance(rate, int | float) else ""


class _Part(NamedTuple):
    """Neighbouring steps, and the median of their losses."""

    first: int
    last: int
    median: float


def _parts(rows: Sequence[MetricsRow]) -> list[_Part]:
    """Twentieths of a run, or single steps of a shorter one."""
    cuts = [index * len(rows) // _PARTS for index in range(_PARTS + 1)]
    parts = [rows[a:b] for a, b in itertools.pairwise(cuts) if b > a]
    return [
        _Part(part[0].step, part[-1].step, statistics.median(row.loss for row in part))
        for part in parts
    ]


def _noise(rows: Sequence[MetricsRow]) -> float:
    """How far the median loss of a part strays by chance: the usual difference of neighbouring
    steps over the square root of the steps of a part."""
    steps = [abs(b.loss - a.loss) for a, b in itertools.pairwise(rows)]
    return statistics.median(steps) / math.sqrt(max(1, len(rows) / _PARTS)) if steps else 0.0


def troubles_of(run: Run) -> list[tuple[str, str]]:
    """(label, text) of what happened besides steps, the worst first: failures that the run went on
    from, steps left out, jumps of the loss, alarms."""
    found: list[tuple[str, str]] = []
    if run.earlier_failures:
        found.append(("survived", _survived(run)))
    by_kind: defaultdict[str, list[Event]] = defaultdict(list)
    for event in run.events:
        kind = "spike" if event.kind == "alarm" and JUMPED in event.text else event.kind
        by_kind[kind].append(event)
    for kind in [one for one in _KINDS if by_kind[one.kind]][:_MOST_KINDS]:
        events = by_kind[kind.kind]
        number = f"1 {kind.one}" if len(events) == 1 else f"{len(events):,} {kind.several}"
        last = "" if len(events) == 1 else ", the last"
        text = one_line(events[-1].text.removeprefix("alarm: "))
        found.append((kind.label, f"{number}{last}: {text}"))
    if run.warnings:
        found.append(("files", one_line("; ".join(run.warnings))))
    return found


def _survived(run: Run) -> str:
    failures = run.earlier_failures
    texts = [
        one_line(
            f"{cause_of(failure).name} ({culprit_of(failure, ('step',)) or 'place unknown'})"
            + (f", {action}" if (action := failure.get("action")) else "")
        )
        for failure in failures[-_MOST_FAILURES:]
    ]
    number = "1 failure" if len(failures) == 1 else f"{len(failures)} failures"
    newest = "" if len(failures) <= _MOST_FAILURES else f", the newest {_MOST_FAILURES}"
    return f"{number}{newest}: " + "; ".join(texts) + " (failures/)"


def one_line(text: str, longest: int = _LONGEST) -> str:
    """The text on one line, without the full stop that follows anyway, cut after `longest`
    characters."""
    flat = " ".join(text.split()).rstrip(". ")
    return flat if len(flat) <= longest else f"{flat[: longest - 2].rstrip()} …"
