"""The search space: every legal combination of degrees and strategies, in numpy columns.

A :class:`Family` fixes the pipeline: degree, schedule, chunks. Its arrays are all combinations of
strategies, of the other degrees and of the microbatch; one formula call prices a family.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from moemesh.config.dispatcher_table import PROPOSED
from moemesh.config.names import Names
from moemesh.config.plan import RECOMPUTED, AttentionExit, ScheduleName
from moemesh.config.rules import V_SCHEDULES, experts_fit, uncut_by_tensor
from moemesh.config.schedule_table import SCHEDULES
from moemesh.config.suggest import divisors
from moemesh.planner.arithmetic import FloatArray, Number
from moemesh.planner.memory import needed_bytes
from moemesh.planner.planned_layout import PlannedLayout, Precision
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.stage_cut import with_values
from moemesh.planner.timing.columns import LayoutColumns, layout_row
from moemesh.planner.timing.links import visited_nodes
from moemesh.planner.timing.price import Pricing, software_of
from moemesh.schedule.build import is_defined
from moemesh.sharding.dispatchers import TWO_HOP_SHARE

IntArray = NDArray[np.int64]

#: Schedules that the search compares.
PROPOSED_SCHEDULES = Names(SCHEDULES, where=lambda row: row.is_proposed)
#: Exits of tensor-parallel attention. An all-reduce moves twice the bytes of a reduce-scatter and
#: holds the same.
EXITS: tuple[AttentionExit, ...] = ("reduce_scatter", "all_to_all")


@dataclass(frozen=True, kw_only=True)
class Space:
    """Limits of the search. The answer counts what most limits exclude.

    `tensor_inside_node` keeps tp and etp groups inside a node (an assumption, because such groups
    communicate in every layer). `largest_microbatch` is in sequences, by default that of
    :meth:`most_sequences`.
    """

    num_devices: int
    node_size: int
    seq_len: int
    global_batch: int
    precision: Precision = "bfloat16"
    schedules: tuple[ScheduleName, ...] = field(default_factory=lambda: tuple(PROPOSED_SCHEDULES))
    recompute: tuple[str, ...] = ("none", "selective", "full")
    zero: tuple[int, ...] = (0, 1, 2, 3)
    largest_microbatch: int | None = None
    largest_context: int = 64
    tensor_inside_node: bool = True
    exits: tuple[AttentionExit, ...] = EXITS
    fewest_stages: int = 1
    #: Include ZeRO-2 and 3 with a pipeline, which send gradients for every microbatch.
    sharded_pipelines: bool = False
    #: Fixed values by field of a layout, or by "microbatches".
    fixed: Mapping[str, int] = field(default_factory=dict[str, int])
    #: Only layouts that `moemesh train` supports.
    trainable: bool = False
    #: Other fields of every layout: the weights that train, the loss, offload.
    trained: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def most_sequences(self, shape: ModelShape) -> int:
        """Sequences of the largest microbatch. The default is 16, and more for a small model: until
        the input of a layer has a quarter GiB, its launches take longer than its products."""
        usual = max(16, 2**28 // (2 * shape.hidden_size * self.seq_len))
        return usual if self.largest_microbatch is None else self.largest_microbatch

    def allows(self, **values: int) -> bool:
        """Whether the values agree with the fixed ones."""
        return all(self.fixed.get(name, value) == value for name, value in values.items())


class Columns(NamedTuple):
    """Degrees and batch of many layouts: every cut of the dense weights and of the batch (columns
    of shape [cuts, 1]) with every cut of the experts ([expert cuts])."""

    tp: IntArray
    cp: IntArray
    dp: IntArray
    microbatch: IntArray
    microbatches: IntArray
    ep: IntArray
    etp: IntArray
    #: The dispatcher is the node-aware one, which sends a token once to each rank.
    deduplicated: NDArray[np.bool_]

    @property
    def size(self) -> int:
        return self.tp.size * self.ep.size

    def where(self, cuts: NDArray[np.bool_], experts: NDArray[np.bool_] | None = None) -> Columns:
        """The columns of the selected cuts, and of all or the selected expert cuts."""
        # The last three fields are those of expert cuts.
        kept = {name: getattr(self, name)[cuts] for name in self._fields[:-3]}
        if experts is not None:
            kept |= {name: getattr(self, name)[experts] for name in self._fields[-3:]}
        return self._replace(**kept)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Layouts that share pp, schedule and chunks: every strategy with every cut.

    A number per layout is an array [ZeRO, attention exit, recomputation, cut, expert cut]; a
    formula is evaluated only along the axes on which its inputs vary. `legal` is a mask of legal
    combinations of strategies and cuts, along which layouts are numbered.
    """

    pp: int
    schedule: ScheduleName
    stages_per_rank: int
    zero: tuple[int, ...]
    columns: Columns = field(repr=False)
    legal: NDArray[np.bool_] = field(repr=False)
    space: Space = field(repr=False)

    @cached_property
    def size(self) -> int:
        return int(self.legal.sum()) * self.columns.ep.size

    @cached_property
    def _legal_entries(self) -> IntArray:
        """Flat indices of the legal entries."""
        return np.flatnonzero(self.legal)

    def layout(self, number: int) -> PlannedLayout:
        entry, expert_cut = divmod(number, self.columns.ep.size)
        at = np.unravel_index(int(self._legal_entries[entry]), self.legal.shape)
        return self._layout(*map(int, at), expert_cut=expert_cut)

    def _layout(
        self, zero: int, attention_exit: int, recompute: int, cut: int = 0, expert_cut: int = 0
    ) -> PlannedLayout:
        """The layout at one entry: indices of its strategies and its cuts."""
        space, columns = self.space, self.columns
        ep, etp = int(columns.ep[expert_cut]), int(columns.etp[expert_cut])
        values: dict[str, Any] = {name: int(getattr(columns, name)[cut, 0]) for name in _CUTS}
        values |= {name: getattr(space, name) for name in ("seq_len", "global_batch", "precision")}
        values |= {name: getattr(self, name) for name in ("pp", "schedule", "stages_per_rank")}
        return PlannedLayout(
            **dict(space.trained),
            **values,
            ep=ep,
            etp=etp,
            recompute=RECOMPUTED[space.recompute[recompute]],
            zero=self.zero[zero],
            attention_exit=space.exits[attention_exit],
            dispatcher=PROPOSED[int(columns.deduplicated[expert_cut])],
            ranks_per_node=min(space.node_size, space.num_devices),
        )

    @cached_property
    def _strategies(self) -> dict[tuple[int, ...], PlannedLayout]:
        """The layout of the first cut for each (ZeRO, attention exit, recomputation)."""
        return {entry: self._layout(*entry) for entry in np.ndindex(*self.legal.shape[:3])}

    def flat(self, number: Number, kind: DTypeLike = np.float64) -> NDArray[Any]:
        """The result of a formula as a flat array in the order of the layouts."""
        shape = *self.legal.shape, self.columns.ep.size
        return np.broadcast_to(np.asarray(number, dtype=kind), shape)[self.legal].ravel()

    @property
    def mechanisms(self) -> NDArray[np.int8]:
        """Number of mechanisms of each layout that can fail or must be understood: axes above 1,
        the pipeline's schedule, its chunks, recomputation, experts that span nodes."""
        columns, axes = self.columns, np.zeros((1, 1), dtype=np.int8)
        for axis in ("tp", "cp", "dp", "ep", "etp"):
            axes = axes + (getattr(columns, axis) > 1)
        spans_nodes = columns.ep * columns.etp > self.space.node_size
        # Deferred weight gradients are one mechanism of a schedule, two directions another.
        schedule = SCHEDULES[self.schedule]
        pipeline = (self.pp > 1) + bool(schedule.undeferred) + (schedule.stages != "line")
        pipeline += self.stages_per_rank > 1
        recomputes = np.array([word != "none" for word in self.space.recompute])[:, None, None]
        return self.flat(axes + spans_nodes + pipeline + recomputes, np.int8)

    def memory_bytes(self, shape: ModelShape, pricing: Pricing) -> FloatArray:
        """Bytes that a device needs, for each layout."""
        degrees = {name: getattr(self.columns, name) for name in (*_CUTS, "ep", "etp")}
        table = np.empty((*self.legal.shape, self.columns.ep.size))
        rows = [with_values(layout, **degrees) for layout in self._strategies.values()]
        needed = needed_bytes(shape, rows, pricing.allocation_of(rows[0]))
        for entry, num_bytes in zip(self._strategies, needed, strict=True):
            table[entry] = num_bytes
        return self.flat(table)

    def seconds_bound(self, shape: ModelShape, pricing: Pricing) -> FloatArray:
        """Lower bound of the seconds of a step, for each layout."""
        strategies = self.legal.shape[:3]
        layouts = [*self._strategies.values()]
        rows = [layout_row(shape, layout, software_of(layout)) for layout in layouts]
        varied: dict[str, Any] = {}
        for item in fields(LayoutColumns):
            if isinstance(getattr(rows[0], item.name), tuple):
                continue  # columns of ranks, which the schedule determines
            values = np.array([getattr(row, item.name) for row in rows]).reshape(strategies)
            # An axis along which the values are equal shrinks to one entry.
            for axis in range(3):
                if (values == (first := values.take([0], axis))).all():
                    values = first
            if values.size > 1:
                varied[item.name] = values[..., None, None]
        columns = replace(rows[0], **varied, **self.columns._asdict())
        return self.flat(pricing.bound(shape, columns, self.space.precision))


#: Columns of cuts that are also fields of a layout.
_CUTS = ("tp", "cp", "dp", "microbatch")


def families(shape: ModelShape, space: Space, rejected: Counter[str]) -> Iterator[Family]:
    """Every family with its legal columns; `rejected` counts the combinations that a rule excludes:
    of the degrees that it compares, or of all columns."""
    for pp in divisors(space.num_devices):
        if pp < space.fewest_stages or not space.allows(pp=pp):
            continue
        if pp > shape.num_layers:
            rejected["more stages than layers"] += 1
            continue
        every = _columns(shape, space, pp, rejected)
        if not every.size:
            continue
        for schedule, chunks in _schedules(shape, space, pp):
            if not space.allows(stages_per_rank=chunks):
                continue
            # Numbers of microbatches for which the schedule is defined.
            numbers, number_of_cut = np.unique(every.microbatches[:, 0], return_inverse=True)
            are_legal = [is_defined(schedule, pp, int(number)) for number in numbers]
            allowed = every.where(np.array(are_legal, dtype=np.bool_)[number_of_cut])
            rejected[f"microbatches do not fit {schedule}"] += every.size - allowed.size
            if not allowed.size:
                continue
            # ZeRO needs several ranks with the same dense weights, or with the same experts.
            sharded = (allowed.dp * allowed.cp > 1)[:, 0]
            zero_stages: list[int] = []
            for zero in space.zero:
                if zero >= 2 and pp > 1 and not space.sharded_pipelines:
                    # Gradients (and weights) would be sent for every microbatch.
                    count = int(sharded.sum()) * allowed.ep.size * len(space.recompute)
                    rejected["ZeRO-2 or 3 with a pipeline"] += count
                else:
                    zero_stages.append(zero)
            replicated = allowed.ep * allowed.etp < space.num_devices // pp
            #: Cuts in which experts alone have replicas.
            experts_alone = allowed.where(~sharded, replicated)
            #: Columns, their stages of ZeRO, and the cuts with something to shard.
            parts = [(allowed, zero_stages, sharded)]
            if shape.is_moe and experts_alone.size:
                sharding = [zero for zero in zero_stages if zero]
                all_cut = np.ones(len(experts_alone.tp), dtype=np.bool_)
                parts.append((experts_alone, sharding, all_cut))
            for columns, values, is_cut in parts:
                has_zero = np.array(values, dtype=np.int64)[:, None, None, None] > 0
                has_exit = np.arange(len(space.exits))[:, None, None] > 0
                # ZeRO needs something to shard, and an exit other than the first needs tp.
                legal = (is_cut | ~has_zero) & ((columns.tp > 1)[:, 0] | ~has_exit)
                legal = np.repeat(legal, len(space.recompute), axis=2)
                if legal.any():
                    yield Family(
                        pp=pp,
                        schedule=schedule,
                        stages_per_rank=chunks,
                        zero=tuple(values),
                        columns=columns,
                        legal=legal,
                        space=space,
                    )


def _schedules(shape: ModelShape, space: Space, pp: int) -> Iterator[tuple[ScheduleName, int]]:
    """(schedule, chunks) for `pp` ranks; without a pipeline all schedules are equal."""
    if pp == 1:
        yield space.schedules[0] if "1f1b" not in space.schedules else "1f1b", 1
        return
    for schedule in space.schedules:
        if schedule == "interleaved_1f1b":
            for chunks in range(2, shape.num_layers // pp + 1):
                # With unequal chunks all stages wait for the longest one.
                is_even = shape.num_layers % (pp * chunks) == 0
                if is_even or chunks in (2, 3, 4) or "stages_per_rank" in space.fixed:
                    yield schedule, chunks
        elif schedule not in V_SCHEDULES or 2 * pp <= shape.num_layers:
            yield schedule, 1


def _columns(shape: ModelShape, space: Space, pp: int, rejected: Counter[str]) -> Columns:
    """All legal degrees and microbatches of one pipeline degree."""
    #: (tp, cp, dp, microbatch, microbatches)
    cuts: list[tuple[int, ...]] = []
    stage_devices, most_sequences = space.num_devices // pp, space.most_sequences(shape)
    # The code of transformers needs whole sequences.
    largest_context = 1 if shape.counted else space.largest_context
    expert_cuts = [(1, 1)]
    if shape.is_moe:
        expert_cuts = [
            (ep, etp)
            for ep in divisors(shape.num_experts)
            for etp in divisors(stage_devices)
            if etp <= (space.node_size if space.tensor_inside_node else stage_devices)
            and experts_fit(shape.sizes, stage_devices, ep, etp)
        ]
    expert_cuts = [(ep, etp) for ep, etp in expert_cuts if space.allows(ep=ep, etp=etp)]
    for tp in divisors(stage_devices):
        if uncut_by_tensor(shape.sizes, tp, copied_kv_heads=not space.trainable):
            rejected["tp does not divide the heads or widths"] += 1
            continue
        if space.tensor_inside_node and tp > space.node_size:
            rejected["tp would cross nodes"] += 1
            continue
        for cp in divisors(stage_devices // tp):
            if cp > largest_context or space.seq_len % cp:
                rejected["cp beyond its limit"] += 1
                continue
            dp = stage_devices // (tp * cp)
            if space.global_batch % dp:
                rejected["dp does not divide the batch"] += 1
                continue
            share = space.global_batch // dp
            for size in divisors(share):
                batch = {"microbatch": size, "microbatches": share // size}
                if size <= most_sequences and space.allows(tp=tp, cp=cp, dp=dp, **batch):
                    cuts.append((tp, cp, dp, *batch.values()))
    dense = np.array(cuts, dtype=np.int64).reshape(-1, 5).T
    experts = np.array(expert_cuts, dtype=np.int64).reshape(-1, 2).T
    # The node-aware dispatcher is for experts that span nodes, or if its exchange inside a node is
    # clearly smaller.
    chosen, groups = shape.experts_per_token, (shape.router_groups, shape.router_groups_kept)
    fewer = visited_nodes(shape.num_experts, chosen, experts[0], *groups) < TWO_HOP_SHARE * chosen
    deduplicated = (experts[0] * experts[1] > space.node_size) | (fewer & (experts[0] > 1))
    columns = (np.ascontiguousarray(column)[:, None] for column in dense)
    return Columns(*columns, *experts, deduplicated=deduplicated)
