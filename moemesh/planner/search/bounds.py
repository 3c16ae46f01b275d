"""Columns of a family: what the time model reads, and a lower bound of the peak memory.

The bound leaves out what a framework holds beside the tensors (working set, gathered copies): it is
never above :func:`moemesh.planner.peak_memory.peak_memory`, which has the last word. Both are sums
of the same terms, so that few layouts pass the bound and fail the check.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moemesh.planner.activations import layer_kept
from moemesh.planner.layout import PlannedLayout
from moemesh.planner.memory import StageContent, in_flight, rank_weights
from moemesh.planner.peak_memory import Allocation
from moemesh.planner.search.space import Columns, Family, Space
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.timing.arithmetic import Number, maximum, where
from moemesh.planner.timing.columns import LayoutColumns, Software, layout_row


def time_columns(family: Family, space: Space, columns: Columns) -> LayoutColumns:
    """The family's words as numbers, its degrees as columns."""
    row = layout_row(family.layout(space, 0), Software(fsdp=family.zero >= 2))
    return replace(
        row,
        deduplicated=columns.ep * columns.etp > space.node_size,
        tp=columns.tp,
        cp=columns.cp,
        dp=columns.dp,
        ep=columns.ep,
        etp=columns.etp,
        microbatch=columns.microbatch,
        microbatches=columns.microbatches,
    )


def memory_floor(shape: ModelShape, family: Family, space: Space, allocation: Allocation) -> Number:
    """Bytes that the worst pipeline rank needs at least, one number a row."""
    pp = family.pp
    # Counts of weights, and bytes per token, do not depend on the degrees: any row tells them.
    example = family.layout(space, 0).changed(fused_activation=allocation.fused_activation)
    by_etp = {
        int(etp): _with_expert_tensor(example, int(etp)) for etp in np.unique(family.columns.etp)
    }
    floors = [
        _rank_floor(shape, family, space, allocation, rank, example, by_etp)
        for rank in sorted({0, min(1, pp - 1), pp - 1})
    ]
    worst = floors[0]
    for other in floors[1:]:
        worst = maximum(worst, other)
    return worst + allocation.workspace_bytes


def _rank_floor(
    shape: ModelShape,
    family: Family,
    space: Space,
    allocation: Allocation,
    rank: int,
    example: PlannedLayout,
    by_etp: dict[int, PlannedLayout],
) -> Number:
    columns = family.columns
    content = StageContent(shape, example, rank)
    flying = _in_flight(example, columns, rank)
    flying = flying + (allocation.extra_in_flight if family.pp > 1 else 0.0)
    tokens = columns.microbatch * space.seq_len / columns.cp
    kept: Number = np.zeros(len(columns))
    for kind, number in content.kinds.items():
        for etp, layout in by_etp.items():
            one = layer_kept(shape, kind, layout)
            # The layout of the search always cuts tokens along tp.
            per_token = (one.tokens + one.routed + one.width) / columns.tp
            kept = kept + where(columns.etp == etp, number * per_token, 0.0)
    scale = 1.0 if "full" in example.recompute else allocation.activation_scale
    activations = kept * tokens * flying * scale
    logits: Number = 0.0
    if content.has_head and not (family.zero >= 3 and "full" in example.recompute):
        logits = allocation.logit_bytes * tokens * shape.vocab_size / columns.tp
    return _states(shape, family, example, allocation, rank) + activations + logits


def _with_expert_tensor(example: PlannedLayout, etp: int) -> PlannedLayout:
    """A layout that differs in etp alone, on as many ranks as that needs."""
    return example.changed(tp=1, cp=1, ep=1, etp=etp, dp=etp, global_batch=etp, microbatch=1)


def _states(
    shape: ModelShape, family: Family, example: PlannedLayout, allocation: Allocation, rank: int
) -> Number:
    """Weights, gradients and optimizer of one pipeline rank."""
    columns, zero = family.columns, family.zero
    weights = rank_weights(shape, example, rank)
    dense = weights.sharded / columns.tp + weights.replicated
    expert = weights.expert / (columns.ep * columns.etp) + weights.expert_rows / columns.ep
    replicas = columns.dp * columns.cp
    expert_replicas = replicas * columns.tp / (columns.ep * columns.etp)
    width = example.element_bytes
    total: Number = 0.0
    parts = ((width, 3), (allocation.gradient_bytes, 2), (allocation.optimizer_bytes, 1))
    for size, sharded_from in parts:
        if zero >= sharded_from:
            total = total + size * (dense / replicas + expert / expert_replicas)
        else:
            total = total + size * (dense + expert)
    return total


def _in_flight(example: PlannedLayout, columns: Columns, rank: int) -> Number:
    """`in_flight` by rows: it depends on the number of microbatches alone."""
    counts, place = np.unique(columns.microbatches, return_inverse=True)
    found = [
        in_flight(
            example.changed(tp=1, cp=1, ep=1, etp=1, dp=1, microbatch=1, global_batch=int(count)),
            rank,
        )
        for count in counts
    ]
    return np.array(found)[place]
