"""ZeRO-3 has the flat gradients of one unit at a time."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import Tensor, nn

from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout
from moemesh.config.plan import Plan
from moemesh.parallel.data.buckets import GatheredBucket
from moemesh.parallel.parallelize import parallelize
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.step import gradients_of_step
from tests.parity.training import Shape, microbatches, model_of
from tests.ranks import mesh_on_ranks

SHAPE = Shape(global_batch=4, seq_len=8)


def _flat_at_launches(mesh: Mesh) -> list[int]:
    """Of a step of two microbatches: flat gradients that there were when each of the sums over
    ranks had started."""
    config, plan = model_of({"num_layers": 3}), Plan(dp=2, data="zero3", microbatches=2)
    tokens = plan.tokens_per_rank(SHAPE.seq_len, SHAPE.global_batch)
    parallel = parallelize(config, plan, mesh, seed=0, dtype=torch.float32, tokens_per_rank=tokens)
    buckets = parallel.reducer.buckets
    found: list[int] = []
    launch, add = GatheredBucket.launch, GatheredBucket.add

    def count() -> None:
        found.append(sum(one._flat is not None or one._work is not None for one in buckets))  # type: ignore[attr-defined]

    def counted_launch(bucket: GatheredBucket) -> None:
        launch(bucket)
        count()

    def counted_add(bucket: GatheredBucket, parameter: nn.Parameter, gradient: Tensor) -> None:
        add(bucket, parameter, gradient)
        count()

    with patch.multiple(GatheredBucket, launch=counted_launch, add=counted_add):
        batches = microbatches(config, plan, SHAPE, 1, mesh)
        gradients_of_step(parallel, batches, TimelineRecorder(mesh.rank))
    return found


def test_flat_gradients_are_those_of_one_unit() -> None:
    for found in mesh_on_ranks(Layout(dp=2), _flat_at_launches):
        assert len(found) > 20 and max(found) == 1
