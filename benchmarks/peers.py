"""The same experts and routing through transformers, in one process beside ours."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders import Step, Work
from moemesh.model.moe import MoE


def transformers_step(layer: MoE) -> tuple[str, Step] | None:
    """(version, forward and backward of transformers' experts with the weights of `layer`).

    Its fastest form, `grouped_mm`; None when transformers, or its stacked experts (version 5 on),
    are not installed.
    """
    try:
        version: str = importlib.import_module("transformers").__version__
        configuration: Any = importlib.import_module("transformers.models.qwen3_moe")
        modeling: Any = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
        make: Callable[[Any], Any] = modeling.Qwen3MoeExperts
    except (ImportError, AttributeError):
        return None
    config = layer.config
    chosen = configuration.Qwen3MoeConfig(
        hidden_size=config.hidden_size,
        moe_intermediate_size=config.expert_intermediate_size,
        num_experts=config.num_experts,
        num_experts_per_tok=config.experts_per_token,
        hidden_act="silu",
    )
    chosen._experts_implementation = "grouped_mm"
    experts = make(chosen).to(layer.experts.gate_up.dtype)
    with torch.no_grad():
        experts.gate_up_proj.copy_(layer.experts.gate_up.flatten(1, 2))
        experts.down_proj.copy_(layer.experts.down)

    def step(work: Work) -> Tensor:
        x_TH = work.x_TH.detach().requires_grad_()
        weights_TK = work.weights_TK.detach().requires_grad_()
        for parameter in experts.parameters():
            parameter.grad = None
        y_TH = experts(x_TH, work.experts_TK, weights_TK.to(x_TH.dtype))
        y_TH.backward(work.gradient_TH)
        return y_TH.detach()

    return version, step
