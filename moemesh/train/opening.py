"""The model, the schedule and the batches of a run, on the ranks of its plan.

Legend: B sequences, S positions.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from moemesh.comm.collectives import gather_json
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import shard_range
from moemesh.config.run import RunConfig
from moemesh.model.batch import Batch
from moemesh.parallel.parallelize import RankModel, parallelize
from moemesh.schedule.action import Schedule
from moemesh.schedule.plan_schedule import build_step
from moemesh.schedule.text import from_text, to_text
from moemesh.train.records.kept_schedules import SCHEDULE, has_name
from moemesh.train.records.run_folder import RunFolder


class ArraySource(Protocol):
    """Samples of a run's data, of an evaluation, or of a bundle."""

    def arrays(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays "tokens", "targets", ... [samples, positions] of the samples `ids`; "documents"
        has one position more."""
        ...


def own_batches(
    samples: ArraySource, mesh: Mesh, ids: np.ndarray, num_parts: int, *, seed: int, step: int = 0
) -> list[Batch]:
    """This data-parallel rank's share of the samples `ids` [global batch], cut in `num_parts`.

    `seed` and `step` (from 1; 0 = none) are the key of the random numbers of a training forward.
    The numbers of sequences (`sequences_B`) are their positions in `ids`.
    """
    batches: list[Batch] = []
    for rows in own_rows(len(ids), mesh, num_parts):
        sampled = samples.arrays(ids[rows])
        arrays = {name: torch.from_numpy(array) for name, array in sampled.items()}
        batch = Batch(
            tokens_BS=arrays["tokens"],
            targets_BS=arrays["targets"],
            sequences_B=torch.arange(rows.start, rows.stop),
            valid_BS=arrays.get("valid"),
            loss_mask_BS=arrays.get("loss_mask"),
            # Documents of tokens and targets: one position more than there are tokens.
            documents_BS=arrays["documents"][:, :-1] if "documents" in arrays else None,
            seed=seed,
            step=step,
        )
        batches.append(batch.to(mesh.device))
    return batches


def own_rows(number: int, mesh: Mesh, num_parts: int) -> list[slice]:
    """This data-parallel rank's rows of `number` sequences, cut in `num_parts`. Shares may differ
    by one row and may be empty."""
    dp = mesh["dp"]
    local = shard_range(number, dp.size, dp.index)
    parts = (shard_range(len(local), num_parts, index) for index in range(num_parts))
    return [slice(local.start + part.start, local.start + part.stop) for part in parts]


def schedule_of_run(config: RunConfig, folder: RunFolder, mesh: Mesh) -> Schedule:
    """The schedule of a step, the same on every rank; all ranks call, after
    :func:`moemesh.train.records.kept_schedules.update_schedule`."""
    if has_name(config.plan):
        return build_step(config.plan)
    # Files may differ between nodes: rank 0 reads for all.
    text = (folder.path / SCHEDULE).read_text(encoding="utf-8") if mesh.rank == 0 else None
    return from_text(gather_json(text, mesh.control)[0])


def schedule_of_step(config: RunConfig, mesh: Mesh) -> Schedule:
    """The schedule of a step without a run folder, the same on every rank; all ranks call."""
    schedule = build_step(config.plan, config.model, config.data.seq_len)
    if has_name(config.plan):
        return schedule
    text = to_text(schedule) if mesh.rank == 0 else None
    return from_text(gather_json(text, mesh.control)[0])


def construct(config: RunConfig, mesh: Mesh, schedule: Schedule | None = None) -> RankModel:
    """The model with newly initialized weights; `schedule` (None: the plan's) is that of a step.
    All ranks call. Raises ValueError for a plan that cannot be carried out."""
    data, train = config.data, config.train
    if not train.compile:
        torch.compiler.set_stance("force_eager")
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
