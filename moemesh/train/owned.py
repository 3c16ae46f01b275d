"""The parts of logical tensors that a rank owns, whatever its layout.

Each weight of an expert is a logical tensor of its own, under the expert's global id:

    layers.1.feed_forward.experts.17.gate_up
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from moemesh.checkpoint.store import Shard, Sharded, shard_of
from moemesh.comm.mesh import Mesh
from moemesh.parallel.parallelize import RankModel
from moemesh.parallel.placement import OwnRange, Placement, part_of
from moemesh.sharding.boxes import logical_parts


def owned_shards(
    parallel: RankModel, tensors: Mapping[str, Tensor], prefix: str = "", *, saved: bool = False
) -> Iterator[Shard]:
    """The parts of logical tensors that this rank holds. `tensors`: parameter -> the weight, or a
    gradient or moment of its shape; shards share their memory.

    The name of a shard is `prefix` and the name in a checkpoint. Parts that several ranks hold are
    included; `saved`: only those that this rank saves, since one rank saves each logical element.
    """
    for name, held in parallel.reducer.held.items():
        placement = parallel.placements[name]
        if name in tensors and (placement.counts(held, parallel.mesh) or not saved):
            yield from shards_of(placement, held, tensors[name], parallel.mesh, prefix)


def shards_of(
    placement: Placement, held: OwnRange, tensor: Tensor, mesh: Mesh, prefix: str = ""
) -> Iterator[Shard]:
    """The shards of one parameter; `tensor` holds the elements of its range `held`."""
    is_expert = placement.is_expert
    experts = placement.experts(mesh) if is_expert else None
    shape = placement.shape[1:] if is_expert else placement.shape
    boxes = placement.parts_of_expert(mesh) if is_expert else [placement.slices(mesh)]
    for part, numbers in logical_parts(placement.name, shape, boxes, held.numbers, experts):
        data = part_of(tensor, held, numbers).view(part.sizes)
        yield shard_of(f"{prefix}{part.name}", Sharded(data, part.shape, part.offset))
