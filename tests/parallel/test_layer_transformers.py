"""MoE blocks of transformers as layers: outputs, choices and gradients are theirs."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moemesh.config.errors import ConfigError
from moemesh.parallel.expert.layer import MoELayer
from moemesh.parallel.expert.spread import LayerError
from tests.huggingface.ours import assert_near
from tests.huggingface.tiny import DENSE, FAMILIES, make
from tests.ranks import run_on_ranks

pytest.importorskip("transformers")

KINDS = [kind for kind in FAMILIES if kind not in DENSE]
TOKENS = torch.arange(2 * 48).view(2, 48) * 7 % 288


def holders(model: Any) -> list[tuple[nn.Module, str]]:
    """The decoder layers with experts, and the name of the block there."""
    blocks = [
        (layer, name)
        for layer in model.model.layers
        for name in ("mlp", "block_sparse_moe")
        if hasattr(getattr(layer, name, None), "experts")
    ]
    assert blocks
    return blocks


def block_of(kind: str) -> Any:
    layer, name = holders(make(kind))[0]
    return getattr(layer, name)


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_its_block_and_gives_it_back(kind: str) -> None:
    block = block_of(kind)
    layer = MoELayer.from_transformers(block)
    chosen: list[Tensor] = []
    router = getattr(block, "router", None) or block.gate
    router.register_forward_hook(lambda module, inputs, outputs: chosen.append(outputs[-1]))
    x = torch.randn(2, 33, 48, requires_grad=True)
    own_x = x.detach().clone().requires_grad_()
    theirs, ours = block(x), layer(own_x)
    assert isinstance(ours, tuple) == isinstance(theirs, tuple)
    assert_near(first(ours), first(theirs))
    assert torch.equal(
        layer.counts, torch.bincount(chosen[0].flatten(), minlength=len(layer.counts))
    )

    weights = torch.randn_like(x)
    for y in (first(theirs), first(ours)):
        (y * weights).sum().backward()
    assert_near(own_x.grad, x.grad)
    gradients = dict(layer.state_dict())
    for name, parameter in layer.named_parameters():
        gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    assert layer.origin is not None
    gradients = layer.origin.stored(gradients)
    for name, parameter in block.named_parameters():
        if parameter.grad is not None:
            assert_near(gradients[name], parameter.grad)

    back, state = layer.to_transformers(), block.state_dict()
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name
    block.load_state_dict(back)


@pytest.mark.representative(
    "True-qwen3_moe",
    "True-gpt_oss",
    "True-deepseek_v3",
    "True-mixtral",
    "True-minimax_m2",
    "False-qwen3_moe",
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_run", [False, True])
def test_blocks_are_replaced_and_put_back_at_any_time(kind: str, has_run: bool) -> None:
    """transformers installs what collects the logits of routers once, at a first forward."""
    model = make(kind, output_router_logits=True, router_aux_loss_coef=0.1)
    twin = copy.deepcopy(model)
    expected = twin(TOKENS, labels=TOKENS, output_router_logits=True)
    expected.loss.backward()
    if has_run:
        model(TOKENS, output_router_logits=True)
    blocks = [getattr(holder, name) for holder, name in holders(model)]
    places = holders(model)
    for put_back in (False, True):
        for (holder, name), block in zip(places, blocks, strict=True):
            made = block if put_back else MoELayer.from_transformers(block)
            setattr(holder, name, made)
        for one in (model, copy.deepcopy(model)):  # with what transformers looks for
            output = one(TOKENS, labels=TOKENS, output_router_logits=True)
            assert_near(output.logits, expected.logits)
            assert_near(output.loss, expected.loss)
            if expected.aux_loss is not None:
                assert_near(output.aux_loss, expected.aux_loss)
            assert len(output.router_logits) == len(blocks)
            for ours, theirs in zip(output.router_logits, expected.router_logits, strict=True):
                assert_near(ours.view_as(theirs), theirs)
            one.zero_grad()
            output.loss.backward()
            gradient, wanted = (net.model.embed_tokens.weight.grad for net in (one, twin))
            assert_near(gradient, wanted)
            assert wanted.abs().max() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_save_pretrained_writes_what_transformers_reads(kind: str, tmp_path: Path) -> None:
    """Files and all, those of the model with its own blocks."""
    model = make(kind)
    model.save_pretrained(tmp_path / "theirs")
    names = list[str]()
    for holder, name in holders(model):
        with torch.no_grad():
            setattr(holder, name, MoELayer.from_transformers(getattr(holder, name)))
        names += [name]
    copy.deepcopy(model).save_pretrained(tmp_path / "ours")
    theirs, ours = (
        {path.name: path.read_bytes() for path in (tmp_path / one).iterdir()}
        for one in ("theirs", "ours")
    )
    assert ours == theirs
    # A state dict for anybody else is that of the layers.
    assert any(key.endswith(f"{names[0]}.experts.gate_up") for key in model.state_dict())
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_dtypes_frozen_parameters_and_copies(kind: str) -> None:
    block = block_of(kind).to(torch.bfloat16).train()
    block.gate.float()
    block.experts.requires_grad_(False)
    layer = MoELayer.from_transformers(block, router_bias_rate=0.25)
    assert layer.training and layer.router.weight.dtype == torch.float32
    assert layer.experts.down.dtype == torch.bfloat16 and layer.router.weight.requires_grad
    assert not layer.experts.gate_up.requires_grad and not layer.experts.down.requires_grad
    before = block.experts.down_proj.clone()
    with torch.no_grad():
        layer.experts.down.zero_()
    assert torch.equal(block.experts.down_proj, before), "the layer shares the memory of the block"
    layer(torch.randn(1, 5, 48, dtype=torch.bfloat16)).sum().backward()
    again = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    assert all(map(torch.equal, again.state_dict().values(), layer.state_dict().values()))
    if kind == "deepseek_v3":
        layer.update_selection_bias(torch.arange(8))
        bias = layer.to_transformers()["gate.e_score_correction_bias"]
        assert not torch.equal(bias, block.gate.e_score_correction_bias)
    meta = MoELayer.from_transformers(block.to("meta"))
    assert {one.device.type for one in meta.state_dict().values()} == {"meta"}


def on_ranks(rank: int, kind: str) -> None:
    block = block_of(kind)
    layer = MoELayer.from_transformers(block, None, "all_to_all")
    assert len(layer.experts.down) == block.experts.num_experts // 2
    x = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(rank))
    assert_near(first(layer(x)), first(block(x)))
    back = layer.to_transformers()
    assert all(torch.equal(back[name], tensor) for name, tensor in block.state_dict().items())


@pytest.mark.representative("gpt_oss")
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen2_moe"])
def test_experts_of_a_block_over_ranks(kind: str) -> None:
    """Biases and clamps, and a gated shared expert."""
    run_on_ranks(2, on_ranks, kind)


def test_what_is_no_block_or_no_option_is_named() -> None:
    with pytest.raises(LayerError, match="Linear is not a MoE block of transformers 5"):
        MoELayer.from_transformers(nn.Linear(2, 2))
    block = block_of("mixtral")
    with pytest.raises(LayerError, match="router_score follows from the block: leave it out"):
        MoELayer.from_transformers(block, router_score="sigmoid")
    with pytest.raises(LayerError, match="dtype follows from the block"):
        MoELayer.from_transformers(block, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="did you mean"):
        MoELayer.from_transformers(block, router_bias_rates=0.1)
    with pytest.raises(LayerError, match=r"was not made by MoELayer\.from_"):
        MoELayer(8, 4, 4, 2).to_transformers()
    block.jitter_noise = 0.1
    with pytest.raises(LayerError, match="set jitter_noise to 0"):
        MoELayer.from_transformers(block)
    block.jitter_noise = 0.0
    block.experts.down_proj = nn.Parameter(torch.zeros(4, 48, 55))
    block.extra = nn.Parameter(torch.zeros(3))
    words = r"experts.down_proj is \(4, 48, 55\), not \(4, 48, 56\); extra is \(3,\), not None"
    with pytest.raises(LayerError, match=words):
        MoELayer.from_transformers(block)
    block.experts.config = SimpleNamespace(to_dict=lambda: {"model_type": "cohere2"})
    with pytest.raises(ConfigError, match="can be planned at most"):
        MoELayer.from_transformers(block)
