"""Model states of one rank, measured: bytes of weights, gradients and optimizer."""

from __future__ import annotations

from moemesh.parallel.parallelize import RankModel
from moemesh.train.optimizer import Optimizer


def state_bytes(parallel: RankModel, optimizer: Optimizer) -> dict[str, int]:
    """Bytes by the classes of :data:`moemesh.trace.memory_profile.PARTS`, between two steps; of
    gathered weights the most that a step has held."""
    reducer = parallel.reducer
    return {
        "dense_weights": reducer.weight_bytes(experts=False),
        "expert_weights": reducer.weight_bytes(experts=True),
        "gathered_weights": reducer.gathered_bytes,
        "gradients": reducer.gradient_bytes,
        "optimizer": optimizer.num_state_bytes(),
    }
