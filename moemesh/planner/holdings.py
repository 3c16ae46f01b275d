"""Shares of ranks under a plan: groups of every axis; layers, heads, experts and tokens.

All shares come from functions that a run uses to place parameters and to cut batches
(:mod:`moemesh.config.layout`, :mod:`moemesh.sharding`; stages through
:mod:`moemesh.planner.traffic.tensors`), so they are those of `moemesh train`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from typing import Any, cast

from moemesh.config.data import DataConfig
from moemesh.config.errors import ConfigError, Problem, UserError
from moemesh.config.layout import AXES as LAYOUT_AXES
from moemesh.config.layout import shard_range
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.planner.layout_sources import plan_table, read_plan, smallest_batch
from moemesh.planner.shapes.load_shape import load_model
from moemesh.planner.traffic.tensors import StagePlacement
from moemesh.sharding.context import context_runs
from moemesh.sharding.parameters import ParameterTensor

#: Axes of the two meshes, outermost first, without duplicates.
AXES = ("pp", "dp", "cp", "tp", "edp", "ep", "etp")
#: Largest number of ranks with all groups in one JSON: about 70 MB.
MOST_LISTED = 2**18


@dataclass(frozen=True)
class AxisGroups:
    """The `count` groups of an axis: `size` ranks each, `distance` apart. `nodes` is the most nodes
    that a group spans."""

    axis: str
    count: int
    size: int
    distance: int
    nodes: int

    def groups(self, most: int | None = None) -> list[range]:
        """The first `most` groups, ordered by their first rank; None: all of them."""
        count, distance = self.count if most is None else min(self.count, most), self.distance
        blocks = (divmod(index, distance) for index in range(count))
        firsts = (block * distance * self.size + inside for block, inside in blocks)
        return [range(first, first + distance * self.size, distance) for first in firsts]


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """The part of a model and of a step's batch that one rank holds; all indices from 0.

    ``at`` are the rank's coordinates, ``stages`` its pipeline stages, ``layers`` the layers of
    each. ``vocabulary`` are its rows of the embedding or the head, none on a rank without either.
    Every layer on the rank has its query ``heads``, ``kv_heads`` (equal to ``heads`` in latent
    attention), routed ``experts`` and ``expert_columns`` of each expert's width. Every step has its
    ``sequences`` of the global batch and the ``positions`` of each, as runs. ``tokens`` is the
    number of tokens of the first (the largest) microbatch in its residual stream, after the cut by
    tp; ``parameters`` the number of its parameters.
    """

    rank: int
    node: int
    at: dict[str, int]
    stages: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]
    vocabulary: range
    heads: range
    kv_heads: range
    experts: range
    expert_columns: range
    sequences: range
    positions: tuple[range, ...]
    tokens: int
    parameters: int


class Holdings:
    """Shares of all ranks of a plan; without a model only nodes, groups and coordinates."""

    def __init__(
        self, plan: Plan, model: ModelConfig | None, *, seq_len: int, global_batch: int
    ) -> None:
        """Raises ConfigError for an illegal plan, and for a model or a schedule that it cannot
        run."""
        if problems := plan.check(model, seq_len=None if model is None else seq_len):
            raise ConfigError(problems)
        self.plan, self.model, self.layout = plan, model, plan.layout
        self.seq_len, self.global_batch = seq_len, global_batch
        self._placement = None
        if model is not None:
            try:
                self._placement = StagePlacement(model, plan, seq_len)
            except ValueError as error:
                problem = Problem.of("schedule", "plan.schedule", plan.schedule, str(error))
                raise ConfigError([problem]) from None
        # Caches of values that many ranks share.
        #: Pipeline rank -> tensors, and whether a vocabulary table and experts are among them.
        self._held: dict[int, tuple[list[ParameterTensor], bool, bool]] = {}
        #: (pp, tp, ep, etp) -> number of parameters.
        self._parameters: dict[tuple[int, ...], int] = {}

    @classmethod
    def named(
        cls,
        plan: str,
        model: str | None = None,
        *,
        seq_len: int | None = None,
        global_batch: int | None = None,
    ) -> Holdings:
        """The holdings of a plan and a model, given as for `moemesh estimate`.

        `seq_len` None: the plan's, or the default of a run; `global_batch` None: the plan's, or the
        smallest that the plan divides. Raises ConfigError.
        """
        loaded = None if model is None else load_model(model)
        table = plan_table(plan, {"seq_len": seq_len, "global_batch": global_batch})
        if seq_len is None:
            table.setdefault("seq_len", DataConfig().seq_len)
        if global_batch is None:
            table.setdefault("global_batch", smallest_batch(table))
        planned = read_plan(table, seq_len=seq_len, global_batch=global_batch, model=loaded)
        problems: list[Problem] = []
        if planned.plan is None:
            message = "this layout has keys that no [plan] of a run has, so no rank holds it"
            fix = "keys of [plan] only: pp, dp, cp, tp, ep, etp, schedule, microbatches, ..."
            problems.append(Problem.of("not-a-plan", "plan", plan, message, fix))
        if loaded is not None and loaded.config is None:
            message = "only the sizes of this model are known, not the layers that a run builds"
            fix = "a preset or a folder that `moemesh train` trains, or no --model"
            problems.append(Problem.of("not-available", "model", str(model), message, fix))
        if problems:
            raise ConfigError(problems)
        assert planned.plan is not None
        layout, config = planned.layout, None if loaded is None else loaded.config
        batch = layout.global_batch
        return cls(planned.plan, config, seq_len=layout.seq_len, global_batch=batch)

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def ranks_per_node(self) -> int:
        return self.layout.ranks_per_node or self.world_size

    @property
    def num_nodes(self) -> int:
        return -(-self.world_size // self.ranks_per_node)

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    @cached_property
    def axes(self) -> tuple[AxisGroups, ...]:
        """The groups of every axis of both meshes."""
        axes: list[AxisGroups] = []
        for name in AXES:
            view = self.layout.dimensions(LAYOUT_AXES[name][0])
            inner = list(view)[list(view).index(name) + 1 :]
            size, distance = view[name], prod(view[axis] for axis in inner)
            nodes = size
            if distance < (node := self.ranks_per_node):
                # Of every `size * distance` ranks the first `distance` are first ranks of groups.
                # The group whose first rank is nearest to the end of its node spans most nodes:
                # `last` is the offset of that rank in the node.
                repeat = gcd(size * distance, node)
                last = node - 1 - max(repeat - distance, 0)
                nodes = (last + (size - 1) * distance) // node + 1
            axes.append(AxisGroups(name, self.world_size // size, size, distance, nodes))
        return tuple(axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank on both meshes."""
        at = self.layout.coordinates(rank)
        return {name: at[name] for name in AXES}

    def share(self, rank: int) -> RankShare:
        """The share of one rank. The holdings must have a model."""
        model, placement, plan = self.model, self._placement, self.plan
        assert model is not None and placement is not None and 0 <= rank < self.world_size
        at = self.coordinates(rank)
        if at["pp"] not in self._held:
            tensors = placement.held(at["pp"])
            names = {tensor.name for tensor in tensors}
            has_table = not names.isdisjoint({"embedding.weight", "head.weight"})
            self._held[at["pp"]] = tensors, has_table, any(tensor.is_expert for tensor in tensors)
        tensors, has_table, has_experts = self._held[at["pp"]]
        stages = tuple(placement.stages(at["pp"]))
        # Tensor parallelism cuts key/value heads, each with the query heads of its group.
        kv_heads = shard_range(model.kv_heads, plan.tp, at["tp"])
        group_size = model.num_heads // model.kv_heads
        cut = at["pp"], at["tp"], at["ep"], at["etp"]
        if cut not in self._parameters:
            sizes = (tensor.local_elements(self.layout, at) for tensor in tensors)
            self._parameters[cut] = sum(sizes)
        sequences = placement.sequences(self.global_batch, at["dp"], 0)
        slices = range(placement.schedule.num_slices)
        positions = max(placement.positions(at["cp"], part) for part in slices)
        num_experts = model.num_experts if has_experts else 0
        width = model.expert_intermediate_size if has_experts else 0
        whole = (range(self.seq_len),)
        return RankShare(
            rank=rank,
            node=self.node_of(rank),
            at=at,
            stages=stages,
            layers=tuple(tuple(placement.layers_of(stage)) for stage in stages),
            vocabulary=shard_range(model.vocab_size if has_table else 0, plan.tp, at["tp"]),
            heads=range(kv_heads.start * group_size, kv_heads.stop * group_size),
            kv_heads=kv_heads,
            experts=shard_range(num_experts, plan.ep, at["ep"]),
            expert_columns=shard_range(width, plan.etp, at["etp"]),
            sequences=shard_range(self.global_batch, plan.dp, at["dp"]),
            positions=context_runs(self.seq_len, plan.cp, at["cp"]) if plan.cp > 1 else whole,
            tokens=len(shard_range(sequences * positions, self.plan.tp, at["tp"])),
            parameters=self._parameters[cut],
        )

    def to_json(self, ranks: Sequence[int] | None = None) -> dict[str, Any]:
        """The holdings as plain values; `ranks` None: all of them. Raises UserError for more than
        :data:`MOST_LISTED` ranks."""
        if self.world_size > MOST_LISTED:
            raise UserError(
                f"the groups of {self.world_size} ranks are too many to list (at most "
                f"{MOST_LISTED}): the text has the first ones"
            )
        chosen = range(self.world_size) if ranks is None else ranks
        if self.model is None:
            rows = [{"rank": r, "node": self.node_of(r), "at": self.coordinates(r)} for r in chosen]
        else:
            shares = (vars(self.share(rank)) for rank in chosen)
            rows = [{name: _plain(value) for name, value in share.items()} for share in shares]
        return {
            "world_size": self.world_size,
            "nodes": self.num_nodes,
            "ranks_per_node": self.ranks_per_node,
            "seq_len": self.seq_len,
            "global_batch": self.global_batch,
            "groups": {axis.axis: list(map(list, axis.groups())) for axis in self.axes},
            "nodes_of_a_group": {axis.axis: axis.nodes for axis in self.axes},
            "ranks": rows,
        }


def _plain(value: object) -> object:
    """`value` for JSON, with ranges as [start, stop]."""
    if isinstance(value, range):
        return [value.start, value.stop]
    if isinstance(value, tuple):
        return [_plain(part) for part in cast("tuple[object, ...]", value)]
    return value
