"""Ledger of the bytes sent over each axis, by caller and phase, predicted or measured.

The planner predicts a `Ledger` and `moemesh.comm.transfers` records one; the two are compared to
the byte. The three byte columns, always for one rank:

payload_bytes
    bytes of the full tensor. all_reduce, broadcast: the tensor; all_gather: the gathered
    result; reduce_scatter: the full input; all_to_all: this rank's send buffer with its own part;
    send_receive: the message.
wire_bytes
    bytes that this rank sends to *other* ranks under the algorithm stated in `moemesh.trace.wire`.
received_bytes
    bytes that this rank receives from other ranks, counted in the same way.

A collective over an axis of size 1 sends nothing and is not recorded.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any

#: (axis, op, phase, caller).
_Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class LedgerTotal:
    """A sum over ledger entries: number of operations, and bytes as defined in the module."""

    count: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    received_bytes: int = 0

    def plus(self, other: LedgerTotal) -> LedgerTotal:
        return LedgerTotal(
            self.count + other.count,
            self.payload_bytes + other.payload_bytes,
            self.wire_bytes + other.wire_bytes,
            self.received_bytes + other.received_bytes,
        )


@dataclass(frozen=True, kw_only=True, order=True)
class LedgerEntry:
    """Sum over all calls of one operation by one caller over one axis in one phase."""

    axis: str
    op: str
    phase: str
    caller: str
    count: int
    payload_bytes: int
    wire_bytes: int
    received_bytes: int


class Ledger:
    """Record of communication, aggregated by (axis, op, phase, caller)."""

    def __init__(self) -> None:
        self._totals: dict[_Key, LedgerTotal] = {}
        self._scopes: list[str] = []
        self._num_pauses = 0

    def record(
        self,
        *,
        axis: str,
        op: str,
        phase: str,
        caller: str,
        payload_bytes: int,
        wire_bytes: int,
        received_bytes: int,
        count: int = 1,
    ) -> None:
        """Add `count` operations that together moved the given bytes."""
        if self._num_pauses:
            return
        if phase == "forward" and self._scopes:
            phase = self._scopes[-1]
        key = (axis, op, phase, caller)
        added = LedgerTotal(count, payload_bytes, wire_bytes, received_bytes)
        self._totals[key] = self._totals.get(key, LedgerTotal()).plus(added)

    @contextmanager
    def scope(self, name: str) -> Generator[None]:
        """Context in which the phase "forward" is recorded as `name` ("evaluate", ...).

        Scopes nest; the innermost name wins. Other phases keep their names.
        """
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Context in which nothing is recorded."""
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1

    def entries(self) -> tuple[LedgerEntry, ...]:
        """The entries, sorted by (axis, op, phase, caller)."""
        return tuple(
            LedgerEntry(axis=axis, op=op, phase=phase, caller=caller, **asdict(total))
            for (axis, op, phase, caller), total in sorted(self._totals.items())
        )

    def total(
        self,
        *,
        axis: str | None = None,
        op: str | None = None,
        phase: str | None = None,
        caller: str | None = None,
    ) -> LedgerTotal:
        """The sum over all entries that match every given filter."""
        filters = (axis, op, phase, caller)
        totals = (
            total
            for key, total in self._totals.items()
            if all(name in (None, part) for name, part in zip(filters, key, strict=True))
        )
        return reduce(LedgerTotal.plus, totals, LedgerTotal())

    def __add__(self, other: Ledger) -> Ledger:
        both = Ledger()
        for key, total in (*self._totals.items(), *other._totals.items()):
            both._totals[key] = both._totals.get(key, LedgerTotal()).plus(total)
        return both

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self._totals == other._totals

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __len__(self) -> int:
        return len(self._totals)

    def __repr__(self) -> str:
        return f"Ledger({len(self)} entries, {self.total().wire_bytes} bytes sent)"

    def rows(self) -> list[dict[str, Any]]:
        """The entries as plain dictionaries, for JSON."""
        return [asdict(entry) for entry in self.entries()]

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> Ledger:
        """The inverse of :meth:`rows`. Raises ValueError for a row that is not a ledger entry."""
        ledger = cls()
        for row in rows:
            try:
                ledger.record(**row)
            except TypeError as error:
                raise ValueError(f"not a ledger entry: {row!r} ({error})") from error
        return ledger
