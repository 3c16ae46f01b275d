"""Gradients in buckets: ZeRO-3 has those of one unit at a time, and one that is missing is zero."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout
from moemesh.config.plan import DataStrategy, Plan
from moemesh.parallel.data.buckets import GatheredBucket
from moemesh.parallel.data.reducer import GradientReducer
from moemesh.parallel.placement import Placement
from tests.parity.training import Shape, build, gradients, model_of
from tests.ranks import mesh_on_ranks

SHAPE = Shape(global_batch=4, seq_len=8)


def _flat_at_launches(mesh: Mesh) -> list[int]:
    """Number of flat gradients in memory after the start of each sum over ranks, in a step of two
    microbatches."""
    config, plan = model_of({"num_layers": 3}), Plan(dp=2, data="zero3", microbatches=2)
    parallel = build(mesh, config, plan, SHAPE, "float32")
    buckets = parallel.reducer.buckets
    counts: list[int] = []
    launch, add = GatheredBucket.launch, GatheredBucket.add

    def count() -> None:
        counts.append(sum(one._flat is not None or one._work is not None for one in buckets))  # type: ignore[attr-defined]

    def counted_launch(bucket: GatheredBucket) -> None:
        launch(bucket)
        count()

    def counted_add(bucket: GatheredBucket, parameter: nn.Parameter, gradient: Tensor) -> None:
        add(bucket, parameter, gradient)
        count()

    with patch.multiple(GatheredBucket, launch=counted_launch, add=counted_add):
        gradients(parallel, plan, SHAPE)
    return counts


def test_flat_gradients_are_those_of_one_unit() -> None:
    for found in mesh_on_ranks(Layout(dp=2), _flat_at_launches):
        assert len(found) > 20 and max(found) == 1


def _second_step(mesh: Mesh, data: DataStrategy) -> dict[str, Tensor]:
    """The sums that this rank owns of a step in which "b" has no gradient, after a step in which it
    had one; "a" has two microbatches."""
    weights = {name: nn.Parameter(torch.ones(4)) for name in "ab"}
    held: Any = [
        (name, weight, Placement(name=name, shape=(4,), shards={}, summed_over="dp_cp"))
        for name, weight in weights.items()
    ]
    reducer = GradientReducer(held, mesh, data=data)
    for step, names in enumerate((("a", "b"), ("a", "a"))):
        reducer.begin()
        if reducer.is_per_backward:
            reducer.expect(weights.values())
        for name in names:
            gradient = torch.full((4,), 1.0 + step, dtype=torch.bfloat16)
            reducer.accumulate(weights[name], gradient)
        reducer.finish()
    return {name: gradient.clone() for name, gradient in reducer.gradients.items()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("data", ["replicate", "zero1", "zero2"])
def test_a_gradient_that_does_not_come_is_zero(ranks: int, data: DataStrategy) -> None:
    for found in mesh_on_ranks(Layout(dp=ranks), _second_step, data):
        for name, gradient in found.items():
            assert gradient.dtype == torch.float32
            assert gradient.eq(4.0 * ranks if name == "a" else 0.0).all(), name
