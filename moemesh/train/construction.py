"""The model of a configuration on the ranks of its plan."""

from __future__ import annotations

import torch

from moemesh.comm.mesh import Mesh
from moemesh.config.run import RunConfig
from moemesh.parallel.parallelize import RankModel, parallelize
from moemesh.schedule.action import Schedule


def construct(config: RunConfig, mesh: Mesh, schedule: Schedule | None = None) -> RankModel:
    """The model with fresh weights; `schedule` in place of the plan's. All ranks call. Raises
    ValueError for a plan that cannot be carried out."""
    data, train = config.data, config.train
    return parallelize(
        config.model,
        config.plan,
        mesh,
        seed=train.seed,
        dtype=getattr(torch, train.dtype),
        tokens_per_rank=config.plan.tokens_per_rank(data.seq_len, data.global_batch),
        schedule=schedule,
        tuning=config.tuning,
    )
