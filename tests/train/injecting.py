"""Numbers that are not finite, put into a step at a chosen place of a chosen rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.model.batch import Batch, Context
from moemesh.parallel.parallelize import RankModel, parallelize
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.numerics.nan_check import NonfiniteOrigin, examine, nonfinite_gradients
from moemesh.train.optimizer import Optimizer
from moemesh.train.step import gradients_of_step, update
from tests.parity.training import Shape, microbatches

MODEL: dict[str, Any] = {
    "vocab_size": 32,
    "num_layers": 4,
    "hidden_size": 16,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 4,
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_intermediate_size": 8,
    "intermediate_size": 8,
}
SHAPE = Shape(global_batch=8, seq_len=6)
#: Sample ids: not the numbers of the sequences.
IDS = [100 + 7 * number for number in range(SHAPE.global_batch)]


class Injection(NamedTuple):
    """`kind` at `rank` in `layer`; `expert` for weights and their gradients; `value` it takes."""

    kind: Literal["weight", "activation", "gradient", "weight gradient", "loss"]
    rank: int
    layer: int
    microbatch: int
    module: str = "attention"
    expert: int | None = None
    value: float = float("nan")


class Hit(NamedTuple):
    """Whether the place exists on this rank, and the sample that was hit there, if it is known."""

    hit: bool
    sample: int | None = None


@contextmanager
def injected(
    parallel: RankModel, batches: Sequence[Batch], where: Injection
) -> Iterator[list[Hit]]:
    """Inside, every run of the step meets the value; the list fills with what was hit."""
    hits: list[Hit] = []
    with ExitStack() as stack:
        if where.kind == "loss":
            stack.enter_context(_loss(parallel, where, hits))
        elif parallel.mesh.rank == where.rank and str(where.layer) in parallel.model.layers:
            put = {
                "weight": _weight,
                "activation": _activation,
                "gradient": _gradient,
                "weight gradient": _weight_gradient,
            }[where.kind]
            stack.enter_context(put(parallel, batches, where, hits))
        yield hits


def _parameter(parallel: RankModel, where: Injection) -> tuple[str, nn.Parameter, int | None]:
    """Name, tensor and local row (None: the expert is not here, or there are no experts)."""
    prefix = f"layers.{where.layer}."
    if where.expert is None:
        name = prefix + "attention.output"
        return name, parallel.model.get_parameter(name), 0
    name = prefix + "feed_forward.experts.down"
    own = list(parallel.placements[name].experts(parallel.mesh))
    row = own.index(where.expert) if where.expert in own else None
    return name, parallel.model.get_parameter(name), row


@contextmanager
def _weight(
    parallel: RankModel, batches: Sequence[Batch], where: Injection, hits: list[Hit]
) -> Iterator[None]:
    _, parameter, row = _parameter(parallel, where)
    if row is None or not parameter.untyped_storage().size():
        yield
        return
    number = parameter.data[row].view(-1)[:1]
    before = number.clone()
    number.fill_(where.value)
    hits.append(Hit(True))
    try:
        yield
    finally:
        number.copy_(before)


@contextmanager
def _weight_gradient(
    parallel: RankModel, batches: Sequence[Batch], where: Injection, hits: list[Hit]
) -> Iterator[None]:
    _, parameter, row = _parameter(parallel, where)
    calls = 0

    def spoil(gradient: Tensor | None) -> Tensor | None:
        nonlocal calls
        calls += 1
        if gradient is None:  # it is deferred, and comes by another way
            return None
        if row is None or (calls - 1) % len(batches) != where.microbatch:
            return gradient
        hits.append(Hit(True))
        gradient = gradient.clone()
        gradient[row].view(-1)[-1] = where.value
        return gradient

    handle = parameter.register_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


class _Place:
    """The microbatch whose forward runs in a layer, and the samples of its rows."""

    def __init__(self, layer: nn.Module, batches: Sequence[Batch]) -> None:
        self._batches, self.context = batches, None
        self.handle = layer.register_forward_pre_hook(self._begin)

    def _begin(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        (self.context,) = (value for value in args if isinstance(value, Context))

    def is_in(self, microbatch: int) -> bool:
        return bool(len(self.sequences())) and int(self.sequences()[0]) in (
            self._batches[microbatch].sequences_B.tolist()
        )

    def sequences(self) -> Tensor:
        assert self.context is not None
        return self.context.token_ids_T // self.context.length


@contextmanager
def _activation(
    parallel: RankModel, batches: Sequence[Batch], where: Injection, hits: list[Hit]
) -> Iterator[None]:
    layer = parallel.model.layers[str(where.layer)]
    place = _Place(layer, batches)

    def spoil(_: nn.Module, args: Any, output: Any) -> Any:
        if not place.is_in(where.microbatch):
            return output
        x = output if isinstance(output, Tensor) else output[0]
        if not len(x):
            return output
        is_rows = where.module == "feed_forward.experts"
        hits.append(Hit(True, None if is_rows else IDS[int(place.sequences()[-1])]))
        x = x.clone()
        x[-1, 0] = where.value
        return x if isinstance(output, Tensor) else output._replace(y_TH=x)

    handle = layer.get_submodule(where.module).register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()
        place.handle.remove()


@contextmanager
def _gradient(
    parallel: RankModel, batches: Sequence[Batch], where: Injection, hits: list[Hit]
) -> Iterator[None]:
    layer = parallel.model.layers[str(where.layer)]
    place = _Place(layer, batches)

    def spoil(_: nn.Module, args: tuple[Any, ...]) -> None:
        if not place.is_in(where.microbatch) or not len(args[0]):
            return
        sample = IDS[int(place.sequences()[-1])]

        def change(gradient: Tensor) -> Tensor:
            hits.append(Hit(True, sample))
            gradient = gradient.clone()
            gradient[-1, 0] = where.value
            return gradient

        if args[0].requires_grad:
            args[0].register_hook(change)

    handle = layer.get_submodule(where.module).register_forward_pre_hook(spoil)
    try:
        yield
    finally:
        handle.remove()
        place.handle.remove()


@contextmanager
def _loss(parallel: RankModel, where: Injection, hits: list[Hit]) -> Iterator[None]:
    """A loss that is not finite for one target, in the data of every rank; its gradient is."""
    vocabulary = parallel.model.vocabulary
    plain = vocabulary.cross_entropy

    def spoiled(x_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> Tensor:
        bad_T = targets_T == where.layer
        if bad_T.any():
            hits.append(Hit(True))
        losses_T = plain(x_TH, weight_VH, targets_T)
        return losses_T + torch.zeros_like(losses_T).masked_fill(bad_T, where.value)

    vocabulary.cross_entropy = spoiled  # type: ignore[method-assign]
    try:
        yield
    finally:
        del vocabulary.cross_entropy


class Outcome(NamedTuple):
    """Of one injection on one rank: whether the step was skipped, whether weights and moments are
    bit for bit what they were, what was found, and what was hit here."""

    skipped: bool
    is_unchanged: bool
    finding: NonfiniteOrigin
    hits: list[Hit]


def inject_on_rank(
    mesh: Mesh, plan_keys: dict[str, Any], injections: Sequence[Injection], keys: dict[str, Any]
) -> list[Outcome]:
    """One sound step, then one step with each of the injections, then a sound step again."""
    plan, config = Plan(**plan_keys), ModelConfig(**MODEL | keys)
    parallel = parallelize(
        config,
        plan,
        mesh,
        seed=1,
        dtype=torch.float32,
        tokens_per_rank=plan.tokens_per_rank(SHAPE.seq_len, SHAPE.global_batch),
    )
    optimizer = Optimizer.of(parallel, TrainConfig(lr=1e-2))

    def step(number: int, batches: Sequence[Batch]) -> bool:
        result = gradients_of_step(parallel, batches, TimelineRecorder(mesh.rank), refuses=False)
        update(parallel, optimizer, result, lr=1e-2, clip=1.0)
        return result.skipped

    assert not step(1, microbatches(config, plan, SHAPE, 1, mesh))
    found: list[Outcome] = []
    for number, where in enumerate(injections, start=2):
        batches = microbatches(config, plan, SHAPE, number, mesh)
        before = _state(parallel, optimizer)
        with injected(parallel, batches, where) as hits:
            skipped = step(number, batches)
            finding = examine(parallel, optimizer, batches, IDS, nonfinite_gradients(parallel))
        after = _state(parallel, optimizer)
        same = before.keys() == after.keys() and all(
            torch.equal(before[name], after[name]) for name in before
        )
        found.append(Outcome(skipped, same, finding, hits))
    batches = microbatches(config, plan, SHAPE, 1000, mesh)
    sound = examine(parallel, optimizer, batches, IDS)
    assert sound.phase == "unrepeated", f"found in a sound step: {sound}"
    assert not step(1000, batches)
    return found


def _state(parallel: RankModel, optimizer: Optimizer) -> dict[str, Tensor]:
    weights = {
        name: tensor
        for named in (parallel.model.named_parameters(), parallel.model.named_buffers())
        for name, tensor in named
        if tensor.untyped_storage().size()  # zero3 frees weights between steps
    }
    weights |= {f"own {name}": tensor for name, tensor in parallel.reducer.held_weights.items()}
    moments = {
        f"{kind}.{name}": tensor
        for kind, tensors in optimizer.state().items()
        for name, tensor in tensors.items()
    }
    return {name: tensor.detach().clone() for name, tensor in (weights | moments).items()}
