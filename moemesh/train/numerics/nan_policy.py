"""The NaN policy of a run: the reaction to a non-finite step, or a loss that jumps.

All ranks decide alike, from reduced numbers, before any of them updates. (A post-validated update
is undone. The stages of an asynchronous schedule update at different times, and each skips its own
non-finite updates.)
``train.on_nonfinite`` and ``train.on_spike`` are one of:

    alarm     (spikes only) an event; the step counts
    skip      no rank updates; the samples of the step are not trained on
    rollback  back to the newest checkpoint; the samples since then are not trained on
    stop      (non-finite steps only) the run ends, with the origin of the value in failure.json
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

from moemesh.config.train import TrainConfig
from moemesh.trace.run import JUMPED
from moemesh.train.numerics.nan_check import NonfiniteOrigin
from moemesh.train.step import StepResult

#: Number of the newest losses that give the spread, and the centre.
WINDOW, CENTRE = 128, 32
#: Number of losses before the first score.
LEAST = 32
#: Standard deviation of losses over the median of their absolute differences (:class:`Spikes`).
_TO_DEVIATION = 1.4826 / math.sqrt(2.0)
#: Least spread over the centre: losses on a plateau in low precision hardly differ.
_LEAST_SPREAD = 1e-6


class Spikes:
    """Loss spikes: a robust z-score of each loss against those before, (loss - centre) / spread.

    The centre is the median of the last :data:`CENTRE` losses. The spread estimates the standard
    deviation s of a loss from the differences of neighbouring losses, on which the slope of a
    falling loss has little influence: differences of independent losses have the deviation
    sqrt(2) s, and the median of their absolute values is 0.6745 = 1 / 1.4826 of that for a normal
    distribution. A few outliers hardly move the median. Only a loss above the centre is a spike.
    """

    def __init__(self, sigma: float) -> None:
        """`sigma`: least z-score of a spike; 0: no spikes."""
        self.sigma = sigma
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def score(self, loss: float) -> float:
        """The robust z-score of `loss`, which then joins the last ones; 0.0 while there are too
        few. A non-finite loss has none and is ignored."""
        if not math.isfinite(loss):
            return 0.0
        losses = list(self._losses)
        self._losses.append(loss)
        if len(losses) < LEAST:
            return 0.0
        centre = median(losses[-CENTRE:])
        steps = [abs(b - a) for a, b in pairwise(losses)]
        spread = max(_TO_DEVIATION * median(steps), _LEAST_SPREAD * abs(centre), 1e-300)
        return (loss - centre) / spread

    def is_spike(self, score: float) -> bool:
        """Whether a loss with this score is a spike."""
        return self.sigma > 0 and score >= self.sigma

    def state(self) -> dict[str, Any]:
        """The state in a checkpoint: a resumed run computes the same scores."""
        return {"losses": list(self._losses)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`state`."""
        self._losses = deque(map(float, state.get("losses", ())), maxlen=WINDOW)


class Diverged(RuntimeError):
    """Training has diverged; the message has the place. `facts`: keys of failure.json."""

    #: A restart would fail in the same way.
    is_final = True

    def __init__(self, message: str, facts: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.facts = dict(facts)


#: Finds the origin of a non-finite step, on all ranks; writes its bundle if requested, and returns
#: its path.
Examine = Callable[[int, bool], tuple[NonfiniteOrigin, str | None]]


class NaNPolicy:
    """Judges each step once, in order, the same on every rank. ``skipped``: number of non-finite
    steps since the last finite one. They did not change the weights (of the stage concerned, if the
    schedule is asynchronous), which may be their cause."""

    def __init__(self, train: TrainConfig, log: Callable[[str, str], None]) -> None:
        """`log`: called with text and kind of an event."""
        self._train, self._log = train, log
        self._spikes = Spikes(train.spike_sigma)
        #: Faulty steps: the step, whether its loss jumped (else it is not finite), and the number
        #: of consecutive skipped steps up to it.
        self._faults: list[tuple[int, bool, int]] = []
        #: `_spiked`: number of consecutive steps with a spike.
        self.skipped = self._spiked = 0
        #: Origin of the last non-finite step.
        self._finding: NonfiniteOrigin | None = None
        #: Path of the bundle of the first step of the last row of non-finite steps.
        self._bundle: str | None = None
        #: Step of a checkpoint -> number of returns to it.
        self._returns: Counter[int] = Counter()

    def judge(self, step: int, result: StepResult) -> StepResult:
        """`result`, marked as skipped if no rank may update; all ranks call."""
        if result.skipped:
            self.skipped += 1
            self._faults.append((step, False, self.skipped))
            return result
        self.skipped = 0
        score = self._spikes.score(result.loss)
        if not self._spikes.is_spike(score):
            self._spiked = 0
            return result
        self._spiked += 1
        loss = f"step {step}: loss {result.loss:.4f} is {score:.1f} {JUMPED}"
        action = self._train.on_spike
        if action == "alarm" or self._spiked > self._train.max_skips:
            if self._spiked == 1 or action != "alarm":
                end = "" if action == "alarm" else "; it stays there, so it is taken as it is"
                self._log(loss + end, "alarm")
            return result
        if action == "skip":
            self._log(f"{loss}; no rank updates its weights, the samples are left out", "skipped")
        else:
            self._faults.append((step, True, 1))
            self._log(loss, "alarm")
        return replace(result, skipped=True)

    def decide(self, examine: Examine) -> str | None:
        """Decide on the steps judged since the last call: None to continue, else the reason to
        return to a checkpoint. Raises Diverged, on all ranks, to end the run; all ranks call."""
        faults, self._faults = self._faults, []
        reason: str | None = None
        for step, jumped, in_a_row in faults:
            if jumped:
                reason = f"the loss of step {step} jumped"
                continue
            # Of consecutive non-finite steps, which differ in their samples, the first has a
            # bundle.
            is_first = in_a_row == 1 or self._finding is None
            self._finding, bundle = examine(step, is_first)
            self._bundle = bundle if is_first else self._bundle
            origin, action = self._finding, self._train.on_nonfinite
            text = f"step {step}: a loss or a gradient is not finite: {origin}"
            if bundle is not None:
                text += f"; moemesh replay {self._bundle} repeats the step"
            if action == "rollback":
                self._log(text, "alarm")
                reason = f"step {step} is not finite"
                continue
            if action == "stop":
                raise self._failure(text, origin, "train.on_nonfinite is stop", step - in_a_row)
            if origin.phase == "weight":
                why = "no later step can be finite"
                raise self._failure(text, origin, why, step - in_a_row)
            if in_a_row >= self._train.max_skips:
                why = f"no step of the last {in_a_row} was finite"
                raise self._failure(text, origin, why, step - in_a_row)
            self._log(f"{text}; no rank updates its weights, the samples are left out", "skipped")
        return reason

    def damaged(self, step: int, origin: NonfiniteOrigin) -> str:
        """The reason to return to a checkpoint, since the state after `step` is not finite and is
        not saved. Raises Diverged unless the policy is rollback."""
        text = f"the state of step {step} is not finite and is not saved: {origin}"
        if self._train.on_nonfinite == "rollback":
            self._log(text, "alarm")
            return f"the state of step {step} is not finite"
        raise self._failure(text, origin, "no later step can be finite", step)

    def returned(self, reason: str, step: int | None, bad: range) -> None:
        """Record a return to the checkpoint of `step` because of `reason`; the samples at the
        places `bad` of the data order are skipped. Raises Diverged without a checkpoint (None), or
        after too many returns to it."""
        if step is None:
            facts = {"advice": f"{self._change()}, or save earlier: train.checkpoint_every"}
            raise Diverged(f"{reason}, and no checkpoint exists to return to", facts)
        self._returns[step] += 1
        times = self._returns[step]
        if times > self._train.max_skips:
            facts = self._finding.facts() if self._finding is not None else {}
            raise Diverged(
                f"{reason}, after {times - 1} returns to the checkpoint of step {step}",
                facts | {"advice": self._change()},
            )
        self.skipped = self._spiked = 0
        self._log(
            f"{reason}: back to the checkpoint of step {step}; the samples {bad.start} to "
            f"{bad.stop - 1} of the data order, read since, are left out",
            "rollback",
        )

    def _failure(
        self, text: str, origin: NonfiniteOrigin, reason: str, finite_step: int
    ) -> Diverged:
        """The error that ends the run, with its advice. `finite_step`: the last step with finite
        loss and gradients."""
        # Never recommend a command that would end in the same way.
        advice = f"the same command would end in the same way: {self._change()}"
        if origin.is_damage:
            advice = (
                f"rank {origin.rank} alone holds that value, other copies are finite: its memory "
                "is suspect; the same command resumes from the newest checkpoint, which is finite"
            )
        elif origin.phase == "unrepeated":
            advice = "test the hardware of the ranks; repeated, the same numbers were finite"
        elif origin.phase == "loss" and origin.samples and not origin.num_alike:
            advice = "look at the samples named; to leave them out: train.on_nonfinite = skip"
        bundle = {} if self._bundle is None else {"bundle": self._bundle}
        facts = origin.facts() | bundle | {"advice": advice, "finite_step": finite_step}
        return Diverged(f"{text}; {reason}", facts)

    def _change(self) -> str:
        train = self._train
        return f"lower train.lr ({train.lr:g}), or clip harder (train.clip = {train.clip:g})"

    def state(self) -> dict[str, Any]:
        """State for a checkpoint; input of :meth:`load_state`."""
        return {"spikes": self._spikes.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue after the step of the checkpoint."""
        self._spikes.load_state(state.get("spikes", {}))
