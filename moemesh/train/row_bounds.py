"""Rows above the bound: how often a rank was sent more rows than it computes at once.

``Experts.max_rows`` keeps memory below a bound under any routing, by computing what lies above it
in blocks, each once more in the backward. That is slow where it is frequent.
"""

from __future__ import annotations

from collections.abc import Callable

from moemesh.comm.collectives import gather_json
from moemesh.parallel.parallelize import ParallelModel

#: From this share of a rank's forwards of expert layers on, speed suffers noticeably.
_FREQUENT = 0.1
_MOST_RANKS = 8


class RowBounds:
    """Counts, from one look to the next, which ranks had more rows than the bound."""

    def __init__(
        self,
        parallel: ParallelModel,
        microbatches: int,
        step: int,
        *,
        keep: Callable[[str, str], None],
        say: Callable[[str], None],
    ) -> None:
        """`microbatches` of a step, `step`: the last one that was finished. `keep` takes each event
        (kind "rows"), `say` one line a run, where rows above the bound are frequent."""
        self._parallel, self._microbatches, self._step = parallel, microbatches, step
        self._keep, self._say = keep, say
        self._has_said = False

    def look(self, step: int) -> None:
        """Tell of what lay above the bound since the last look; all ranks call."""
        layers = self._parallel.model.moe_layers()
        own: list[tuple[int, int, int]] = []
        for layer, moe in layers.items():
            if moe.experts.num_bounded:
                own.append((layer, moe.experts.num_bounded, moe.experts.max_rows or 0))
                moe.experts.num_bounded = 0
        forwards = max((step - self._step) * self._microbatches * len(layers), 1)
        self._step = step
        told = gather_json([own, forwards], self._parallel.mesh.control)
        found = {rank: rows for rank, (rows, _) in enumerate(told) if rows}
        if not found:
            return
        texts = [
            f"rank {rank} in {sum(number for _, number, _ in rows)} forwards of layers "
            + ", ".join(str(layer) for layer, _, _ in rows)
            for rank, rows in list(found.items())[:_MOST_RANKS]
        ]
        if len(found) > _MOST_RANKS:
            texts.append(f"{len(found) - _MOST_RANKS} more ranks")
        bound = max(rows[0][2] for rows in found.values())
        self._keep(
            f"step {step}: more than {bound} rows were sent to {'; '.join(texts)} since the last "
            "checkpoint: computed in pieces, which is slower",
            "rows",
        )
        share = max(sum(number for _, number, _ in rows) / total for rows, total in told)
        if share >= _FREQUENT and not self._has_said:
            self._has_said = True
            self._say(
                "note: experts are loaded so unevenly that a rank computes their rows in pieces in "
                f"{min(share, 1):.0%} of its forwards, which is slower; train.rebalance_every "
                "moves experts between ranks"
            )
