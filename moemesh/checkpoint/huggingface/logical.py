"""Stored tensors of a folder that hold a tensor of our checkpoints, without torch.

Names and shapes alone say it, so that a folder is checked before anything is read or started.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.huggingface.contents import FolderContents
from moemesh.checkpoint.huggingface.names import pieces, view_of
from moemesh.checkpoint.huggingface.pieces import Piece, Read, assemble
from moemesh.config.huggingface.folder import read_config
from moemesh.config.huggingface.model import family_of
from moemesh.config.huggingface.quantization import quantization_of
from moemesh.config.lora import NO_ADAPTERS
from moemesh.config.model import ModelConfig
from moemesh.config.parameters import tensors
from moemesh.config.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

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
    found: dict[str, LogicalTensor] = {}
    for name, shape in _named_shapes(config):
        view = view_of(name, shape, config)
        try:
            found[name] = LogicalTensor(shape, view, pieces(name, view, kind, fused=fused))
        except KeyError:
            raise CheckpointError(
                f"{name} is a part of the model that folders of the family {kind} have no name for"
            ) from None
    return found


def checked_tensors(
    contents: FolderContents, config: ModelConfig, kind: str
) -> dict[str, LogicalTensor]:
    """The same of a folder that is there, in the layout that it has. Raises CheckpointError unless
    it holds the tensors of the model and no others."""
    fused = any(name.endswith(".experts.gate_up_proj") for name in contents.tensors)
    found = logical_tensors(config, kind, fused=fused)
    expected = {piece.source: piece.stored for one in found.values() for piece in one.pieces}
    # Further prediction layers stand behind the last layer; a tied head may be written twice.
    known = [*_WITHOUT_USE, *extra_layers(config)]
    if config.tied_embeddings:
        known.append(r"lm_head\.weight")
    contents.check(expected, known)
    return found


def check_model_folder(path: Path, config: ModelConfig) -> None:
    """Raises a UserError unless the headers in the folder `path` are those of the model `config`;
    no number is read."""
    given = read_config(path)
    checked_tensors(FolderContents(path, quantization_of(given)), config, family_of(given))


def extra_layers(config: ModelConfig) -> list[str]:
    """Patterns of the tensors behind the last layer: further prediction layers of DeepSeek-V3 and
    GLM-4.5, which loaders of transformers skip."""
    first = config.num_layers
    behind = "|".join(str(index) for index in range(first, first + 8))
    return [rf"model\.layers\.({behind})\..*", r"mtp\..*"]


def _named_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of parameters, then of buffers. Adapters have folders of their own."""
    routers: list[str] = []
    for tensor in tensors(config.with_lora(NO_ADAPTERS), Plan()):
        yield tensor.name, tensor.shape
        if tensor.name.endswith(".router.weight"):
            routers.append(tensor.name.removesuffix("weight"))
    if config.router_selection_bias:
        for router in routers:
            yield f"{router}selection_bias", (config.num_experts,)
