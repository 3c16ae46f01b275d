"""Weights that follow from stored ones: of an equal model that is written down otherwise, and with
adapters merged in.

A model may differ from all families of transformers only in how it is written down: which channels
RoPE rotates as a pair, and whether its router has a selection bias, which is zero here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moemesh.checkpoint.huggingface.convert import LogicalWeights
from moemesh.config.lora import TargetPart, factor_name, parts_of
from moemesh.config.model import ModelConfig
from moemesh.config.parameters import ParameterTensor, tensors
from moemesh.config.plan import Plan

# Weights with their adapters merged in: W + s B A, any part of any of them.


class MergedWeights:
    """The weights of a model without adapters that computes what `model` does with its own."""

    def __init__(self, weights: LogicalWeights, model: ModelConfig) -> None:
        self.weights, self.lora = weights, model.lora
        self._tensors = {tensor.name: tensor for tensor in tensors(model, Plan())}

    def read(self, name: str, box: Sequence[range]) -> Tensor:
        """The part `box` of a parameter, buffer or stack of experts; in fp32 at least where an
        adapter is merged."""
        found, tensor = self.weights.read(name, box), self._tensors.get(name)
        if tensor is None:
            return found
        for part in parts_of(name.rpartition(".")[2], tensor.shape):
            if self.lora.adapts(part.target):
                found = self._with(found, tensor, part, list(box))
        return found

    def _with(
        self, found: Tensor, tensor: ParameterTensor, part: TargetPart, box: list[range]
    ) -> Tensor:
        """`found` with the adapter of one part of the weight."""
        *rows, columns = box
        into = [slice(None)] * len(rows)
        if part.dim is not None:
            dim = part.dim + tensor.is_expert
            first = max(rows[dim].start, part.start)
            last = min(rows[dim].stop, part.start + part.size)
            if first >= last:
                return found
            into[dim] = slice(first - rows[dim].start, last - rows[dim].start)
            rows[dim] = range(first - part.start, last - part.start)
        block, rank = tensor.name.rpartition(".")[0], range(self.lora.rank)
        experts = box[:1] if tensor.is_expert else []
        wide = torch.promote_types(found.dtype, torch.float32)
        a, b = (
            self.weights.read(f"{block}.{factor_name(part.target, factor)}", own).to(wide)
            for factor, own in (("A", [*experts, rank, columns]), ("B", [*rows, rank]))
        )
        delta = b.flatten(len(experts), -2) @ a
        found = found.to(wide, copy=True)
        found[tuple(into)] += self.lora.scaling * delta.view(*b.shape[:-1], -1)
        return found


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
