"""A ledger under construction: predicted operations of one rank, times how often they happen."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from functools import cached_property

from moemesh.config.layout import AXES, Layout
from moemesh.trace import wire
from moemesh.trace.ledger import Ledger

_Key = tuple[str, str, str, str]


class LedgerLines:
    """Adds operations of one rank in closed form; expected bytes may be fractions until
    :meth:`ledger` rounds each sum once.

    A forward that runs `forwards` times enters its lines as often; those of the callers in
    `recomputed` are entered once more as "recompute".
    """

    def __init__(
        self, layout: Layout, rank: int, *, forwards: int = 1, recomputed: Collection[str] = ()
    ) -> None:
        self.layout, self.rank = layout, rank
        self._forwards, self._recomputed = forwards, recomputed
        self._members: dict[str, tuple[int, ...]] = {}
        self._sums: dict[_Key, list[float]] = {}
        self._has_backward = True

    @contextmanager
    def backward(self, exists: bool) -> Generator[None]:
        """Inside, forwards have a backward only where `exists`: else nothing of a backward is
        entered, nor what is computed again for it."""
        before, self._has_backward = self._has_backward, self._has_backward and exists
        yield
        self._has_backward = before

    @cached_property
    def here(self) -> dict[str, int]:
        """This rank's coordinates in all views."""
        return self.layout.coordinates(self.rank)

    def members(self, axis: str, rank: int | None = None) -> tuple[int, ...]:
        """The ranks of `axis` around `rank` (this one by default), ascending."""
        if rank is None or rank == self.rank:
            if axis not in self._members:
                self._members[axis] = members(self.layout, axis, self.rank)
            return self._members[axis]
        return members(self.layout, axis, rank)

    def size(self, axis: str) -> int:
        return len(self.members(axis))

    def index(self, axis: str) -> int:
        return self.members(axis).index(self.rank)

    def all_reduce(
        self, axis: str, elements: int, width: int, phase: str, caller: str, times: int = 1
    ) -> None:
        """Ring all-reduce of `elements` numbers of `width` bytes."""
        if (size := self.size(axis)) > 1:
            moved = wire.all_reduce(elements, width, size, self.index(axis))
            self._add(axis, "all_reduce", phase, caller, moved, times)

    def all_gather(
        self, axis: str, blocks: Sequence[float], phase: str, caller: str, times: int = 1
    ) -> None:
        """All-gather of ``blocks[i]`` bytes of each rank."""
        if self.size(axis) > 1:
            own, total = blocks[self.index(axis)], sum(blocks)
            moved = (total, own * (len(blocks) - 1), total - own)
            self._add(axis, "all_gather", phase, caller, moved, times, [own] * len(blocks))

    def reduce_scatter(
        self, axis: str, blocks: Sequence[float], phase: str, caller: str, times: int = 1
    ) -> None:
        """Reduce-scatter in which rank i keeps ``blocks[i]`` bytes."""
        if self.size(axis) > 1:
            own, total = blocks[self.index(axis)], sum(blocks)
            moved = (total, total - own, own * (len(blocks) - 1))
            self._add(axis, "reduce_scatter", phase, caller, moved, times, blocks)

    def all_to_all(
        self,
        axis: str,
        inputs: Sequence[float],
        outputs: Sequence[float],
        phase: str,
        caller: str,
        times: int = 1,
    ) -> None:
        """``inputs[i]`` bytes to rank i, ``outputs[i]`` from it."""
        if self.size(axis) > 1:
            index = self.index(axis)
            sent, received = sum(inputs), sum(outputs)
            moved = (sent, sent - inputs[index], received - outputs[index])
            self._add(axis, "all_to_all", phase, caller, moved, times, inputs)

    # Collectives of a forward with their pairs in the backward.

    def gathered(self, axis: str, blocks: Sequence[float], caller: str, times: int = 1) -> None:
        """All-gather; its gradients are reduced and scattered."""
        self.all_gather(axis, blocks, "forward", caller, times)
        self.reduce_scatter(axis, blocks, "backward", caller, times)

    def scattered(self, axis: str, blocks: Sequence[float], caller: str, times: int = 1) -> None:
        """Reduce-scatter; its gradients are gathered."""
        self.reduce_scatter(axis, blocks, "forward", caller, times)
        self.all_gather(axis, blocks, "backward", caller, times)

    def exchanged(
        self,
        axis: str,
        inputs: Sequence[float],
        outputs: Sequence[float],
        caller: str,
        times: int = 1,
    ) -> None:
        """All-to-all; its gradients take the way back."""
        self.all_to_all(axis, inputs, outputs, "forward", caller, times)
        self.all_to_all(axis, outputs, inputs, "backward", caller, times)

    def message(
        self, axis: str, size: float, phase: str, caller: str, times: int = 1, *, sends: bool
    ) -> None:
        """A message, sent or received; nothing is sent when it is empty."""
        if size and times:
            moved = (size, size, 0) if sends else (size, 0, size)
            self._add(axis, "send_receive", phase, caller, moved, times)

    def broadcast(
        self, axis: str, size: int, phase: str, caller: str, times: int = 1, *, source: int = 0
    ) -> None:
        """Broadcast of `size` bytes from index `source`."""
        if (members := self.size(axis)) > 1:
            moved = wire.broadcast(size, members, self.index(axis), source)
            self._add(axis, "broadcast", phase, caller, moved, times)

    def _add(
        self,
        axis: str,
        op: str,
        phase: str,
        caller: str,
        moved: Sequence[float],
        times: int,
        sent: Sequence[float] = (),
    ) -> None:
        """Add (payload, sent, received) bytes; `sent` are those to each member of the axis."""
        if phase in ("backward", "recompute") and not self._has_backward:
            return
        if phase == "forward":
            if caller in self._recomputed:
                self._add(axis, op, "recompute", caller, moved, times, sent)
            times *= self._forwards
        found = self._sums.setdefault((axis, op, phase, caller), [0, 0, 0, 0])
        found[0] += times
        for place, value in enumerate(moved, start=1):
            found[place] += value * times

    def ledger(self) -> Ledger:
        """The finished ledger."""
        ledger = Ledger()
        for (axis, op, phase, caller), (count, *moved) in self._sums.items():
            payload, sent, received = (round(value) for value in moved)
            ledger.record(
                axis=axis,
                op=op,
                phase=phase,
                caller=caller,
                count=int(count),
                payload_bytes=payload,
                wire_bytes=sent,
                received_bytes=received,
            )
        return ledger


def members(layout: Layout, axis: str, rank: int) -> tuple[int, ...]:
    """The ranks of `axis` around `rank`, ascending: as `Layout.group_of`, without listing the
    world."""
    if axis == "mirror" or axis.endswith(("_shard", "_copies")):
        return layout.group_of(axis, rank)
    view, spanned = AXES[axis]
    dimensions, at = layout.dimensions(view), layout.coordinates(rank)
    found = [0]
    for name, degree in dimensions.items():
        places = range(degree) if name in spanned else (at[name],)
        found = [base * degree + place for base in found for place in places]
    return tuple(found)
