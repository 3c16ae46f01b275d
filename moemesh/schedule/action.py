"""The language of pipeline schedules: operations, blocks, and the order of each rank.

A :class:`Schedule` is a value. It holds no times and no communication: times come from the
simulator's costs or the executor's clock, messages follow from where stages live.

Kinds of operation, for one microbatch (or a slice of it) on one stage: ``F`` forward, ``B`` full
backward, ``I`` its input-gradient half, ``W`` its weight-gradient half. It has one ``F`` and either
one ``B``, or one ``I`` and later one ``W``. (The Zero Bubble papers write "B" for our ``I``,
DualPipe writes "B" for our ``B``.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from moemesh.config.shown import Shown

Kind = Literal["F", "B", "I", "W"]


class Op(NamedTuple):
    """One operation. `microbatch` counts within its pipe, `slice` within its sequence."""

    kind: Kind
    stage: int
    microbatch: int
    pipe: int = 0
    slice: int = 0

    def __str__(self) -> str:
        """``<stage><kind><microbatch>[p<pipe>][.<slice>]``, for example ``3F0`` or ``1B2p1``."""
        pipe = f"p{self.pipe}" if self.pipe else ""
        part = f".{self.slice}" if self.slice else ""
        return f"{self.stage}{self.kind}{self.microbatch}{pipe}{part}"


#: Operations that a rank runs together: one, or an overlapped block of several (usually the forward
#: of one microbatch with the backward of another).
Entry = tuple[Op, ...]


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """Rule by which an asynchronous schedule updates weights while microbatches are in flight.

    ``stash``: every backward updates; it uses the version its forward used (PipeDream).
    ``two_versions``: every `window` backwards update once; both directions use the version before
    the newest (PipeDream-2BW). ``newest``: every `window` local backwards update, and a backward
    uses whatever is newest (AMPNet).
    """

    kind: Literal["stash", "two_versions", "newest"]
    window: int = 1


@dataclass(frozen=True, kw_only=True, repr=False)
class Schedule(Shown):
    """The operations of every rank and their order.

    ``placement[pipe][stage]`` is the rank of a stage, ``orders[rank]`` that rank's entries,
    ``num_microbatches[pipe]`` how many enter each pipe in a step, `num_slices` into how many pieces
    a sequence is cut (1 = whole). `update` is None for a synchronous schedule: all gradients belong
    to one version of the weights. `parameters` are the generator's arguments that no other field
    shows, for display and the digest. Backwards end at `first_trained_stage`: in the stages before
    it nothing trains, and no gradient is sent to them.
    """

    shown = ("name", "num_ranks", "num_stages", "num_microbatches", "num_slices", "parameters")

    name: str
    num_ranks: int
    num_stages: int
    placement: tuple[tuple[int, ...], ...]
    orders: tuple[tuple[Entry, ...], ...]
    num_microbatches: tuple[int, ...]
    num_slices: int = 1
    update: UpdateRule | None = None
    first_trained_stage: int = 0
    parameters: Mapping[str, int | float | str] = field(
        default_factory=dict[str, int | float | str]
    )

    @property
    def num_pipes(self) -> int:
        """1, or 2 where microbatches enter at both ends (Chimera, DualPipe)."""
        return len(self.placement)

    @property
    def stages_per_rank(self) -> int:
        """Chunks of one pipe on each rank."""
        return self.num_stages // self.num_ranks

    @cached_property
    def first_sample(self) -> tuple[int, ...]:
        """Per pipe, the index of its microbatch 0 among those of all pipes."""
        return (0, *accumulate(self.num_microbatches))[:-1]

    @property
    def total_microbatches(self) -> int:
        """Microbatches of one step, all pipes together."""
        return sum(self.num_microbatches)

    def sample(self, op: Op) -> int:
        """Index of the microbatch in the step, over all pipes. It selects the batch, so that a
        two-pipe schedule sees the samples of a one-pipe schedule."""
        return self.first_sample[op.pipe] + op.microbatch

    def rank_of(self, op: Op) -> int:
        """The rank that runs `op`."""
        return self.placement[op.pipe][op.stage]

    def stages_of(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(pipe, stage) of everything placed on `rank`, ordered by stage, then pipe."""
        return tuple(
            (pipe, stage)
            for stage, owners in enumerate(zip(*self.placement, strict=True))
            for pipe, owner in enumerate(owners)
            if owner == rank
        )

    def ops(self, rank: int) -> Iterator[Op]:
        """Operations of `rank` in order, blocks flattened."""
        for entry in self.orders[rank]:
            yield from entry

    @cached_property
    def split_backwards(self) -> frozenset[tuple[int, int, int, int]]:
        """(stage, microbatch, pipe, slice) of every backward that is cut in ``I`` and ``W``."""
        return frozenset(
            op[1:] for rank in range(self.num_ranks) for op in self.ops(rank) if op.kind == "I"
        )

    def backward(self, stage: int, microbatch: int, pipe: int = 0, slice: int = 0) -> Op:
        """The ``B`` or ``I`` that makes the input gradient of this microbatch on this stage."""
        key = (stage, microbatch, pipe, slice)
        return Op("I" if key in self.split_backwards else "B", *key)

    def dependencies(self, op: Op) -> tuple[Op, ...]:
        """Operations that must have ended before `op` can start, besides earlier ones of its rank.

        A forward needs the stage before, and the slice before (keys and values); a backward needs
        its forward, the backward of the next stage, and of the next slice (gradients of keys
        and values); ``W`` needs its ``I``.
        """
        kind, stage, microbatch, pipe, slice = op
        if kind == "W":
            return (op._replace(kind="I"),)
        predecessors = [] if kind == "F" else [op._replace(kind="F")]
        if (before := predecessor(self, op)) is not None:
            predecessors.append(before)
        if kind == "F" and slice > 0:
            predecessors.append(op._replace(slice=slice - 1))
        if kind != "F" and slice < self.num_slices - 1:
            predecessors.append(self.backward(stage, microbatch, pipe, slice + 1))
        return tuple(predecessors)


# The messages of an ordered pair of ranks form a queue in the *sender's* program order, which both
# sides compute from the schedule. Two stages on one rank hand over locally, without a message.


class Message(NamedTuple):
    """The output of `producer`, message number `position` from rank `source` to `destination`."""

    source: int
    destination: int
    position: int
    producer: Op
    consumer: Op


def successor(schedule: Schedule, op: Op) -> Op | None:
    """The operation of the neighbouring stage that takes `op`'s output. None for forwards of the
    last stage, backwards of the first trained stage, and weight gradients."""
    kind, stage, microbatch, pipe, slice = op
    if kind == "F" and stage < schedule.num_stages - 1:
        return Op("F", stage + 1, microbatch, pipe, slice)
    if kind in ("B", "I") and stage > schedule.first_trained_stage:
        return schedule.backward(stage - 1, microbatch, pipe, slice)
    return None


def predecessor(schedule: Schedule, op: Op) -> Op | None:
    """The operation of the neighbouring stage whose output `op` takes: see :func:`successor`."""
    kind, stage, microbatch, pipe, slice = op
    if kind == "F" and stage > 0:
        return Op("F", stage - 1, microbatch, pipe, slice)
    if kind in ("B", "I") and schedule.first_trained_stage <= stage < schedule.num_stages - 1:
        return schedule.backward(stage + 1, microbatch, pipe, slice)
    return None


def messages(schedule: Schedule) -> dict[Op, Message]:
    """Producer -> its message, for every hand-over between two ranks."""
    sent: Counter[tuple[int, int]] = Counter()
    by_producer: dict[Op, Message] = {}
    for source in range(schedule.num_ranks):
        for op in schedule.ops(source):
            consumer = successor(schedule, op)
            if consumer is None or (destination := schedule.rank_of(consumer)) == source:
                continue
            pair = (source, destination)
            by_producer[op] = Message(source, destination, sent[pair], op, consumer)
            sent[pair] += 1
    return by_producer


def one_pipe(
    name: str,
    placement: tuple[int, ...],
    orders: tuple[tuple[Entry, ...], ...],
    num_microbatches: int,
    *,
    num_slices: int = 1,
    update: UpdateRule | None = None,
    parameters: Mapping[str, int | float | str] | None = None,
) -> Schedule:
    """A schedule in which all microbatches go one way, through the stages of `placement`."""
    return Schedule(
        name=name,
        num_ranks=len(orders),
        num_stages=len(placement),
        placement=(placement,),
        orders=orders,
        num_microbatches=(num_microbatches,),
        num_slices=num_slices,
        update=update,
        parameters=parameters or {},
    )


def single(*ops: Op) -> tuple[Entry, ...]:
    """Entries of one operation each."""
    return tuple((op,) for op in ops)


def linear(num_ranks: int) -> tuple[int, ...]:
    """Stage s on rank s."""
    return tuple(range(num_ranks))


def looped(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Placement of stage s on rank s % ranks: the first rank follows the last."""
    return tuple(range(num_ranks)) * chunks


def v_shape(num_ranks: int, chunks: int = 2) -> tuple[int, ...]:
    """Even chunks go up the ranks, odd chunks come back: with 2, rank 0 has first and last
    stage."""
    up = tuple(range(num_ranks))
    return tuple(rank for chunk in range(chunks) for rank in (up[::-1] if chunk % 2 else up))


def mirrored(num_ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two pipes over the same ranks, from both ends."""
    up = linear(num_ranks)
    return up, up[::-1]
