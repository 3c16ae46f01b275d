"""Numbers that are not finite, found at their origin, and copies of weights that differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.model.batch import Batch, Context
from moemesh.parallel.parallelize import RankModel
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.numerics.nan_check import NonfiniteOrigin, examine, nonfinite_gradients
from moemesh.train.numerics.replica_checksums import (
    CopiesDiffer,
    Mismatch,
    ReplicaChecksums,
    digest,
)
from moemesh.train.optimizer import Optimizer
from moemesh.train.step import gradients_of_step, update
from tests.parity.training import Shape, build, microbatches
from tests.ranks import mesh_on_ranks

MODEL: dict[str, Any] = {
    "vocab_size": 32, "num_layers": 4, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 2,
    "head_dim": 4, "num_experts": 4, "experts_per_token": 2, "expert_intermediate_size": 8,
    "intermediate_size": 8,
}  # fmt: skip
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


class Injector:
    """The value of an :class:`Injection` in every run of a step, until `undo` is closed. `hits` are
    the places that were hit on this rank."""

    def __init__(self, parallel: RankModel, batches: Sequence[Batch], where: Injection) -> None:
        self.parallel, self.batches, self.where = parallel, batches, where
        self.hits, self.undo = list[Hit](), ExitStack()
        #: Context of the forward that runs in the layer.
        self.context: Context | None = None
        if where.kind == "loss":
            self.loss()
        elif parallel.mesh.rank == where.rank and str(where.layer) in parallel.model.layers:
            put = {"weight": self.weight, "weight gradient": self.weight_gradient}
            put |= {"activation": self.activation, "gradient": self.gradient}
            put[where.kind]()

    def parameter(self) -> tuple[nn.Parameter, int | None]:
        """Tensor and local row (None: the expert is on another rank, or no expert exists)."""
        prefix, parallel = f"layers.{self.where.layer}.", self.parallel
        if self.where.expert is None:
            return parallel.model.get_parameter(prefix + "attention.output"), 0
        name = prefix + "feed_forward.experts.down"
        own = list(parallel.placements[name].experts(parallel.mesh))
        row = own.index(self.where.expert) if self.where.expert in own else None
        return parallel.model.get_parameter(name), row

    def weight(self) -> None:
        parameter, row = self.parameter()
        if row is not None and parameter.untyped_storage().size():
            number = parameter.data[row].view(-1)[:1]
            self.undo.callback(number.copy_, number.clone())
            number.fill_(self.where.value)
            self.hits.append(Hit(True))

    def weight_gradient(self) -> None:
        parameter, row = self.parameter()
        calls = 0

        def spoil(gradient: Tensor | None) -> Tensor | None:
            nonlocal calls
            calls += 1
            if gradient is None:  # it is deferred, and comes by another way
                return None
            if row is None or (calls - 1) % len(self.batches) != self.where.microbatch:
                return gradient
            self.hits.append(Hit(True))
            gradient = gradient.clone()
            gradient[row].view(-1)[-1] = self.where.value
            return gradient

        self.undo.callback(parameter.register_hook(spoil).remove)

    def module(self) -> nn.Module:
        """The module of the injection, in a layer that notes the context of its forward."""

        def begin(_: nn.Module, args: tuple[Any, ...]) -> None:
            (self.context,) = (value for value in args if isinstance(value, Context))

        layer = self.parallel.model.layers[str(self.where.layer)]
        self.undo.callback(layer.register_forward_pre_hook(begin).remove)
        return layer.get_submodule(self.where.module)

    def sequences(self) -> Tensor:
        """Sequences of the rows of the forward that runs; empty in another microbatch."""
        assert self.context is not None
        sequences_T = self.context.token_ids_T // self.context.length
        own = self.batches[self.where.microbatch].sequences_B
        is_here = bool(torch.isin(sequences_T[:1], own).any())
        return sequences_T if is_here else sequences_T[:0]

    def activation(self) -> None:
        def spoil(_: nn.Module, args: Any, output: Any) -> Any:
            sequences_T, x = self.sequences(), output if isinstance(output, Tensor) else output[0]
            if not len(sequences_T) or not len(x):
                return output
            is_rows = self.where.module == "feed_forward.experts"
            self.hits.append(Hit(True, None if is_rows else IDS[int(sequences_T[-1])]))
            x = x.clone()
            x[-1, 0] = self.where.value
            return x if isinstance(output, Tensor) else output._replace(y_TH=x)

        self.undo.callback(self.module().register_forward_hook(spoil).remove)

    def gradient(self) -> None:
        def spoil(_: nn.Module, args: tuple[Any, ...]) -> None:
            sequences_T = self.sequences()
            if not len(sequences_T) or not len(args[0]):
                return
            sample = IDS[int(sequences_T[-1])]

            def change(gradient: Tensor) -> Tensor:
                self.hits.append(Hit(True, sample))
                gradient = gradient.clone()
                gradient[-1, 0] = self.where.value
                return gradient

            if args[0].requires_grad:
                args[0].register_hook(change)

        self.undo.callback(self.module().register_forward_pre_hook(spoil).remove)

    def loss(self) -> None:
        """A loss that is not finite for one target, in the data of every rank; its gradient is."""
        vocabulary = self.parallel.model.vocabulary
        plain = vocabulary.cross_entropy

        def spoiled(x_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> Tensor:
            bad_T = targets_T == self.where.layer
            if bad_T.any():
                self.hits.append(Hit(True))
            losses_T = plain(x_TH, weight_VH, targets_T)
            return losses_T + torch.zeros_like(losses_T).masked_fill(bad_T, self.where.value)

        vocabulary.cross_entropy = spoiled  # type: ignore[method-assign]
        self.undo.callback(vars(vocabulary).pop, "cross_entropy")


class Outcome(NamedTuple):
    """Result of one injection on one rank: whether the step was skipped, whether weights and
    moments are unchanged bit for bit, the detected origin, and the tensors hit on this rank."""

    skipped: bool
    is_unchanged: bool
    finding: NonfiniteOrigin
    hits: list[Hit]


def inject_on_rank(
    mesh: Mesh, plan_keys: dict[str, Any], injections: Sequence[Injection], keys: dict[str, Any]
) -> list[Outcome]:
    """One sound step, then one step with each of the injections, then another sound step."""
    plan, config = Plan(**plan_keys), ModelConfig(**MODEL | keys)
    parallel = build(mesh, config, plan, SHAPE, "float32", seed=1)
    optimizer = Optimizer.of(parallel, TrainConfig(lr=1e-2))

    def step(number: int, batches: Sequence[Batch]) -> bool:
        result = gradients_of_step(parallel, batches, TimelineRecorder(mesh.rank), refuses=False)
        update(parallel, optimizer, result, lr=1e-2, clip=1.0)
        return result.skipped

    assert not step(1, microbatches(config, plan, SHAPE, 1, mesh))
    outcomes: list[Outcome] = []
    for number, where in enumerate(injections, start=2):
        batches = microbatches(config, plan, SHAPE, number, mesh)
        before = _state(parallel, optimizer)
        injector = Injector(parallel, batches, where)
        with injector.undo:
            skipped = step(number, batches)
            finding = examine(parallel, optimizer, batches, IDS, nonfinite_gradients(parallel))
        after = _state(parallel, optimizer)
        same = before.keys() == after.keys() and all(
            torch.equal(before[name], after[name]) for name in before
        )
        outcomes.append(Outcome(skipped, same, finding, injector.hits))
    batches = microbatches(config, plan, SHAPE, 1000, mesh)
    sound = examine(parallel, optimizer, batches, IDS)
    assert sound.phase == "unrepeated", f"found in a sound step: {sound}"
    assert not step(1000, batches)
    return outcomes


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


NAN, INF = math.nan, math.inf


def check(where: Injection, outcomes: list[Outcome]) -> None:
    """Check the outcomes of one injection on all ranks."""
    hits = [hit for outcome in outcomes for hit in outcome.hits]
    finding = outcomes[0].finding
    assert all(outcome.finding == finding for outcome in outcomes), "ranks differ"
    if not hits:  # the rank does not hold the layer or the expert, or had no rows
        assert not outcomes[0].skipped
        return
    assert all(outcome.skipped for outcome in outcomes), where
    if where.kind != "weight":
        assert all(outcome.is_unchanged for outcome in outcomes), where
    if where.kind == "loss":  # of a target, which every sequence of a microbatch may have
        assert finding.phase == "loss" and finding.samples, finding
        return
    assert not finding.num_alike, "one sequence alone was spoiled"
    phase = {"activation": "forward", "weight gradient": "gradient", "gradient": "backward"}
    assert finding.phase == phase.get(where.kind, where.kind), (where, finding)
    assert where.rank in finding.ranks, (where, finding)
    assert finding.rank == where.rank or len(finding.ranks) > 1, (where, finding)
    assert finding.layer == where.layer, (where, finding)
    assert finding.value == ("NaN" if math.isnan(where.value) else "infinite"), (where, finding)
    if where.kind != "weight":
        assert finding.microbatch == where.microbatch, (where, finding)
    if where.kind in ("activation", "gradient"):
        assert finding.name == f"layers.{where.layer}.{where.module}", (where, finding)
        samples = {hit.sample for hit in hits if hit.sample is not None}
        assert samples <= set(finding.samples) <= set(IDS), (where, finding, samples)
    if where.expert is not None:
        assert finding.expert == where.expert, (where, finding)


def injections(plan: Plan, ranks: list[int], layers: list[int]) -> list[Injection]:
    injections: list[Injection] = [Injection("loss", 0, token, 0, value=INF) for token in (3, 5)]
    for number, rank in enumerate(ranks):
        for layer in layers:
            microbatch = (number + layer) % plan.microbatches
            value = (NAN, INF)[(number + layer) % 2]
            at = (rank, layer, microbatch)
            for expert in (None, 0, 3):
                injections.append(Injection("weight", *at, expert=expert, value=value))
                injections.append(Injection("weight gradient", *at, expert=expert, value=value))
            for module in ("attention", "feed_forward", "feed_forward.experts"):
                injections.append(Injection("activation", *at, module=module, value=value))
                if module != "feed_forward.experts":
                    injections.append(Injection("gradient", *at, module=module, value=value))
    return injections


def run(plan_keys: dict[str, Any], ranks: list[int], layers: list[int], **keys: Any) -> int:
    plan = Plan(**plan_keys)
    cases = injections(plan, ranks, layers)
    if plan.schedule in ("chimera", "dualpipe", "terapipe"):
        # Gradients of weights do not come once a microbatch on every rank.
        cases = [case for case in cases if case.kind != "weight gradient"]
    outcomes = mesh_on_ranks(plan.layout, inject_on_rank, plan_keys, cases, keys)
    for number, where in enumerate(cases):
        check(where, [rank[number] for rank in outcomes])
    return sum(any(rank[number].hits for rank in outcomes) for number in range(len(cases)))


def test_one_rank() -> None:
    assert run({"microbatches": 2}, [0], [2]) >= 10


@pytest.mark.slow
def test_four_ranks() -> None:
    assert run({"dp": 2, "tp": 2, "ep": 2}, [1], [1]) >= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 2, "ep": 2, "microbatches": 2},
        {"pp": 2, "dp": 2, "ep": 2, "microbatches": 3},
        {"pp": 2, "tp": 2, "microbatches": 2, "schedule": "zb_h1"},
        {"pp": 2, "stages_per_rank": 2, "microbatches": 2, "schedule": "interleaved_1f1b"},
        {"pp": 2, "microbatches": 4, "schedule": "chimera"},
        {"pp": 2, "dp": 2, "ep": 2, "microbatches": 4, "schedule": "dualpipe"},
        {"pp": 2, "microbatches": 2, "schedule": "terapipe", "slices": 2},
        {"dp": 4, "ep": 4, "dispatcher": "hierarchical", "ranks_per_node": 2},
        {"dp": 4, "ep": 2, "dispatcher": "low_latency", "recompute": "full"},
        {"dp": 2, "ep": 2, "dispatcher": "all_gather", "recompute": "full"},
        {"dp": 2, "cp": 2, "ep": 4},
        {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
        {"dp": 2, "data": "zero1", "microbatches": 2},
        {"dp": 2, "ep": 2, "data": "zero2", "microbatches": 2},
        {"dp": 2, "ep": 2, "data": "zero3", "microbatches": 2},
        {"dp": 4, "data": "parameter_server", "microbatches": 2},
    ],
    ids=str,
)
def test_every_kind_of_plan(plan: dict[str, Any]) -> None:
    last = Plan(**plan).world_size - 1
    assert run(plan, [0, last], [1, 2, 3]) >= 20


NORM, EXPERTS = "layers.1.attention_norm.weight", "layers.1.feed_forward.experts.gate_up"
QKV = "layers.2.attention.qkv"


def flip_on_rank(
    mesh: Mesh, plan_keys: dict[str, Any], flips: list[tuple[int, str]]
) -> list[tuple[list[Mismatch], bool, list[Mismatch]]]:
    """Results of each flip: mismatches of the vote, whether it was repaired, those after it."""
    plan = Plan(**plan_keys)
    parallel = build(mesh, ModelConfig(**MODEL), plan, SHAPE, "float32", seed=1)
    optimizer = Optimizer.of(parallel, TrainConfig())
    vote = ReplicaChecksums(parallel, optimizer, TrainConfig(), lambda text, kind: None)
    assert not vote.compare(), "copies differ from the start"
    entries = mesh.ledger.entries()
    votes: list[tuple[list[Mismatch], bool, list[Mismatch]]] = []
    for number, (rank, name) in enumerate(flips):
        held = dict(parallel.model.named_parameters()).get(name)
        before = None if held is None else held.detach().clone()
        if mesh.rank == rank:
            assert held is not None
            bits = held.data.view(torch.int32).view(-1)
            bits[number % len(bits)] ^= 1 << (number % 31)
        said = vote.compare()
        repaired = bool(said) and vote.take_majority(said)
        left = vote.compare()
        if repaired:
            assert held is None or torch.equal(held, before)
        elif held is not None:
            held.data.copy_(before)
        votes.append((said, repaired, left))
    assert mesh.ledger.entries() == entries, "votes are not entered"
    return votes


@pytest.mark.representative("0")
@pytest.mark.parametrize(
    ("plan", "flips"),
    [
        ({"dp": 4, "ep": 2}, {(2, NORM): (2,), (3, QKV): (3,), (0, NORM): (0,), (1, EXPERTS): ()}),
        ({"dp": 2, "tp": 2, "ep": 2}, {(3, NORM): (3,), (1, QKV): (), (0, EXPERTS): ()}),
        ({"dp": 3, "data": "zero1"}, {(1, QKV): (1,), (2, EXPERTS): (2,)}),
        ({"dp": 3, "data": "zero2"}, {(1, QKV): (1,), (0, EXPERTS): (0,)}),
        ({"pp": 2, "dp": 3}, {(4, QKV.replace("2", "3")): (4,), (0, QKV.replace("2", "0")): (0,)}),
        ({"dp": 3, "cp": 1, "tp": 1, "ep": 3}, {(1, QKV): (1,), (2, EXPERTS): None}),
    ],
    ids=["0", "tp", "zero1", "zero2", "pp", "stored once"],
)
def test_one_bit_is_found(
    plan: dict[str, Any], flips: dict[tuple[int, str], tuple[int, ...] | None]
) -> None:
    """None: it cannot be, for it is stored once; (): two copies, neither of which is right."""
    ranks = mesh_on_ranks(Plan(**plan).layout, flip_on_rank, plan, list(flips))
    assert all(rank == ranks[0] for rank in ranks)
    for ((rank, name), culprits), (said, repaired, left) in zip(
        flips.items(), ranks[0], strict=True
    ):
        if culprits is None:
            assert not said
            continue
        (mismatch,) = said
        assert mismatch.parameter == name and rank in mismatch.ranks
        assert mismatch.culprits == culprits and repaired == bool(culprits)
        assert bool(left) != repaired
        facts = CopiesDiffer(7, said).facts
        assert facts["parameter"] == name and rank in facts["ranks"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_a_digest_sees_every_bit(dtype: torch.dtype) -> None:
    x = torch.arange(6).to(dtype).view(2, 3)
    whole = int(digest(x))
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()]
    for place in range(6):
        for bit in range(8 * x.element_size() - 1):
            other = x.clone()
            other.view(words).view(-1)[place] ^= 1 << bit
            assert int(digest(other)) != whole
