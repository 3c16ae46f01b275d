"""Train a few steps on one rank of any plan, and merge the ranks' shards."""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import add
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import pytest
import torch
from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.config.layout import shard_range
from moemesh.config.lora import LoraConfig, packed_bytes
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.config.tuning import Tuning
from moemesh.model import initialization
from moemesh.model.batch import Batch
from moemesh.parallel.parallelize import RankModel, parallelize
from moemesh.parallel.placement import part_of
from moemesh.schedule.plan_schedule import build_step
from moemesh.sharding.boxes import logical_parts
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.optimizer import Optimizer
from moemesh.train.records.artifacts import state_bytes
from moemesh.train.step import StepResult, gradients_of_step, update
from tests.ranks import mesh_on_ranks
from tests.twins.predictions import assert_predicted, recorded_choices


class Shape(NamedTuple):
    """The data of a parity run; lengths need not divide by anything."""

    global_batch: int = 5
    seq_len: int = 7
    padding: bool = False
    #: Documents packed in every sequence, of any length.
    packed: bool = False


WHOLE = Shape()
PADDED = Shape(padding=True)


def shape_of(words: str) -> Shape:
    """A shape in words: ``3x13 padded packed`` are 3 sequences of 13 tokens; 5x7 by default."""
    sizes = [int(size) for size in words.split()[0].split("x")] if "x" in words else [5, 7]
    return Shape(*sizes, padding="padded" in words, packed="packed" in words)


def keys_of(words: str) -> dict[str, Any]:
    """The keys of a section in words: ``dp=2 schedule=zb_h1 layers_per_stage=(7,1)``."""
    values: dict[str, Any] = {}
    for word in words.split():
        key, _, value = word.partition("=")
        try:
            values[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            values[key] = value
    return values


def lines(table: str) -> Iterator[tuple[str, list[str], str]]:
    """Model, plans and data of each line of a table ``model | plan | data``; the plan with values
    like ``context=ring/all_gather`` is several. Lines that begin with # are comments."""
    for line in filter(None, (line.partition("#")[0].strip() for line in table.splitlines())):
        model, plan, data, *_ = (" ".join(cell.split()) for cell in (line + "||").split("|"))
        words = [
            [f"{key}={value}" for value in values.split("/")]
            for key, _, values in (word.partition("=") for word in plan.split())
        ]
        yield model, [" ".join(choice) for choice in itertools.product(*words)], data


def rows(table: str, models: Iterable[str] = ()) -> list[Any]:
    """Cases (model, keys of the plan, shape) of a table: see `lines`, `keys_of` and `shape_of`.

    Several models make a case each; ``...`` are all other `models`. A model with a star runs by
    default, the others are slow. The first of two equal cases counts.
    """
    cases: dict[str, Any] = {}
    for names, plans, data in lines(table):
        given = names.replace("*", "").split()
        others = [name for name in models if name not in given] if "..." in given else []
        for name in [*names.replace("...", "").split(), *others]:
            for plan in plans:
                text = f"{name.strip('*')} | {plan} | {data}".strip(" |")
                marks = () if name.startswith("*") else (pytest.mark.slow,)
                values = name.strip("*"), keys_of(plan), shape_of(data)
                cases.setdefault(text, pytest.param(*values, id=text, marks=marks))
    return list(cases.values())


class Trained(NamedTuple):
    """Loss, aux loss, norm, loads of every step; logical gradients and weights of the last one."""

    losses: list[float]
    aux: list[float]
    norms: list[float]
    loads: list[list[list[int]]]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    biases: list[Tensor]
    #: Losses of extra prediction layers; None where there are none.
    mtp: list[float | None]
    #: Weights that do not train, before and after.
    frozen: list[dict[str, Tensor]]


def microbatches(
    config: ModelConfig, plan: Plan, shape: Shape, step: int, mesh: Mesh
) -> list[Batch]:
    """The sequences of one data-parallel rank in one step, cut into the plan's microbatches."""
    dp = mesh["dp"].index
    generator = torch.Generator().manual_seed(1000 + step)
    size = (shape.global_batch, shape.seq_len + 1)
    tokens = torch.randint(config.vocab_size, size, generator=generator)
    valid = torch.rand(shape.global_batch, shape.seq_len, generator=generator) < 0.7
    begins = torch.rand(shape.global_batch, shape.seq_len, generator=generator) < 0.3
    own = shard_range(shape.global_batch, plan.dp, dp)
    batches = []
    for index in range(plan.microbatches):
        part = shard_range(len(own), plan.microbatches, index)
        rows = slice(own.start + part.start, own.start + part.stop)
        batches.append(
            Batch(
                tokens_BS=tokens[rows, :-1],
                targets_BS=tokens[rows, 1:],
                sequences_B=torch.arange(shape.global_batch)[rows],
                valid_BS=valid[rows] if shape.padding else None,
                documents_BS=begins[rows].cumsum(1) if shape.packed else None,
            ).to(mesh.device)
        )
    return batches


def model_of(keys: Mapping[str, Any]) -> ModelConfig:
    """The model of these keys; those of `lora` are of its adapters."""
    own = {key: value for key, value in keys.items() if key != "lora"}
    return ModelConfig(**own).with_lora(LoraConfig(**keys.get("lora", {})))


def build(
    mesh: Mesh, config: ModelConfig, plan: Plan, shape: Shape, dtype: str, **more: Any
) -> RankModel:
    """The part of a rank, for steps of `shape`; `more`: what else `parallelize` takes."""
    tokens = plan.tokens_per_rank(shape.seq_len, shape.global_batch)
    options: dict[str, Any] = {"seed": 0, "tokens_per_rank": tokens} | more
    return parallelize(config, plan, mesh, dtype=getattr(torch, dtype), **options)


def gradients(parallel: RankModel, plan: Plan, shape: Shape, step: int = 1) -> StepResult:
    """Compute the gradients of one step, which the reducer holds then."""
    batches = microbatches(parallel.model.config, plan, shape, step, parallel.mesh)
    return gradients_of_step(parallel, batches, TimelineRecorder(parallel.mesh.rank))


def on_ranks_of(
    config: ModelConfig, plan: Plan, function: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """``function(mesh, *arguments)`` of every rank of a plan that fits; one rank is this process.
    Where it returns "steps", they are the same on all ranks."""
    assert plan.check(config) == []
    if plan.world_size == 1:
        return [function(Mesh.single("cpu"), *arguments)]
    ranks = mesh_on_ranks(plan.layout, function, *arguments)
    for rank in ranks if isinstance(ranks[0], dict) else ():
        same = str(rank.get("steps")) == str(ranks[0].get("steps"))  # two NaN are the same here
        assert same, "ranks report different numbers"
    return ranks


def shared_biases(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Buffers of the routers by name, of whatever ranks hold them: all copies are equal."""
    biases: dict[str, Tensor] = {}
    for rank in ranks:
        for name, bias in rank["biases"].items():
            assert torch.equal(biases.setdefault(name, bias), bias), f"ranks differ in {name}"
    return biases


def train_on_rank(
    mesh: Mesh,
    model_keys: dict[str, Any],
    plan_keys: dict[str, Any],
    train_keys: dict[str, Any],
    shape: Shape,
) -> dict[str, Any]:
    """A few steps; returns what this rank owns, with its place in the logical tensors."""
    config, plan = model_of(model_keys), Plan(**plan_keys)
    train = TrainConfig(**train_keys)
    options = {
        "seed": train.seed,
        "schedule": build_step(plan, config, shape.seq_len),
        "tuning": Tuning(freeze=train.freeze, train_only=train.train_only),
    }
    # Adapters that are zero at first would have no gradient in half of their parameters.
    with mock.patch.object(initialization, "starts_at_zero", lambda name: name.endswith("bias")):
        parallel = build(mesh, config, plan, shape, train.dtype, **options)
    optimizer = Optimizer.of(parallel, train)
    frozen = owned(parallel, parallel.reducer.frozen_weights)
    steps = []
    for step in range(1, train.steps + 1):
        # The last step is measured.
        ledger = mesh.ledger.paused() if step < train.steps else contextlib.nullcontext()
        with ledger, recorded_choices() as choices:
            result = gradients(parallel, plan, shape, step)
            last = owned(parallel, parallel.reducer.gradients)
            update(parallel, optimizer, result, lr=train.learning_rate(step), clip=train.clip)
        steps.append(
            (
                result.loss,
                result.aux_loss,
                result.grad_norm,
                result.counts_LE.tolist(),
                result.mtp_loss,
            )
        )
    memory = state_bytes(parallel, optimizer)
    if plan.combine == "exact":
        # Of several microbatches the order of gradients, and what waits, is autograd's choice.
        del memory["buffers"]
    return {
        "steps": steps,
        "gradients": last,
        "weights": owned(parallel, parallel.reducer.held_weights),
        "frozen": [frozen, owned(parallel, parallel.reducer.frozen_weights)],
        "biases": {name: buffer.clone() for name, buffer in parallel.model.named_buffers()},
        "ledger": mesh.ledger,
        "choices": choices,
        "memory": memory,
    }


#: (name, logical shape, slices, tensor) of a part of a logical tensor.
Part: TypeAlias = tuple[str, tuple[int, ...], tuple[range, ...], Tensor]


def owned(parallel: RankModel, tensors: Mapping[str, Tensor]) -> list[Part]:
    """Parts of `tensors`, states of parameters by name, that this rank owns and counts. Experts are
    parts of the whole stack, in the place of their logical id."""
    parts: list[Part] = []
    mesh, num_experts = parallel.mesh, parallel.model.config.num_experts
    for name, own in parallel.reducer.held.items():
        where = parallel.placements[name]
        if where.is_packed:  # compared byte by byte
            where = replace(where, shape=(*where.shape[:-1], packed_bytes(where.shape[-1])))
        if name not in tensors or not where.counts(own, mesh):
            continue
        experts = where.experts(mesh) if where.is_expert else None
        shape = where.shape[1:] if where.is_expert else where.shape
        boxes = where.parts_of_expert(mesh) if where.is_expert else [where.slices(mesh)]
        for part, numbers in logical_parts(name, shape, boxes, own.numbers, experts):
            tensor = part_of(tensors[name].detach(), own, numbers).view(part.sizes).clone()
            box = tuple(map(range, part.offset, map(add, part.offset, part.sizes)))
            if where.is_expert:
                module, expert, leaf = part.name.rsplit(".", 2)
                first = range(int(expert), int(expert) + 1)
                stack = f"{module}.{leaf}", (num_experts, *shape)
                parts.append((*stack, (first, *box), tensor[None]))
            else:
                parts.append((part.name, shape, box, tensor))
    return parts


def assemble(parts: list[list[Part]], some: bool = False) -> dict[str, Tensor]:
    """Logical tensors from the ranks' shards; every element must be owned exactly once. `some`: or
    never, where some experts of a stack train; those are zeros."""
    whole: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for part in parts:
        for name, shape, slices, tensor in part:
            index = tuple(slice(piece.start, piece.stop) for piece in slices)
            whole.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))[index] = tensor
            times.setdefault(name, torch.zeros(shape, dtype=torch.int64))[index] += 1
    for name, count in times.items():
        legal = count <= 1 if some else count == 1
        assert bool(legal.all()), f"{name}: elements owned {count.unique().tolist()} times"
    return whole


def train(
    model: dict[str, Any],
    plan: dict[str, Any],
    train: dict[str, Any],
    shape: Shape = WHOLE,
    *,
    on_rank: Callable[..., dict[str, Any]] = train_on_rank,
    predicts: bool = True,
) -> Trained:
    """Train on the gloo ranks of `plan` (in this process for one rank).

    `on_rank`: :func:`train_on_rank` or what changes it; `predicts`: the planner has predicted
    traffic and model states of every rank, to the byte.
    """
    config, checked, keys = model_of(model), Plan(**plan), TrainConfig(**train)
    ranks = on_ranks_of(config, checked, on_rank, model, plan, train, shape)
    if predicts:
        batch, seq_len, *_ = shape
        tuning = Tuning(freeze=keys.freeze, train_only=keys.train_only)
        sizes = {"batch": batch, "seq_len": seq_len}
        assert_predicted(config, checked, ranks, keys, **sizes, activations=False, tuning=tuning)
    biases = shared_biases(ranks)
    losses, aux, norms, loads, mtp = zip(*ranks[0]["steps"], strict=True)
    return Trained(
        losses=list(losses),
        aux=list(aux),
        norms=list(norms),
        loads=list(loads),
        gradients=assemble([rank["gradients"] for rank in ranks], some=True),
        weights=assemble([rank["weights"] for rank in ranks]),
        biases=[biases[name] for name in sorted(biases)],
        mtp=list(mtp),
        frozen=[assemble([rank["frozen"][i] for rank in ranks], some=True) for i in range(2)],
    )


_ALONE: dict[str, Trained] = {}


def alone(
    model: dict[str, Any], keys: dict[str, Any], shape: Shape = WHOLE, microbatches: int = 1
) -> Trained:
    """The same on one device, trained once for all that is compared with it."""
    name = repr((sorted(model.items()), sorted(keys.items()), shape, microbatches))
    if name not in _ALONE:
        _ALONE[name] = train(model, {"microbatches": microbatches}, keys, shape)
    return _ALONE[name]


def assert_same(got: Trained, expected: Trained, tolerance: float = 1e-10) -> None:
    fields = ("losses", "aux", "norms", *(["mtp"] if expected.mtp[0] is not None else []))
    for field in fields:
        ours, theirs = (torch.tensor(getattr(t, field)).double() for t in (got, expected))
        torch.testing.assert_close(
            ours, theirs, rtol=tolerance, atol=0, msg=f"{field} {ours} {theirs}"
        )
    assert got.loads == expected.loads
    for field in ("gradients", "weights"):
        ours, theirs = getattr(got, field), getattr(expected, field)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            worst = float((ours[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-30))
            assert worst <= tolerance, f"{field} of {name}: relative difference {worst:.2e}"
    for ours, theirs in zip(got.biases, expected.biases, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


def assert_equals_one_device(
    model: dict[str, Any],
    plan: dict[str, Any],
    keys: dict[str, Any],
    shape: Shape,
) -> Trained:
    """A run under `plan`, as the run on one device, which is returned."""
    # Losses over more than a sequence depend on how a step is cut.
    is_cut = model.get("aux_loss_scope", "sequence") != "sequence"
    expected = alone(model, keys, shape, plan.get("microbatches", 1) if is_cut else 1)
    assert_same(train(model, plan, keys, shape), expected)
    return expected
