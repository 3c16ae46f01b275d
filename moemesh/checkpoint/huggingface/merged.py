"""Weights with their adapters merged in: W + s B A, any part of any of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moemesh.checkpoint.huggingface.convert import LogicalWeights
from moemesh.config.lora import TargetPart, factor_name, parts_of
from moemesh.config.model import ModelConfig
from moemesh.config.parameters import ParameterTensor, tensors
from moemesh.config.plan import Plan


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
