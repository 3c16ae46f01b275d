"""Buckets: parameters whose gradients are summed, sharded and gathered in one operation.

The parameters of a bucket are equal in four properties: the axis of their gradient sum (under
zero3: its ranks), the bytes of their weights, whether two pipeline ranks hold them, and whether
they train. Parameters come in reversed order, because the backward reaches the last layers first;
a bucket is closed when it is large enough. A bucket of n elements is one flat vector. If states are
sharded, rank i of the N ranks that share them (with a parameter server: of the N servers) owns
``shard_range(n, N, i)`` of it (:func:`owned_sizes`).

| plan.data | a bucket ends | because |
|---|---|---|
| replicate | at 25 MiB of gradients | few operations, which start early |
| zero1 | also at a share of the rank's gradients | pending sums add little to the states |
| parameter_server | the same, at 4 MiB | a server receives a copy of it from every rank at once |
| zero2 | as zero1, and at the border of a stage | the backward of a stage fills and empties it |
| zero3 | at the border of a unit, whatever its size | a unit is gathered before it is used |

A unit is the embedding, a layer, or everything after the last layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from moemesh.config.layout import EXPERT_AXES, shard_sizes
from moemesh.config.plan import SHARDED_STATES

#: Bytes of one bucket of gradients: large enough for bandwidth, small enough to start early.
BUCKET_BYTES = 25 << 20
#: Bytes of one bucket of a parameter server, which receives it from all other ranks at once.
SERVED_BUCKET_BYTES = 4 << 20
#: A bucket of sharded states ends at this share of a rank's gradients, so that pending buckets and
#: their receive buffers stay small beside the states; and not below this number of bytes.
SHARE_OF_GRADIENTS, LEAST_BUCKET_BYTES = 1 / 16, 1 << 18


#: Largest number of pending gradient sums of buckets with sharded states.
MOST_UNDER_WAY = 2


@dataclass(frozen=True, kw_only=True)
class Member:
    """One parameter on one rank. `numbers`: count of local elements, bytes if packed;
    `weight_bytes`: bytes of an element; `axis`: the axis over which its gradient is summed;
    `mirrored`: another pipeline rank holds it too; `stages`: pipeline stages of this rank that use
    it; `unit`: "" takes that of the name."""

    name: str
    numbers: int
    weight_bytes: int
    axis: str
    mirrored: bool = False
    stages: tuple[int, ...] = (0,)
    trains: bool = True
    unit: str = ""

    def __post_init__(self) -> None:
        if not self.unit:
            object.__setattr__(self, "unit", unit_of(self.name))

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of the accumulated gradient: never below fp32."""
        return max(self.weight_bytes, 4)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Parameters in the order of the flat vector, equal in the four properties that the module
    docstring lists. `unit`: their unit; None if buckets may span several."""

    members: tuple[Member, ...]
    unit: str | None = None

    @property
    def axis(self) -> str:
        """Axis of the first member; those of the others have the same ranks."""
        return self.members[0].axis

    @property
    def mirrored(self) -> bool:
        return self.members[0].mirrored

    @property
    def trains(self) -> bool:
        return self.members[0].trains

    @property
    def stages(self) -> tuple[int, ...]:
        """Pipeline stages of this rank that use any of the members."""
        return tuple(sorted({stage for member in self.members for stage in member.stages}))

    @property
    def weight_bytes(self) -> int:
        return self.members[0].weight_bytes

    @property
    def gradient_bytes(self) -> int:
        return self.members[0].gradient_bytes

    @property
    def numbers(self) -> int:
        return sum(member.numbers for member in self.members)

    def expert_numbers(self, own: range) -> int:
        """Count of the elements in the range `own` that belong to routed experts."""
        return sum(len(part) for member, part in self.parts(own) if member.axis in EXPERT_AXES)

    def parts(self, own: range) -> Iterator[tuple[Member, range]]:
        """Each member with its elements in the range `own` of the bucket, counted in the member."""
        start = 0
        for member in self.members:
            first, end = max(own.start - start, 0), min(own.stop - start, member.numbers)
            yield member, range(first, end)
            start += member.numbers


def owned_sizes(numbers: int, ranks: int, owners: int) -> tuple[int, ...]:
    """Count of elements that each of `ranks` ranks owns of a flat vector of `numbers`: equal parts
    for the first `owners` ranks (`Plan.owners`), in order, 0 for the rest."""
    return shard_sizes(numbers, owners) + (0,) * (ranks - owners)


def unit_of(name: str) -> str:
    """The unit of a parameter: "embedding", "layers.3", or "head" (with its norms)."""
    owner, *rest = name.split(".")
    if owner == "layers":
        return f"{owner}.{rest[0]}"
    return owner if owner == "embedding" else "head"


def buckets(
    members: Sequence[Member], data: str, same_ranks: Callable[[str], str] | None = None
) -> tuple[Bucket, ...]:
    """The buckets of one rank under ``plan.data = data``, in the order in which a backward fills
    them; `members` in the model's order. `same_ranks`: axis -> one name for all axes with the
    same groups (:meth:`moemesh.config.layout.Layout.same_ranks`), whose parameters zero3 joins;
    None: it joins only those of one axis."""
    bucket_bytes = SERVED_BUCKET_BYTES if data == "parameter_server" else BUCKET_BYTES
    if data != "replicate":
        trained = (member for member in members if member.trains)
        gradients = sum(member.numbers * member.gradient_bytes for member in trained)
        share = max(int(gradients * SHARE_OF_GRADIENTS), LEAST_BUCKET_BYTES)
        bucket_bytes = min(bucket_bytes, share)
    by_unit = "weights" in SHARDED_STATES[data]
    by_stage = "gradients" in SHARDED_STATES[data]
    filled: list[list[tuple[int, Member]]] = []
    unfinished: dict[tuple[object, ...], list[tuple[int, Member]]] = {}
    for place, member in enumerate(reversed(members)):
        key = (
            same_ranks(member.axis) if by_unit and same_ranks else member.axis,
            member.weight_bytes,
            member.mirrored,
            member.trains,
            member.stages if by_stage else None,
            member.unit if by_unit else None,
        )
        bucket = unfinished.get(key)
        if bucket is not None and not by_unit:
            numbers = sum(other.numbers for _, other in bucket)
            if numbers * member.gradient_bytes >= bucket_bytes:
                bucket = None
        if bucket is None:
            bucket = unfinished[key] = []
            filled.append(bucket)
        bucket.append((place, member))
    filled.sort(key=lambda bucket: bucket[-1][0])  # by the last member that a backward reaches
    return tuple(
        Bucket(
            members=tuple(member for _, member in bucket),
            unit=bucket[0][1].unit if by_unit else None,
        )
        for bucket in filled
    )
