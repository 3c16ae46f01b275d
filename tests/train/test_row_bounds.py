"""Every token to one expert: the rank that has it computes in pieces, and that is told once."""

from __future__ import annotations

import torch

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.parallel.parallelize import parallelize
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.records.expert_loads import RowBounds
from moemesh.train.step import gradients_of_step
from tests.parity.training import microbatches
from tests.ranks import mesh_on_ranks
from tests.train.injecting import MODEL, SHAPE

PLAN = Plan(dp=4, ep=4)


def adversarial_on_rank(mesh: Mesh) -> tuple[list[tuple[str, str]], list[str]]:
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
    kept: list[tuple[str, str]] = []
    said: list[str] = []
    bounds = RowBounds(
        parallel, 1, -100, keep=lambda text, kind: kept.append((text, kind)), say=said.append
    )
    for step in (1, 2, 3):
        if step == 2:
            for moe in parallel.model.moe_layers().values():
                assert moe.router.selection_bias is not None
                moe.router.selection_bias[2] = 100.0
        gradients_of_step(
            parallel, microbatches(config, PLAN, SHAPE, step, mesh), TimelineRecorder(mesh.rank)
        )
        if step == 3:
            bounds.look(step)
    bounds.look(4)
    assert not said, "two forwards of a hundred are none to speak of"
    for step in (5, 6):
        for moe in parallel.model.moe_layers().values():
            moe.experts.num_bounded = int(mesh.rank == 2)
        bounds.look(step)
    return kept, said


def test_the_rank_with_all_rows_is_named() -> None:
    for kept, said in mesh_on_ranks(PLAN.layout, adversarial_on_rank):
        text, kind = kept[0]
        bound = 2 * PLAN.tokens_per_rank(SHAPE.seq_len, SHAPE.global_batch)
        assert kind == "rows" and text.startswith(
            f"step 3: more than {bound} rows were sent to rank 2 in 2 forwards of layers 1 since"
        )
        assert len(kept) == 3 and len(said) == 1 and "100% of its forwards" in said[0]
