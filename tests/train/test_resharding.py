"""A checkpoint of any plan is read under any other, whoever keeps which states: bit-equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moemesh.config.plan import Plan
from tests.parity.test_parity import MODEL
from tests.train.resharding import chain
from tests.waiting import PATIENCE

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
    plans = [CHAIN[place] for place in (0, 2, 3, 4, 5, 9, 10, 11, 13, 15, 16)]
    check(tmp_path, MODEL | SMALL, plans, "bfloat16")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_states_go_through_every_layout_under_every_strategy(
    tmp_path: Path, dtype: str, tied: bool
) -> None:
    plans = plans_of(["zero1", "replicate", "zero3", "parameter_server", "zero2"])
    check(tmp_path, MODEL | SMALL | {"tied_embeddings": tied}, plans, dtype, timeout=900)
