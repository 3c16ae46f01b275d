"""Proof of a layout before a run: a small model of the family, on one device and in the layout.

The modelling code of transformers is not ours, so its behaviour is tested: forward and backward of
a small instance run on one device by transformers alone and on all ranks of the plan, in float64.
A difference of losses or gradients above :data:`MOST` is a refusal.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.checkpoint.load import Shard
from moemesh.comm.collectives import gather_json
from moemesh.comm.mesh import Mesh
from moemesh.config.architecture import Architecture
from moemesh.config.errors import UserError
from moemesh.config.huggingface.architecture import hub_model
from moemesh.config.layout import shard_range
from moemesh.config.plan import Plan
from moemesh.config.run import RunConfig
from moemesh.config.train import TrainConfig
from moemesh.model.batch import Batch
from moemesh.parallel.parallelize import parallelize
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.optimizer import Optimizer
from moemesh.train.step import gradients_of_step
from moemesh.train.weights import saving
from moemesh.train.weights.owned import owned_shards

#: Largest accepted difference of a loss or a gradient.
MOST = 1e-9
#: Largest number of experts of the small model, and its number of positions.
_EXPERTS, _LENGTH = 8, 16
#: Seconds up to which a proof is not mentioned.
_MOST_SECONDS = 10.0


class ProofError(UserError):
    """The layout gives other results than one device."""


class _Weights:
    """A :class:`~moemesh.train.weights.saving.WeightSource` of tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def load_into(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            inner = replace(shard, name=shard.name.removeprefix("model."))
            shard.tensor.copy_(_part(self.tensors, inner))


def _part(tensors: Mapping[str, Tensor], shard: Shard) -> Tensor:
    """The elements of a shard; an expert has a name of its own, and is a row of a stack."""
    if shard.name in tensors:
        part = tensors[shard.name]
    else:
        module, _, leaf = shard.name.rpartition(".")
        stack, _, expert = module.rpartition(".")
        part = tensors[f"{stack}.{leaf}"][int(expert)]
    for dim, (start, size) in enumerate(zip(shard.offset, shard.tensor.shape, strict=True)):
        part = part.narrow(dim, start, size)
    return part


def prove(config: RunConfig, mesh: Mesh) -> str:
    """Raise ProofError on every rank unless the plan reproduces the family's results; all ranks
    call. Returns a note if the proof was slow, else ""."""
    start = time.perf_counter()
    assert config.model.architecture is not None
    plan = config.plan
    changes: dict[str, object] = {"layers_per_stage": None}  # the small model has fewer layers
    if plan.dispatcher == "auto":
        changes["dispatcher"] = "all_to_all"
    plan = plan.model_copy(update=changes)
    experts = plan.ep * max(1, _EXPERTS // plan.ep)
    with mesh.ledger.paused():
        worst, name = _difference(config.model.architecture, experts, plan, mesh)
    of_ranks = [tuple(pair) for pair in gather_json([worst, name], mesh.control)]
    worst, name = max(of_ranks, key=lambda pair: (not pair[0] <= MOST, pair[0]))
    if not worst <= MOST:
        raise ProofError(
            f"{config.model.architecture.model_type}: {name} of a small model differs by "
            f"{worst:.1e} between one device and this layout (at most {MOST:.0e}): it cannot be "
            "trained with this plan; take dp alone, or another version of transformers"
        )
    seconds = time.perf_counter() - start
    is_slow = seconds > _MOST_SECONDS
    return f"the proof of the layout on a small model took {seconds:.0f} s" if is_slow else ""


def _difference(
    architecture: Architecture, experts: int, plan: Plan, mesh: Mesh
) -> tuple[float, str]:
    """The largest difference on this rank, and its name."""
    # Late: transformers takes seconds to import.
    from moemesh.model.hub.architecture import read
    from moemesh.model.hub.build import initialize
    from moemesh.model.hub.precision import exactly
    from moemesh.model.hub.shrink import shrunken

    try:
        small = shrunken(architecture.values, experts, layers=plan.num_stages)
        net: Any = small.build()
    except Exception as error:  # of a configuration class, whatever it checks
        raise ProofError(
            f"{architecture.model_type}: no small model of the family can be made to prove this "
            f"layout with ({type(error).__name__}: {error}): train it in one process, or take "
            "another version of transformers"
        ) from error
    initialize(net, seed=0)
    net = net.to(mesh.device)
    sequences = plan.dp * plan.microbatches
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 100, (sequences, _LENGTH + 1), generator=generator).to(mesh.device)
    with exactly(torch.float64):
        logits = net(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    record = read(small.config.to_dict(), documents=architecture.documents)
    model = hub_model(record).model_copy(update={"aux_loss_coefficient": 0.0})
    parallel = parallelize(
        model,
        plan,
        mesh,
        seed=0,
        dtype=torch.float64,
        tokens_per_rank=plan.tokens_per_rank(_LENGTH, sequences),
    )
    optimizer = Optimizer.of(parallel, TrainConfig(optimizer="sgd"))
    saving.load_weights(_Weights(net.state_dict()), parallel, optimizer)
    result = gradients_of_step(
        parallel, _batches(tokens, plan, mesh), TimelineRecorder(mesh.rank), refuses=False
    )
    differences = [(abs(result.loss - loss.item()), "the loss")]
    gradients = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in net.named_parameters()
    }
    for shard in owned_shards(parallel, parallel.reducer.gradients):
        difference = (shard.tensor - _part(gradients, shard)).abs().max().item()
        differences.append((difference, f"the gradient of {shard.name}"))
    return max(differences, key=lambda pair: (not pair[0] <= MOST, pair[0]))


def _batches(tokens: Tensor, plan: Plan, mesh: Mesh) -> list[Batch]:
    mine = shard_range(len(tokens), plan.dp, mesh["dp"].index)
    return [
        Batch(
            tokens_BS=tokens[row : row + 1, :-1],
            targets_BS=tokens[row : row + 1, 1:],
            sequences_B=torch.tensor([row], device=tokens.device),
        )
        for row in mine
    ]
