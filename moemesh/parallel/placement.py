"""Placement of parameters: sharded dims, own slices, and the axis of each gradient sum.

:mod:`moemesh.sharding.parameters` has the table of the parameters and of the sums of their
gradients. Pipeline ranks hold different parameters. If two of them hold the same parameter
(mirrored pipes, an embedding tied to the head), its gradient is summed over the axis `mirror` as
well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.config.layout import shard_range
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.tuning import FULL, Tuning
from moemesh.sharding.parameters import ParameterTensor, tuned_tensors

# Ownership: the elements of a parameter that a rank updates. One of the ranks that own an element
# counts it in the norm and saves it (:meth:`Placement.counts`).
#
# Under ``plan.data = replicate`` these are the whole local tensor. With sharded states they are a
# range of the flattened local tensor, which need not start or end at a row: in the logical tensor
# the range covers a few boxes (:mod:`moemesh.sharding.boxes`).


@dataclass(frozen=True, kw_only=True)
class OwnRange:
    """The range `numbers` of a flattened local tensor (row-major) whose states this rank keeps.
    `is_first`: this is the first of the ranks of one pipeline rank that keep it."""

    numbers: range
    is_first: bool


def part_of(tensor: Tensor, own: OwnRange, numbers: range) -> Tensor:
    """The range `numbers` of the flattened local tensor: a view of `tensor`, which holds the range
    `own` of it."""
    start = numbers.start - own.numbers.start
    return tensor.view(-1)[start : start + len(numbers)]


@dataclass(frozen=True, kw_only=True)
class Placement(ParameterTensor):
    """A parameter and the pipeline ranks that hold it (ascending)."""

    holders: tuple[int, ...] = (0,)

    def slices(self, mesh: Mesh) -> tuple[range, ...]:
        """:meth:`slices_at` of this rank."""
        return self.slices_at(mesh.layout, mesh.layout.coordinates(mesh.rank))

    def parts_of_expert(self, mesh: Mesh) -> list[tuple[range, ...]]:
        """Boxes of one expert (a range of each of its dims) that this rank holds of each expert of
        a stack, in the order of its memory: one box for each block that etp shards."""
        local, etp = self.slices(mesh)[1:], mesh["etp"]
        if self.blocks == 1 or etp.size == 1:
            return [local]
        assert self.shards["etp"] == 1, "parts of blocks follow one another in memory"
        size = self.shape[1] // self.blocks
        held = shard_range(size, etp.size, etp.index)
        starts = range(0, self.shape[1], size)
        return [(range(at + held.start, at + held.stop), *local[1:]) for at in starts]

    def experts(self, mesh: Mesh) -> Sequence[int]:
        """The logical ids of the experts that this rank holds, in the order of its stack."""
        held = self.slices(mesh)[0]
        return held if self.places is None else self.places[held.start : held.stop]

    def counts(self, own: OwnRange, mesh: Mesh) -> bool:
        """Whether this rank counts (norm) and saves (checkpoint) the range that it owns."""
        return own.is_first and mesh["pp"].index == self.holders[0]

    def rows(self, mesh: Mesh) -> Sequence[int]:
        """Row of each expert of this rank in the stack sorted by logical id, which does not depend
        on the layout."""
        experts = self.experts(mesh)
        if not self.per_rank or self.places is None:
            return experts
        order = {expert: row for row, expert in enumerate(sorted(self.places))}
        return [order[expert] for expert in experts]

    @property
    def is_vector(self) -> bool:
        """Whether it is a norm, a bias or the like, or a stack of one for each expert."""
        return len(self.shape) == 1 or self.name.endswith("bias")

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def placements(
    config: ModelConfig,
    plan: Plan,
    holders: Mapping[str, tuple[int, ...]] | None = None,
    tuning: Tuning = FULL,
) -> dict[str, Placement]:
    """Placements of all parameters of the model of `config`. `holders`: parameter name -> pipeline
    ranks that hold it; None: one pipeline rank. `tuning`: the parameters that train; where only
    some experts of a layer do, the others are stacks of their own, under ``experts.rest``."""
    by_name: dict[str, Placement] = {}
    for tensor in tuned_tensors(config, plan, tuning):
        placement = Placement(**vars(tensor))
        if holders is not None:
            stack = tensor.name.replace(".experts.rest.", ".experts.")
            placement = replace(placement, holders=holders[stack])
        by_name[tensor.name] = placement
    return by_name
