"""A checkpoint of any plan is read under any other plan, bit-equal, wherever the states live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.parallel.parallelize import RankModel
from moemesh.train.console import Console
from moemesh.train.optimizer import Optimizer
from moemesh.train.records.run_folder import RunFolder
from moemesh.train.step import update
from moemesh.train.weights import saving
from moemesh.train.weights.saving import Checkpoints
from tests.parity.models import MODEL
from tests.parity.training import Part, Shape, assemble, build, gradients, owned
from tests.ranks import end_meshes, run_on_ranks
from tests.waiting import PATIENCE

SHAPE = Shape(global_batch=5, seq_len=4)


def chain_on_rank(
    rank: int,
    folder: str,
    model: dict[str, Any],
    plans: list[dict[str, Any]],
    train: dict[str, Any],
) -> list[dict[str, list[Part]]]:
    """States that this rank owns under each plan: the first plan trains two steps, each other one
    reads the checkpoint of the plan before it."""
    owned_states: list[dict[str, list[Part]]] = []
    config, keys = ModelConfig(**model), TrainConfig(**train)
    run = RunFolder(Path(folder), has_run=False)
    for number, plan_keys in enumerate(plans):
        plan = Plan(**plan_keys)
        assert plan.check(config) == []
        mesh = Mesh.create(plan.layout, "cpu")
        # What is not read shows.
        parallel = build(mesh, config, plan, SHAPE, keys.dtype, seed=17 + number)
        optimizer = Optimizer.of(parallel, keys)
        if not number:
            for step in (1, 2):
                result = gradients(parallel, plan, SHAPE, step)
                update(parallel, optimizer, result, lr=keys.lr, clip=keys.clip)
        else:
            checkpoint = saving.newest(run, parallel, lambda step, why: None)
            assert checkpoint is not None and checkpoint.step == number - 1
            saving.load(checkpoint, parallel, optimizer)
        owned_states.append(states(parallel, optimizer))
        saver = Checkpoints(run, parallel, optimizer, keys, Console(silent=True))
        saver.save(number, {"step": number}, is_last=True)
        parallel.close()
        end_meshes()
    return owned_states


def states(parallel: RankModel, optimizer: Optimizer) -> dict[str, list[Part]]:
    """Weights as they are used, masters and moments, of what this rank owns."""
    held = {
        "weights": parallel.reducer.weights,
        "masters": optimizer.masters,
        **optimizer.state(),
    }
    states = {kind: owned(parallel, tensors) for kind, tensors in held.items()}
    # What a rank gathers is what the owners have.
    reducer = parallel.reducer
    for name, _ in parallel.model.named_parameters():
        whole = reducer.whole_weights(name).flatten()
        if name in reducer.owned:
            own, part = reducer.owned[name].numbers, reducer.weights[name].detach().flatten()
            assert torch.equal(whole[own.start : own.stop], part), name
    return states


def chain(
    folder: Path,
    model: dict[str, Any],
    plans: list[dict[str, Any]],
    train: dict[str, Any],
    *,
    timeout: float = PATIENCE,
) -> list[dict[str, Tensor]]:
    """Logical name -> state, for each plan."""
    size = Plan(**plans[0]).world_size
    ranks = run_on_ranks(size, chain_on_rank, str(folder), model, plans, train, timeout=timeout)
    results: list[dict[str, Tensor]] = []
    for number in range(len(plans)):
        state: dict[str, Tensor] = {}
        kinds = sorted({kind for rank in ranks for kind in rank[number]})
        for kind in kinds:
            whole = assemble([rank[number].get(kind, []) for rank in ranks])
            state |= {f"{kind}.{name}": tensor for name, tensor in whole.items()}
        results.append(state)
    return results


SMALL: dict[str, Any] = {"num_layers": 4, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 4}
TRAIN: dict[str, Any] = {
    "steps": 4,
    "optimizer": "adamw",
    "lr": 0.01,
    "warmup_steps": 0,
    "clip": 0.5,
}
#: Four ranks. Beside each other: other strategies, other degrees, or both.
CHAIN: list[dict[str, Any]] = [
    {"dp": 4, "ep": 2, "data": "zero3"},
    {"dp": 4, "ep": 4},
    {"dp": 2, "tp": 2, "ep": 2, "data": "zero1"},
    {"pp": 2, "dp": 2, "data": "zero2", "microbatches": 2},
    {"tp": 4, "ep": 2, "etp": 2, "data": "zero3"},
    {"dp": 4, "ep": 2, "data": "parameter_server", "servers": 3},
    {"pp": 2, "tp": 2, "etp": 2, "data": "zero1", "microbatches": 2},
    {"dp": 4, "data": "zero3"},
    {"dp": 4, "ep": 2, "data": "zero2"},
    {"tp": 2, "dp": 2, "ep": 4, "data": "replicate"},
    {"pp": 4, "schedule": "zb_h1", "microbatches": 4, "data": "zero1"},
    {"pp": 2, "dp": 2, "ep": 2, "data": "zero3", "microbatches": 2},
    {"tp": 4, "ep": 4, "data": "zero2"},
    {"dp": 4, "data": "zero3", "shard_group": 2},
    {"dp": 4, "data": "zero1"},
    {"cp": 2, "dp": 2, "ep": 4, "context": "all_gather", "data": "zero2"},
    {"cp": 4, "ep": 2},
    {"cp": 2, "tp": 2, "ep": 2, "data": "zero3"},
]


def plans_of(strategies: list[str]) -> list[dict[str, Any]]:
    """The layouts of the chain, each under all of the strategies, so that neighbours differ."""
    layouts = [{k: v for k, v in plan.items() if k != "data"} for plan in CHAIN]
    layouts = [plan for plan in layouts if "schedule" not in plan]
    plans = [
        layouts[(place + shift) % len(layouts)] | {"data": strategy}
        for shift in range(len(layouts))
        for place, strategy in enumerate(strategies)
    ]
    return [plan for plan in plans if Plan(**plan).check() == []]  # a server needs a worker


def check(
    folder: Path,
    model: dict[str, Any],
    plans: list[dict[str, Any]],
    dtype: str,
    timeout: float = PATIENCE,
) -> None:
    first, *others = chain(folder, model, plans, TRAIN | {"dtype": dtype}, timeout=timeout)
    kinds = {name.partition(".")[0] for name in first}
    assert kinds == {"weights", "masters", "exp_avg", "exp_avg_sq"}
    assert all(float(tensor.abs().max()) > 0 for tensor in first.values())
    for plan, state in zip(plans[1:], others, strict=True):
        assert state.keys() == first.keys()
        for name, tensor in first.items():
            assert state[name].dtype == tensor.dtype
            assert torch.equal(state[name], tensor), f"{plan}: {name}"


def test_states_go_from_plan_to_plan_bit_by_bit(tmp_path: Path) -> None:
    """Every strategy and axis once; the slow test below has every pair."""
    plans = [CHAIN[place] for place in (13, 6, 5, 15, 9)]
    check(tmp_path, MODEL | SMALL | {"num_layers": 2}, plans, "bfloat16")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_states_go_through_every_layout_under_every_strategy(
    tmp_path: Path, dtype: str, tied: bool
) -> None:
    plans = plans_of(["zero1", "replicate", "zero3", "parameter_server", "zero2"])
    check(tmp_path, MODEL | SMALL | {"tied_embeddings": tied}, plans, dtype, timeout=900)
