"""Every token to one expert: the rank that has it computes in pieces, and that is told once."""

from __future__ import annotations

import torch

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.parallel.parallelize import parallelize
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.row_bounds import tell_bounded
from moemesh.train.step import gradients_of_step
from tests.parity.training import microbatches
from tests.ranks import mesh_on_ranks
from tests.train.injecting import MODEL, SHAPE

PLAN = Plan(dp=4, ep=4)


def adversarial_on_rank(mesh: Mesh) -> list[tuple[str, str]]:
    config = ModelConfig(
        **MODEL | {"router_selection_bias": True, "experts_per_token": 1, "num_layers": 2}
    )
    parallel = parallelize(
        config,
        PLAN,
        mesh,
        seed=1,
        dtype=torch.float32,
        tokens_per_rank=PLAN.tokens_per_rank(SHAPE.seq_len, SHAPE.global_batch),
    )
    said: list[tuple[str, str]] = []
    for step in (1, 2, 3):
        if step == 2:
            for moe in parallel.model.moe_layers().values():
                assert moe.router.selection_bias is not None
                moe.router.selection_bias[2] = 100.0
        gradients_of_step(
            parallel, microbatches(config, PLAN, SHAPE, step, mesh), TimelineRecorder(mesh.rank)
        )
        if step != 2:
            tell_bounded(parallel, step, lambda text, kind: said.append((text, kind)))
    tell_bounded(parallel, 4, lambda text, kind: said.append((text, kind)))
    return said


def test_the_rank_with_all_rows_is_named() -> None:
    for said in mesh_on_ranks(PLAN.layout, adversarial_on_rank):
        ((text, kind),) = said
        bound = 2 * PLAN.tokens_per_rank(SHAPE.seq_len, SHAPE.global_batch)
        assert kind == "rows" and text.startswith(
            f"step 3: rank 2 was sent more than {bound} rows in 2 forwards of layers 1 since"
        )
