"""The predicted memory of a run of our own library on a CPU, rank by rank, as its memory.json says.

Model states are exact (:mod:`.own_states`), activations near (:mod:`.own_activations`).
"""

from __future__ import annotations

from typing import Literal

from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.tuning import FULL, Tuning
from moemesh.planner.traffic.own_activations import predict_activations
from moemesh.planner.traffic.own_states import predict_states
from moemesh.planner.traffic.routing import Routing
from moemesh.planner.traffic.tensors import StagePlacement
from moemesh.trace.memory_profile import MemoryProfile

#: Of a number of a weight, by dtype.
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


def predict_memory(
    model: ModelConfig,
    plan: Plan,
    *,
    seq_len: int,
    global_batch: int,
    dtype: str = "bfloat16",
    optimizer: Literal["adamw", "sgd"] = "adamw",
    momentum: float = 0.0,
    rank: int = 0,
    routing: Routing | None = None,
    tuning: Tuning = FULL,
) -> MemoryProfile:
    """The memory of `rank` in a training step; `peak` is the sum of the parts.

    `momentum` is that of SGD; `routing` None: uniform; `tuning`: what trains. Raises ValueError
    when the plan's schedule cannot be made.
    """
    placement = StagePlacement(model, plan, seq_len, tuning)
    layout, element = plan.layout, ELEMENT_BYTES[dtype]
    states = predict_states(
        placement, layout, element=element, optimizer=optimizer, momentum=momentum, rank=rank
    )
    kinds = predict_activations(
        placement, layout, global_batch=global_batch, element=element, rank=rank, routing=routing
    )
    return MemoryProfile(
        rank=rank,
        **states._asdict(),
        activations=sum(kinds.values()),
        activation_kinds=kinds,
        peak=sum(states) + sum(kinds.values()),
    )
