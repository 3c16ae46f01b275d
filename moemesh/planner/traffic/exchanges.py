"""Exchanges of a training step: tables that both predictions read, and their sums on a rank.

:mod:`moemesh.planner.traffic.ledger` predicts the bytes of a run of ours exactly,
:mod:`moemesh.planner.traffic.volumes` those of any layout in closed form.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

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
#: Operation of one side of a message -> name in the ledger.
_MESSAGES = {"send": "send_receive", "receive": "send_receive"}
#: Exit of a tensor-parallel block -> collective of the gradients that enter the block there.
EXIT_GRADIENTS = {**_PAIRS, "all_reduce": "all_gather"}
# Recomputed parts that contain a whole layer, its attention core, its experts and their exchange.
_LAYER = frozenset({"full"})
_CORE, _EXPERTS = _LAYER | {"attention"}, _LAYER | {"moe"}
#: Caller of collectives in a forward -> recomputed parts of a layer that contain them.
REPEATED_BY: dict[str, frozenset[str]] = {
    "attention.enter": _LAYER,
    "attention.norm": _LAYER,
    "attention.leave": _LAYER,
    "context.keys": _CORE,
    "context.heads": _CORE,
    "context.positions": _LAYER,  # after the core of attention
    "mlp.enter": _LAYER,
    "mlp.leave": _LAYER,
    "moe.replicas": _LAYER,
    "moe.dispatch": _EXPERTS,
    "moe.dispatch.weights": _EXPERTS,
    "moe.combine": _EXPERTS,
}
#: Callers at the end of a layer. `moemesh train` does not repeat them (except for shared experts,
#: which routed ones follow), because nothing that the backward needs follows; other trainers do.
LAYER_EXITS = ("mlp.leave", "moe.combine")


def repeated_callers(recompute: Collection[str]) -> frozenset[str]:
    """Callers whose collectives the recomputation of these parts of a layer repeats."""
    return frozenset(name for name, parts in REPEATED_BY.items() if not parts.isdisjoint(recompute))


class StateExchange(NamedTuple):
    """A collective of gradients or weights between ranks with the same weights: "all" of them,
    those that "shard" one copy of the states, or those with "copies" of the same shard. One in the
    phase "optimizer" runs once after each update."""

    ranks: Literal["all", "shard", "copies"]
    op: str
    phase: str
    caller: Literal["gradients", "weights"]


_SCATTERED = (
    StateExchange("shard", "reduce_scatter", "backward", "gradients"),
    StateExchange("copies", "all_reduce", "backward", "gradients"),
)
_UPDATED = (*_SCATTERED, StateExchange("shard", "all_gather", "optimizer", "weights"))
#: `plan.data` -> its exchanges of a bucket. Gradients are summed once an update, but under ZeRO 2
#: and 3 scattered after every backward. Servers own uneven shards.
STATE_EXCHANGES: dict[str, tuple[StateExchange, ...]] = {
    "replicate": (StateExchange("all", "all_reduce", "backward", "gradients"),),
    "parameter_server": _UPDATED,
    "zero1": _UPDATED,
    "zero2": _UPDATED,
    "zero3": (
        StateExchange("shard", "all_gather", "forward", "weights"),
        StateExchange("shard", "all_gather", "backward", "weights"),
        *_SCATTERED,
    ),
}
#: Phase of a collective in a forward that has its pair, for the gradients, in the backward.
BOTH = "both"


class Transfer(NamedTuple):
    """An operation of a rank that runs `times` times.

    `amounts` are arguments of :mod:`moemesh.trace.wire`: elements and bytes of each (all_reduce),
    bytes of each member's block (all_gather, reduce_scatter), bytes to and from each member
    (all_to_all), bytes from the first member (broadcast); or the bytes of a message ("send",
    "receive"), which is left out if they are 0.
    """

    axis: str
    op: str
    phase: str
    caller: str
    amounts: tuple[Any, ...]
    times: int = 1


class LedgerLines:
    """Sums of a rank's transfers in closed form; expected bytes may be fractions until
    :meth:`ledger` rounds each sum once.

    Lines of a forward are entered `forwards` times; those of the callers in `recomputed` also as
    phase "recompute".
    """

    def __init__(
        self, layout: Layout, rank: int, *, forwards: int = 1, recomputed: Collection[str] = ()
    ) -> None:
        self.layout, self.rank = layout, rank
        #: Coordinates of the rank in all views.
        self.coordinates = layout.coordinates(rank)
        self._forwards, self._recomputed = forwards, recomputed
        self._group_of = cache(layout.group_of)
        #: (axis, op, phase, caller) -> number of operations; payload, sent and received bytes.
        self._sums: dict[tuple[str, str, str, str], list[float]] = {}

    def members(self, axis: str, rank: int | None = None) -> tuple[int, ...]:
        """Ranks of the `axis` group of `rank` (this one by default), ascending."""
        return self._group_of(axis, self.rank if rank is None else rank)

    def enter(self, transfers: Iterable[Transfer], has_backward: bool = True) -> None:
        """Add transfers; those of backward and recomputation only if `has_backward`. Collectives
        on an axis of one rank are left out."""
        for transfer in transfers:
            axis, op, phase, caller, amounts, times = transfer
            passes = [(phase, op, amounts)]
            if phase == BOTH:
                back = amounts[::-1] if op == "all_to_all" else amounts
                passes = [("forward", op, amounts), ("backward", _PAIRS[op], back)]
            for phase, op, amounts in passes:
                is_forward = phase == "forward"
                is_kept = has_backward or phase not in ("backward", "recompute")
                if is_kept and times and (moved := self._moved(axis, op, amounts)):
                    name = _MESSAGES.get(op, op)
                    count = times * self._forwards if is_forward else times
                    self._add((axis, name, phase, caller), moved, count)
                    if is_forward and has_backward and caller in self._recomputed:
                        self._add((axis, name, "recompute", caller), moved, times)

    def _moved(self, axis: str, op: str, amounts: tuple[Any, ...]) -> Sequence[float]:
        """(payload, sent, received) bytes of one operation; empty if nothing moves."""
        if op in _MESSAGES:
            size = amounts[0]
            if not size:
                return ()
            return (size, size, 0) if op == "send" else (size, 0, size)
        if len(ranks := self.members(axis)) == 1:
            return ()
        # Only these two need the size of the group: lists of the others have it as their length.
        others: dict[str, dict[str, int]] = {
            "all_reduce": {"size": len(ranks)},
            "broadcast": {"size": len(ranks), "source_index": 0},
        }
        return getattr(wire, op)(*amounts, index=ranks.index(self.rank), **others.get(op, {}))

    def _add(self, key: tuple[str, str, str, str], moved: Sequence[float], times: int) -> None:
        sums = self._sums.setdefault(key, [0, 0, 0, 0])
        sums[0] += times
        for index, size in enumerate(moved, start=1):
            sums[index] += size * times

    def ledger(self) -> Ledger:
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
