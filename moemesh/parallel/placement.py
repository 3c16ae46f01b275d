"""Placement of parameters: sharded dims, own slices, and the axis of each gradient sum.

The residual stream is always token-sharded, so the local gradient of every parameter is *partial*
on every axis on which the parameter is replicated: the true gradient is the SUM over those axes.
From that one rule everything follows (no averaging, no factor):

| parameter | view | sharded over | gradient summed over |
|---|---|---|---|
| QKV, its bias, sinks, norms over all heads | dense | tp | dp_cp |
| latents up to heads (MLA), row-parallel W_o | dense | tp | dp_cp |
| dense and shared MLP, vocabulary rows | dense | tp | dp_cp |
| other norms, router, output bias | dense | - | stage (dp, cp, tp) |
| down to latents (MLA), whole W_o after the all_to_all exit | dense | - | stage (dp, cp, tp) |
| routed experts | expert | ep, etp | edp |
| factors of adapters | as their weight | where it is, in the dims they have | see `config.lora` |

Pipeline ranks hold different parameters. If two of them hold the same one (mirrored pipes, an
embedding tied to the head), its gradient is summed over the axis `mirror` as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.config.layout import EXPERT_AXES, shard_range
from moemesh.config.lora import TargetPart, factors_of, parts_of
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.tuning import FULL, Tuning
from moemesh.model.attention import Attention, LatentAttention, ProjectionNorm
from moemesh.model.experts import Experts
from moemesh.model.layers import MLP, AdaptedModule, VocabularyRows
from moemesh.model.transformer import Transformer
from moemesh.sharding.parameters import held_slices, tensors

# Ownership: the elements of a parameter that a rank updates, counts in the norm, and saves.
#
# Under ``plan.data = replicate`` these are the whole local tensor. With sharded states they are a
# range of the flattened local tensor, which need not start or end at a row: in the logical tensor
# it covers a few boxes.


@dataclass(frozen=True, kw_only=True)
class OwnRange:
    """The range `numbers` of a flattened local tensor (row-major) whose states this rank keeps.
    `is_first`: of the ranks that keep it, this one counts it in the norm and saves it."""

    numbers: range
    is_first: bool


def part_of(tensor: Tensor, own: OwnRange, numbers: range) -> Tensor:
    """The range `numbers` of the flattened local tensor, from `tensor`, the part `own` of it."""
    start = numbers.start - own.numbers.start
    return tensor.view(-1)[start : start + len(numbers)]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A parameter's logical shape, the dim that each axis shards, the axis over which its gradient
    is summed, the pipeline ranks that hold it (ascending), and whether it trains. ``places``:
    logical ids of a stack's experts; None: in order. ``per_rank``: experts on each rank of ep, for
    a stack of some experts of a layer. ``unit``: the unit of the forward that reads it, if its name
    does not contain it. ``blocks``: equal blocks of the dim that etp shards; a rank holds its part
    of each. ``is_packed``: the local tensor is in NF4."""

    name: str
    shape: tuple[int, ...]
    shards: dict[str, int]
    summed_over: str
    holders: tuple[int, ...] = (0,)
    trains: bool = True
    places: tuple[int, ...] | None = None
    per_rank: tuple[int, ...] | None = None
    unit: str = ""
    blocks: int = 1
    is_packed: bool = False

    def slices(self, mesh: Mesh) -> tuple[range, ...]:
        """:func:`moemesh.sharding.parameters.held_slices` of this rank."""
        shape, shards, per_rank = self.shape, self.shards, self.per_rank
        return held_slices(
            shape, shards, per_rank, lambda axis: mesh[axis].size, lambda axis: mesh[axis].index
        )

    def parts_of_expert(self, mesh: Mesh) -> list[tuple[range, ...]]:
        """The parts of each expert of a stack that this rank holds, in the order of its memory."""
        whole, etp = self.slices(mesh)[1:], mesh["etp"]
        if self.blocks == 1 or etp.size == 1:
            return [whole]
        assert self.shards["etp"] == 1, "parts of blocks follow one another in memory"
        size = self.shape[1] // self.blocks
        held = shard_range(size, etp.size, etp.index)
        starts = range(0, self.shape[1], size)
        return [(range(at + held.start, at + held.stop), *whole[1:]) for at in starts]

    def offset(self, mesh: Mesh) -> tuple[int, ...]:
        """First index of this rank's part in each dim."""
        return tuple(part.start for part in self.slices(mesh))

    def experts(self, mesh: Mesh) -> Sequence[int]:
        """The logical ids of the experts that this rank holds, in the order of its stack."""
        held = self.slices(mesh)[0]
        return held if self.places is None else self.places[held.start : held.stop]

    def counts(self, own: OwnRange, mesh: Mesh) -> bool:
        """Whether this rank counts (norm) and saves (checkpoint) the range that it owns."""
        return own.is_first and mesh["pp"].index == self.holders[0]

    @property
    def is_expert(self) -> bool:
        return self.summed_over in EXPERT_AXES

    @property
    def stack(self) -> str:
        """The name of the whole stack, if this is the part of it that does not train."""
        return self.name.replace(".experts.rest.", ".experts.")

    def rows(self, mesh: Mesh) -> Sequence[int]:
        """Row of each expert of this rank in the stack sorted by logical id, which does not depend
        on the layout."""
        experts = self.experts(mesh)
        if self.per_rank is None or self.places is None:
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
    ranks that hold it; None: one pipeline rank. `tuning`: the trained ones."""
    found: dict[str, Placement] = {}
    if config.architecture is not None:
        for tensor in tensors(config, plan):
            found[tensor.name] = Placement(
                name=tensor.name,
                shape=tensor.shape,
                shards=tensor.shards,
                summed_over=tensor.summed_over,
                holders=(0,) if holders is None else holders[tensor.name],
                trains=bool(tensor.trained_rows(tuning)),
                unit=tensor.unit,
                blocks=tensor.blocks,
                is_packed=tensor.is_packed,
            )
        return found
    for prefix, module in Transformer(config).named_modules():
        rules: dict[str, tuple[dict[str, int], str]] = {}
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}"
            shards, summed_over = rules.get(leaf) or _rule(module, leaf, plan)
            parts: tuple[TargetPart, ...] = ()
            if isinstance(module, AdaptedModule):
                # The adapter parameters of this weight follow it.
                shape, is_stack = tuple(parameter.shape), isinstance(module, Experts)
                parts = parts_of(leaf, shape)
                for factor in factors_of(
                    module.lora, parts, shape, shards, summed_over, is_stack=is_stack
                ):
                    rules[factor.leaf] = factor.shards, factor.summed_over
            experts = parameter.shape[0] if summed_over in EXPERT_AXES else 0
            found[name] = Placement(
                name=name,
                shape=tuple(parameter.shape),
                shards=shards,
                summed_over=summed_over,
                holders=(0,) if holders is None else holders[name],
                trains=bool(tuning.rows(name, experts)),
                is_packed=config.lora.is_packed and bool(parts),
            )
    return found


def _rule(module: object, leaf: str, plan: Plan) -> tuple[dict[str, int], str]:
    """(axis -> sharded dim, axis to sum over); see the table above."""
    match module, leaf:
        case Experts(), "gate_up" | "down" | "gate_up_bias":
            return {"ep": 0, "etp": 2}, "edp"
        case Experts(), "down_bias":
            # Added once: every rank of etp adds its own channels of it to its part of the sum.
            return {"ep": 0, "etp": 1}, "edp"
        case Attention(), "qkv" | "qkv_bias" | "sinks":
            return {"tp": 0}, "dp_cp"
        case LatentAttention(), "query" | "query_up" | "key_value_up" | "sinks":
            return {"tp": 0}, "dp_cp"
        case ((ProjectionNorm() | VocabularyRows()), "weight"):
            return {"tp": 0}, "dp_cp"
        case Attention() | LatentAttention(), "output" if plan.attention_exit != "all_to_all":
            return {"tp": 1}, "dp_cp"
        case MLP(), "gate_up" | "down":
            return {"tp": 1}, "dp_cp"
        case _:
            return {}, "stage"
