"""Train with skewed routing on one rank of any plan, with replicas and with moved experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.workloads import workload
from moemesh.balance.compiled import plain_loops
from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.model.batch import Batch
from moemesh.parallel.expert.homes import rank_tokens as home_tokens
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.migration import ExpertMigration
from moemesh.train.optimizer import Optimizer
from moemesh.train.step import gradients_of_step, update
from tests.parity.training import Shape, assemble, build, microbatches, on_ranks_of, owned


class Case(NamedTuple):
    """A training: keys of model, plan and train, the data, and the workload that routes it."""

    model: dict[str, Any]
    plan: dict[str, Any]
    train: dict[str, Any]
    shape: Shape = Shape(global_batch=8, seq_len=12)
    workload: str = "W2"


class Trained(NamedTuple):
    """Results of a training. Every step: loss and norm; the end: logical weights (experts by id);
    each rank: tokens of the experts' ranks per step and layer, and the ledger; experts moved."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    counts: list[Tensor]
    rank_tokens: list[Tensor]
    ledgers: list[Any]
    num_moved: int


def routed(config: ModelConfig, batch: Batch, name: str, step: int) -> Batch:
    """`batch` with the experts that the workload chooses for its tokens in every layer."""
    length = batch.tokens_BS.shape[1]
    gids = (batch.sequences_B[:, None] * length + torch.arange(length)).flatten()
    experts = {
        layer: workload(
            name,
            seed=1 + layer,
            step=step,
            gids=gids,
            num_experts=config.num_experts,
            experts_per_token=config.experts_per_token,
            num_groups=4,
        )
        for layer in config.routed_layers
    }
    return replace(batch, experts=experts)


def train_on_rank(mesh: Mesh, case: Case) -> dict[str, Any]:
    """The steps of `case`; returns what this rank owns, by logical name."""
    with plain_loops():
        return _train(mesh, case)


def _train(mesh: Mesh, case: Case) -> dict[str, Any]:
    config, plan, train = ModelConfig(**case.model), Plan(**case.plan), TrainConfig(**case.train)
    parallel = build(mesh, config, plan, case.shape, train.dtype, seed=train.seed)
    optimizer = Optimizer.of(parallel, train)
    mover = ExpertMigration(parallel, optimizer, train.rebalance_every, lambda text, kind: None)
    steps, rank_tokens, counts, num_moved = [], [], [], 0
    for step in range(1, train.steps + 1):
        batches = [
            batch if case.workload == "own" else routed(config, batch, case.workload, step)
            for batch in microbatches(config, plan, case.shape, step, mesh)
        ]
        result = gradients_of_step(parallel, batches, TimelineRecorder(mesh.rank))
        update(parallel, optimizer, result, lr=train.learning_rate(step), clip=train.clip)
        steps.append((result.loss, result.grad_norm))
        rank_LP = result.rank_LP
        if rank_LP is None:
            layers, homes = config.routed_layers, parallel.homes
            rank_LP = home_tokens(result.counts_LE, layers, homes, plan.ep)
        rank_tokens.append(rank_LP)
        counts.append(result.counts_LE)
        num_moved += mover.update(step, result.counts_LE)
    return {
        "steps": steps,
        "weights": owned(parallel, parallel.reducer.weights),
        "rank_tokens": rank_tokens,
        "counts": counts,
        "ledger": mesh.ledger,
        "num_moved": num_moved,
    }


def train(case: Case) -> Trained:
    """Train on the ranks of the plan (in this process for one)."""
    ranks = on_ranks_of(ModelConfig(**case.model), Plan(**case.plan), train_on_rank, case)
    return Trained(
        losses=[loss for loss, _ in ranks[0]["steps"]],
        norms=[norm for _, norm in ranks[0]["steps"]],
        weights=assemble([rank["weights"] for rank in ranks]),
        counts=ranks[0]["counts"],
        rank_tokens=ranks[0]["rank_tokens"],
        ledgers=[rank["ledger"] for rank in ranks],
        num_moved=ranks[0]["num_moved"],
    )


def difference(got: Trained, expected: Trained) -> float:
    """The largest relative difference of losses, norms and weights (by a tensor's largest)."""
    pairs = [*zip(got.losses, expected.losses, strict=True)]
    pairs += [*zip(got.norms, expected.norms, strict=True)]
    ratios = [abs(a / b - 1) for a, b in pairs]
    assert set(got.weights) == set(expected.weights)
    for name, weight in expected.weights.items():
        ratios.append(float((got.weights[name] - weight).abs().max() / weight.abs().max()))
    return max(ratios)
