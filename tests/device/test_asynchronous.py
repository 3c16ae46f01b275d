"""Asynchronous schedules with tensors on a device: stages come to their windows in other orders."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.simulated_device import SimulatedDevice
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.model.batch import Batch
from moemesh.train.step import count_over_step
from tests.device.test_waits import SMALL
from tests.parity.asynchronous import stream, stream_on_rank
from tests.parity.training import Shape
from tests.ranks import run_on_ranks

MODEL = {**SMALL, "first_dense_layers": 0, "router_selection_bias": True}
TRAIN = {"steps": 4, "dtype": "float32", "optimizer": "sgd", "lr": 0.1, "clip": 1.0}
SHAPE = Shape(seq_len=8, global_batch=8)


def streamed_on_device(rank: int, plan: dict[str, Any]) -> list[tuple[float, float]]:
    with SimulatedDevice():
        mesh = Mesh.create(Plan(**plan).layout, "cuda:0")
        return stream_on_rank(mesh, MODEL, plan, TRAIN, SHAPE)["steps"]


def counted_by_one_stage(rank: int) -> int:
    with SimulatedDevice():
        mesh = Mesh.create(Layout(pp=2, dp=2), "cuda:0")
        model = SimpleNamespace(config=ModelConfig(**MODEL))
        generator = torch.Generator().manual_seed(rank)
        tokens_BS = torch.randint(8, (2, 4 + rank), generator=generator)
        batch = Batch(tokens_BS=tokens_BS, targets_BS=tokens_BS, sequences_B=torch.arange(2)).to(
            mesh.device
        )
        if mesh["pp"].index:
            return 0
        parallel: Any = SimpleNamespace(model=model, mesh=mesh)
        return count_over_step(parallel, [batch]).num_tokens


def test_a_stage_counts_tokens_without_the_other_stages() -> None:
    assert run_on_ranks(4, counted_by_one_stage) == [18, 18, 0, 0]


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("pipedream", {"pp": 2}),
        *(
            pytest.param(name, {"pp": 2, "dp": 2, "ep": 2}, marks=pytest.mark.slow)
            for name in ("pipedream", "pipedream_2bw")
        ),
    ],
)
def test_an_asynchronous_run_on_a_device_learns_as_on_the_host(
    name: str, degrees: dict[str, int]
) -> None:
    plan = {**degrees, "microbatches": 4, "schedule": name, "dispatcher": "all_to_all"}
    wanted = stream(MODEL, plan, TRAIN, SHAPE)
    ranks = degrees["pp"] * degrees.get("dp", 1)
    for steps in run_on_ranks(ranks, streamed_on_device, plan):
        assert [loss for loss, _ in steps] == pytest.approx(wanted.losses, rel=1e-5)
        assert [aux for _, aux in steps] == pytest.approx(wanted.aux, rel=1e-5)
