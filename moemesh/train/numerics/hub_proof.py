"""Proof of a layout before a run: a small model of the family, on one device and in the layout.

The modelling code of transformers is not ours, so its behaviour is tested: forward and backward of
a small instance run on one device by transformers alone and on all ranks of the plan, in float64.
A difference of losses or gradients above :data:`MOST` refuses the layout.

The small model is tuned as the run is: with adapters at the same projections, which the one device
adds to the weights, and with the same patterns of what trains. If a run trains some experts of a
layer, every second expert of the small model, which has fewer, trains. If the patterns match
nothing in the small model, because they name other layers, all of it trains.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from moemesh.checkpoint.huggingface.derived import delta_of
from moemesh.checkpoint.load import Shard
from moemesh.comm.collectives import gather_json
from moemesh.comm.mesh import Mesh
from moemesh.config.errors import UserError
from moemesh.config.huggingface.architecture import hub_model
from moemesh.config.layout import shard_range
from moemesh.config.lora import is_adapter
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.run import RunConfig
from moemesh.config.train import TrainConfig
from moemesh.config.trainable import trains_some_experts
from moemesh.config.tuning import FULL
from moemesh.model.batch import Batch
from moemesh.parallel.parallelize import parallelize
from moemesh.sharding.parameters import tensors
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.optimizer import Optimizer
from moemesh.train.owned import owned_shards
from moemesh.train.step import gradients_of_step
from moemesh.train.weights import saving

#: Largest accepted difference of a loss or a gradient.
MOST = 1e-9
#: Largest number of experts of the small model (unless ep is larger), and its sequence length.
_EXPERTS, _LENGTH = 8, 16
#: Largest rank of its adapters.
_RANK = 2
#: Seconds of a proof above which a note mentions it.
_MOST_SECONDS = 10.0


class ProofError(UserError):
    """The results in the layout differ from those of one device, or cannot be computed."""


class _Weights:
    """A :class:`~moemesh.train.weights.saving.WeightSource` of tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def load_into(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            inner = replace(shard, name=shard.name.removeprefix("model."))
            shard.tensor.copy_(_part(self.tensors, inner))


def _part(tensors: Mapping[str, Tensor], shard: Shard) -> Tensor:
    """The elements of a shard from tensors by name. The shard of an expert, ``STACK.7.LEAF``, is in
    row 7 of the tensor ``STACK.LEAF``."""
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
    with mesh.ledger.paused():
        alone, problem = None, None
        try:
            alone = _alone(config, plan, mesh)
        except Exception as error:  # transformers' classes may raise anything
            problem = f"{type(error).__name__}: {error}"
        # If a rank has failed, all raise, before the first collective of the layout.
        for rank, other in enumerate(gather_json(problem, mesh.control)):
            if other is not None:
                raise ProofError(
                    f"{config.model.architecture.model_type}: no small model of the family can be "
                    f"made to prove this layout with (rank {rank}: {other}): train it in one "
                    "process, or take another version of transformers"
                )
        assert alone is not None
        worst, name = _difference(alone, config, plan, mesh)
    of_ranks = [tuple(pair) for pair in gather_json([worst, name], mesh.control)]
    worst, name = max(of_ranks, key=_order)
    if not worst <= MOST:
        raise ProofError(
            f"{config.model.architecture.model_type}: {name} of a small model differs by "
            f"{worst:.1e} between one device and this layout (at most {MOST:.0e}): it cannot be "
            "trained with this plan; take dp alone, or another version of transformers"
        )
    seconds = time.perf_counter() - start
    is_slow = seconds > _MOST_SECONDS
    return f"the proof of the layout on a small model took {seconds:.0f} s" if is_slow else ""


class _Alone(NamedTuple):
    """A small model on one device: its configuration, its tokens [B, S + 1], its loss, and its
    weights and gradients by name, those of adapters included."""

    model: ModelConfig
    tokens: Tensor
    loss: float
    weights: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


def _alone(config: RunConfig, plan: Plan, mesh: Mesh) -> _Alone:
    """Forward and backward of a small model by transformers alone, with the deltas of adapters
    added to its weights."""
    architecture = config.model.architecture
    assert architecture is not None
    # Late: transformers takes seconds to import.
    from moemesh.model.hub.architecture import read
    from moemesh.model.hub.build import initialize
    from moemesh.model.hub.precision import exactly
    from moemesh.model.hub.shrink import shrunken

    experts = plan.ep * max(1, _EXPERTS // plan.ep)
    small = shrunken(architecture.values, experts, layers=plan.num_stages)
    net: Any = small.build()
    initialize(net, seed=0)
    net = net.to(mesh.device)
    sequences = plan.dp * plan.microbatches
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 100, (sequences, _LENGTH + 1), generator=generator).to(mesh.device)
    description = read(small.config.to_dict(), documents=architecture.documents)
    changed = {"rank": min(config.lora.rank, _RANK), "base": "same"}
    lora = config.lora.model_copy(update=changed)
    model = hub_model(description).model_copy(update={"aux_loss_coefficient": 0.0}).with_lora(lora)
    assert model.architecture is not None
    factors: dict[str, Tensor] = {}
    merged: dict[str, Tensor] = {}
    for record in model.architecture.parameters:
        if is_adapter(record.name):
            factor = torch.randn(record.shape, generator=generator, dtype=torch.float64)
            factors[record.name] = (0.1 * factor).to(mesh.device).requires_grad_()
    for record in model.architecture.parameters:
        if record.adapted(lora):
            delta = delta_of(record, lora, lambda name, _: factors[name])
            merged[record.name] = net.get_parameter(record.name) + lora.scaling * delta
    with exactly(torch.float64):
        inputs = {"input_ids": tokens[:, :-1], "use_cache": False}
        logits = functional_call(net, merged, kwargs=inputs).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    gradients = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in (*net.named_parameters(), *factors.items())
    }
    weights = {**net.state_dict(), **{name: factor.detach() for name, factor in factors.items()}}
    return _Alone(model, tokens, loss.item(), weights, gradients)


def _difference(alone: _Alone, config: RunConfig, plan: Plan, mesh: Mesh) -> tuple[float, str]:
    """The largest difference on this rank between the layout and one device, and what differs."""
    # The parameters of the small model that train: all of them if no named one is in it.
    model, tuning = alone.model, replace(config.tuning, experts=())
    if trains_some_experts(config):
        every_second = tuple(range(0, model.num_experts, 2))
        chosen = tuple((layer, every_second) for layer in model.routed_layers)
        tuning = replace(tuning, experts=chosen)
    if not any(tensor.trained_rows(tuning) for tensor in tensors(model, config.plan)):
        tuning = FULL
    parallel = parallelize(
        model,
        plan,
        mesh,
        seed=0,
        dtype=torch.float64,
        tokens_per_rank=plan.tokens_per_rank(_LENGTH, len(alone.tokens)),
        tuning=tuning,
    )
    optimizer = Optimizer.of(parallel, TrainConfig(optimizer="sgd"))
    saving.load_weights(_Weights(alone.weights), parallel, optimizer)
    tokens = alone.tokens
    batches = [
        Batch(
            tokens_BS=tokens[row : row + 1, :-1],
            targets_BS=tokens[row : row + 1, 1:],
            sequences_B=torch.tensor([row], device=tokens.device),
        )
        for row in shard_range(len(tokens), plan.dp, mesh["dp"].index)
    ]
    result = gradients_of_step(parallel, batches, TimelineRecorder(mesh.rank), refuses=False)
    differences = [(abs(result.loss - alone.loss), "the loss")]
    for shard in owned_shards(parallel, parallel.reducer.gradients):
        difference = (shard.tensor - _part(alone.gradients, shard)).abs().max().item()
        differences.append((difference, f"the gradient of {shard.name}"))
    return max(differences, key=_order)


def _order(pair: tuple[float, str]) -> tuple[bool, float]:
    """Sort key of a difference and its name; NaN is above :data:`MOST`."""
    return not pair[0] <= MOST, pair[0]
