"""The model states of one rank of a run of our own library, to the byte: weights to snapshots.

Every parameter's local shard times its bytes:

| state | bytes a number |
|---|---|
| weights | those of the run's dtype; routers never below fp32 |
| gradients | 4; 8 in float64 |
| masters | 4 where a weight has 2 bytes, else the weight is its own master |
| AdamW | two moments as wide as a gradient; SGD one with momentum, none without |
| weight versions | of a stream: those that its update rule keeps beside the newest, with biases |
| snapshots | what an update behind which the norm is validated changes: masters, moments, biases |

Versions are those of a stream long enough to need them. A rank takes a snapshot when it steps
before it knows the whole norm: not in the first steps of a run, nor where each is clipped.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from moemesh.config.layout import Layout
from moemesh.planner.traffic.tensors import StagePlacement
from moemesh.schedule.closed_forms import FORMS, Numbers, Times

#: Bytes of one number of a router's selection bias, in any run.
_BIAS = 4


class States(NamedTuple):
    """Bytes of one rank, by the classes of :data:`moemesh.trace.memory.PARTS`."""

    dense_weights: int
    expert_weights: int
    gradients: int
    optimizer: int
    gathered_weights: int = 0
    weight_versions: int = 0
    snapshots: int = 0


def predict_states(
    placement: StagePlacement,
    layout: Layout,
    *,
    element: int,
    optimizer: Literal["adamw", "sgd"] = "adamw",
    momentum: float = 0.0,
    rank: int = 0,
) -> States:
    """What `rank` holds of the model, `element` bytes a weight; `momentum` is that of SGD."""
    wide, pp_rank = max(element, 4), layout.coordinates(rank)["pp"]
    kinds = 2 if optimizer == "adamw" else int(momentum > 0)
    weights = {True: 0, False: 0}
    numbers = masters = 0
    for tensor in placement.held(pp_rank):
        local, own = tensor.local_elements(layout, rank), tensor.weight_bytes(element)
        weights[tensor.is_expert] += local * own
        numbers += local
        masters += local * wide if own < wide else 0
    moments, biases = kinds * numbers * wide, _bias_bytes(placement, pp_rank)
    is_undone = placement.plan.optimizer_validation == "after" and placement.schedule.update is None
    return States(
        dense_weights=weights[False],
        expert_weights=weights[True],
        gradients=numbers * wide,
        optimizer=masters + moments,
        weight_versions=(_versions(placement, pp_rank) - 1) * (sum(weights.values()) + biases),
        # A weight that is its own master is copied as one.
        snapshots=numbers * wide + moments + biases if is_undone else 0,
    )


def _bias_bytes(placement: StagePlacement, pp_rank: int) -> int:
    """Of the selection biases of a pipeline rank's routers, whole on every rank."""
    model = placement.model
    if not model.router_selection_bias:
        return 0
    here = {index for stage in placement.stages(pp_rank) for index in placement.layers[stage]}
    return _BIAS * model.num_experts * sum(map(model.is_moe_layer, here))


def _versions(placement: StagePlacement, pp_rank: int) -> int:
    """Versions of its weights that a pipeline rank keeps in a stream, the newest included."""
    schedule = placement.schedule
    if schedule.update is None:
        return 1
    numbers = Numbers(
        ranks=schedule.num_ranks,
        microbatches=4 * schedule.num_ranks,
        chunks=schedule.stages_per_rank,
        times=Times(),
    )
    return FORMS[placement.plan.schedule].copies(numbers, pp_rank)
