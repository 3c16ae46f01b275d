"""The search space: every legal combination of degrees and strategies, in numpy columns.

A :class:`Family` fixes what is a word or decides what a rank holds (pipeline degree, schedule,
chunks, recomputation, ZeRO, attention exit); its columns are all combinations of the other degrees
and of the microbatch. One formula call prices a family.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moemesh.config.plan import AttentionExit, ScheduleName
from moemesh.config.rules import experts_fit, uncut_by_tensor
from moemesh.config.suggest import divisors
from moemesh.planner.planned_layout import RECOMPUTED, PlannedLayout, Precision
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.stage_cut import with_values
from moemesh.planner.timing.columns import LayoutColumns, layout_row
from moemesh.planner.timing.price import software_of
from moemesh.schedule.build import is_defined

IntArray = NDArray[np.int64]

#: Schedules that the search compares. GPipe takes the time of 1F1B and holds more; Chimera's bubble
#: is larger than that of zero-bubble schedules; TeraPipe has no time model here; asynchronous
#: schedules change what is learned.
SCHEDULES: tuple[ScheduleName, ...] = (
    "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "dualpipe", "dualpipe_v",
)  # fmt: skip
#: Mechanisms of a schedule: deferred weight gradients are one, two directions another.
_SCHEDULES_BEYOND_1F1B = {"zb_h1": 1, "zb_h2": 1, "zb_v": 2, "dualpipe": 2, "dualpipe_v": 2}
#: Ways out of tensor-parallel attention. An all-reduce moves twice the bytes of a reduce-scatter
#: and holds the same.
EXITS: tuple[AttentionExit, ...] = ("reduce_scatter", "all_to_all")


@dataclass(frozen=True, kw_only=True)
class Space:
    """Limits of the search. None of them is silent: each that cuts is counted.

    `tensor_inside_node` keeps tp and etp groups inside a node (an assumption: such groups exchange
    for every layer). `largest_microbatch` in sequences.
    """

    num_devices: int
    node_size: int
    seq_len: int
    global_batch: int
    precision: Precision = "bfloat16"
    schedules: tuple[ScheduleName, ...] = SCHEDULES
    recompute: tuple[str, ...] = ("none", "selective", "full")
    zero: tuple[int, ...] = (0, 1, 2, 3)
    largest_microbatch: int = 16
    largest_context: int = 64
    tensor_inside_node: bool = True
    exits: tuple[AttentionExit, ...] = EXITS
    fewest_stages: int = 1
    #: Also ZeRO-2 and 3 with a pipeline, where gradients travel for every microbatch.
    sharded_pipelines: bool = False
    #: Values that do not vary, by their names in a layout; `microbatches` among them.
    fixed: Mapping[str, int] = field(default_factory=dict[str, int])
    #: Only what `moemesh train` carries out.
    trainable: bool = False
    #: What trains, as fields of a layout.
    trained: Mapping[str, float | bool] = field(default_factory=dict[str, "float | bool"])

    def allows(self, **values: int) -> bool:
        """Whether none of the values is fixed at another one."""
        return all(self.fixed.get(name, value) == value for name, value in values.items())


class Columns(NamedTuple):
    """Degrees and batch of many layouts, one row each."""

    tp: IntArray
    cp: IntArray
    dp: IntArray
    ep: IntArray
    etp: IntArray
    microbatch: IntArray
    microbatches: IntArray

    def __len__(self) -> int:
        return len(self[0])

    def where(self, mask: NDArray[np.bool_]) -> Columns:
        return Columns(*(column[mask] for column in self))


@dataclass(frozen=True, kw_only=True)
class Family:
    """Layouts that share pp, schedule, chunks, recomputation, ZeRO and attention exit."""

    pp: int
    schedule: ScheduleName
    stages_per_rank: int
    recompute: str
    zero: int
    attention_exit: AttentionExit
    columns: Columns = field(repr=False)

    def layout(self, space: Space, row: int) -> PlannedLayout:
        """One row as a layout. Experts that span nodes are reached by the node-aware exchange."""
        values: dict[str, Any] = dict(space.trained)
        for name in _DEGREES:
            values[name] = int(getattr(self.columns, name)[row])
        is_wide = values["ep"] * values["etp"] > space.node_size
        return PlannedLayout(
            **values,
            pp=self.pp,
            schedule=self.schedule,
            stages_per_rank=self.stages_per_rank,
            recompute=RECOMPUTED[self.recompute],
            zero=self.zero,
            attention_exit=self.attention_exit,
            dispatcher="hierarchical" if is_wide else "all_to_all",
            seq_len=space.seq_len,
            global_batch=space.global_batch,
            precision=space.precision,
            ranks_per_node=min(space.node_size, space.num_devices),
        )

    def rows(self, space: Space) -> PlannedLayout:
        """All rows at once: a layout whose degrees are columns, for formulas that take them."""
        degrees = {name: getattr(self.columns, name) for name in _DEGREES}
        return with_values(self.layout(space, 0), **degrees)

    def mechanisms(self, space: Space) -> IntArray:
        """Number of mechanisms of each row, which can go wrong or must be understood: axes above 1,
        the pipeline's schedule, its chunks, recomputation, experts that span nodes."""
        words = _SCHEDULES_BEYOND_1F1B.get(self.schedule, 0) + (self.stages_per_rank > 1)
        found = np.full(len(self.columns), (self.pp > 1) + words + (self.recompute != "none"))
        for axis in ("tp", "cp", "dp", "ep", "etp"):
            found += getattr(self.columns, axis) > 1
        return found + (self.columns.ep * self.columns.etp > space.node_size)

    def time_columns(self, shape: ModelShape, space: Space) -> LayoutColumns:
        """The same for the time model."""
        example = self.layout(space, 0)
        row = layout_row(shape, example, software_of(example))
        degrees = {name: getattr(self.columns, name) for name in Columns._fields}
        spans_nodes = self.columns.ep * self.columns.etp > space.node_size
        return replace(row, deduplicated=spans_nodes, **degrees)


#: Columns that a layout has by the same names.
_DEGREES = ("tp", "cp", "dp", "ep", "etp", "microbatch")


def families(shape: ModelShape, space: Space, rejected: Counter[str]) -> Iterator[Family]:
    """Every family with its legal columns; what a rule cuts is counted in `rejected`."""
    for pp in divisors(space.num_devices):
        if pp < space.fewest_stages or not space.allows(pp=pp):
            continue
        if pp > shape.num_layers:
            rejected["more stages than layers"] += 1
            continue
        columns = _columns(shape, space, pp, rejected)
        if not len(columns):
            continue
        for schedule, chunks in _schedules(shape, space, pp):
            if not space.allows(stages_per_rank=chunks):
                continue
            allowed = columns.where(runs(schedule, pp, columns.microbatches))
            rejected[f"microbatches do not fit {schedule}"] += len(columns) - len(allowed)
            if not len(allowed):
                continue
            for zero in space.zero:
                # Nothing to shard where no rank holds the same weights.
                own = allowed.where(allowed.dp * allowed.cp > 1) if zero else allowed
                if zero >= 2 and pp > 1 and not space.sharded_pipelines:
                    # Gradients (and weights) would travel again for every microbatch.
                    rejected["ZeRO-2 or 3 with a pipeline"] += len(own) * len(space.recompute)
                    continue
                for attention_exit in space.exits:
                    if attention_exit != space.exits[0]:
                        own = own.where(own.tp > 1)
                    for recompute in space.recompute:
                        if len(own):
                            yield Family(
                                pp=pp,
                                schedule=schedule,
                                stages_per_rank=chunks,
                                recompute=recompute,
                                zero=zero,
                                attention_exit=attention_exit,
                                columns=own,
                            )


def _schedules(shape: ModelShape, space: Space, pp: int) -> Iterator[tuple[ScheduleName, int]]:
    """(schedule, chunks) for `pp` ranks; without a pipeline all are the same."""
    if pp == 1:
        yield space.schedules[0] if "1f1b" not in space.schedules else "1f1b", 1
        return
    for schedule in space.schedules:
        if schedule == "interleaved_1f1b":
            for chunks in range(2, shape.num_layers // pp + 1):
                # Unequal chunks make the longest stage the pace of all.
                is_even = shape.num_layers % (pp * chunks) == 0
                if is_even or chunks in (2, 3, 4) or "stages_per_rank" in space.fixed:
                    yield schedule, chunks
        elif schedule not in ("zb_v", "dualpipe_v") or 2 * pp <= shape.num_layers:
            yield schedule, 1


def runs(schedule: ScheduleName, pp: int, microbatches: IntArray) -> NDArray[np.bool_]:
    """Whether the schedule is defined, for each number of microbatches."""
    numbers, places = np.unique(microbatches, return_inverse=True)
    held = [is_defined(schedule, pp, int(number)) for number in numbers]
    return np.array(held, dtype=np.bool_)[places]


def _columns(shape: ModelShape, space: Space, pp: int, rejected: Counter[str]) -> Columns:
    """All legal (tp, cp, dp, ep, etp, microbatch) of one pipeline degree."""
    rows: list[tuple[int, ...]] = []
    stage = space.num_devices // pp
    expert_degrees = [(1, 1)]
    if shape.is_moe:
        expert_degrees = [
            (ep, etp)
            for ep in divisors(shape.num_experts)
            for etp in divisors(stage)
            if etp <= (space.node_size if space.tensor_inside_node else stage)
            and experts_fit(shape.sizes, stage, ep, etp)
        ]
    for tp in divisors(stage):
        if uncut_by_tensor(shape.sizes, tp, copied_kv_heads=not space.trainable):
            rejected["tp does not divide the heads or widths"] += 1
            continue
        if space.tensor_inside_node and tp > space.node_size:
            rejected["tp would cross nodes"] += 1
            continue
        for cp in divisors(stage // tp):
            if cp > space.largest_context or space.seq_len % cp:
                rejected["cp beyond its limit"] += 1
                continue
            dp = stage // (tp * cp)
            if space.global_batch % dp:
                rejected["dp does not divide the batch"] += 1
                continue
            share = space.global_batch // dp
            batches = [size for size in divisors(share) if size <= space.largest_microbatch]
            for ep, etp in expert_degrees:
                rows += [
                    (tp, cp, dp, ep, etp, size, share // size)
                    for size in batches
                    if space.allows(
                        tp=tp, cp=cp, dp=dp, ep=ep, etp=etp, microbatch=size,
                        microbatches=share // size,
                    )
                ]  # fmt: skip
    table = np.array(rows, dtype=np.int64).reshape(-1, len(Columns._fields))
    return Columns(*(np.ascontiguousarray(column) for column in table.T))
