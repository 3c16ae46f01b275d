"""``loads.jsonl``: expert loads of a run, in bins of steps, so that the file stays small."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from moemesh.checkpoint.files import replace_by
from moemesh.trace.load_bins import neighbours
from moemesh.trace.loads import LayerLoads
from moemesh.train.row_log import RowLog


class _Bin(NamedTuple):
    """The last step of a bin, and the number of its steps."""

    step: int
    steps: int


class LoadLog:
    """Writes the loads of every step, summed over neighbouring steps where there are many.

    The file holds at most twice `bins` bins (and one for each checkpoint), each a line a layer;
    when it is full, neighbours are summed and new bins are as wide as these. No token is lost.
    `bins` 0: a line for each step and layer, and no bound.
    """

    def __init__(self, log: RowLog, bins: int, checkpoints: Callable[[], set[int]] = set) -> None:
        """`checkpoints`: steps from which the run may go on; no bin is made across them."""
        self._log, self._most, self._checkpoints = log, bins, checkpoints
        self._bins: list[_Bin] = []
        self._width = 1
        self._open: list[LayerLoads] = []

    def resume(self) -> None:
        """Go on behind the bins that the file holds."""
        if not self._most:
            return
        self._bins = [_Bin(step, rows[0].steps) for step, rows in _bins_of(self._log.path)]
        self._width = max((one.steps for one in self._bins), default=1)

    def add(self, layers: Sequence[LayerLoads]) -> None:
        """The loads of all layers in the next step."""
        if self._open:
            layers = [one.plus(other) for one, other in zip(self._open, layers, strict=True)]
        self._open = list(layers)
        if self._open and (not self._most or self._open[0].steps >= self._width):
            self.flush()

    def flush(self) -> None:
        """Write the bin that is being filled: before a checkpoint, and at the end of the run.

        A bin that cannot be written stays open, so that later steps are added to it.
        """
        if not self._open:
            return
        if not self._log.append([loads.to_json() for loads in self._open], waits=False):
            return
        if self._most:
            self._bins.append(_Bin(self._open[0].step, self._open[0].steps))
        self._open = []
        if self._most and len(self._bins) >= 2 * self._most:
            self._thin()

    def _thin(self) -> None:
        """Sum neighbours in the file, unless so many checkpoints lie between them that it would
        not get shorter by much."""
        checkpoints = self._checkpoints()
        borders = {place for place, one in enumerate(self._bins) if one.step in checkpoints}
        borders = set(sorted(borders)[-self._most :])
        if len(self._bins) < 2 * self._most + len(borders):
            return
        parts = neighbours([one.steps for one in self._bins], self._most, borders)
        try:
            ends = [self._bins[part.stop - 1].step for part in parts]
            replace_by(self._log.path, _sums(self._log.path, ends))
        except OSError:
            return  # a full disk: the file stays as it is, and the next bin tries again
        self._bins = [
            _Bin(self._bins[part.stop - 1].step, sum(one.steps for one in self._bins[part]))
            for part in parts
        ]
        num_steps = sum(one.steps for one in self._bins)
        self._width = max(self._width, math.ceil(num_steps / self._most))


def _bins_of(path: Path) -> Iterator[tuple[int, list[LayerLoads]]]:
    """The bins of a file: the last step of each, and its loads of every layer."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for step, rows in groupby(_readable(file), key=lambda loads: loads.step):
            yield step, list(rows)


def _readable(lines: Iterator[str]) -> Iterator[LayerLoads]:
    for line in lines:
        try:
            yield LayerLoads.from_json(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # a damaged line: nobody can read it


def _sums(path: Path, ends: Sequence[int]) -> Iterator[bytes]:
    """The rows of a file, summed to bins that end at the steps `ends`."""
    remaining = iter(ends)
    end = next(remaining)
    sums: dict[int, LayerLoads] = {}
    for step, rows in _bins_of(path):
        for loads in rows:
            before = sums.get(loads.layer)
            sums[loads.layer] = loads if before is None else before.plus(loads)
        if step == end:
            yield "".join(sums[layer].to_line() for layer in sorted(sums)).encode()
            sums, end = {}, next(remaining, -1)
