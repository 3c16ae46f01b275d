"""The layer's last knobs: where the scale multiplies, how shared experts join."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from moemesh.comm.overlap import overlapped_exchange
from moemesh.config.model import ModelConfig
from moemesh.model.batch import Batch
from moemesh.model.dispatcher import DispatchedRows, LocalDispatcher
from moemesh.model.initialization import initialize
from moemesh.model.layers import MLP
from moemesh.model.moe import MoE, plain_exchange
from moemesh.model.seams import PLAIN_FLOW
from moemesh.model.transformer import Transformer
from moemesh.ops import expert_blocks
from moemesh.ops.pending import Pending
from moemesh.ops.permute import OwnSlots
from moemesh.ops.weight_gradient import WeightGradientQueue
from moemesh.parallel.expert.build import overlapped
from tests.model.test_router import config_of, context_of


def output(**knobs: Any) -> torch.Tensor:
    layer = MoE(config_of(router_scale=2.5, **knobs)).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    x_TH = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    return layer(x_TH, context_of(12)).y_TH


def test_the_scale_on_weights_and_on_the_output_agree() -> None:
    on_weights, on_output = output(), output(router_scale_on="output")
    torch.testing.assert_close(on_weights, on_output, rtol=1e-12, atol=1e-14)
    assert not torch.equal(on_weights, torch.zeros_like(on_weights))


def test_shared_experts_are_added_or_averaged() -> None:
    """The scale never touches the shared experts."""
    torch.testing.assert_close(output(shared_combine="average"), output() / 2)
    routed = output(num_shared_experts=0)
    averaged = output(num_shared_experts=0, shared_combine="average")
    assert torch.equal(routed, averaged)  # nothing to average with


def _logged_exchange(x: Tensor, /, *, phase: str, name: str, log: list[str]) -> Any:
    """An exchange that keeps the rows and logs its start and end."""
    log.append(f"{phase} {name} starts")
    return lambda: log.append(f"{name} ends") or x.clone()


class _LoggedDispatcher:
    """The local dispatcher, with an exchange of tokens that moves none."""

    def __init__(self, num_experts: int, log: list[str]) -> None:
        self.local, self.log, self.num_sent = LocalDispatcher(num_experts), log, 0
        self.plan, self.combine = self.local.plan, self.local.combine
        self.plan_chunks = self.local.plan_chunks

    def dispatch(self, x_TH: Tensor, weights_TK: Tensor, plan: OwnSlots) -> Pending[DispatchedRows]:
        self.num_sent += 1
        there, back = (
            partial(_logged_exchange, name=f"{way} {self.num_sent}", log=self.log)
            for way in ("there", "back")
        )
        rows = self.local.dispatch(x_TH, weights_TK, plan).wait()
        return overlapped_exchange(x_TH, there, back).then(lambda x: rows._replace(source_NH=x))


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_weight_gradients_are_computed_while_those_of_tokens_travel(
    num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All run together, after the start of the last return and before a wait for it."""
    log: list[str] = []
    compute_sum = expert_blocks.WeightGradient.compute_sum

    def logged(calls: list[Any]) -> Tensor | None:
        log.append(f"gradients of {len(calls)}")
        return compute_sum(calls)

    monkeypatch.setattr(expert_blocks.WeightGradient, "compute_sum", staticmethod(logged))
    config = config_of()
    gradients = []
    for is_local in (True, False):
        torch.manual_seed(0)
        moe = MoE(config).double()
        for parameter in moe.parameters():
            torch.nn.init.normal_(parameter)
        if not is_local:
            moe.dispatcher = _LoggedDispatcher(config.num_experts, log)
            moe.exchange = overlapped(num_chunks)
        x_TH = torch.randn(6, config.hidden_size, dtype=torch.float64, requires_grad=True)
        moe(x_TH, context_of(6)).y_TH.square().sum().backward()
        gradients.append([x_TH.grad, *(p.grad for p in moe.experts.parameters())])
    for whole, cut in zip(*gradients, strict=True):
        assert_close(cut, whole)
    backward = log[log.index(f"there {num_chunks} ends") + 1 :]
    at = backward.index(f"gradients of {num_chunks}")
    assert backward[at - 1] == "backward back 1 starts"
    assert backward[at + 1] == f"gradients of {num_chunks}"
    assert "back 1 ends" in backward[at:]


@pytest.mark.parametrize("without", ["none", "some", "all"])
@pytest.mark.parametrize("through_queue", [False, True])
def test_local_experts_give_the_bits_of_the_single_steps(without: str, through_queue: bool) -> None:
    """Output and gradients; with choices that have no expert, and with deferred gradients."""
    torch.manual_seed(3)
    config, results = config_of(), []
    moe = MoE(config)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter)
    x_TH, upstream_TH = torch.randn(2, 9, config.hidden_size)
    routing = moe.router(x_TH)
    experts_TK = routing.experts_TK
    if without != "none":
        experts_TK = torch.full_like(experts_TK, -1) if without == "all" else experts_TK - 1
    local = moe.dispatcher
    calls = {
        name: getattr(local, name) for name in ("plan", "plan_complete", "dispatch", "combine")
    }
    for dispatcher in (local, cast("Any", SimpleNamespace(**calls))):
        x, weights_TK = x_TH.clone().requires_grad_(), routing.weights_TK.detach().requires_grad_()
        where, tokens = (dispatcher, PLAIN_FLOW, moe.experts), (x, weights_TK, experts_TK)
        y_TH, _ = plain_exchange(*where, tokens, is_complete=without == "none")
        queue = WeightGradientQueue()
        with queue if through_queue else nullcontext():
            y_TH.backward(upstream_TH)
        queue.run()
        tensors = [y_TH, x.grad, weights_TK.grad, *(p.grad for p in moe.experts.parameters())]
        results.append(tensors)
        moe.zero_grad()
    for ours, expected in zip(*results, strict=True):
        assert ours is not None and torch.equal(ours, expected)
    assert (y_TH.count_nonzero() == 0) == (without == "all")


def test_multipliers_are_those_of_scaled_weights() -> None:
    """Each multiplier of Granite is a factor of weights: the same losses in float64."""
    keys = {"vocab_size": 32, "num_layers": 2, "hidden_size": 24, "num_heads": 4, "num_kv_heads": 4,
            "head_dim": 6, "intermediate_size": 20, "expert_intermediate_size": 10,
            "aux_loss_coefficient": 0.0, "expert_bias": True}  # fmt: skip
    factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.25, "logits_scaling": 5.0}
    plain, scaled = (Transformer(ModelConfig(**(keys | more))) for more in ({}, factors))
    for model in (plain, scaled):
        initialize(model, seed=1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for ours, theirs in zip(plain.parameters(), scaled.parameters(), strict=True):
            ours += 0.3 * torch.randn(ours.shape, dtype=torch.float64, generator=generator)
            theirs.copy_(ours)
        assert plain.embedding is not None and plain.head is not None
        plain.embedding.weight *= 3.0
        plain.head.weight /= 5.0
        for layer in plain.layers.values():
            block = layer.feed_forward
            written = [layer.attention.output]
            if isinstance(block, MLP):
                written.append(block.down)
            else:
                written += [block.experts.down, block.experts.down_bias, block.shared.down]
            for weight in written:
                weight *= 0.25
    tokens = torch.randint(32, (2, 20), generator=generator)
    batch = Batch(tokens_BS=tokens[:, :-1], targets_BS=tokens[:, 1:], sequences_B=torch.arange(2))
    expected, got = (model(batch).losses_T for model in (plain, scaled))
    assert expected is not None and got is not None and expected.std() > 0.1
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
