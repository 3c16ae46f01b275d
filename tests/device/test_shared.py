"""Ranks that share a device: gloo carries their tensors through the host (MOEMESH_COMM=gloo)."""

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from benchmarks.simulated_device import SimulatedDevice
from moemesh.comm import transfers
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout
from moemesh.config.plan import Plan
from tests.gpu_session import shared_plans
from tests.parity.models import MODEL, TRAIN
from tests.parity.training import Shape, assemble, train_on_rank
from tests.ranks import run_on_ranks

KEYS, SHAPE = MODEL | {"num_layers": 4}, Shape(global_batch=8, seq_len=8)
PLANS = shared_plans()


def keys_of(settings: tuple[str, ...]) -> dict[str, Any]:
    """Keys of [plan] from the settings of a run."""
    pairs = (setting.removeprefix("plan.").split("=") for setting in settings)
    return {key: int(value) if value.isdigit() else value for key, value in pairs}


def train_on_device(rank: int, plan: dict[str, Any], is_simulated: bool) -> dict[str, Any]:
    """Losses and gradients of a rank that has device 0, as all others."""
    with SimulatedDevice(is_shared=True) if is_simulated else nullcontext():
        mesh = Mesh.create(Plan(**plan).layout, "cuda:0")
        result = train_on_rank(mesh, KEYS, plan, TRAIN, SHAPE)
        gradients = [(*place, tensor.cpu()) for *place, tensor in result["gradients"]]
    return {"losses": [step[0] for step in result["steps"]], "gradients": gradients}


@functools.cache
def alone() -> dict[str, Any]:
    """The steps of one rank on the CPU."""
    return train_on_rank(Mesh.single("cpu"), KEYS, {}, TRAIN, SHAPE)


def check(name: str, *, is_simulated: bool) -> None:
    plan = keys_of(PLANS[name])
    ranks = run_on_ranks(Plan(**plan).layout.world_size, train_on_device, plan, is_simulated)
    for rank in ranks:
        assert rank["losses"] == pytest.approx([step[0] for step in alone()["steps"]], rel=1e-9)
    gradients = assemble([rank["gradients"] for rank in ranks])
    for key, expected in assemble([alone()["gradients"]]).items():
        assert_close(gradients[key], expected, rtol=1e-8, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.representative("zero3 2")
@pytest.mark.parametrize("name", PLANS)
def test_ranks_on_one_simulated_device_give_the_numbers_of_one_rank(name: str) -> None:
    check(name, is_simulated=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", PLANS)
def test_ranks_on_one_gpu_give_the_numbers_of_one_rank(name: str) -> None:
    check(name, is_simulated=False)


def exchange_on_device(rank: int) -> tuple[bool, list[float], str]:
    """Whether all results are on the device, their means, and where control messages travel."""
    with SimulatedDevice(is_shared=True):
        mesh = Mesh.create(Layout(dp=2, ep=2), "cuda:0")
        axis, keys = mesh["ep"], {"phase": "forward", "caller": "test"}
        x = torch.full((20_000, 3), float(rank + 1), device="cuda")
        received = [15_000 if rank else 5_000] * 2
        results = [
            transfers.all_gather(x, axis, [20_000, 20_000], **keys),
            transfers.all_reduce(x, axis, **keys),
            transfers.reduce_scatter(x, axis, **keys),
            transfers.all_to_all(x, axis, [5_000, 15_000], received, **keys),
            transfers.broadcast(x, axis, 1, **keys),
        ]
        sums = [float(result.sum()) / 60_000 for result in results]
        return all(result.is_cuda for result in results), sums, mesh.control.device.type


def test_every_collective_goes_through_the_host() -> None:
    assert run_on_ranks(2, exchange_on_device) == [
        (True, pytest.approx([3, 3, 1.5, 0.75, 2]), "cpu"),
        (True, pytest.approx([3, 3, 1.5, 2.25, 2]), "cpu"),
    ]
