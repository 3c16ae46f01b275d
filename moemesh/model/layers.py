"""Norm, dense SwiGLU MLP, embedding and head: the parts without attention or experts.

Legend: T tokens, H hidden, F MLP width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moemesh.config.lora import NO_ADAPTERS, LoraConfig
from moemesh.model.lora import AdaptedModule
from moemesh.model.seams import Boundary, LocalBoundary
from moemesh.ops.linear import Operand, linear, swiglu
from moemesh.ops.swiglu import PLAIN, SwigluForm


class RMSNorm(nn.Module):
    """Root mean square norm over the last dim (Zhang & Sennrich, 2019), with a learned scale."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class MLP(AdaptedModule):
    """SwiGLU (Shazeer, 2020): ``(silu(x W_gate^T) * x W_up^T) W_down^T``, or another form of it;
    also a shared expert."""

    def __init__(
        self,
        hidden: int,
        width: int,
        form: SwigluForm = PLAIN,
        lora: LoraConfig = NO_ADAPTERS,
    ) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2, width, hidden))
        self.down = nn.Parameter(torch.empty(hidden, width))
        self.add_adapters(lora, "gate_up", "down")
        self.form = form
        self.boundary: Boundary = LocalBoundary()
        self.activate: Callable[[Tensor], Operand] = partial(swiglu, form=form)

    def forward(self, x_TH: Tensor, num_tokens: int) -> Tensor:
        x_TH = self.boundary.enter(x_TH, num_tokens)
        h_TG = linear(x_TH, self.weight("gate_up"))
        return self.boundary.leave(self.activate(h_TG), self.weight("down"))


class VocabularyRows(nn.Module):
    """A table with one row per vocabulary entry: the embedding, or the head."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, hidden))
