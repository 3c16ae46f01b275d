"""The place of a run in its data order: which samples a step reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class Cursor:
    """`position`: samples that the steps up to `step` have read, left out ones included; every step
    reads `batch`. Where a run goes back to an earlier step, the position does not."""

    step: int
    position: int
    batch: int

    def before(self, step: int) -> int:
        """The samples read before `step` (from 1)."""
        return self.position + (step - 1 - self.step) * self.batch

    def places(self, step: int) -> range:
        """The places in the data order that `step` reads."""
        start = self.before(step)
        return range(start, start + self.batch)

    def go_back(self, step: int, last: int) -> range:
        """Be behind `step` again, and read on behind what the step `last` has read; returns the
        places of all samples between the two, which no update will have seen."""
        skipped = range(self.before(step + 1), self.before(last + 1))
        self.step, self.position = step, skipped.stop
        return skipped
