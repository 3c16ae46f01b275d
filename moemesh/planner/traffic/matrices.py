"""Traffic of an optimizer that updates whole matrices (Muon), without torch.

It mirrors :class:`moemesh.train.muon.MatrixUpdates`, and tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from moemesh.config.layout import shard_range
from moemesh.config.optimizer_table import has_matrices
from moemesh.planner.traffic.tensors import StagePlacement, data_buckets, owned
from moemesh.sharding.boxes import boxes, rows
from moemesh.sharding.matrices import MatrixExchange, Part, exchanges
from moemesh.sharding.parameters import ParameterTensor


def matrix_exchanges(
    placement: StagePlacement, rank: int, element: int
) -> dict[str, MatrixExchange]:
    """The exchanges of one update in the stage of `rank`; ranks in them count within the stage."""
    ranks = placement.members("stage", rank)
    return exchanges([list(_parts(placement, one, element)) for one in ranks])


def _parts(placement: StagePlacement, rank: int, element: int) -> Iterator[Part]:
    """The parts of tensors with matrices whose states `rank` keeps."""
    tensors = {tensor.name: tensor for tensor in placement.tensors}
    for bucket in data_buckets(placement, rank, element):
        share = range(bucket.numbers)
        if placement.plan.data != "replicate":
            sizes, index = owned(placement, bucket, rank)
            share = range(sum(sizes[:index]), sum(sizes[: index + 1]))
        start = 0
        for member in bucket.members:
            numbers = range(max(share.start - start, 0), min(share.stop - start, member.numbers))
            start += member.numbers
            if member.trains and numbers and has_matrices(member.name):
                yield from _parts_of(placement, tensors[member.name], rank, numbers)


def _parts_of(
    placement: StagePlacement, tensor: ParameterTensor, rank: int, numbers: range
) -> Iterator[Part]:
    """The parts of logical tensors in a range of the local numbers of a parameter."""
    layout, at = placement.layout, placement.coordinates(rank)
    slices = [range(size) for size in tensor.shape]
    for axis, dim in tensor.shards.items():
        slices[dim] = shard_range(tensor.shape[dim], int(getattr(layout, axis)), at[axis])
        if axis == "ep" and tensor.per_rank:
            first = sum(tensor.per_rank[: at[axis]])
            slices[dim] = range(first, first + tensor.per_rank[at[axis]])
    if not tensor.is_expert:
        yield from _boxes(tensor.name, tensor.shape, slices, numbers)
        return
    module, _, leaf = tensor.name.replace(".experts.rest.", ".experts.").rpartition(".")
    size = prod(map(len, slices[1:]))
    for place, part in rows(len(slices[0]), size, numbers):
        inside = range(part.start - place * size, part.stop - place * size)
        name = f"{module}.{slices[0][place]}.{leaf}"
        yield from _boxes(name, tensor.shape[1:], slices[1:], inside)


def _boxes(
    name: str, shape: tuple[int, ...], slices: list[range], numbers: range
) -> Iterator[Part]:
    for box in boxes([len(part) for part in slices], numbers):
        offset = tuple(part.start + first for part, first in zip(slices, box.offset, strict=True))
        yield Part(name, shape, offset, box.shape)
