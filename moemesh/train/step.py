"""One training step: forward and backward of each microbatch, sums, norm, update.

The objective is divided by global counts before the backward, so that every reduction is a plain
sum and no factor depends on the layout:

    J = (1/N) sum of token losses  +  (1/scopes) sum of auxiliary losses

A scope (``model.aux_loss_scope``) is a sequence, a microbatch of a data-parallel rank, or a
microbatch of all ranks; one without a valid token is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moemesh.comm.collectives import all_reduce_
from moemesh.model.batch import Batch
from moemesh.model.faults import NO_FAULT
from moemesh.parallel.norm import clip_gradients, gradient_norm
from moemesh.parallel.parallelize import ParallelModel
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.optimizer import Optimizer
from moemesh.train.routing_faults import refuse_bad_logits, refuse_replayed


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Of the whole step, the same on every rank. ``loss``: mean negative log-likelihood in nats;
    ``aux_loss``: mean over scopes, coefficients included; per MoE layer (int64) ``counts_LE``:
    tokens of each expert, ``dropped_L``: choices for which an expert had no room; ``skipped``: a
    gradient was not finite, so no rank updated."""

    loss: float
    aux_loss: float
    grad_norm: float
    num_tokens: int
    counts_LE: Tensor
    dropped_L: Tensor
    skipped: bool


def token_losses(losses_T: Tensor, batch: Batch) -> Tensor:
    """Sum of the losses of tokens that carry loss."""
    mask_T = batch.loss_mask_T()
    return losses_T.sum() if mask_T is None else losses_T.masked_fill(~mask_T, 0.0).sum()


def count_over_step(parallel: ParallelModel, microbatches: Sequence[Batch]) -> tuple[int, int]:
    """Loss-bearing tokens and auxiliary scopes of the step, over all replicas and microbatches."""
    scope = parallel.model.config.aux_loss_scope
    scopes = [batch.num_routed_sequences() for batch in microbatches]
    if scope == "sequence":
        scopes = [sum(scopes)]
    elif scope == "microbatch":
        scopes = [sum(map(bool, scopes))]
    counts = torch.tensor(
        [sum(batch.num_loss_tokens() for batch in microbatches), *scopes],
        device=parallel.mesh.device,
    )
    all_reduce_(counts, parallel.mesh["dp_cp"], caller="step.counts", phase="forward")
    num_tokens, *scopes = counts.tolist()
    # A global scope exists when any rank has a token in that microbatch.
    return num_tokens, sum(scopes) if scope != "global" else sum(map(bool, scopes))


def gradients_of_step(
    parallel: ParallelModel, microbatches: Sequence[Batch], recorder: TimelineRecorder
) -> StepResult:
    """Run every microbatch and sum the gradients; they stay in ``parallel.reducer``."""
    model, reducer, mesh = parallel.model, parallel.reducer, parallel.mesh
    refuse_replayed(parallel, microbatches)
    num_tokens, num_scopes = count_over_step(parallel, microbatches)
    # Tensor-parallel ranks compute the same token losses: only the first reports them.
    reports = mesh["tp"].index == 0
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    num_layers = len(model.moe_layers())
    counts_LE = torch.zeros(
        num_layers, model.config.num_experts, dtype=torch.int64, device=mesh.device
    )
    dropped_L = torch.zeros(num_layers, dtype=torch.int64, device=mesh.device)
    fault_L = torch.full_like(dropped_L, NO_FAULT)
    reducer.begin()
    for index, batch in enumerate(microbatches):
        with recorder.span("forward", microbatch=index):
            output = model(batch)
            loss = token_losses(output.losses_T, batch)
            objective = loss / max(num_tokens, 1) + output.aux / max(num_scopes, 1)
        sums[0] += loss.detach() if reports else 0.0
        sums[1] += output.aux.detach()
        counts_LE += output.counts_LE
        dropped_L += output.dropped_L
        fault_L = torch.minimum(fault_L, output.fault_L)
        if index == len(microbatches) - 1:
            reducer.arm()
        with recorder.span("backward", microbatch=index):
            objective.backward()
    with recorder.span("reduce"):
        reducer.finish()
        all_reduce_(sums, mesh["stage"], caller="step.losses", phase="optimizer")
        if counts_LE.numel():
            all_reduce_(counts_LE, mesh["stage"], caller="step.loads", phase="optimizer")
        if model.config.capacity_factor:
            all_reduce_(dropped_L, mesh["stage"], caller="step.dropped", phase="optimizer")
        norm = gradient_norm(reducer.gradients, parallel.placements, mesh)
    if not norm.is_finite:
        refuse_bad_logits(parallel, fault_L, microbatches[0].tokens_BS.shape[1])
    loss_sum, aux_sum = sums.tolist()
    return StepResult(
        loss=loss_sum / max(num_tokens, 1),
        aux_loss=aux_sum / max(num_scopes, 1),
        grad_norm=norm.value,
        num_tokens=num_tokens,
        counts_LE=counts_LE.cpu(),
        dropped_L=dropped_L.cpu(),
        skipped=not norm.is_finite,
    )


def update(
    parallel: ParallelModel, optimizer: Optimizer, result: StepResult, *, lr: float, clip: float
) -> None:
    """Clip, step the optimizer, move the routers' biases; nothing when the step is skipped.

    Decided from reduced values, so by all ranks together.
    """
    if result.skipped:
        return
    clip_gradients(parallel.reducer.gradients, result.grad_norm, clip)
    optimizer.step(parallel.reducer.gradients, lr)
    for counts_E, moe in zip(result.counts_LE, parallel.model.moe_layers().values(), strict=True):
        if moe.router.selection_bias is not None:
            moe.router.update_selection_bias(counts_E.to(parallel.mesh.device))


@torch.no_grad()
def evaluate(parallel: ParallelModel, batches: Sequence[Batch]) -> float:
    """Mean negative log-likelihood (nats per token) of `batches`, without gradients."""
    sums = torch.zeros(2, dtype=torch.float64, device=parallel.mesh.device)
    with parallel.mesh.ledger.scope("evaluate"):
        for batch in batches:
            losses_T = parallel.model(replace(batch, training=False)).losses_T
            sums[0] += token_losses(losses_T, batch)
            sums[1] += batch.num_loss_tokens()
        all_reduce_(sums, parallel.mesh["dp_cp"], caller="evaluate", phase="forward")
    total, count = sums.tolist()
    return total / max(count, 1)
