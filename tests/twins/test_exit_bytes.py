"""Bytes of the three attention exits, per rank, in whole training steps: closed formulas (seed 000,
corrected) equal the ledger to the byte."""

from typing import Any

import pytest

from moemesh.comm.mesh import Mesh
from moemesh.config.plan import Plan
from tests.parity.models import MODEL, TRAIN
from tests.parity.training import Shape, train_on_rank
from tests.ranks import mesh_on_ranks

SHAPE = Shape(global_batch=4, seq_len=8)
BYTES = 8  # float64
HIDDEN, LAYERS = MODEL["hidden_size"], MODEL["num_layers"]
WIDTH = MODEL["num_heads"] * MODEL["head_dim"]


def ledger_on_rank(mesh: Mesh, plan: dict[str, Any]) -> Any:
    train_on_rank(mesh, MODEL, plan, TRAIN | {"steps": 1}, SHAPE)
    return mesh.ledger.rows()


def sent(ledger: list[dict[str, Any]], caller: str, phase: str) -> int:
    return sum(r["wire_bytes"] for r in ledger if r["caller"] == caller and r["phase"] == phase)


@pytest.mark.representative("reduce_scatter-4", "all_to_all-4")
@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("exit_name", ["reduce_scatter", "all_reduce", "all_to_all"])
def test_exit_bytes(exit_name: str, n: int) -> None:
    plan = {"tp": n, "attention_exit": exit_name}
    tokens = SHAPE.global_batch * SHAPE.seq_len
    whole = tokens * HIDDEN * BYTES * LAYERS
    forward = {
        "reduce_scatter": (n - 1) * whole // n,
        "all_reduce": 2 * (n - 1) * whole // n,
        "all_to_all": (n - 1) * tokens * WIDTH * BYTES * LAYERS // n**2,
    }[exit_name]
    # The slice after the all-reduce comes back as an all-gather, not as zero-padding.
    backward = (n - 1) * whole // n if exit_name == "all_reduce" else forward
    for ledger in mesh_on_ranks(Plan(**plan).layout, ledger_on_rank, plan):
        assert sent(ledger, "attention.leave", "forward") == forward
        assert sent(ledger, "attention.leave", "backward") == backward
        assert sent(ledger, "attention.enter", "forward") == (n - 1) * whole // n
        assert sent(ledger, "attention.enter", "backward") == (n - 1) * whole // n
        # Gradients of the whole W_o are summed over tp; sharded ones stay where they are.
        replicated = [r for r in ledger if r["caller"] == "gradients"]
        assert {r["axis"] for r in replicated} == {"stage", "edp"}
