"""Norm, dense SwiGLU MLP, embedding and head: the parts without attention or experts.

Also low-rank adapters of a block's weights (Hu et al., 2021); :mod:`moemesh.config.lora` defines
their parameters and names.

Legend: T tokens, H hidden, F MLP width, G = 2 F (gate, then up).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from moemesh.config.lora import (
    NO_ADAPTERS,
    LoraConfig,
    TargetPart,
    factor_name,
    factors_of,
    parts_of,
)
from moemesh.model.seams import Boundary
from moemesh.ops.linear import Adapted, Adapter, Operand, Weight, linear, swiglu
from moemesh.ops.rms_norm import rms_norm
from moemesh.ops.swiglu import PLAIN, SwigluForm


class AdaptedModule(nn.Module):
    """A block whose weights may have low-rank adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.lora, self.scaling = NO_ADAPTERS, 1.0
        #: Name of a weight -> its parts with an adapter.
        self._adapted: dict[str, list[TargetPart]] = {}

    def add_adapters(self, lora: LoraConfig, *leaves: str, is_stack: bool = False) -> None:
        """Create adapter parameters of the weights `leaves` (`is_stack`: stacks of experts)."""
        if not lora.rank:
            return
        self.lora, self.scaling = lora, lora.scaling
        for leaf in leaves:
            shape = tuple(getattr(self, leaf).shape)
            parts = [part for part in parts_of(leaf, shape) if lora.adapts(part.target)]
            for factor in factors_of(lora, parts, shape, {}, "", is_stack=is_stack):
                setattr(self, factor.leaf, nn.Parameter(torch.empty(factor.shape)))
            if parts:
                self._adapted[leaf] = parts

    def weight(self, leaf: str) -> Weight:
        """The weight `leaf` as :func:`moemesh.ops.linear.linear` takes it."""
        weight = getattr(self, leaf)
        if leaf not in self._adapted:
            return weight
        return Adapted(weight, tuple(self.adapters(leaf)), self.scaling)

    def adapters(self, leaf: str) -> list[Adapter]:
        """The adapters of the weight `leaf`."""
        return adapters_of(self, self._adapted.get(leaf, ()))


def adapters_of(module: nn.Module, parts: Iterable[TargetPart]) -> list[Adapter]:
    """The adapters of `parts` of a weight, whose factors are parameters of `module`."""
    adapters: list[Adapter] = []
    for part in parts:
        a, b = (getattr(module, factor_name(part.target, factor)) for factor in "AB")
        adapters.append(Adapter(a, b, part.dim, part.start, part.size))
    return adapters


class RMSNorm(nn.Module):
    """Root mean square norm over the last dim (Zhang & Sennrich, 2019), with a learned scale."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        weight_H = self.weight
        if x.device.type != "cpu":
            return torch.rms_norm(x, weight_H.shape, weight_H, self.epsilon)
        return rms_norm(x, weight_H, self.epsilon)


class MLP(AdaptedModule):
    """SwiGLU (Shazeer, 2020): ``(silu(x W_gate^T) * x W_up^T) W_down^T``, or a variant (`form`).
    ``gate_up`` [2, F, H] has both first weights; ``down`` is [H, F]."""

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
        self.boundary = Boundary()
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
