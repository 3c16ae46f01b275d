"""Parameters that do not train: any plan gives what one device gives that drops their gradients."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.config.tuning import Tuning
from moemesh.parallel.norm import clip_gradients, gradient_norm
from moemesh.train.optimizer import Optimizer
from moemesh.train.step import move_selection_biases
from tests.parity import training
from tests.parity.models import MODELS, TRAIN
from tests.parity.training import Shape, Trained, assert_same, build, rows, train

TUNINGS: dict[str, dict[str, Any]] = {
    "experts": {"train_only": ("*.experts.*",)},
    "no_experts": {"freeze": ("*.experts.*",)},
    "down": {"train_only": ("*.experts.*.down", "layers.2.attention.*")},
    "late": {"freeze": ("embedding.*", "layers.0.*", "layers.1.*")},
    "layer": {"train_only": ("layers.2.*",)},
    "head": {"train_only": ("head.*", "norm.*")},
    "attention": {"train_only": ("*.attention.*",), "freeze": ("layers.0.*", "*.output")},
    "norms": {"train_only": ("*norm.weight",)},
    "routers": {"freeze": ("*.router.*", "embedding.*")},
    "router_weights": {"train_only": ("*.router.weight", "layers.2.*")},
    "embedding": {"train_only": ("embedding.*",)},
    "ahead": {"train_only": ("layers.4.*",)},
    "second_ahead": {"train_only": ("layers.5.*",)},
    "some_experts": {"train_only": tuple(f"layers.*.experts.{i}.*" for i in (1, 2, 6))},
    # All in one layer of another; on one rank, or on none.
    "uneven_experts": {"train_only": ("layers.1.*.experts.0.*", "layers.2.*.experts.[!3].*")},
    "some_downs": {"train_only": ("*.experts.[25].down", "*.attention.*")},
    "frozen_experts": {"freeze": ("*.experts.[0-4].*", "embedding.*")},
    "tail": {"train_only": ("layers.3.*", "ahead_norms.*")},
}
MODELS = MODELS | {
    "deep": MODELS["moe"] | {"num_layers": 4},
    "biased": MODELS["moe"] | {"num_layers": 4, "expert_bias": True, "swiglu_limit": 1.5},
    "ahead": MODELS["moe"] | {"num_layers": 4, "num_mtp_layers": 2},
    "ahead_tied": MODELS["grouped"] | {"num_layers": 3, "num_mtp_layers": 1},
}

#: "Tuning:model" in place of a model.
CASES = rows(
    """
    experts:moe | dp=2 tp=2 ep=2 etp=2 microbatches=2 | padded
    *late:deep | pp=2 microbatches=4 schedule=zb_h1
    late:deep | pp=2 microbatches=4 dp=2 ep=2 schedule=zb_h1
    layer:deep | dp=4 ep=2 data=zero3 microbatches=2
    attention:grouped | tp=2 cp=2 ep=4 data=zero2
    late:deep | pp=2 microbatches=4 dp=2 ep=2 schedule=dualpipe
    head:deep | pp=2 microbatches=4 dp=2 recompute=full
    routers:sigmoid | dp=2 tp=2 ep=2 | padded
    *router_weights:sigmoid | dp=2 tp=2 ep=2 data=zero1 | padded
    norms:grouped | pp=2 tp=2 microbatches=3
    down:moe | dp=4 ep=2 combine=exact microbatches=2
    embedding:grouped | pp=2 dp=2 microbatches=2 data=zero1
    embedding:grouped | dp=2 tp=2 data=zero3
    ahead:ahead | dp=2 tp=2 ep=2
    second_ahead:ahead | pp=2 dp=2 microbatches=2 data=zero2
    tail:ahead_tied | dp=2 ep=2 data=zero3
    no_experts:moe | dp=4 ep=4 spare_slots=1 microbatches=2
    late:deep | dp=4 ep=4 data=parameter_server | 1x5
    late:deep | pp=2 tp=2 schedule=terapipe microbatches=2
    layer:deep | pp=2 dp=2 schedule=zb_v microbatches=4
    late:deep | pp=2 microbatches=4 schedule=chimera dp=2 data=zero1
    experts:deep | pp=2 microbatches=4 schedule=zb_h2 dp=2 ep=2
    some_experts:moe | dp=2 tp=2 ep=2 etp=2 microbatches=2 | padded
    uneven_experts:moe | dp=4 ep=4 data=zero3 microbatches=2
    some_downs:biased | dp=4 ep=2 data=zero2 microbatches=2
    *uneven_experts:biased | pp=2 microbatches=4 schedule=zb_h1 dp=2 ep=2
    frozen_experts:sigmoid | tp=2 cp=2 ep=4 data=zero1 | padded
    some_experts:deep | pp=2 microbatches=4 schedule=dualpipe dp=2 ep=2
    uneven_experts:moe | dp=4 ep=4 dispatcher=all_gather | 1x5
    some_experts:moe | dp=4 ep=4 dispatcher=hierarchical ranks_per_node=2 dispatch_chunks=2
    some_experts:moe | dp=2 tp=2 ep=4 dispatcher=low_latency
    uneven_experts:moe | dp=4 ep=2 data=parameter_server
    some_downs:moe | dp=4 ep=2 shard_group=2 data=zero3
    frozen_experts:moe | recompute=full dp=2 ep=2
    some_experts:moe | recompute=selective
    uneven_experts:deep | pp=2 dp=2 ep=2 schedule=zb_v microbatches=4
    late:deep | pp=2 dp=2 schedule=interleaved_1f1b stages_per_rank=2 microbatches=2 data=zero2
    layer:deep | dp=4 ep=2 dispatcher=hierarchical ranks_per_node=2 | padded
    experts:moe | dp=4 ep=2 data=zero1 shard_group=2
    attention:moe | cp=4 ep=2 context=all_to_all | padded
    """
)


@cache
def oracle(tuning: str, model: str, shape: Shape) -> Trained:
    """One device that computes every gradient, forgets those of what does not train, and gives the
    weights their values back that do not train."""
    choice, config = Tuning(**TUNINGS[tuning]), ModelConfig(**MODELS[model])
    settings, mesh, plan = TrainConfig(**TRAIN), Mesh.single("cpu"), Plan()
    parallel = build(mesh, config, plan, shape, "float64")
    optimizer = Optimizer.of(parallel, settings)
    reducer, experts = parallel.reducer, config.num_experts
    kept: dict[str, torch.Tensor] = {}
    for name, where in parallel.placements.items():
        rows = choice.rows(name, experts if where.is_expert else 0)
        size = experts if where.is_expert else 1
        mask = torch.tensor([row in rows for row in range(size)], dtype=torch.bool)
        kept[name] = mask.view(-1, *[1] * (len(where.shape) - 1))
    steps = []
    for step in range(1, settings.steps + 1):
        result = training.gradients(parallel, plan, shape, step)
        for name, gradient in reducer.gradients.items():
            gradient *= kept[name]
        norm = gradient_norm(reducer.gradients, parallel.placements, reducer.owned, mesh).value
        gradients = {n: g.clone() for n, g in reducer.gradients.items() if kept[n].any()}
        clip_gradients(reducer.gradients, norm, settings.clip)
        before = {name: weight.detach().clone() for name, weight in reducer.weights.items()}
        optimizer.step(reducer.gradients, settings.learning_rate(step))
        for name, weight in reducer.weights.items():
            weight.data.copy_(torch.where(kept[name], weight.data, before[name]))
        biases = {
            name: (buffer, buffer.clone())
            for name, buffer in parallel.model.named_buffers()
            if not choice.trains(name)
        }
        move_selection_biases(parallel, result.counts_LE)
        for buffer, old in biases.values():
            buffer.copy_(old)
        steps.append(
            (result.loss, result.aux_loss, norm, result.counts_LE.tolist(), result.mtp_loss)
        )
    losses, aux, norms, loads, mtp = zip(*steps, strict=True)
    return Trained(
        losses=list(losses),
        aux=list(aux),
        norms=list(norms),
        loads=list(loads),
        gradients=gradients,
        weights={name: weight.detach() for name, weight in reducer.weights.items()},
        biases=[buffer for _, buffer in sorted(parallel.model.named_buffers())],
        mtp=list(mtp),
        frozen=[{}, {}],
    )


@pytest.mark.parametrize(("case", "plan", "shape"), CASES)
def test_parity(case: str, plan: dict[str, Any], shape: Shape) -> None:
    tuning, model = case.split(":")
    got = train(MODELS[model], plan, TRAIN | TUNINGS[tuning], shape)
    expected = oracle(tuning, model, shape)
    assert_same(got, expected)
    assert all(map(torch.equal, got.biases, expected.biases))
    before, after = got.frozen
    assert before, "something must be frozen"
    assert all(torch.equal(weight, before[name]) for name, weight in after.items())
