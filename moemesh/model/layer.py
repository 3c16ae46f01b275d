"""One layer of the transformer: attention, then a dense MLP or a mixture of experts.

Legend: T tokens of the residual stream held here, H hidden.
"""

from __future__ import annotations

from torch import Tensor, nn

from moemesh.config.model import ModelConfig
from moemesh.model.attention import build_attention
from moemesh.model.batch import Context
from moemesh.model.layers import MLP, RMSNorm
from moemesh.model.moe import MoE, MoEOutput, swiglu_form


class Layer(nn.Module):
    """Pre-norm block: attention, then a dense MLP or a mixture of experts."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        #: Of what a block adds to the residual stream.
        self.multiplier = config.residual_multiplier
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = build_attention(config, index)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward: MoE | MLP = (
            MoE(config, index)
            if config.is_moe_layer(index)
            else MLP(config.hidden_size, config.intermediate_size, swiglu_form(config), config.lora)
        )

    def forward(self, x_TH: Tensor, context: Context) -> tuple[Tensor, MoEOutput | None]:
        x_TH = x_TH + self._scaled(self.attention(self.attention_norm(x_TH), context))
        normed_TH = self.feed_forward_norm(x_TH)
        if isinstance(self.feed_forward, MLP):
            return x_TH + self._scaled(self.feed_forward(normed_TH, context.num_tokens)), None
        x_TH = context.flow.cut(x_TH)
        routed = self.feed_forward(normed_TH, context)
        return x_TH + self._scaled(routed.y_TH), routed

    def _scaled(self, y_TH: Tensor) -> Tensor:
        return y_TH if self.multiplier == 1.0 else y_TH * self.multiplier
