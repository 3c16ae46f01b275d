"""States of the optimizer on the host of a simulated device: where they are, when the host waits,
and the bits of the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.simulated_device import DeviceTensor, SimulatedDevice
from moemesh.checkpoint import store
from moemesh.comm.mesh import Mesh
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.parallel.data.buckets import ReplicatedBucket
from moemesh.parallel.parallelize import RankModel
from moemesh.planner.traffic.own_memory import predict_memory
from moemesh.schedule.plan_schedule import build_step
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.optimizer import Optimizer
from moemesh.train.step import gradients_of_step, update
from moemesh.train.weights import saving
from tests.device.test_waits import SMALL
from tests.parity.training import Shape, build, microbatches, model_of
from tests.ranks import run_on_ranks

SHAPE = Shape(global_batch=4, seq_len=8)
SHAPE_SIZES: dict[str, Any] = {"seq_len": SHAPE.seq_len, "global_batch": SHAPE.global_batch}


class Trained(NamedTuple):
    """Losses and weights of a rank after two steps, waits of the last step by region, numbers of
    buckets with a copy in its backward and after it, kinds of states on the device, and bytes of
    states on device and host."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    waits: dict[str, list[str]]
    copies: tuple[int, int]
    on_device: set[str]
    state_bytes: tuple[int, int]


def train_on_rank(
    rank: int, plan_keys: dict[str, Any], dtype: str, optimizer_name: str, offload: bool
) -> Trained:
    plan = Plan(**plan_keys, offload="optimizer")
    train = TrainConfig(dtype=dtype, optimizer=optimizer_name, momentum=0.9, lr=1e-2, clip=1e-3)
    with SimulatedDevice() as device:
        mesh = Mesh.single("cuda:0") if plan.world_size == 1 else Mesh.create(plan.layout, "cuda:0")
        config = model_of(SMALL)
        schedule = build_step(plan, config, SHAPE.seq_len)
        parallel = build(mesh, config, plan, SHAPE, dtype, schedule=schedule)
        optimizer = Optimizer.of(parallel, train, offload=offload)
        began: list[str] = []
        if (copy := parallel.reducer.on_complete) is not None:

            def counted(bucket: ReplicatedBucket) -> None:
                began.append("end" if is_finishing else "backward")
                copy(bucket)

            parallel.reducer.on_complete = counted
        is_finishing, finish = False, parallel.reducer.finish

        def finishing() -> None:
            nonlocal is_finishing
            is_finishing = True
            finish()
            is_finishing = False

        parallel.reducer.finish = finishing
        losses: list[float] = []
        for step in (1, 2):
            began.clear()
            batches = microbatches(config, plan, SHAPE, step, mesh)
            with device.region(f"gradients {step}"):
                result = gradients_of_step(parallel, batches, TimelineRecorder(mesh.rank))
            with device.region(f"update {step}"):
                update(parallel, optimizer, result, lr=train.lr, clip=train.clip)
            losses.append(result.loss)
        waits = {
            name: [f"{wait.why}, {wait.line}" for wait in device.totals(f"{name} 2").waited]
            for name in ("gradients", "update")
        }
        tensors = {"masters": list(optimizer.masters.values())}
        tensors |= {kind: list(named.values()) for kind, named in optimizer.state().items()}
        on_device = {
            kind for kind, of in tensors.items() if any(isinstance(x, DeviceTensor) for x in of)
        }
        assert all(isinstance(x, DeviceTensor) for x in parallel.reducer.weights.values())
        weights = {
            name: weight.detach().cpu().clone() for name, weight in parallel.reducer.weights.items()
        }
        sizes = optimizer.num_state_bytes(), optimizer.num_state_bytes(on_host=True)
        predicted = predict_memory(
            config,
            plan if offload else plan.without_offload,
            **SHAPE_SIZES,
            dtype=dtype,
            rank=rank,
            num_states=train.num_states,
        )
        assert sizes == (predicted.optimizer, predicted.host)
        counts = began.count("backward"), began.count("end")
        return Trained(losses, weights, waits, counts, on_device, sizes)


def trained(plan: dict[str, Any], *args: Any) -> list[Trained]:
    ranks = Plan(**plan).world_size
    if ranks == 1:
        return [train_on_rank(0, plan, *args)]
    return run_on_ranks(ranks, train_on_rank, plan, *args)


@pytest.mark.parametrize(
    ("plan", "dtype", "optimizer"),
    [
        ({"microbatches": 2}, "bfloat16", "adamw"),
        pytest.param({}, "float32", "sgd", marks=pytest.mark.slow),
        pytest.param(
            {"dp": 2, "ep": 2, "dispatcher": "all_gather"}, "bfloat16", "adamw",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"dp": 2, "data": "zero1", "microbatches": 2}, "float32", "adamw",
            marks=pytest.mark.slow,
        ),
        pytest.param({"dp": 2, "data": "zero3"}, "bfloat16", "adamw", marks=pytest.mark.slow),
        pytest.param(
            {"dp": 2, "data": "zero2", "microbatches": 2}, "bfloat16", "adamw",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"pp": 2, "dp": 2, "microbatches": 2, "data": "parameter_server"}, "float32", "adamw",
            marks=pytest.mark.slow,
        ),
        pytest.param({"tp": 2, "pp": 2, "microbatches": 2}, "bfloat16", "sgd",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_states_on_the_host_give_the_same_bits(
    plan: dict[str, Any], dtype: str, optimizer: str
) -> None:
    for host, device in zip(
        trained(plan, dtype, optimizer, True), trained(plan, dtype, optimizer, False), strict=True
    ):
        assert host.losses == device.losses
        assert all(torch.equal(host.weights[name], one) for name, one in device.weights.items())
        assert not host.on_device
        # What is a master by itself has states on the device only.
        states = {"exp_avg", "exp_avg_sq"} if optimizer == "adamw" else {"momentum_buffer"}
        if device.weights:
            assert device.on_device == {"masters", *states}
        # Nothing waits before the update, and the update once.
        assert len(host.waits["gradients"]) == len(device.waits["gradients"])
        assert [wait.partition(",")[0] for wait in host.waits["update"]] == ["Stream.synchronize"]
        # Gradients that are summed once a step are copied while the backward runs.
        in_backward, at_end = host.copies
        if plan.get("data") in ("zero2", "zero3"):
            assert at_end and not in_backward
        elif plan.get("dp", 1) == 1 and plan.get("pp", 1) == 1:
            assert in_backward and not at_end
        # A master, the states and a gradient of 4 bytes each.
        numbers = sum(weight.numel() for weight in host.weights.values())
        assert host.state_bytes == (0, 4 * (len(states) + 2) * numbers)
        assert device.state_bytes[1] == 0


@pytest.mark.parametrize("offload", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_checkpoint_is_read_with_and_without_offload(offload: bool, tmp_path: Path) -> None:
    """Two steps, a checkpoint, and a third step, by the same model and by a new one that reads the
    checkpoint the other way: the same bits."""
    plan, config = Plan(microbatches=2), model_of(SMALL)
    train = TrainConfig(dtype="bfloat16", lr=1e-2)
    results: list[dict[str, torch.Tensor]] = []
    with SimulatedDevice():
        mesh = Mesh.single("cuda:0")

        def opened(offload: bool) -> tuple[RankModel, Optimizer]:
            schedule = build_step(plan, config, SHAPE.seq_len)
            parallel = build(mesh, config, plan, SHAPE, "bfloat16", schedule=schedule)
            return parallel, Optimizer.of(parallel, train, offload=offload)

        def step(number: int, parallel: RankModel, optimizer: Optimizer) -> None:
            batches = microbatches(config, plan, SHAPE, number, mesh)
            result = gradients_of_step(parallel, batches, TimelineRecorder(0))
            update(parallel, optimizer, result, lr=train.lr, clip=train.clip)
            weights = parallel.reducer.weights.items()
            results.append({name: one.detach().cpu().clone() for name, one in weights})

        parallel, optimizer = opened(offload)
        for number in (1, 2):
            step(number, parallel, optimizer)
        shards, state = saving.contents(parallel, optimizer, {"step": 2})
        shards = [replace(shard, tensor=shard.tensor.cpu()) for shard in shards]
        place = store.save(tmp_path, 2, shards, state)
        step(3, parallel, optimizer)
        parallel, optimizer = opened(not offload)
        saving.load(store.open_checkpoint(place.parent, 2), parallel, optimizer)
        step(3, parallel, optimizer)
    *_, continued, resumed = results
    assert all(torch.equal(resumed[name], weight) for name, weight in continued.items())
