"""Early stopping: the lowest validation loss of a run, and the validations since."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moemesh.checkpoint.retention import VALIDATION_LOSS


class EarlyStop:
    """Validation losses of a run. `best`: step and loss of the lowest one; `since`: number of
    validations after it. Checkpoints have both, so that a resumed run ends at the same step."""

    def __init__(self, patience: int) -> None:
        """`patience`: validations without a new lowest loss that end the run; 0: no end."""
        self.patience = patience
        self.load_state({})

    def add(self, step: int, loss: float) -> None:
        """Add the loss of the validation after `step`; NaN and infinity are never lowest."""
        self._newest = step, loss
        self.since += 1
        if loss < self.best[1]:
            self.best, self.since = self._newest, 0

    def improved_at(self, step: int) -> bool:
        """Whether the run has a patience and the lowest loss so far is that of `step`. The run then
        saves this step."""
        return self.patience > 0 and self.best[0] == step

    @property
    def reason(self) -> str | None:
        """The reason to end the run, or None."""
        if not 0 < self.patience <= self.since:
            return None
        step, loss = self.best
        lowest = f"since step {step} ({loss:.4f})" if step else "yet"
        validations = "1 validation" if self.since == 1 else f"{self.since} validations"
        return (
            f"no lower validation loss {lowest} in {validations} (train.patience = {self.patience})"
        )

    def state(self, step: int) -> dict[str, Any]:
        """State for the checkpoint of `step`."""
        best = list(self.best) if self.best[0] else None
        state: dict[str, Any] = {"best": best, "validations_since": self.since}
        newest, loss = self._newest
        if newest == step and math.isfinite(loss):
            state[VALIDATION_LOSS] = loss
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned; {} for checkpoints of versions that did not save
        it."""
        step, loss = state.get("best") or (0, math.inf)
        self.best: tuple[int, float] = int(step), float(loss)
        self.since = int(state.get("validations_since", 0))
        #: Step and loss of the newest validation of this process.
        self._newest = 0, math.nan
