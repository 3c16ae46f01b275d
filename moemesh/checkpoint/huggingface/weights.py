"""The weights of a folder under the logical names of our checkpoints, any part of any of them.

A rank reads the slices of its shards and nothing else; no rank ever holds the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moemesh.checkpoint.huggingface.logical import LogicalTensor, checked_tensors
from moemesh.checkpoint.huggingface.pieces import TensorPiece, slices
from moemesh.checkpoint.huggingface.weight_folder import WeightFolder
from moemesh.checkpoint.store import Shard
from moemesh.config.huggingface.folder import read_config
from moemesh.config.huggingface.keys import first
from moemesh.config.huggingface.model import Quantization, family_of, quantization_of
from moemesh.config.lora import is_adapter
from moemesh.config.model import ModelConfig

#: A name of one expert of a stack: ``...experts.17.gate_up``.
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")


class HuggingFaceWeights:
    """An opened folder. Raises CheckpointError unless it holds the tensors of the model `config`
    and no others, before any is read."""

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        kind: str,
        quantization: Quantization | None = None,
        num_ahead: int = 0,
    ) -> None:
        self.folder = WeightFolder(path, quantization)
        self.quantization = quantization
        self._experts: dict[str, list[LogicalTensor]] = {}
        self.tensors = checked_tensors(self.folder.contents, config, kind, num_ahead)

    @staticmethod
    def open(path: Path, config: ModelConfig) -> HuggingFaceWeights:
        """A folder whose family, format of weights and prediction layers its ``config.json``
        names."""
        given = read_config(path)
        num_ahead = first(given, "num_mtp_layers", 0)
        return HuggingFaceWeights(path, config, family_of(given), quantization_of(given), num_ahead)

    @property
    def note(self) -> str | None:
        """A note to read before the weights are; None where they are stored as usual."""
        if not self.folder.is_quantized:
            return None
        return (
            f"{self.folder.path}: weights in {self.quantization} are turned into full numbers "
            "while they are read, and are not quantized again"
        )

    def load_into(self, shards: Sequence[Shard]) -> None:
        """Fill every shard's tensor, in place, whatever its dtype and device; names are those of a
        checkpoint, with "model." in front. Adapters stay as they are."""
        with torch.no_grad():
            for shard in (one for one in shards if not is_adapter(one.name)):
                name = shard.name.removeprefix("model.")
                box = [
                    range(start, start + size)
                    for start, size in zip(shard.offset, shard.tensor.shape, strict=True)
                ]
                out = shard.tensor
                tensor = self.tensors.get(name)
                if (match := EXPERT.fullmatch(name)) is not None:
                    expert = int(match[2])
                    tensor = self._expert(f"{match[1]}.{match[3]}", expert)
                    box, out = [range(expert, expert + 1), *box], out[None]
                assert tensor is not None
                if tensor.view == tensor.shape:
                    for piece in tensor.pieces:
                        if (common := piece.overlap(box)) is not None:
                            piece.read_into(common, out[slices(common, box)], self.folder)
                else:
                    out.copy_(tensor.read(box, self.folder.read))
        self.folder.close()

    def _expert(self, stack: str, expert: int) -> LogicalTensor:
        """The stack `stack` with the pieces of one expert. Those of all are found once."""
        if stack not in self._experts:
            tensor = self.tensors[stack]
            by_expert: list[list[TensorPiece]] = [[] for _ in range(tensor.shape[0])]
            for piece in tensor.pieces:
                first = piece.offset[0]
                for index in range(first, first + piece.shape[0]):
                    by_expert[index].append(piece)
            self._experts[stack] = [tensor._replace(pieces=found) for found in by_expert]
        return self._experts[stack][expert]

    def read(self, name: str, box: Sequence[range]) -> Tensor:
        """The part `box` of a parameter, buffer, stack of experts or one of them, as stored."""
        if (match := EXPERT.fullmatch(name)) is not None:
            expert = int(match[2])
            tensor = self._expert(f"{match[1]}.{match[3]}", expert)
            return tensor.read([range(expert, expert + 1), *box], self.folder.read)[0]
        return self.tensors[name].read(box, self.folder.read)
