"""Memory of a step of transformers' models: every class as predicted, to a tenth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moemesh.comm.mesh import Mesh
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.model.batch import Batch
from moemesh.parallel.parallelize import parallelize
from moemesh.planner.traffic.own_memory import predict_memory
from moemesh.trace.memory_profile import MemoryProfile
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.optimizer import Optimizer
from moemesh.train.records.artifacts import measure_saved, state_bytes
from moemesh.train.step import gradients_of_step, update
from tests.hub.training import architecture_of, model_of
from tests.ranks import mesh_on_ranks

#: Two sequences on each of two ranks; whole chunks of linear attention.
LENGTH, SEQUENCES, RANKS = 128, 4, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"ep": 2},
    "zero3": {"data": "zero3", "recompute": "full"},
}
#: Linear attention; scores and experts that the family's own code computes; state spaces.
CASES = [
    ("qwen3_next", "ep2"),
    ("gpt_oss", "zero3"),
    ("nemotron_h", "ep2"),
    pytest.param("qwen3_next", "zero3", marks=pytest.mark.slow),
    pytest.param("gpt_oss", "ep2", marks=pytest.mark.slow),
    pytest.param("nemotron_h", "zero3", marks=pytest.mark.slow),
]


def measured(mesh: Mesh, name: str, keys: dict[str, Any], dtype: str) -> MemoryProfile:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, plan = model_of(architecture_of(name)), Plan(dp=RANKS, **keys)
    parallel = parallelize(
        model,
        plan,
        mesh,
        seed=0,
        dtype=getattr(torch, dtype),
        tokens_per_rank=plan.tokens_per_rank(LENGTH, SEQUENCES),
    )
    optimizer = Optimizer.of(parallel, TrainConfig())
    for master in optimizer.masters.values():
        master.data.normal_(std=0.05)
    optimizer.round_masters()
    tokens = torch.randint(1, 200, (SEQUENCES // RANKS, LENGTH + 1))
    batch = Batch(
        tokens_BS=tokens[:, :-1], targets_BS=tokens[:, 1:], sequences_B=torch.arange(len(tokens))
    )
    with measure_saved(parallel.model) as saved:
        result = gradients_of_step(parallel, [batch], TimelineRecorder(mesh.rank), refuses=False)
    update(parallel, optimizer, result, lr=0.0, clip=1.0)
    states = state_bytes(parallel, optimizer)
    return MemoryProfile(rank=mesh.rank, **states, activations=saved.peak_bytes)


@pytest.mark.representative("gpt_oss-zero3-float32")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_each_class_of_memory_is_as_predicted(name: str, layout: str, dtype: str) -> None:
    model, keys = model_of(architecture_of(name)), LAYOUTS[layout]
    plan = Plan(dp=RANKS, **keys)
    sizes: dict[str, Any] = {"seq_len": LENGTH, "global_batch": SEQUENCES, "dtype": dtype}
    profiles = mesh_on_ranks(plan.layout, measured, name, keys, dtype)
    expected = [predict_memory(model, plan, **sizes, rank=rank) for rank in range(RANKS)]
    for one, other in zip(profiles, expected, strict=True):
        for part, number in one.parts().items():
            assert part == "activations" or other.parts()[part] == number, part
    # Rows that one rank has more of, another has less.
    kept, predicted = (sum(rank.activations for rank in ranks) for ranks in (profiles, expected))
    assert predicted == pytest.approx(kept, rel=0.1)
