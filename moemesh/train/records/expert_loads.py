"""Expert loads of a run: their log, alarms about them, and ranks with rows above the bound."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from moemesh.checkpoint.files import replace_by
from moemesh.comm.collectives import gather_json
from moemesh.config.limits import few, parse_json
from moemesh.parallel.parallelize import RankModel
from moemesh.trace.loads import COLLAPSE_ENTROPY, COLLAPSE_STEPS, LayerLoads, neighbours
from moemesh.train.records.rows import RowLog
from moemesh.train.step import StepBoundary


class LoadLog:
    """Writes ``loads.jsonl``: loads of every step, or sums over consecutive steps in long runs.

    The file holds at most twice `bins` bins (and one for each checkpoint); a bin has a line for
    each layer. A full file is reduced by summing neighbouring bins, and new bins get the width of
    the sums. No token is lost. `bins` 0: a line for each step and layer, without a limit.
    """

    def __init__(
        self, rows_file: RowLog, bins: int, checkpoints: Callable[[], set[int]] = set
    ) -> None:
        """`checkpoints`: steps from which a run may resume; no bin spans the newest of them."""
        self._rows, self._num_bins, self._checkpoints = rows_file, bins, checkpoints
        #: The last step of each bin, and the number of its steps.
        self._bins: list[tuple[int, int]] = []
        self._width = 1  # steps of a new bin
        self._open: list[LayerLoads] = []  # sums of the bin that is being filled

    def resume(self) -> None:
        """Continue after the bins of the file."""
        if not self._num_bins:
            return
        self._bins = [(step, rows[0].steps) for step, rows in _bins_of(self._rows.path)]
        self._width = max((steps for _, steps in self._bins), default=1)

    def add(self, layers: Sequence[LayerLoads]) -> None:
        """Add the loads of all layers in the next step."""
        if self._open:
            layers = [summed.plus(other) for summed, other in zip(self._open, layers, strict=True)]
        self._open = list(layers)
        if self._open and (not self._num_bins or self._open[0].steps >= self._width):
            self.flush()

    def flush(self) -> None:
        """Write the bin that is being filled: before a checkpoint, and at the end of the run.

        A bin that cannot be written stays open, and later steps are added to it.
        """
        if not self._open:
            return
        if not self._rows.append([loads.to_json() for loads in self._open], waits=False):
            return
        if self._num_bins:
            self._bins.append((self._open[0].step, self._open[0].steps))
        self._open = []
        if not self._num_bins or len(self._bins) < 2 * self._num_bins:
            return
        # Sum neighbours in the file, unless checkpoints lie between most of them, so that it would
        # hardly get shorter. `borders`: bins that end with one of the newest checkpoints.
        checkpoints = self._checkpoints()
        borders = [index for index, (step, _) in enumerate(self._bins) if step in checkpoints]
        borders = set(borders[-self._num_bins :])
        if len(self._bins) < 2 * self._num_bins + len(borders):
            return
        sizes = [steps for _, steps in self._bins]
        parts = neighbours(sizes, self._num_bins, borders)
        ends = [self._bins[part.stop - 1][0] for part in parts]
        remaining, texts = iter(ends), list[bytes]()
        end = next(remaining)
        sums = dict[int, LayerLoads]()  # of the part that ends with step `end`, by layer
        try:
            for step, rows in _bins_of(self._rows.path):
                for loads in rows:
                    before = sums.get(loads.layer)
                    sums[loads.layer] = loads if before is None else before.plus(loads)
                if step == end:
                    texts.append("".join(sums[layer].to_line() for layer in sorted(sums)).encode())
                    sums, end = {}, next(remaining, -1)
            replace_by(self._rows.path, texts)
        except OSError:
            return  # a full disk: the file stays unchanged, and the next bin retries
        self._bins = [(end, sum(sizes[part])) for end, part in zip(ends, parts, strict=True)]
        self._width = max(self._width, math.ceil(sum(sizes) / self._num_bins))


def _bins_of(path: Path) -> Iterator[tuple[int, list[LayerLoads]]]:
    """The bins of a file: the last step of each, and its loads of every layer; damaged lines are
    left out."""
    if not path.exists():
        return
    rows: list[LayerLoads] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                loads = LayerLoads.from_json(parse_json(line))
                if rows and rows[0].step != loads.step:
                    yield rows[0].step, rows
                    rows = []
                rows.append(loads)
    if rows:
        yield rows[0].step, rows


#: Share of dropped choices (their expert had no room) above which an alarm is logged.
LARGEST_DROPPED = 0.1


class LoadAlarms:
    """Checks every layer of every step, in order, for dead experts, collapse and drops, which a
    falling loss may hide; each is logged once per layer by ``log(text, "alarm")``."""

    def __init__(self, log: Callable[[str, str], None]) -> None:
        """An alarm is raised after its condition has held for COLLAPSE_STEPS consecutive steps."""
        self._log = log
        #: Layer -> consecutive steps without a token, for each expert.
        self._idle: dict[int, list[int]] = {}
        #: (layer, kind) -> consecutive steps in which its condition has held; and those logged.
        self._held: defaultdict[tuple[int, str], int] = defaultdict(int)
        self._logged: set[tuple[int, str]] = set()

    def check(self, loads: LayerLoads) -> None:
        """Check one layer of one step; a step without tokens is ignored."""
        if not sum(loads.tokens_per_expert) + loads.dropped:
            return
        idle = self._idle.setdefault(loads.layer, [0] * len(loads.tokens_per_expert))
        for expert, tokens in enumerate(loads.tokens_per_expert):
            idle[expert] = 0 if tokens else idle[expert] + 1
        dead = [expert for expert, steps in enumerate(idle) if steps >= COLLAPSE_STEPS]
        experts = f"{len(dead)} expert{'s' if len(dead) > 1 else ''} ({few(dead, 8)})"
        share = max(loads.tokens_per_expert) / max(sum(loads.tokens_per_expert), 1)
        fullest = loads.tokens_per_expert.index(max(loads.tokens_per_expert))
        is_due = {"dead": bool(dead)}
        for kind, holds in (
            ("collapse", loads.entropy < COLLAPSE_ENTROPY),
            ("dropped", loads.dropped_share > LARGEST_DROPPED),
        ):
            key = loads.layer, kind
            self._held[key] = self._held[key] + 1 if holds else 0
            is_due[kind] = self._held[key] >= COLLAPSE_STEPS
        steps = f"{COLLAPSE_STEPS} steps"
        texts = {
            "dead": f"{experts} received no token for {steps}",
            "collapse": f"routing collapses: entropy of the loads {loads.entropy:.3f}, below "
            f"{COLLAPSE_ENTROPY:g} for {steps}; expert {fullest} holds {share:.0%}",
            "dropped": f"{loads.dropped_share:.1%} of the choices found their expert full "
            f"({loads.dropped} in this step), above {LARGEST_DROPPED:.0%} for {steps}",
        }
        for kind, text in texts.items():
            if is_due[kind] and (loads.layer, kind) not in self._logged:
                self._logged.add((loads.layer, kind))
                self._log(f"alarm: step {loads.step}, layer {loads.layer}: {text}", "alarm")


#: Share of a rank's forwards of MoE layers with rows above the bound that slows it noticeably.
_FREQUENT = 0.1
#: Largest number of ranks that a message lists.
_MOST_RANKS = 8


class RowBounds:
    """Reports ranks whose experts got more rows than the bound since the last report.

    ``Experts.max_rows`` bounds the memory under any routing: rows above it are computed in blocks,
    each recomputed in the backward. Frequent blocks are slow.
    """

    def __init__(
        self,
        parallel: RankModel,
        microbatches: int,
        step: int,
        *,
        keep: Callable[[str, str], None],
        log: Callable[[str], None],
    ) -> None:
        """`microbatches`: their number in a step; `step`: the last finished step. `keep` gets each
        event (kind "rows"), `log` one line a run, if rows above the bound are frequent."""
        self._parallel, self._microbatches, self._step = parallel, microbatches, step
        self._keep, self._log = keep, log
        self._has_logged = False

    def after(self, boundary: StepBoundary) -> None:
        """Report before a checkpoint."""
        if boundary.saves:
            self.report(boundary.number)

    def report(self, step: int) -> None:
        """Report the rows above the bound since the last report; all ranks call."""
        layers = self._parallel.model.moe_layers()
        # (layer, number of forwards with rows above the bound, bound)
        local = [
            (layer, moe.experts.num_bounded, moe.experts.max_rows or 0)
            for layer, moe in layers.items()
            if moe.experts.num_bounded
        ]
        for moe in layers.values():
            moe.experts.num_bounded = 0
        forwards = max((step - self._step) * self._microbatches * len(layers), 1)
        self._step = step
        rows_of_ranks = gather_json([local, forwards], self._parallel.mesh.control)
        bounded = {rank: rows for rank, (rows, _) in enumerate(rows_of_ranks) if rows}
        if not bounded:
            return
        texts = [
            f"rank {rank} in {sum(number for _, number, _ in rows)} forwards of layers "
            + ", ".join(str(layer) for layer, _, _ in rows)
            for rank, rows in list(bounded.items())[:_MOST_RANKS]
        ]
        if len(bounded) > _MOST_RANKS:
            texts.append(f"{len(bounded) - _MOST_RANKS} more ranks")
        bound = max(rows[0][2] for rows in bounded.values())
        self._keep(
            f"step {step}: more than {bound} rows were sent to {'; '.join(texts)} since the last "
            "checkpoint: computed in pieces, which is slower",
            "rows",
        )
        share = max(sum(number for _, number, _ in rows) / total for rows, total in rows_of_ranks)
        if share >= _FREQUENT and not self._has_logged:
            self._has_logged = True
            self._log(
                "note: experts are loaded so unevenly that a rank computes their rows in pieces in "
                f"{min(share, 1):.0%} of its forwards, which is slower; train.rebalance_every "
                "moves experts between ranks"
            )
