"""Low-rank adapters of a block's weights (Hu et al., 2021): their parameters, and the products.

Which parameters there are, and what they are called, says :mod:`moemesh.config.lora`.
"""

from __future__ import annotations

import torch
from torch import nn

from moemesh.config.lora import (
    NO_ADAPTERS,
    LoraConfig,
    TargetPart,
    factor_name,
    factors_of,
    parts_of,
)
from moemesh.ops.linear import Adapted, Adapter, Weight


class AdaptedModule(nn.Module):
    """A block whose weights may have adapters beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.lora, self.scaling = NO_ADAPTERS, 1.0
        self._adapted: dict[str, list[TargetPart]] = {}

    def add_adapters(self, lora: LoraConfig, *leaves: str, is_stack: bool = False) -> None:
        """Make the adapter parameters of the weights `leaves`; `is_stack`: those of experts."""
        if not lora.rank:
            return
        self.lora, self.scaling = lora, lora.scaling
        for leaf in leaves:
            shape = tuple(getattr(self, leaf).shape)
            for factor in factors_of(lora, leaf, shape, {}, "", is_stack=is_stack):
                setattr(self, factor.leaf, nn.Parameter(torch.empty(factor.shape)))
            parts = [part for part in parts_of(leaf, shape) if lora.adapts(part.target)]
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
        return [
            Adapter(
                getattr(self, factor_name(part.target, "A")),
                getattr(self, factor_name(part.target, "B")),
                part.dim,
                part.start,
                part.size,
            )
            for part in self._adapted.get(leaf, ())
        ]
