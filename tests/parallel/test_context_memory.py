"""A quarter of the positions keeps a quarter of the activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.model.batch import Batch
from moemesh.ops.saved import SavedForBackward
from moemesh.parallel.context import CONTEXTS
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.step import gradients_of_step
from tests.parity.training import Shape, build
from tests.ranks import mesh_on_ranks

MODEL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 8, "intermediate_size": 32, "num_experts": 4, "experts_per_token": 2,
    "expert_intermediate_size": 16,
}  # fmt: skip


def kept_on_rank(mesh: Mesh, plan_keys: dict[str, Any], length: int) -> int:
    """Bytes that autograd keeps at the fullest moment of a step of one sequence."""
    plan = Plan(**plan_keys)
    parallel = build(mesh, ModelConfig(**MODEL), plan, Shape(1, length), "float32")
    tokens = torch.randint(64, (1, length + 1), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens_BS=tokens[:, :-1], targets_BS=tokens[:, 1:], sequences_B=torch.arange(1))
    saved = SavedForBackward(parallel.model.parameters())
    with saved:
        gradients_of_step(parallel, [batch], TimelineRecorder(mesh.rank))
    return saved.peak_bytes


@pytest.mark.representative("1024-ring")
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("length", [1024, pytest.param(32768, marks=pytest.mark.slow)])
def test_four_ranks_keep_a_quarter(length: int, context: str) -> None:
    alone = kept_on_rank(Mesh.single("cpu"), {}, length)
    plan = {"cp": 4, "context": context}
    for kept in mesh_on_ranks(Plan(**plan).layout, kept_on_rank, plan, length):
        assert kept <= 0.30 * alone
