"""Weights of a mixture of experts made of those of a dense model, any part of any of them.

Legend: E experts, F width of the dense MLP and of every expert, H hidden.

Sparse upcycling (Komatsuzaki et al., 2022, arXiv:2212.05055): every expert is a copy of the dense
MLP, the router is new and small. With weights of the chosen experts that sum to one the mixture
computes what the dense model does. Two ways to make the experts differ: normal noise on every
weight, and drop-upcycling (Nakamura et al., 2025, arXiv:2502.19261), which draws a share of each
expert's F channels anew, with mean and standard deviation of the dense weights.
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
from moemesh.config.model import ModelConfig
from moemesh.model.initialization import normal_slice
from moemesh.model.transformer import Transformer


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
