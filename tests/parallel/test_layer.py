"""MoELayer in a user's own program: each way of training equals one device, in float64 by SGD."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, get_type_hints

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from moemesh.config.errors import ConfigError
from moemesh.config.model import ModelConfig
from moemesh.ops.permute import NoSecondDerivative
from moemesh.ops.saved import SavedForBackward
from moemesh.parallel.expert.layer import MoELayer, RoutingOptions
from moemesh.parallel.expert.spread import (
    LayerError,
    clip_grad_norm_,
    expert_parameters,
    full_state_dict,
)
from tests.ranks import run_on_ranks

HIDDEN, WIDTH, EXPERTS, TOP_K, STEPS, RANKS, CLIP = 8, 12, 8, 2, 4, 4, 0.05
OPTIONS: dict[str, Any] = {
    "num_shared_experts": 1,
    "router_score": "sigmoid",
    "router_scale": 2.0,
    "aux_loss_coefficient": 0.3,
    "z_loss_coefficient": 0.2,
}


class Net(nn.Module):
    """A user's model: two linear layers around experts."""

    def __init__(self, group: Any = None, **options: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.moe = MoELayer(
            HIDDEN, WIDTH, EXPERTS, TOP_K, group, dtype=torch.float64, **(OPTIONS | options)
        )
        self.outer = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)

    def forward(self, x: Tensor, recompute: bool = False) -> tuple[Tensor, Tensor]:
        h = self.inner(x).tanh()
        y, aux = checkpoint(self.moe, h, use_reentrant=False) if recompute else self.moe(h)
        return self.outer(h + y), aux.loss


def tokens_of(step: int, rank: int, num_sequences: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(num_sequences, 5, HIDDEN, dtype=torch.float64, generator=generator)


def build(**options: Any) -> Net:
    torch.manual_seed(7)
    return Net(**options)


def run_parts(
    call: Any, step: int, ranks: Iterable[int], sizes: Sequence[int], way: str = "", **options: bool
) -> Tensor:
    """Forward and backward of two microbatches with the tokens of `ranks`; the mean of losses."""
    total, num_numbers = torch.zeros((), dtype=torch.float64), sum(sizes) * 5 * HIDDEN
    for part in range(2):
        x = torch.cat([tokens_of(2 * step + part, rank, sizes[rank]) for rank in ranks])
        with call.no_sync() if way == "ddp" and part == 0 else nullcontext():
            y, aux = call(x, **options)
            loss = (y.square().sum() / num_numbers if way == "sum" else y.square().mean()) + aux
            (loss / 2).backward()
        total += loss.detach() / 2
    return total


def one_device(scope: str, clip: str, sizes: tuple[int, ...]) -> Any:
    """Weights, losses and norms of one process with the tokens of all ranks."""
    model = build(aux_loss_scope=scope, gradients="sum" if scope == "global" else "mean")
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.5)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(run_parts(model, step, range(len(sizes)), sizes).item())
        if clip:
            order = float(clip) if clip[0].isdigit() or clip == "inf" else 2.0
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP, order).item())
        optimizer.step()
        optimizer.zero_grad()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}, losses, norms


def wrapped(model: Net, way: str) -> nn.Module:
    if way in ("ddp", "ddp unused", "replicas"):
        model._ddp_params_and_buffers_to_ignore = list(expert_parameters(model))  # type: ignore[assignment]
        unused = way == "ddp unused"
        return DistributedDataParallel(
            model, gradient_as_bucket_view=True, find_unused_parameters=unused
        )
    if way in ("fsdp2", "hsdp"):
        names = "replicas", "shards"
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=names) if way == "hsdp" else None
        for module in (model.moe, model):  # a block of its own and the root, as programs do
            fully_shard(module, mesh=mesh)
    return model


def clipped(model: nn.Module, clip: str) -> float:
    if clip == "accelerate":
        from accelerate import Accelerator

        norm = Accelerator(cpu=True).clip_grad_norm_(model.parameters(), CLIP)
        assert norm is not None
    elif clip == "by hand":
        norms = [parameter.grad.norm() for parameter in model.parameters()]  # type: ignore[union-attr]
        norm = torch.stack(norms).norm()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= (CLIP / (norm + 1e-6)).clamp(max=1)
    elif clip == "moemesh":
        norm = clip_grad_norm_(model, CLIP)
    else:
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP, float(clip))
    return norm.item()


def train(rank: int, way: str, scope: str, dispatcher: str, options: dict[str, Any]) -> Any:
    """The same, by one of several ranks, in the way of a user's program."""
    clip, recompute = options.pop("clip", ""), options.pop("recompute", False)
    sizes, is_sum = options.pop("sizes", (2,) * RANKS), way == "sum"
    if way == "replicas":
        options["group"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "experts"))
    gradients = "sum" if is_sum else "mean"
    model = build(dispatcher=dispatcher, aux_loss_scope=scope, gradients=gradients, **options)
    called = wrapped(model, way)
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.5)
    losses, norms = [], []
    for step in range(STEPS):
        total = run_parts(called, step, [rank], sizes, way, recompute=recompute)
        if way in ("sum", "mean"):
            apart = {id(p) for p in expert_parameters(model).values()}
            for parameter in model.parameters():
                if id(parameter) not in apart:
                    assert parameter.grad is not None
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= 1 if is_sum else len(sizes)
        model.moe.sync_expert_gradients()
        norms += [clipped(model, clip)] if clip else []
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        dist.all_reduce(total)
        losses.append(total.item() / (1 if is_sum else len(sizes)))
    return full_state_dict(model), losses, norms


PAIR: dict[str, Any] = {"sizes": (2, 2)}
WAYS = [
    ("fsdp2", "global", "all_to_all", {"clip": "moemesh", "dispatch_chunks": 2}),
    ("replicas", "sequence", "hierarchical", {"recompute": True, "dispatch_chunks": 2}),
    ("sum", "global", "low_latency", {"sizes": (0, 1, 5, 2)}),
    ("ddp unused", "sequence", "auto", PAIR | {"clip": "by hand"}),
]
SLOW_WAYS = [
    ("mean", "sequence", "all_to_all", {}),
    ("ddp", "sequence", "auto", {}),
    ("ddp", "global", "all_gather", {"clip": "moemesh"}),
    ("ddp", "sequence", "hierarchical", {"combine": "exact", "recompute": True}),
    ("ddp", "sequence", "auto", PAIR | {"clip": "2"}),
    ("ddp", "sequence", "auto", PAIR | {"clip": "inf"}),
    ("fsdp2", "sequence", "auto", PAIR | {"clip": "2"}),
    ("hsdp", "sequence", "auto", PAIR | {"clip": "1"}),
    ("hsdp", "sequence", "auto", PAIR | {"clip": "accelerate"}),
]


@pytest.mark.parametrize(
    ("way", "scope", "dispatcher", "options"),
    [*WAYS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_WAYS)],
)
def test_training_equals_one_device(
    way: str, scope: str, dispatcher: str, options: dict[str, Any]
) -> None:
    """The ranks stay equal, to the bit."""
    sizes, clip = options.get("sizes", (2,) * RANKS), options.get("clip", "")
    expected, expected_losses, norms = one_device(scope, clip, sizes)
    assert not clip or norms[0] > CLIP
    results = run_on_ranks(len(sizes), train, way, scope, dispatcher, dict(options))
    for state, losses, own_norms in results:
        assert losses == pytest.approx(expected_losses, rel=1e-10)
        assert own_norms == pytest.approx(norms, rel=1e-10) and own_norms == results[0][2]
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12, msg=name)
            assert torch.equal(state[name], results[0][0][name]), name


def share_state(rank: int, state: dict[str, Tensor]) -> Any:
    """Draw, load, copy and call a layer over all ranks; both ends of a state dict."""
    drawn = full_state_dict(build())
    torch.manual_seed(rank)  # what is loaded replaces different routers
    model = build()
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    twin = copy.deepcopy(model)
    x = tokens_of(0, rank)
    with torch.no_grad():
        first, second = model(x)[0], twin(x)[0]
    assert torch.equal(first, second)
    with torch.no_grad():
        twin.moe.experts.down.zero_()
        assert torch.equal(model(x)[0], first) and not torch.equal(twin(x)[0], first)
    with pytest.raises(RuntimeError, match=r"moe.experts.down: the state has \[2, 8, 12\], the"):
        model.load_state_dict(state | {"moe.experts.down": state["moe.experts.down"][:2]})
    # Layers with the same experts: the gradient is summed over replicas once.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "experts"))
    pair = [build(group=mesh, gradients="sum").moe for _ in range(2)]
    pair[1].experts = pair[0].experts
    weight = pair[0].experts.down
    weight.grad = torch.ones_like(weight)
    for layer in (*pair, pair[0]):
        layer.sync_expert_gradients()
        assert weight.grad.eq(2).all()
    weight.grad += 1
    pair[0].sync_expert_gradients()
    assert weight.grad.eq(6).all()
    with pytest.raises(LayerError, match=r"\[\[3, 1\], \[0, 2\]\] would hold other experts"):
        build(group=DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]])))
    with pytest.raises(RuntimeError, match=r"Missing key.*moe\.experts\.down"):
        model.load_state_dict({k: v for k, v in state.items() if k != "moe.experts.down"})
    return drawn, full_state_dict(model), first


def test_state_dicts_hold_all_experts_by_global_id() -> None:
    torch.manual_seed(99)
    drawn, other = build(), Net()
    for rank, (first, loaded, y) in enumerate(run_on_ranks(4, share_state, other.state_dict())):
        for found, expected in ((first, drawn.state_dict()), (loaded, other.state_dict())):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        torch.testing.assert_close(y, other(tokens_of(0, rank))[0], rtol=1e-12, atol=0)


def odd_calls(rank: int) -> None:
    """Everything else that a program does to a layer; the expected values come from all experts."""
    torch.manual_seed(0)
    layer = MoELayer(HIDDEN, WIDTH, EXPERTS, TOP_K, router_selection_bias=True)
    # No token on one rank, with and without a gradient of its own, and none on any.
    for sizes in ((0, 3), (3, 0), (0, 0)):
        x = torch.randn(sizes[rank], HIDDEN, requires_grad=rank == 0)
        y, aux = layer(x)
        (y.sum() + aux.loss).backward()
        assert y.shape == x.shape and aux.counts.sum() == sizes[rank] * TOP_K
        assert not y._is_view()  # `y += x` would drop hooks of FSDP2 on a view
    # bfloat16 by autocast and by an input, fp32 weights; then a layer of bfloat16.
    x = torch.randn(2, 3, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(x)
    assert y.dtype == torch.bfloat16 and layer.experts.gate_up.dtype == torch.float32
    assert torch.equal(layer(x.bfloat16())[0], y)
    torch.testing.assert_close(y.float(), layer(x)[0], atol=1e-3, rtol=0.1)
    y.sum().backward()
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half.router.selection_bias.dtype == torch.float32
    assert half(x.bfloat16())[0].dtype == torch.bfloat16
    with pytest.raises(LayerError, match=r"x is torch\.float32, the experts are torch\.bfloat16"):
        half(x)
    # Padding is not routed.
    valid = torch.tensor([[True, False, True], [False, False, False]])
    y, aux = layer(x, valid)
    assert y[~valid].abs().max() == 0 and aux.counts.sum() == 2 * TOP_K and bool(aux.finite)
    layer.eval()
    with torch.no_grad():
        torch.testing.assert_close(layer(x[valid])[0], y[valid])
    # The bias of the choice moves alike on all ranks: by the counts of all.
    counts = torch.zeros(EXPERTS, dtype=torch.int64)
    counts[rank] = 5
    layer.update_selection_bias(counts)
    bias = layer.router.selection_bias
    assert bias is not None and bias[0] == bias[1] < bias[2]
    before = bias.clone()
    for wrong, words in (
        (counts.tolist(), "not the type list"),
        (torch.tensor(3), r"not torch.int64 of the shape \[\]"),
        (counts[:-1], rf"not torch.int64 of the shape \[{EXPERTS - 1}\]"),
        (counts[None], rf"of the shape \[1, {EXPERTS}\]"),
        (counts.bool(), "not torch.bool"),
        (counts.to(torch.complex64), "not torch.complex64"),
        (torch.full((EXPERTS,), torch.nan), "all finite and not negative"),
        (torch.full((EXPERTS,), torch.inf), "all finite"),
        (counts - 1, "not negative"),
    ):
        with pytest.raises(LayerError, match=rf"tokens of {EXPERTS} experts, .*{words}"):
            layer.update_selection_bias(wrong)
    assert torch.equal(bias, before)
    layer.update_selection_bias(counts.int() if rank else counts.float())
    assert bias[0] == bias[1] < bias[2]
    bad = x.clone()
    bad[0, 0, 0] = torch.nan
    assert not layer(bad)[1].finite


def test_empty_inputs_dtypes_padding_and_bias() -> None:
    run_on_ranks(2, odd_calls)


@pytest.mark.parametrize("gradients", ["mean", "sum"])
def test_auxiliary_losses_have_the_gradients_of_their_formulas(gradients: Any) -> None:
    torch.manual_seed(1)
    layer = MoELayer(
        HIDDEN,
        WIDTH,
        EXPERTS,
        TOP_K,
        gradients=gradients,
        dtype=torch.float64,
        router_score="softmax",
        aux_loss_scope="sequence",
        aux_loss_coefficient=0.3,
        z_loss_coefficient=0.2,
    )
    x = torch.randn(3, 5, HIDDEN, dtype=torch.float64)
    _, aux = layer(x)
    weight = layer.router.weight.detach().clone().requires_grad_()
    balance = z = torch.zeros((), dtype=torch.float64)
    for logits in x @ weight.T:
        chosen = torch.bincount(logits.topk(TOP_K).indices.flatten(), minlength=EXPERTS)
        shares = chosen / (TOP_K * len(logits))
        balance = balance + 0.3 * EXPERTS * (shares * logits.softmax(1).mean(0)).sum()
        z = z + 0.2 * logits.logsumexp(1).square().mean()
    parts = 3 if gradients == "mean" else 1
    for found, expected in (
        (aux.balance_loss, balance / parts),
        (aux.z_loss, z / parts),
        (aux.loss, (balance + z) / parts),
    ):
        torch.testing.assert_close(found, expected)
        ours, theirs = (
            torch.autograd.grad(loss, of, retain_graph=True)[0]
            for loss, of in ((found, layer.router.weight), (expected, weight))
        )
        torch.testing.assert_close(ours, theirs)


def everything_to_rank_zero(rank: int, state: dict[str, Tensor]) -> Any:
    """All tokens of all ranks to experts 0 and 1: the output, and bytes kept for the backward."""
    layer = MoELayer(HIDDEN, 256, EXPERTS, TOP_K, router_selection_bias=True)
    layer.load_state_dict(state)
    x = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(rank))
    with SavedForBackward(layer.parameters()) as saved:
        y, aux = layer(x)
        kept = saved.peak_bytes
    y.sum().backward()
    return y.detach(), kept, aux.counts.tolist()


def test_memory_is_bounded_whatever_the_routing() -> None:
    torch.manual_seed(3)
    layer = MoELayer(HIDDEN, 256, EXPERTS, TOP_K, router_selection_bias=True)
    layer.router.selection_bias[:2] = 100.0  # type: ignore[index]
    # One rank computes up to twice its balanced share at once, and keeps nothing of more than that.
    inner = 2 * 64 * TOP_K * 2 * 256 * 4
    results = run_on_ranks(RANKS, everything_to_rank_zero, layer.state_dict())
    for rank, (y, kept, counts) in enumerate(results):
        x = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(rank))
        torch.testing.assert_close(y, layer(x)[0])
        assert counts == [64, 64] + [0] * (EXPERTS - 2)
        assert kept < inner


def mistakes(rank: int) -> None:
    with pytest.raises(LayerError, match=r"num_experts \(7\) must be a multiple of the 2 ranks.*6"):
        MoELayer(HIDDEN, WIDTH, 7, TOP_K)
    model = build()
    with pytest.raises(LayerError, match="DDP has overwritten"):
        DistributedDataParallel(model)(tokens_of(0, rank))
    torch.manual_seed(rank)
    layer = MoELayer(HIDDEN, WIDTH, EXPERTS, TOP_K)
    with pytest.raises(LayerError, match="ranks 0 and 1 of the group have different router"):
        layer(torch.ones(3, HIDDEN))
    for options in ({"combine": "exact" if rank else "fast"}, {"dispatch_chunks": 1 + rank}):
        layer = MoELayer(HIDDEN, WIDTH, EXPERTS, TOP_K, **options)
        with pytest.raises(LayerError, match="ranks 0 and 1 of the group were built"):
            layer(torch.ones(3, HIDDEN))
    with pytest.raises(TypeError, match=r"ProcessGroup, not list: torch.distributed.new_group"):
        build(group=[0, 1])
    alone = dist.new_group([0])
    if rank == 1:
        with pytest.raises(LayerError, match="rank 1 is not in the group"):
            MoELayer(HIDDEN, WIDTH, EXPERTS, TOP_K, alone)
    else:
        assert len(MoELayer(HIDDEN, WIDTH, EXPERTS, TOP_K, alone).experts.down) == EXPERTS
    group = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(LayerError, match="not initialized"):
        MoELayer(HIDDEN, WIDTH, EXPERTS, TOP_K, group)


def test_mistakes_on_ranks_are_named() -> None:
    run_on_ranks(2, mistakes)


def test_ranks_without_a_process_group_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(LayerError, match="4 ranks were started, without a process group"):
        MoELayer(HIDDEN, WIDTH, EXPERTS, TOP_K)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"top_k": 9}, LayerError, r"top_k \(9\) exceeds num_experts \(8\)"),
        ({"dispatcher": "deepep", "combine": "exact"}, LayerError, 'combine = "fast"'),
        ({"dispatcher": "deepep", "payload": "fp8"}, LayerError, 'payload = "same"'),
        ({"num_experts": 0}, LayerError, "num_experts must be an integer of at least 1, not 0"),
        ({"hidden_size": 8.0}, LayerError, "hidden_size must be an integer"),
        ({"dispatcher": "alltoall"}, LayerError, "did you mean all_to_all"),
        ({"gradients": "average"}, LayerError, "choices: mean, sum"),
        ({"dispatch_chunks": 0}, LayerError, "at least 1"),
        ({"router_scores": "softmax"}, TypeError, "did you mean 'router_score'"),
        ({"router_score": "soft"}, ConfigError, "router_score cannot be"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], error: type[Exception], words: str) -> None:
    sizes = {"hidden_size": HIDDEN, "expert_size": WIDTH, "num_experts": EXPERTS, "top_k": TOP_K}
    with pytest.raises(error, match=words):
        MoELayer(**(sizes | change))


def test_inputs_that_cannot_be_are_named() -> None:
    layer = MoELayer(HIDDEN, WIDTH, EXPERTS, TOP_K)
    for x, words in (
        (torch.ones(3, HIDDEN + 1), r"shape \[3, 9\].*hidden_size = 8"),
        (torch.ones(3, HIDDEN, dtype=torch.float64), "x is torch.float64"),
        (torch.ones(3, HIDDEN, dtype=torch.int64), r"x.to\(torch.float32\)"),
        (torch.ones(3, HIDDEN, device="meta"), "without values, of the meta device"),
        (torch.ones(3, HIDDEN).to_sparse(), r"not torch.sparse_coo: x.to_dense\(\)"),
        (torch.nested.nested_tensor([torch.ones(3, HIDDEN)], layout=torch.jagged), "x.values"),
    ):
        with pytest.raises(LayerError, match=words):
            layer(x)
    with pytest.raises(LayerError, match="valid must be bool"):
        layer(torch.ones(3, HIDDEN), torch.ones(4, dtype=torch.bool))
    with pytest.raises(LayerError, match="x is on cpu, valid on meta"):
        layer(torch.ones(3, HIDDEN), torch.ones(3, dtype=torch.bool, device="meta"))


@pytest.mark.parametrize(
    "options", [{}, {"num_shared_experts": 1}, {"combine": "exact"}, {"dispatch_chunks": 2}]
)
def test_a_second_derivative_is_refused(options: dict[str, Any]) -> None:
    """Not at the second backward: one that names its inputs would leave out terms in silence."""
    layer, x_TH = MoELayer(16, 32, 4, 2, **options), torch.randn(5, 16, requires_grad=True)
    with pytest.raises(NoSecondDerivative, match="create_graph must be False"):
        torch.autograd.grad(layer(x_TH)[0].square().sum(), x_TH, create_graph=True)
    with pytest.raises(NoSecondDerivative):
        torch.autograd.functional.hessian(lambda x: layer(x)[0].square().sum(), x_TH)


def test_options_are_those_of_the_configuration() -> None:
    fields = get_type_hints(ModelConfig)  # without their ranges
    for name, kind in get_type_hints(RoutingOptions).items():
        assert fields[name] in (kind, kind | None), name


def test_a_layer_is_made_on_meta_and_filled_later() -> None:
    layer = MoELayer(HIDDEN, WIDTH, EXPERTS, TOP_K, device="meta").to_empty(device="cpu")
    torch.manual_seed(5)
    layer.reset_parameters()
    torch.manual_seed(5)
    expected = MoELayer(HIDDEN, WIDTH, EXPERTS, TOP_K)
    assert all(map(torch.equal, layer.state_dict().values(), expected.state_dict().values()))
