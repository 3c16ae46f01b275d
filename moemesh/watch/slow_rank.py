"""Slow ranks: those that the others wait for again and again, from the progress words of a run.

Seconds a step say nothing, since collectives make them equal. A rank is late where it works longer
than the others before it enters what they wait in: its seconds a step outside of operations are
compared with those of the others of its stage, step by step. Nothing is said of stages of one rank.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from moemesh.watch.progress_words import Word

#: Comparisons on which a verdict rests; one is of a step, or of the few between two looks.
_COMPARISONS = 18
#: A slow rank works so many times as long as the others, in the median ...
_RATIO = 1.25
#: ... and so many standard errors longer, by the mean of the middle half.
_DEVIATIONS = 4.5
#: Standard error of the mean of the middle half of normal values, in their deviation / sqrt(n).
_MIDDLE_HALF = 1.1
_MAD_TO_DEVIATION = 1.4826
#: Lateness below this, in seconds a step, is not worth a word.
_LEAST_SECONDS = 0.002
#: In the first steps of a process something is compiled, read or grown for the first time.
_FIRST_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """`rank` works `ratio` times as long as the others of its stage, `seconds` more a step, in the
    median of the comparisons up to `step`."""

    rank: int
    step: int
    ratio: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: it works {self.ratio:.2f} times as long a step as the "
            f"others of its stage, which wait for it ({1e3 * self.seconds:.0f} ms a step, median "
            f"of {_COMPARISONS}); look for other programs on its cores, a hot device, or more work "
            "than the others have"
        )


class SlowRanks:
    """Looks at the words of all ranks again and again; names each slow rank once."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        self._stages: dict[int, _StageRanks] = {}
        self._named: set[int] = set()

    def look(self, words: Sequence[Word]) -> list[SlowRank]:
        """Slow ranks that were not named before."""
        by_stage: dict[int, list[Word]] = {}
        for word in words:
            if word.step:
                first = self._first.setdefault(word.rank, word.step)
                if word.step >= first + _FIRST_STEPS:
                    by_stage.setdefault(word.stage, []).append(word)
        stages = {stage: self._stages.setdefault(stage, _StageRanks()) for stage in by_stage}
        slow = (ranks.look(by_stage[stage]) for stage, ranks in stages.items())
        found = [one for one in slow if one is not None and one.rank not in self._named]
        self._named.update(one.rank for one in found)
        return found


class _StageRanks:
    """The ranks of one stage."""

    def __init__(self) -> None:
        self._before: dict[int, Word] = {}
        self._rows: deque[dict[int, float]] = deque(maxlen=_COMPARISONS)

    def look(self, words: Sequence[Word]) -> SlowRank | None:
        """Compare once all have finished a step since the last comparison."""
        now = {word.rank: word for word in words}
        if now.keys() != self._before.keys():
            self._before = now
            self._rows.clear()
            return None
        steps = {rank: word.step - self._before[rank].step for rank, word in now.items()}
        if len(now) < 2 or min(steps.values()) < 1:
            return None
        row = {r: (now[r].worked - self._before[r].worked) / steps[r] for r in now}
        self._before = now
        if min(row.values()) <= 0:
            return None
        self._rows.append(row)
        if len(self._rows) < _COMPARISONS:
            return None
        rows = list(self._rows)
        late: dict[int, list[float]] = {}
        seconds: dict[int, float] = {}
        for rank in rows[0]:
            usual = [statistics.median(v for r, v in row.items() if r != rank) for row in rows]
            pairs = [(row[rank], other) for row, other in zip(rows, usual, strict=True)]
            late[rank] = [math.log(own / other) for own, other in pairs]
            seconds[rank] = statistics.median(own - other for own, other in pairs)
        # The mean of the middle half: a few outliers do not count.
        cut = slice(len(rows) // 4, len(rows) - len(rows) // 4)
        middle = {rank: statistics.fmean(sorted(values)[cut]) for rank, values in late.items()}
        # Of all ranks together: the deviation of one rank's few values often comes out too small.
        spread = statistics.median(abs(v - middle[rank]) for rank in late for v in late[rank])
        error = _MIDDLE_HALF * _MAD_TO_DEVIATION * spread / math.sqrt(len(rows))
        rank = max(middle, key=lambda one: middle[one])
        ratio = math.exp(statistics.median(late[rank]))
        if ratio < _RATIO or middle[rank] < _DEVIATIONS * error or seconds[rank] < _LEAST_SECONDS:
            return None
        step = max(word.step for word in words) - 1
        return SlowRank(rank=rank, step=step, ratio=ratio, seconds=seconds[rank])
