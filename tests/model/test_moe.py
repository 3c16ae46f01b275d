"""The layer's last knobs: where the scale multiplies, how shared experts join."""

from typing import Any

import torch

from moemesh.model.moe import MoE
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
