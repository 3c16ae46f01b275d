"""The weights of a model as those of another that computes the same.

A model may differ from all families of transformers only in how it is written down: which channels
RoPE rotates as a pair, and whether its router has a selection bias, which is zero here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moemesh.checkpoint.huggingface.convert import LogicalWeights
from moemesh.config.model import ModelConfig


class EquivalentWeights:
    """The weights of `model` for `other`, one of its :func:`~moemesh.config.huggingface.export.
    equivalents`."""

    def __init__(self, weights: LogicalWeights, model: ModelConfig, other: ModelConfig) -> None:
        self.weights, self.model = weights, model
        self._adds_bias = other.router_selection_bias and not model.router_selection_bias
        self._order: Tensor | None = None
        if other.rope_interleave != model.rope_interleave:
            pairs = torch.arange(model.head_dim)
            rotated = pairs[: model.rotary_dim]
            # Pairs (i, i + F) stand at (2i, 2i + 1) in the other form.
            halves = rotated.view(2, -1).T if other.rope_interleave else rotated.view(-1, 2).T
            pairs[: model.rotary_dim] = halves.reshape(-1)
            self._order = pairs

    def read(self, name: str, box: Sequence[range]) -> Tensor:
        """The part `box` of a parameter, buffer or stack of experts."""
        if self._adds_bias and name.endswith("router.selection_bias"):
            return torch.zeros([len(part) for part in box])
        leaf = name.rpartition(".")[2]
        if self._order is None or leaf not in ("qkv", "qkv_bias"):
            return self.weights.read(name, box)
        if leaf == "qkv":
            # Channels of a head are the third dimension: they are read whole.
            groups, heads, channels, inputs = box
            whole = [groups, heads, range(self.model.head_dim), inputs]
            found = self._turned(self.weights.read(name, whole), heads)
            return found[:, :, channels.start : channels.stop]
        kv_heads, head_dim = self.model.num_kv_heads, self.model.head_dim
        (part,), size = box, (self.model.num_heads + 2 * kv_heads) * head_dim
        found = self.weights.read(name, [range(size)]).view(kv_heads, -1, head_dim, 1)
        found = self._turned(found, range(found.shape[1])).reshape(-1)
        return found[part.start : part.stop]

    def _turned(self, found: Tensor, heads: range) -> Tensor:
        """Queries and keys [groups, heads, channels, inputs] with their channels in the other
        order; the last head of a group is its value."""
        assert self._order is not None
        value = self.model.num_heads // self.model.num_kv_heads + 1
        is_rotated = torch.tensor([head != value for head in heads])
        return torch.where(is_rotated[None, :, None, None], found[:, :, self._order], found)
