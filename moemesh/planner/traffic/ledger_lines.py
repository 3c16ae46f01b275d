"""A ledger under construction: predicted operations of one rank, with their counts."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from moemesh.config.layout import Layout
from moemesh.trace import wire
from moemesh.trace.ledger import Ledger

#: Collective of a forward -> collective of its gradients.
_PAIRS = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "all_reduce": "all_reduce",
}


class LedgerLines:
    """Adds operations of one rank in closed form; expected bytes may be fractions until
    :meth:`ledger` rounds each sum once.

    Lines of a forward are entered `forwards` times; those of the callers in `recomputed` also as
    phase "recompute".
    """

    def __init__(
        self, layout: Layout, rank: int, *, forwards: int = 1, recomputed: Collection[str] = ()
    ) -> None:
        self.layout, self.rank = layout, rank
        #: This rank's coordinates in all views.
        self.coordinates = layout.coordinates(rank)
        self._forwards, self._recomputed = forwards, recomputed
        self._group_of = cache(layout.group_of)
        self._sums: dict[tuple[str, str, str, str], list[float]] = {}
        self._has_backward = True

    @contextmanager
    def backward(self, exists: bool) -> Generator[None]:
        """Context in which lines of backward and recomputation are dropped unless `exists`."""
        before, self._has_backward = self._has_backward, self._has_backward and exists
        yield
        self._has_backward = before

    def members(self, axis: str, rank: int | None = None) -> tuple[int, ...]:
        """Ranks of the `axis` group of `rank` (this one by default), ascending."""
        return self._group_of(axis, self.rank if rank is None else rank)

    def enter(
        self, axis: str, op: str, phase: str, caller: str, *amounts: Any, times: int = 1
    ) -> None:
        """Enter one collective, `times` times; no-op on an axis of one rank.

        `amounts` are arguments of :mod:`moemesh.trace.wire`: elements and bytes of each
        (all_reduce), bytes of each member's block (all_gather, reduce_scatter), bytes to and from
        each member (all_to_all), bytes from the first member (broadcast).
        """
        ranks = self.members(axis)
        if len(ranks) == 1:
            return
        index = ranks.index(self.rank)
        last: dict[str, Any] = {"all_reduce": {"size": len(ranks)}}
        last["broadcast"] = {"size": len(ranks), "source_index": 0}
        moved = getattr(wire, op)(*amounts, index=index, **last.get(op, {}))
        self._add(axis, op, phase, caller, moved, times)

    def paired(self, axis: str, op: str, caller: str, *amounts: Any, times: int = 1) -> None:
        """Enter a collective of a forward and its pair in the backward, for the gradients."""
        self.enter(axis, op, "forward", caller, *amounts, times=times)
        back = reversed(amounts) if op == "all_to_all" else amounts
        self.enter(axis, _PAIRS[op], "backward", caller, *back, times=times)

    def message(
        self, axis: str, size: float, phase: str, caller: str, times: int = 1, *, sends: bool
    ) -> None:
        """Enter a message, sent or received; no-op for an empty message."""
        if size and times:
            moved = (size, size, 0) if sends else (size, 0, size)
            self._add(axis, "send_receive", phase, caller, moved, times)

    def _add(
        self, axis: str, op: str, phase: str, caller: str, moved: Sequence[float], times: int
    ) -> None:
        """Add (payload, sent, received) bytes."""
        if phase in ("backward", "recompute") and not self._has_backward:
            return
        if phase == "forward":
            if caller in self._recomputed:
                self._add(axis, op, "recompute", caller, moved, times)
            times *= self._forwards
        sums = self._sums.setdefault((axis, op, phase, caller), [0, 0, 0, 0])
        sums[0] += times
        for place, value in enumerate(moved, start=1):
            sums[place] += value * times

    def ledger(self) -> Ledger:
        """The finished ledger."""
        return ledger_of((*key, *sums) for key, sums in self._sums.items())


def ledger_of(lines: Iterable[tuple[Any, ...]]) -> Ledger:
    """The ledger of lines (axis, op, phase, caller, count, payload, sent, received bytes), with
    rounded numbers."""
    ledger = Ledger()
    for axis, op, phase, caller, *numbers in lines:
        names = ("count", "payload_bytes", "wire_bytes", "received_bytes")
        counted = dict(zip(names, map(round, numbers), strict=True))
        ledger.record(axis=axis, op=op, phase=phase, caller=caller, **counted)
    return ledger
