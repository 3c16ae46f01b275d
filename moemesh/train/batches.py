"""The samples of a step as this rank's microbatches."""

from __future__ import annotations

import numpy as np
import torch

from moemesh.comm.mesh import Mesh
from moemesh.config.layout import shard_range
from moemesh.data.samples import Windows
from moemesh.model.batch import Batch


def own_batches(
    samples: Windows, mesh: Mesh, ids: np.ndarray, num_parts: int, *, seed: int, step: int = 0
) -> list[Batch]:
    """This data-parallel rank's share of the samples `ids` [global batch], cut in `num_parts`.

    `seed` and `step` (from 1; 0 = none) key the random numbers of a training forward. Shares may
    differ by one sequence and may be empty. Sequences are numbered over all of `ids`.
    """

    dp = mesh["dp"]
    found: list[Batch] = []
    own = shard_range(len(ids), dp.size, dp.index)
    for index in range(num_parts):
        part = shard_range(len(own), num_parts, index)
        rows = slice(own.start + part.start, own.start + part.stop)
        tokens, targets = map(torch.from_numpy, samples.batch(ids[rows]))
        documents, learned = samples.documents(ids[rows]), samples.loss_mask(ids[rows])
        valid = samples.valid(ids[rows])
        batch = Batch(
            tokens_BS=tokens,
            targets_BS=targets,
            sequences_B=torch.arange(rows.start, rows.stop),
            valid_BS=None if valid is None else torch.from_numpy(np.ascontiguousarray(valid)),
            loss_mask_BS=None if learned is None else torch.from_numpy(learned),
            documents_BS=None if documents is None else torch.from_numpy(documents[:, :-1]),
            seed=seed,
            step=step,
        )
        found.append(batch.to(mesh.device))
    return found
