"""MoELayer in programs as people write them: torch's scaling, saving and compiling."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import vector_to_parameters
from torch.nn.utils.parametrize import register_parametrization
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from moemesh.parallel.expert.layer import MoELayer
from moemesh.parallel.expert.spread import (
    LayerError,
    expert_parameters,
    full_state_dict,
)
from tests.parallel.test_layer import CLIP, HIDDEN, Net, build, tokens_of, wrapped
from tests.ranks import run_on_ranks

RANKS = 2


def scale(rank: int) -> Any:
    """One rank's experts alone have a gradient that is not finite: no rank takes the step."""
    model = build()
    model._ddp_params_and_buffers_to_ignore = list(expert_parameters(model))  # type: ignore[assignment]
    called = DistributedDataParallel(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.2), torch.amp.GradScaler("cpu")
    weights = []
    for step in range(3):
        y, aux = called(tokens_of(step, rank))
        optimizer.zero_grad()
        scaler.scale(y.square().mean() + aux).backward()
        if step == 1 and rank == 1:
            gradient = model.moe.experts.down.grad
            assert gradient is not None
            gradient[0, 0, 0] = torch.inf
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        weights.append(model.inner.weight.detach().clone())
    return weights, scaler.get_scale()


def test_a_scaler_skips_a_step_on_all_ranks() -> None:
    (first, scale_of_first), (second, scale_of_second) = run_on_ranks(RANKS, scale)
    assert all(map(torch.equal, first, second)) and scale_of_first == scale_of_second
    assert torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])


#: Numbers that programs take of a gradient: those of the gradient of all experts on one device.
REDUCTIONS: list[Callable[[Tensor], Any]] = [
    lambda g: (g**2).sum().sqrt(),
    lambda g: torch.linalg.norm(g.flatten(), 3),
    lambda g: torch.dot(g.view(-1), g.detach().reshape(-1)),
    lambda g: torch.dot(torch.ones(math.prod(g.shape), dtype=g.dtype), g.view(-1).abs()),
    lambda g: g.square().sum() / g.numel(),
    lambda g: g.float().abs().max(),
    lambda g: g.mean(dim=(0, 1, 2), keepdim=True),
    lambda g: g.data.amin(),
    lambda g: (g.norm(2).item() ** 2 + g.norm(p=1)) / 2,
    lambda g: g.norm(dim=-1).shape[1:],
    lambda g: torch.isfinite(g).all(),
    lambda g: (g > 0.9 * g.abs().max()).any(),
    lambda g: (g == 0).count_nonzero(),
    lambda g: torch.cat([g.flatten(), g.flatten()]).norm(),
    lambda g: torch.sum(input=torch.cat(tensors=[g, g])),
    lambda g: torch.linalg.norm(input=torch.stack(tensors=[torch.norm(input=g, p=1)])),
    lambda g: torch.linalg.vector_norm(g * (g > 0), 0),
    # Experts as the second operand, in lists, and reduced dimension by dimension.
    lambda g: (torch.full_like(g.as_subclass(Tensor), 2.0) * g).sum(),
    lambda g: torch.ones(math.prod(g.shape), dtype=g.dtype) @ g.abs().flatten(),
    lambda g: torch.einsum("efh,efh->", g, g),
    lambda g: torch._foreach_max(torch._foreach_abs([g]))[0],
    lambda g: torch._foreach_norm(torch._foreach_add([g.as_subclass(Tensor)], [g]))[0],
    lambda g: g.flatten(1).norm(dim=1).max(),
    lambda g: g.abs().sum(-1).mean(dim=1).mean(),
    # Formatted, of integers, of matrices, and of a list given by name.
    lambda g: float(f"{g.norm():.12f}"),
    lambda g: (g > 0).int().sum(),
    lambda g: torch.linalg.matrix_norm(g.flatten(1)),
    lambda g: torch.linalg.matrix_norm(g).norm(),
    lambda g: torch._foreach_abs(self=[g])[0].sum(),
]
#: Numbers of one rank, which are not combined.
REFUSED: list[Callable[[Tensor], Any]] = [
    lambda g: g.std(),
    lambda g: g.argmax(),
    lambda g: torch.aminmax(g),
    lambda g: g.flatten().max(dim=0),
    lambda g: nn.functional.l1_loss(torch.zeros(g.shape, dtype=g.dtype), g),
    lambda g: nn.functional.cosine_similarity(g.flatten(), g.flatten(), dim=0),
    lambda g: nn.functional.normalize(g.flatten(), dim=0),
    lambda g: torch.norm(g.flatten(1), "nuc"),
    lambda g: torch.linalg.norm(g.flatten(1), 2),
    lambda g: torch.linalg.matrix_norm(g.flatten(1), ord=1),
]


def reductions(rank: int) -> Any:
    """Reductions of one gradient, in a hook as well, and programs that reduce several at once."""
    model = build()
    in_hook: list[Tensor] = []
    model.moe.experts.down.register_post_accumulate_grad_hook(
        lambda parameter: in_hook.append(parameter.grad.norm())  # type: ignore[union-attr]
    )
    y, aux = model(tokens_of(0, rank))
    (y.square().mean() + aux).backward()
    gradient = model.moe.experts.down.grad
    assert gradient is not None
    results = [reduction(gradient) for reduction in REDUCTIONS]
    assert len(in_hook) == 1 and torch.equal(in_hook[0], gradient.norm())
    row, own = gradient.reshape(1, -1), gradient.as_subclass(Tensor)
    assert torch.equal(row.sum(dim=1), own.reshape(1, -1).sum(dim=1))  # of each expert: of no rank
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
    for mixed in (flat, flat * 2):
        with pytest.raises(LayerError, match="norm over gradients of experts and of others"):
            mixed.norm()
    for refused in REFUSED:
        with pytest.raises(LayerError, match=r"over gradients of experts that are spread.*norm, s"):
            refused(gradient)
    for sized in (
        lambda: gradient.view(gradient.numel()),
        lambda: torch.zeros(gradient.numel()).copy_(gradient.flatten()),
        lambda: vector_to_parameters(torch.zeros(9), [gradient]),
    ):
        with pytest.raises(LayerError, match=r"size.*views and buffers math\.prod"):
            sized()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(LayerError, match="of experts and of others would be that of this rank"):
        optimizer.step(lambda: torch.zeros(()))
    return results


def test_reductions_of_a_gradient_are_those_of_all_experts() -> None:
    model = build()
    y, aux = model(torch.cat([tokens_of(0, rank) for rank in range(RANKS)]))
    (y.square().mean() + aux).backward()
    gradient = model.moe.experts.down.grad
    assert gradient is not None
    for results in run_on_ranks(RANKS, reductions):
        for result, reduction in zip(results, REDUCTIONS, strict=True):
            torch.testing.assert_close(result, reduction(gradient), rtol=1e-6, atol=0)


def states(rank: int, folder: str) -> None:
    model = build()
    whole = full_state_dict(model)
    assert all(type(value) is Tensor for value in whole.values())
    if rank == 0:  # nothing waits for the other rank
        state = model.state_dict()
        moved = {name: value.clone().float().cpu() for name, value in state.items()}
        for unfit in (state, moved, copy.deepcopy(state)):
            with pytest.raises(LayerError, match=r"holds experts 0 to 3 of 8: save mm\.full_state"):
                torch.save(unfit, io.BytesIO())
        with pytest.raises(LayerError, match=r"holds experts 0 to 3 of 8"):
            from safetensors.torch import save_file

            save_file(state, f"{folder}/model.safetensors")
        with pytest.raises(LayerError, match="over 2 ranks cannot be pickled"):
            torch.save(model, io.BytesIO())
        torch.save(whole, f"{folder}/whole.pt")
    dist.barrier()
    other = Net()
    other.load_state_dict(torch.load(f"{folder}/whole.pt"))
    assert all(map(torch.equal, full_state_dict(other).values(), whole.values()))
    # A state dict goes back without a message, and torch's own functions read it.
    other = Net()
    if rank == 0:
        other.load_state_dict(model.state_dict())
        assert torch.equal(other.moe.experts.down, model.moe.experts.down)
    options = StateDictOptions(full_state_dict=True)
    for name, value in get_model_state_dict(model, options=options).items():
        assert torch.equal(value, whole[name]), name
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/dcp")
    other = Net()
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    other.load_state_dict(state["model"])
    assert all(map(torch.equal, full_state_dict(other).values(), whole.values()))


def test_states_are_complete_or_refused(tmp_path: Path) -> None:
    run_on_ranks(RANKS, states, str(tmp_path))
    # One process reads the shares of both ranks.
    one = Net()
    state = {"model": one.state_dict()}
    dcp.load(state, checkpoint_id=f"{tmp_path}/dcp")
    expected = torch.load(f"{tmp_path}/whole.pt")
    assert all(torch.equal(state["model"][name], value) for name, value in expected.items())


def deferred_initialization(rank: int, way: str) -> Any:
    """Built on the meta device, sharded, allocated, drawn: the order of torchtitan."""
    with torch.device("meta"):
        model = Net()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    called = wrapped(model, way)
    model.to_empty(device="cpu")
    torch.manual_seed(7)
    model.moe.reset_parameters()
    for linear in (model.inner, model.outer):
        nn.init.constant_(linear.weight, 0.25)
        nn.init.zeros_(linear.bias)
    y, aux = called(tokens_of(0, rank))
    (y.square().mean() + aux).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    gradients = {
        name: parameter.grad.full_tensor() if hasattr(parameter, "full_tensor") else parameter.grad
        for name, parameter in model.named_parameters()
    }
    return full_state_dict(model), gradients


@pytest.mark.parametrize("way", ["fsdp2", "hsdp"])
def test_a_model_on_meta_is_sharded_and_drawn_later(way: str) -> None:
    model = Net()
    torch.manual_seed(7)
    model.moe.reset_parameters()
    for linear in (model.inner, model.outer):
        nn.init.constant_(linear.weight, 0.25)
        nn.init.zeros_(linear.bias)
    y, aux = model(torch.cat([tokens_of(0, rank) for rank in range(RANKS)]))
    (y.square().mean() + aux).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    for rank, (state, gradients) in enumerate(run_on_ranks(RANKS, deferred_initialization, way)):
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        for name, parameter in model.named_parameters():
            expected = parameter.grad
            assert expected is not None
            if ".experts." in name:
                expected = expected.chunk(RANKS)[rank]
            torch.testing.assert_close(gradients[name], expected, rtol=1e-10, atol=1e-12, msg=name)


def mixed_experts(rank: int) -> None:
    with warnings.catch_warnings():  # the import compiles scripts of torch.jit, which is deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    model = build()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    y, _ = model(tokens_of(0, rank))
    y.sum().backward()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    averaged = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=1, warmup_steps=0))
    for refused in (optimizer, averaged):
        with pytest.raises(LayerError, match="every rank has experts of its own"):
            refused.step()
    fully_shard(model.moe.router)
    with pytest.raises(LayerError, match="fully_shard on the layer or on a module around it"):
        model(tokens_of(0, rank))
    model = build()
    model._ddp_params_and_buffers_to_ignore = list(expert_parameters(model))  # type: ignore[assignment]
    ddp = DistributedDataParallel(model)
    with pytest.raises(LayerError, match="without join"), ddp.join():
        ddp(tokens_of(0, rank))
    register_parametrization(model.moe.experts, "down", nn.Tanh())
    with pytest.raises(LayerError, match="parametrizations and adapters of PEFT change experts"):
        model(tokens_of(0, rank))


def test_programs_that_mix_the_experts_of_ranks_are_refused() -> None:
    run_on_ranks(RANKS, mixed_experts)


def forward_mode(layer: MoELayer, x: Tensor) -> object:
    with forward_ad.dual_level():
        return layer(forward_ad.make_dual(x, x))


@pytest.mark.parametrize(
    "call",
    [
        lambda layer, x: torch.export.export(layer, (x,), strict=False),
        lambda layer, x: torch.jit.trace(layer, (x,)),
        lambda layer, x: torch.compile(layer, fullgraph=True, backend="eager")(x),
        lambda layer, x: torch.func.vmap(lambda x: layer(x)[0])(x),
        lambda layer, x: torch.func.grad(lambda x: layer(x)[0].sum())(x),
        forward_mode,
    ],
    ids=["export", "trace", "fullgraph", "vmap", "grad", "forward_ad"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_calls_that_need_a_graph_are_named(call: Callable[[MoELayer, Tensor], Any]) -> None:
    layer, x = MoELayer(HIDDEN, 6, 4, 2), torch.randn(2, 3, HIDDEN)
    expected = layer(x)[0]
    with pytest.raises(Exception, match=r"no graph of torch\.export, torch\.jit\.trace"):
        call(layer, x)
    assert torch.equal(layer(x)[0], expected)


def test_a_checkpoint_that_loses_the_loss_is_refused() -> None:
    x = torch.randn(2, 3, HIDDEN, requires_grad=True)
    for options, is_refused in (({}, True), ({"aux_loss_coefficient": 0.0}, False)):
        layer = MoELayer(HIDDEN, 6, 4, 2, **options)
        checkpoint(lambda x, layer=layer: (layer(x)[1].loss,), x, use_reentrant=True)
        with pytest.raises(LayerError, match="loses the bal") if is_refused else nullcontext():
            checkpoint(layer, x, use_reentrant=True)
        checkpoint(layer.eval(), x, use_reentrant=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("combine", ["fast", "exact"])
def test_results_of_products_are_seen_by_modes(dtype: torch.dtype, combine: Any) -> None:
    """Selective checkpoints save and return them; a counter of FLOPs counts them."""

    def saves_products(_: object, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.mm.out)
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    layer = MoELayer(HIDDEN, 6, 4, 2, combine=combine, dtype=dtype)
    x = torch.randn(9, HIDDEN, dtype=dtype, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x)[0].square().sum(), x)
    contexts = partial(
        create_selective_checkpoint_contexts, saves_products, allow_cache_entry_mutation=True
    )
    y, _ = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], expected)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    rows = 9 * 2 if dtype == torch.float64 else 1  # 16 bits: more, padded to whole kernels
    assert counter.get_total_flops() >= 2 * rows * 3 * HIDDEN * 6


def compiled(rank: int, backend: str) -> Any:
    """Losses and gradients with and without torch.compile around the model, and the layer alone."""
    torch.set_default_device("cpu")
    model = build()
    results = []
    for call in (model, torch.compile(model, backend=backend)):
        for size in (2, 3):
            model.zero_grad()
            y, aux = call(tokens_of(0, rank, size))
            (y.square().mean() + aux).backward()
            results.append([y.detach(), *(p.grad.clone() for p in model.parameters())])  # type: ignore[union-attr]
    x = tokens_of(1, rank)
    y, aux = torch.compile(model.moe, backend=backend)(x)
    expected, expected_aux = model.moe(x)
    assert torch.equal(y, expected) and torch.equal(aux.counts, expected_aux.counts)
    return results


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        ("aot_eager", 1),
        pytest.param("eager", 2, marks=pytest.mark.slow),
        pytest.param("aot_eager", 2, marks=pytest.mark.slow),
        pytest.param("inductor", 1, marks=pytest.mark.slow),
        pytest.param("inductor", 2, marks=pytest.mark.slow),
    ],
)
def test_compiled_models_compute_the_same(backend: str, ranks: int) -> None:
    runs = [compiled(0, backend)] if ranks == 1 else run_on_ranks(ranks, compiled, backend)
    for plain_2, plain_3, compiled_2, compiled_3 in runs:
        for found, expected in ((compiled_2, plain_2), (compiled_3, plain_3)):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_parameters_and_modules_given_from_outside_are_used() -> None:
    """Functional calls, tied modules, averages and copies."""
    x = torch.randn(3, HIDDEN)
    layer = MoELayer(HIDDEN, 6, 4, 2, router_selection_bias=True)
    other = MoELayer(HIDDEN, 6, 4, 2, router_selection_bias=True)
    assert other.router.selection_bias is not None
    other.router.selection_bias[0] = 100.0
    expected = other(x)[0]
    assert torch.equal(functional_call(layer, dict(other.state_dict()), (x,))[0], expected)
    layer.experts, layer.router = other.experts, other.router
    assert torch.equal(layer(x)[0], expected)

    model = build()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += step
        average.update_parameters(model)
    start = build()
    for name, parameter in average.module.named_parameters():
        torch.testing.assert_close(parameter, start.get_parameter(name) + 0.5)


def test_a_double_layer_has_double_losses_with_padding() -> None:
    """The mean over sequences that have tokens, in the precision of the layer."""
    torch.manual_seed(0)
    options: Any = {"aux_loss_coefficient": 0.3, "z_loss_coefficient": 0.2}
    layer = MoELayer(HIDDEN, 6, 4, 2, dtype=torch.float64, **options)
    x = torch.randn(7, 5, HIDDEN, dtype=torch.float64)
    valid = torch.ones(7, 5, dtype=torch.bool)
    valid[4:] = False
    loss = layer(x, valid)[1].loss
    torch.testing.assert_close(loss, layer(x[:4])[1].loss, rtol=1e-14, atol=0)
    torch.testing.assert_close(
        layer(x[:3], valid[:3])[1].loss, layer(x[:3])[1].loss, rtol=1e-14, atol=0
    )
    assert layer(x[:0], valid[:0])[1].loss == 0
