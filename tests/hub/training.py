"""Steps of a model of transformers in a layout, and the same steps by a plain loop over it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.config.architecture import Architecture
from moemesh.config.huggingface.architecture import hub_values, read_architecture
from moemesh.config.lora import NO_ADAPTERS, LoraConfig
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.config.tuning import FULL, Tuning
from moemesh.model.batch import Batch
from moemesh.model.hub.build import allocate, blueprint
from moemesh.model.hub.precision import exactly
from moemesh.parallel.parallelize import parallelize
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.numerics.hub_proof import _Weights
from moemesh.train.opening import own_rows
from moemesh.train.optimizer import Optimizer
from moemesh.train.owned import owned_shards
from moemesh.train.step import gradients_of_step, update
from moemesh.train.weights.saving import _weights, load_base, load_weights
from tests.hub.families import random_model, tiny_config
from tests.ranks import mesh_on_ranks

STEPS, SEQUENCES, LENGTH, CLIP = 3, 8, 20, 1.0


class Trained(NamedTuple):
    """Losses and norms of the steps, and the weights after the last step, by name."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def values_of(name: str) -> dict[str, Any]:
    """The ``config.json`` of the tiny model of a family."""
    values = tiny_config(name).to_dict()
    return {key: value for key, value in values.items() if key != "transformers_version"}


@cache
def architecture_of(name: str) -> Architecture:
    """The architecture of the tiny model of a family, from the cache of the session."""
    return read_architecture(values_of(name))


def model_of(architecture: Architecture, **changes: Any) -> ModelConfig:
    values = {**hub_values(architecture), **changes}
    layers = values.get("moe_layers")
    values |= {} if layers is None else {"moe_layers": tuple(layers)}
    return ModelConfig(**values).with_architecture(architecture)


def tokens_of(step: int, vocab_size: int) -> Tensor:
    """Tokens [B, S + 1] of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1, min(vocab_size, 250), (SEQUENCES, LENGTH + 1), generator=generator)


def train_config() -> TrainConfig:
    plain = {"optimizer": "sgd", "weight_decay": 0.0, "dtype": "float64"}
    return TrainConfig(steps=STEPS, lr=0.05, warmup_steps=1, clip=CLIP, **plain)


def plain_model(name: str) -> Any:
    """The model of transformers, in float64."""
    net, theirs = blueprint(values_of(name)).build(torch.float64), random_model(name)
    allocate(net, dtype=torch.float64)
    net.load_state_dict(theirs.state_dict(), strict=False)
    for key, buffer in theirs.named_buffers():  # some are computed and not stored
        torch.testing.assert_close(net.get_buffer(key).double(), buffer.double(), rtol=0, atol=1e-4)
    return net


def plain(name: str, *, num_parts: int = 1, tuning: Tuning = FULL) -> Trained:
    """The steps by transformers and torch alone, in float64."""
    net = plain_model(name)
    records = {one.name: one for one in architecture_of(name).parameters}
    masks: dict[Any, Tensor] = {}
    for key, parameter in net.named_parameters():
        experts = len(parameter) if records[key].is_expert else 0
        rows = tuning.rows(key, experts)
        masks[parameter] = torch.zeros_like(parameter)
        masks[parameter][list(rows) if experts else slice(None)] = float(bool(rows))
    return steps(net, net.parameters(), masks, num_parts=num_parts)


def steps(
    net: Any, chosen: Iterable[Any], masks: Mapping[Any, Tensor], *, num_parts: int = 1
) -> Trained:
    """Steps of gradient descent on the parameters `chosen`, in the numbers where `masks` are 1."""
    train, losses, norms = train_config(), list[float](), list[float]()
    parameters = list(chosen)
    for step in range(1, STEPS + 1):
        tokens = tokens_of(step, net.config.get_text_config().vocab_size)
        total = 0.0
        for part in tokens.chunk(num_parts):
            with exactly(torch.float64):
                logits = net(input_ids=part[:, :-1], use_cache=False).logits
                loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
                loss = loss / tokens[:, 1:].numel()
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        for parameter in parameters:
            if parameter.grad is not None and parameter in masks:
                parameter.grad *= masks[parameter]
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, CLIP)))
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter -= train.learning_rate(step) * parameter.grad
                parameter.grad = None
    return Trained(losses, norms, {n: p.detach() for n, p in net.named_parameters()})


def on_rank(
    mesh: Mesh,
    model: ModelConfig,
    keys: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    tuning: Tuning = FULL,
) -> tuple[list[float], list[float], list[Any]]:
    """The steps of one rank; returns what it owns of each parameter, each expert by itself."""
    torch.set_num_threads(1)
    plan, train = Plan(**keys), train_config()
    parallel = parallelize(
        model,
        plan,
        mesh,
        seed=0,
        dtype=torch.float64,
        tokens_per_rank=plan.tokens_per_rank(LENGTH, SEQUENCES),
        tuning=tuning,
    )
    optimizer = Optimizer.of(parallel, train)
    load_weights(_Weights(weights), parallel, optimizer)
    if model.lora.is_packed:
        load_base(_Weights(weights), parallel)
    losses, norms = list[float](), list[float]()
    for step in range(1, STEPS + 1):
        batches = batches_of(mesh, model, plan, step)
        result = gradients_of_step(parallel, batches, TimelineRecorder(mesh.rank))
        update(parallel, optimizer, result, lr=train.learning_rate(step), clip=train.clip)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    shards = owned_shards(parallel, _weights(parallel, optimizer), ".", saved=True)
    return losses, norms, [(s.name[1:], s.offset, s.tensor.detach().clone()) for s in shards]


def batches_of(mesh: Mesh, model: ModelConfig, plan: Plan, step: int) -> list[Batch]:
    tokens = tokens_of(step, model.vocab_size)
    return [
        Batch(
            tokens_BS=tokens[rows, :-1],
            targets_BS=tokens[rows, 1:],
            sequences_B=torch.arange(rows.start, rows.stop),
            seed=0,
            step=step,
        )
        for rows in own_rows(SEQUENCES, mesh, plan.microbatches)
    ]


def split(
    name: str,
    *,
    tuning: Tuning = FULL,
    lora: LoraConfig = NO_ADAPTERS,
    factors: Mapping[str, Tensor] | None = None,
    changed: Callable[[str, Tensor], Tensor] = lambda name, weight: weight,
    **keys: Any,
) -> Trained:
    """The steps in the layout `keys`, by this library; `factors`: adapters at first, by name;
    `changed`: (name, weight) -> another weight to start from."""
    model = model_of(architecture_of(name)).with_lora(lora)
    architecture = model.architecture
    assert architecture is not None
    random = random_model(name)
    weights = {key: changed(key, value.double()) for key, value in random.state_dict().items()}
    weights |= factors or {}
    for record in architecture.parameters:  # experts by themselves, as checkpoints have them
        if record.is_expert:
            module, _, leaf = record.name.rpartition(".")
            for expert, row in enumerate(weights[record.name]):
                weights[f"{module}.{expert}.{leaf}"] = row
    plan = Plan(**keys)
    given = model, keys, weights, tuning
    if plan.world_size == 1:
        ranks = [on_rank(Mesh.single("cpu"), *given)]
    else:
        ranks = mesh_on_ranks(plan.layout, on_rank, *given)
    losses, norms, _ = ranks[0]
    numbers = {"fill_value": math.nan, "dtype": torch.float64}
    tensors = {x.name: torch.full(x.shape, **numbers) for x in architecture.parameters}
    for _, _, shards in ranks:
        for key, offset, tensor in shards:
            module, _, leaf = key.rpartition(".")
            stack, _, row = module.rpartition(".")
            target = tensors[key] if key in tensors else tensors[f"{stack}.{leaf}"][int(row)]
            for dim, (start, size) in enumerate(zip(offset, tensor.shape, strict=True)):
                target = target.narrow(dim, start, size)
            target.copy_(tensor)
    return Trained(losses, norms, tensors)


def difference(one: Trained, other: Trained) -> float:
    """The largest difference of a loss, a norm or a weight; NaN counts as infinite."""
    pairs = [*zip(one.losses, other.losses, strict=True), *zip(one.norms, other.norms, strict=True)]
    numbers = [abs(a - b) for a, b in pairs]
    numbers += [float((w - other.weights[name]).abs().max()) for name, w in one.weights.items()]
    return max(math.inf if math.isnan(number) else number for number in numbers)
