"""Muon gives every plan the updates of one device, and on one device those of the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moemesh.config.trainable import refusals
from moemesh.sharding.load_run import load_run
from moemesh.sharding.matrices import matrices
from moemesh.train.muon import orthogonalize
from tests.parity.models import ALL, TRAIN
from tests.parity.training import WHOLE, alone, assert_same, rows, train

MUON = TRAIN | {"optimizer": "muon", "lr": 0.05, "weight_decay": 0.1, "steps": 3}

CASES = rows(
    """
    moe | tp=2 dp=2 ep=4
    moe | tp=2 dp=2 ep=2 etp=2 data=zero1
    *moe | dp=2 ep=2 data=zero3
    moe | dp=4 ep=2 data=zero2 microbatches=2
    moe | tp=4
    moe | dp=2 etp=2 dispatcher=all_gather
    moe | pp=2 dp=2 ep=2 microbatches=2
    moe | pp=2 tp=2 microbatches=4 schedule=zb_h1 data=zero1
    moe | pp=2 dp=2 schedule=chimera microbatches=2
    moe | dp=2 data=parameter_server
    grouped | tp=4 dp=2 ep=8
    dense | tp=2 dp=2
    *latent | tp=2 ep=2
    latent | tp=2 dp=2 ep=2 data=zero1
    """
)


@pytest.mark.parametrize(("model", "plan", "shape"), CASES)
def test_every_plan_updates_as_one_device(model: str, plan: dict[str, Any], shape: Any) -> None:
    expected = alone(ALL[model], MUON, shape, 1)
    assert_same(train(ALL[model], plan, MUON, shape), expected)


def test_singular_values_come_near_one() -> None:
    given = torch.randn(3, 20, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(given, full_matrices=False)
    results = orthogonalize(given)
    # The singular vectors stay, and the values are near 1 (Keller Jordan: 0.7 to 1.2).
    values = torch.diagonal(left.mT @ results @ right.mT, dim1=-2, dim2=-1)
    assert float(values.min()) > 0.65 and float(values.max()) < 1.2
    assert float((left @ torch.diag_embed(values) @ right - results).abs().max()) < 1e-9
    assert torch.allclose(orthogonalize(given.mT), results.mT, atol=1e-12)
    assert not orthogonalize(torch.zeros(1, 4, 4)).any()


def test_one_device_follows_the_formula() -> None:
    keys = MUON | {"steps": 1, "clip": 0.0, "lr_schedule": "constant"}
    before = alone(ALL["moe"], keys | {"lr": 1e-30, "weight_decay": 0.0}, WHOLE, 1)
    after = alone(ALL["moe"], keys, WHOLE, 1)
    checked = 0
    for name, gradients in after.gradients.items():
        stacks = (gradients, before.weights[name], after.weights[name])
        if ".experts." not in name:  # an expert is a tensor of its own
            stacks = tuple(stack[None] for stack in stacks)
        for gradient, weight, result in zip(*stacks, strict=True):
            expected = weight * (1 - keys["lr"] * keys["weight_decay"])
            for matrix in matrices(name, gradient.shape):
                # The first momentum is the gradient, and Nesterov's step adds 0.95 of it.
                direction = 1.95 * gradient[matrix.box].reshape(matrix.rows, matrix.columns)
                size = 0.2 * max(matrix.rows, matrix.columns) ** 0.5
                update = size * orthogonalize(direction[None])
                expected[matrix.box] -= keys["lr"] * update.view(expected[matrix.box].shape)
                checked += 1
            if matrices(name, gradient.shape):
                assert float((result - expected).abs().max()) < 1e-12, name
    assert checked > 20


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("train.rebalance_every=5", "plan.dp=2", "plan.ep=2"), "experts cannot move"),
        (("lora.rank=4",), "adapters (rank = 4) are none"),
        (("plan.pp=2", "plan.schedule=pipedream"), "updates the weights of a stage"),
    ],
)
def test_what_cannot_be_combined_is_refused(words: tuple[str, ...], text: str) -> None:
    loaded = load_run([], ["train.optimizer=muon", *words], environ={})
    assert any(text in problem.message for problem in refusals(loaded.config))
