"""Plans of 512 ranks: what one of them sends and holds in a step is the predicted, to the byte.

No other rank runs. In place of torch.distributed, collectives hand this rank its own numbers as
those of the others, so that the numbers are nonsense; the bytes are not, because a replayed routing
gives every rank the same choices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moemesh.comm import point_to_point, transfers
from moemesh.comm.mesh import Axis, Mesh
from moemesh.config.layout import AXES
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.model.batch import Batch
from moemesh.parallel.expert import build
from moemesh.parallel.parallelize import parallelize
from moemesh.planner.traffic.ledger import predict_ledger
from moemesh.planner.traffic.own_memory import predict_memory
from moemesh.schedule.plan_schedule import build_step
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.optimizer import Optimizer
from moemesh.train.records.artifacts import state_bytes
from moemesh.train.step import gradients_of_step, update
from tests.parity.training import Shape, microbatches
from tests.twins.predictions import chosen_routing

RANKS = 512
#: Tokens of a rank's residual stream in a microbatch: each expert is chosen once.
TOKENS = 32
MODEL = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=16, num_heads=8, num_kv_heads=8, head_dim=4,
    intermediate_size=32, first_dense_layers=1, num_experts=64, experts_per_token=2,
    expert_intermediate_size=8, num_shared_experts=1,
)  # fmt: skip
PLANS: dict[str, dict[str, Any]] = {
    "experts": {"dp": 512, "ep": 64, "data": "zero1"},
    "tensor": {"dp": 64, "tp": 8, "ep": 64, "data": "zero2", "microbatches": 2},
    "sharded": {"dp": 128, "tp": 4, "ep": 32, "etp": 4, "data": "zero3"},
    "context": {"dp": 64, "cp": 8, "ep": 64, "context": "all_to_all", "microbatches": 2},
    "ring": {"dp": 32, "cp": 16, "ep": 64, "context": "ring", "data": "zero1"},
    "1f1b": {"pp": 8, "dp": 32, "tp": 2, "ep": 64, "microbatches": 16, "data": "zero1"},
    "interleaved": {"pp": 8, "dp": 16, "tp": 4, "ep": 16, "microbatches": 8, "stages_per_rank": 2,
                    "schedule": "interleaved_1f1b", "recompute": "full"},
    "zero bubble": {"pp": 8, "dp": 64, "ep": 32, "microbatches": 12, "schedule": "zb_h1"},
    "dualpipe_v": {"pp": 8, "dp": 32, "tp": 2, "ep": 64, "microbatches": 20,
                   "schedule": "dualpipe_v", "stages_per_rank": 2, "data": "zero1"},
    "all_gather": {"dp": 512, "ep": 64, "dispatcher": "all_gather"},
    "hierarchical": {"dp": 512, "ep": 64, "dispatcher": "hierarchical", "ranks_per_node": 8},
}  # fmt: skip


class Done:
    """Work that is complete."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


def own_block(
    output: Tensor,
    input: Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Done:
    """An all-to-all in which every rank sends what this one keeps for itself."""
    blocks = output.split(output_splits or len(output) // group.size)
    own = input.split(input_splits or len(input) // group.size)[group.index]
    for block in blocks:
        block.zero_()[: len(own)] = own[: len(block)]
    return Done()


def own_rows(blocks: Sequence[Tensor], into: Sequence[Tensor], axis: Axis, tag: int) -> Done:
    """The same, message by message."""
    own = blocks[axis.index]
    for block in into:
        if block.data_ptr() != own.data_ptr():
            block.zero_()[: len(own)] = own[: len(block)]
    return Done()


def nothing(*_: Any, **__: Any) -> Done:
    return Done()


def zeros(into: Tensor, *_: Any, **__: Any) -> Done:
    into.zero_()
    return Done()


def batch_of(operations: list[Any]) -> list[Done]:
    return [one.op(one.tensor) for one in operations]


@contextlib.contextmanager
def alone_in_a_world() -> Iterator[Callable[[Plan, int], Mesh]]:
    """Makes the mesh of any rank of a plan, while torch.distributed has no other ranks."""

    def mesh_of(plan: Plan, rank: int) -> Mesh:
        options = SimpleNamespace(_timeout=None)
        gloo = SimpleNamespace(name=lambda: "gloo", options=options)
        groups: dict[tuple[int, ...], Any] = {}
        for name in AXES:
            ranks = plan.layout.group_of(name, rank)
            index = ranks.index(rank)
            groups[ranks] = SimpleNamespace(
                size=len(ranks), index=index, _get_backend=lambda device: gloo
            )
        return Mesh(plan.layout, rank, torch.device("cpu"), groups)

    def operation(op: Any, tensor: Tensor, *_: Any) -> SimpleNamespace:
        return SimpleNamespace(op=op, tensor=tensor)

    stubs = {
        "all_to_all_single": own_block, "all_reduce": nothing, "broadcast": nothing,
        "barrier": nothing, "isend": nothing, "irecv": zeros, "P2POp": operation,
        "batch_isend_irecv": batch_of,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, stub in stubs.items():
            stack.enter_context(mock.patch.object(dist, name, stub))
        stack.enter_context(mock.patch.object(transfers, "send_and_receive", own_rows))
        stack.enter_context(mock.patch.object(point_to_point, "new_group", nothing))
        # It compares with numbers of other ranks.
        stack.enter_context(mock.patch.object(build, "self_test", nothing))
        yield mesh_of


class SameChoices(dict[tuple[int, int, int], list[list[int]]]):
    """The choices of any rank, forward and layer: every expert once."""

    def __missing__(self, key: tuple[int, int, int]) -> list[list[int]]:
        return choices(TOKENS).tolist()


def choices(num_tokens: int) -> Tensor:
    return (torch.arange(num_tokens * 2) % MODEL.num_experts).view(num_tokens, 2)


def replayed(batch: Batch) -> Batch:
    chosen = choices(batch.num_tokens)
    return replace(batch, experts=dict.fromkeys(MODEL.routed_layers, chosen))


@pytest.mark.representative("dualpipe_v-in the middle")
@pytest.mark.parametrize("ranks", [(0, 333), (333,)], ids=["two", "in the middle"])
@pytest.mark.parametrize("name", PLANS)
def test_a_rank_of_512_sends_and_holds_what_is_predicted(name: str, ranks: tuple[int, ...]) -> None:
    plan = Plan(**PLANS[name])
    assert plan.layout.world_size == RANKS and not plan.check()
    shape = Shape(plan.dp * plan.microbatches, TOKENS * plan.tp * plan.cp)
    train = TrainConfig(optimizer="adamw", dtype="bfloat16")
    tokens = plan.tokens_per_rank(shape.seq_len, shape.global_batch)
    for rank in ranks:
        with alone_in_a_world() as mesh_of:
            mesh = mesh_of(plan, rank)
            parallel = parallelize(
                MODEL, plan, mesh, seed=0, dtype=torch.bfloat16, tokens_per_rank=tokens,
                schedule=build_step(plan, MODEL, shape.seq_len),
            )  # fmt: skip
            optimizer = Optimizer.of(parallel, train)
            batches = [replayed(one) for one in microbatches(MODEL, plan, shape, 1, mesh)]
            result = gradients_of_step(parallel, batches, TimelineRecorder(rank))
            update(parallel, optimizer, result, lr=1e-3, clip=1.0)
        settings: dict[str, Any] = {
            "seq_len": shape.seq_len,
            "global_batch": shape.global_batch,
            "dtype": train.dtype,
            "rank": rank,
            "routing": chosen_routing(MODEL, plan.layout, SameChoices()),
        }
        predicted = predict_ledger(MODEL, plan, **settings)
        assert predicted.rows() == mesh.ledger.rows(), f"rank {rank} (left: predicted)"
        assert mesh.ledger.entries(), "something was sent"
        held = predict_memory(MODEL, plan, **settings).to_json()
        num_bytes = state_bytes(parallel, optimizer)
        assert {part: held[part] for part in num_bytes} == num_bytes, f"rank {rank}"
