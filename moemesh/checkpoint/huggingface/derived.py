"""Weights that follow from stored ones: with adapters merged in, of an equal model that is written
down otherwise, and of a mixture of experts made of a dense model.

A model may differ from all families of transformers only in how it is written down: which channels
RoPE rotates as a pair, and whether its router has a selection bias, which is zero here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moemesh.checkpoint.huggingface.convert import LogicalWeights
from moemesh.checkpoint.huggingface.weights import EXPERT
from moemesh.config.lora import factor_name, parts_of
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.model.initialization import normal_slice
from moemesh.model.transformer import Transformer
from moemesh.sharding.parameters import tensors

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
        block, rank = tensor.name.rpartition(".")[0], range(self.lora.rank)
        experts = list(box[:1]) if tensor.is_expert else []
        wide = torch.promote_types(found.dtype, torch.float32)
        for part in parts_of(name.rpartition(".")[2], tensor.shape):
            *rows, columns = box
            into = [slice(None)] * len(rows)
            if not self.lora.adapts(part.target):
                continue
            if part.dim is not None:
                dim = part.dim + tensor.is_expert
                first = max(rows[dim].start, part.start)
                last = min(rows[dim].stop, part.start + part.size)
                if first >= last:
                    continue
                into[dim] = slice(first - rows[dim].start, last - rows[dim].start)
                rows[dim] = range(first - part.start, last - part.start)
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


# Weights of a mixture of experts made of those of a dense model, any part of any of them.
#
# Legend: E experts, F width of the dense MLP and of every expert, H hidden.
#
# Sparse upcycling (Komatsuzaki et al., 2022, arXiv:2212.05055): every expert is a copy of the
# dense MLP, the router is new and small. With weights of the chosen experts that sum to one the
# mixture computes what the dense model does. Two ways to make the experts differ: normal noise
# on every weight, and drop-upcycling (Nakamura et al., 2025, arXiv:2502.19261), which draws a
# share of each expert's F channels anew, with mean and standard deviation of the dense weights.


class Upcycling(NamedTuple):
    """`noise`: standard deviation of what is added to an expert's weights, in that of the dense
    weight; `drop`: the share of its channels that are drawn anew; all draws follow from `seed`."""

    noise: float = 0.0
    drop: float = 0.0
    seed: int = 0


class UpcycledWeights:
    """The weights of `model`, a mixture of experts that is like a dense model but for its MLPs."""

    def __init__(self, dense: LogicalWeights, model: ModelConfig, upcycling: Upcycling) -> None:
        self.dense, self.model, self.upcycling = dense, model, upcycling
        #: Every parameter by its name, on the meta device.
        self.tensors: dict[str, Tensor] = dict(Transformer(model).named_parameters())
        self._statistics: dict[str, tuple[float, float]] = {}

    def read(self, name: str, box: Sequence[range]) -> Tensor:
        """The part `box` of a parameter, stack of experts or one of them."""
        if (match := EXPERT.fullmatch(name)) is not None:
            expert = int(match[2])
            return self.read(f"{match[1]}.{match[3]}", [range(expert, expert + 1), *box])[0]
        block, _, leaf = name.rpartition(".")
        if block.endswith(".router"):
            shape = tuple(self.tensors[name].shape)
            return normal_slice(self.upcycling.seed, name, shape, box) * self.model.init_std
        if not block.endswith(".experts"):
            return self.dense.read(name, box)
        source = f"{block.removesuffix('.experts')}.{leaf}"
        copied = self.dense.read(source, box[1:])
        return torch.stack([self._expert(copied, name, source, one, box[1:]) for one in box[0]])

    def _expert(
        self, copied: Tensor, name: str, source: str, expert: int, box: Sequence[range]
    ) -> Tensor:
        """The part `box` of the weight `name` of one expert: `copied`, as the dense MLP has it, or
        what comes of it."""
        noise, drop, seed = self.upcycling
        if not (noise or drop):
            return copied
        wide = torch.promote_types(copied.dtype, torch.float32)
        shape = tuple(self.tensors[name].shape[1:])
        drawn = normal_slice(seed, f"{name}.{expert}", shape, box).to(wide)
        if source not in self._statistics:
            whole = self.dense.read(source, [range(size) for size in shape]).double()
            self._statistics[source] = float(whole.mean()), float(whole.std())
        mean, deviation = self._statistics[source]
        found = copied.to(wide) + noise * deviation * drawn
        if drop:
            # The same channels of gate, up and down: rows of [2, F, H], columns of [H, F].
            dim = -2 if len(shape) == 3 else -1
            module, width = name.rpartition(".")[0], shape[dim]
            text = f"{seed}/{module}.{expert}/channels".encode()
            key = np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), "<u8")
            order = np.random.Generator(np.random.Philox(key=key)).permutation(width)
            chosen = order < round(drop * width)
            fresh = torch.from_numpy(chosen[box[dim].start : box[dim].stop])
            if dim == -2:
                fresh = fresh[:, None]
            found = torch.where(fresh, mean + deviation * drawn, found)
        return found
