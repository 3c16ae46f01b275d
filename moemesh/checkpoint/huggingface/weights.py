"""The weights of a folder under the logical names of our checkpoints, any part of any of them.

A rank reads the slices of its shards and nothing else; no rank ever holds the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.huggingface.folder import WeightFolder
from moemesh.checkpoint.huggingface.names import pieces, view_of
from moemesh.checkpoint.huggingface.pieces import Piece, Read, assemble, assemble_into
from moemesh.checkpoint.store import Shard
from moemesh.config.huggingface.folder import read_config
from moemesh.config.huggingface.model import family_of
from moemesh.config.huggingface.quantization import Quantization, quantization_of
from moemesh.config.lora import NO_ADAPTERS, is_adapter
from moemesh.config.model import ModelConfig
from moemesh.model.transformer import Transformer

#: A name of one expert of a stack: ``...experts.17.gate_up``.
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")
#: Tensors that some versions of transformers write and no model needs.
_WITHOUT_USE = (r".*\.rotary_emb\.inv_freq",)


class LogicalTensor(NamedTuple):
    """A parameter or buffer of the whole model: its shape, and the pieces that hold it, which speak
    of its dims or, of a vector, of those of the table `view` that it stands for."""

    shape: tuple[int, ...]
    view: tuple[int, ...]
    pieces: list[Piece]

    def read(self, box: Sequence[range], read: Read) -> Tensor:
        """The part `box` of the tensor."""
        if self.view == self.shape:
            return assemble(self.pieces, box, read)
        # The rows of the table that hold the wanted part of the vector.
        (wanted,), width = box, prod(self.view[1:])
        rows = range(wanted.start // width, -(-wanted.stop // width))
        table = assemble(self.pieces, [rows, *map(range, self.view[1:])], read)
        start = wanted.start - rows.start * width
        return table.reshape(-1)[start : start + len(wanted)]


def logical_tensors(
    config: ModelConfig, kind: str, *, fused: bool = False
) -> dict[str, LogicalTensor]:
    """Every parameter and buffer of a model of the family `kind`, by its name without "model."; of
    a folder with `fused` experts (:mod:`moemesh.checkpoint.huggingface.names`)."""
    # Adapters have folders of their own.
    model = Transformer(config.with_lora(NO_ADAPTERS))
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found: dict[str, LogicalTensor] = {}
    for name, tensor in named.items():
        shape = tuple(tensor.shape)
        view = view_of(name, shape, config)
        try:
            found[name] = LogicalTensor(shape, view, pieces(name, view, kind, fused=fused))
        except KeyError:
            raise CheckpointError(
                f"{name} is a part of the model that folders of the family {kind} have no name for"
            ) from None
    return found


class HuggingFaceWeights:
    """An opened folder. Raises CheckpointError unless it holds the tensors of the model `config`
    and no others, before any is read."""

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        kind: str,
        quantization: Quantization | None = None,
    ) -> None:
        self.folder = WeightFolder(path, quantization)
        self.quantization = quantization
        self._experts: dict[str, list[LogicalTensor]] = {}
        fused = any(name.endswith(".experts.gate_up_proj") for name in self.folder.tensors)
        self.tensors = logical_tensors(config, kind, fused=fused)
        expected = {
            piece.source: piece.stored for one in self.tensors.values() for piece in one.pieces
        }
        # Further prediction layers stand behind the last layer; a tied head may be written twice.
        known = [*_WITHOUT_USE, *extra_layers(config)]
        if config.tied_embeddings:
            known.append(r"lm_head\.weight")
        self.folder.check(expected, known)

    @staticmethod
    def open(path: Path, config: ModelConfig) -> HuggingFaceWeights:
        """A folder whose family and format of weights its ``config.json`` names."""
        given = read_config(path)
        return HuggingFaceWeights(path, config, family_of(given), quantization_of(given))

    @property
    def note(self) -> str | None:
        """What is to be known before the weights are read; None where they are stored as usual."""
        if self.quantization is None:
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
                self._read_into(name, box, shard.tensor)
        self.folder.close()

    def _expert(self, stack: str, expert: int) -> LogicalTensor:
        """The stack `stack` with the pieces of one expert. Those of all are found once."""
        if stack not in self._experts:
            tensor = self.tensors[stack]
            by_expert: list[list[Piece]] = [[] for _ in range(tensor.shape[0])]
            for piece in tensor.pieces:
                first = piece.offset[0]
                for index in range(first, first + piece.shape[0]):
                    by_expert[index].append(piece)
            self._experts[stack] = [tensor._replace(pieces=found) for found in by_expert]
        return self._experts[stack][expert]

    def _read_into(self, name: str, box: Sequence[range], out: Tensor) -> None:
        tensor = self.tensors.get(name)
        if (match := EXPERT.fullmatch(name)) is not None:
            expert = int(match[2])
            tensor = self._expert(f"{match[1]}.{match[3]}", expert)
            box, out = [range(expert, expert + 1), *box], out[None]
        assert tensor is not None
        if tensor.view == tensor.shape:
            assemble_into(tensor.pieces, box, out, self.folder)
        else:
            out.copy_(tensor.read(box, self.folder.read))

    def read(self, name: str, box: Sequence[range]) -> Tensor:
        """The part `box` of a parameter, buffer, stack of experts or one of them, as stored."""
        if (match := EXPERT.fullmatch(name)) is not None:
            expert = int(match[2])
            tensor = self._expert(f"{match[1]}.{match[3]}", expert)
            return tensor.read([range(expert, expert + 1), *box], self.folder.read)[0]
        return self.tensors[name].read(box, self.folder.read)


def extra_layers(config: ModelConfig) -> list[str]:
    """Patterns of the tensors behind the last layer: further prediction layers of DeepSeek-V3 and
    GLM-4.5, which loaders of transformers skip."""
    first = config.num_layers
    behind = "|".join(str(index) for index in range(first, first + 8))
    return [rf"model\.layers\.({behind})\..*", r"mtp\..*"]
