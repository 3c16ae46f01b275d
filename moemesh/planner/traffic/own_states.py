"""The model states of one rank of a run of our own library, to the byte.

Every parameter's local shard times its bytes: weights in the model's dtype, routers never below
fp32; gradients fp32 or fp64; AdamW two moments, SGD one, and for 16-bit weights an fp32 master.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from moemesh.config.layout import Layout
from moemesh.planner.traffic.tensors import StagePlacement


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
    rank: int = 0,
) -> States:
    """What `rank` holds of the model, `element` bytes a weight."""
    wide = max(element, 4)
    weights = {True: 0, False: 0}
    gradients = states = 0
    for tensor in placement.held(layout.coordinates(rank)["pp"]):
        numbers = tensor.local_elements(layout, rank)
        own = tensor.weight_bytes(element)
        weights[tensor.is_expert] += numbers * own
        gradients += numbers * wide
        states += numbers * (2 if optimizer == "adamw" else 1) * wide
        states += numbers * wide if own < wide else 0
    return States(weights[False], weights[True], gradients, states)
