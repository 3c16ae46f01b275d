"""The parts of logical tensors that a rank owns, whatever its layout.

An expert is a logical tensor of its own, under its global id:

    layers.1.feed_forward.experts.17.gate_up
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from moemesh.checkpoint.store import Shard, Sharded, shard_of
from moemesh.comm.mesh import Mesh
from moemesh.parallel.parallelize import RankModel
from moemesh.parallel.placement import OwnRange, Placement, part_of
from moemesh.sharding.boxes import boxes, rows


def owned_shards(
    parallel: RankModel, tensors: Mapping[str, Tensor], prefix: str = "", *, saved: bool = False
) -> Iterator[Shard]:
    """The parts of logical tensors that this rank holds in `tensors` of parameters, sharing memory.

    They are named `prefix` and the name in a checkpoint. Parts that several ranks hold are
    included; `saved`: only those that this rank saves, since one rank saves each logical element.
    """
    for name, own in parallel.reducer.held.items():
        where = parallel.placements[name]
        if name in tensors and (where.counts(own, parallel.mesh) or not saved):
            yield from shards_of(where, own, tensors[name], parallel.mesh, prefix)


def shards_of(
    where: Placement, own: OwnRange, tensor: Tensor, mesh: Mesh, prefix: str = ""
) -> Iterator[Shard]:
    """The same of one parameter, whose range `own` is in `tensor`."""
    if not where.is_expert:
        slices = where.slices(mesh)
        yield from _parts(f"{prefix}{where.name}", where.shape, slices, own, tensor)
        return
    module, _, leaf = where.stack.rpartition(".")
    experts, held = where.experts(mesh), where.parts_of_expert(mesh)
    size = math.prod(map(len, held[0]))
    for index, part in rows(len(experts) * len(held), size, own.numbers):
        numbers = range(part.start - index * size, part.stop - index * size)
        own_part, numbers_held = (
            OwnRange(numbers=numbers, is_first=own.is_first),
            part_of(tensor, own, part),
        )
        place, block = divmod(index, len(held))
        expert = f"{prefix}{module}.{experts[place]}.{leaf}"
        yield from _parts(expert, where.shape[1:], held[block], own_part, numbers_held)


def _parts(
    name: str, shape: tuple[int, ...], slices: Sequence[range], own: OwnRange, tensor: Tensor
) -> Iterator[Shard]:
    """The boxes of a logical tensor of global `shape`, held in `slices`, that `tensor` fills."""
    for box in boxes([len(part) for part in slices], own.numbers):
        offset = tuple(part.start + first for part, first in zip(slices, box.offset, strict=True))
        part = part_of(tensor, own, box.numbers).view(box.shape)
        yield shard_of(name, Sharded(part, shape, offset))
