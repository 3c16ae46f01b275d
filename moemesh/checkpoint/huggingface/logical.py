"""Stored tensors of a folder that hold a tensor of our checkpoints, without torch.

Names and shapes alone say it, so that a folder is checked before anything is read or started.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.huggingface.contents import FolderContents, layer_of
from moemesh.checkpoint.huggingface.names import pieces
from moemesh.checkpoint.huggingface.pieces import Read, TensorPiece, assemble, whole
from moemesh.config.huggingface.folder import EMBEDDING, HEAD
from moemesh.config.huggingface.keys import first
from moemesh.config.huggingface.model import family_of, trained_families
from moemesh.config.lora import NO_ADAPTERS
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.sharding.parameters import tensors

if TYPE_CHECKING:
    from torch import Tensor

_FUSED = re.compile(r"\.experts\.gate_up_proj$")
#: Tables that old versions of transformers wrote, which follow from config.json.
_WITHOUT_USE = ".rotary_emb.inv_freq"
#: Of prediction layers (MTP): names that have no layer's number, modules that no other layer has,
#: and copies of the model's tables.
_AHEAD = re.compile(r"(model\.)?mtp[._]")
_ONLY_AHEAD = re.compile(r"model\.layers\.\d+\.(eh_proj|enorm|hnorm)\.")
AHEAD_COPIES = ("embed_tokens.weight", "shared_head.head.weight")


class LogicalTensor(NamedTuple):
    """A parameter or buffer of the whole model: its shape, and the pieces that hold it, which speak
    of its dims or, of a vector, of those of the table `view` that it stands for."""

    shape: tuple[int, ...]
    view: tuple[int, ...]
    pieces: list[TensorPiece]

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


def logical_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter and buffer of a model by its name without "model.", but for adapters, which
    have folders of their own."""
    whole_model = tensors(config.with_lora(NO_ADAPTERS), Plan())
    shapes = {tensor.name: tensor.shape for tensor in whole_model}
    if config.router_selection_bias:
        routers = [name for name in shapes if name.endswith(".router.weight")]
        biases = [f"{name.removesuffix('weight')}selection_bias" for name in routers]
        shapes |= dict.fromkeys(biases, (config.num_experts,))
    return shapes


def logical_tensors(
    config: ModelConfig, kind: str, *, fused: bool = False
) -> dict[str, LogicalTensor]:
    """The :func:`logical_shapes` of a model in folders of the family `kind`, with `fused` experts
    or without (:mod:`moemesh.checkpoint.huggingface.names`)."""
    found: dict[str, LogicalTensor] = {}
    for name, shape in logical_shapes(config).items():
        view = shape
        if name.endswith(".attention.qkv_bias"):  # a vector that stands for a table
            heads = config.num_kv_heads
            view = (heads, config.num_heads // heads + 2, config.head_dim)
        try:
            found[name] = LogicalTensor(shape, view, pieces(name, view, kind, fused=fused))
        except KeyError:
            raise CheckpointError(
                f"{name} is a part of the model that folders of the family {kind} have no name for"
            ) from None
    return found


def checked_tensors(
    contents: FolderContents, config: ModelConfig, given: Mapping[str, Any]
) -> dict[str, LogicalTensor]:
    """The tensors of a folder that is there, in the layout that it has; `given`: its config.json,
    which names the family and the prediction layers. Raises CheckpointError unless it holds the
    tensors of the model, and others only that are known to be of no use to it."""
    fused, kind = any(map(_FUSED.search, contents.tensors)), family_of(given)
    found = logical_tensors(config, kind, fused=fused)
    known = ahead_tensors(contents.tensors, config, kind, first(given, "num_mtp_layers", 0))
    known |= {name for name in contents.tensors if name.endswith(_WITHOUT_USE)}
    if config.tied_embeddings:
        known.add(HEAD)  # where it is the embedding once more
        if HEAD in contents.tensors and EMBEDDING not in contents.tensors:
            table = found["embedding.weight"]
            found["embedding.weight"] = table._replace(pieces=[whole(HEAD, table.shape)])
    expected = {piece.source: piece.stored for one in found.values() for piece in one.pieces}
    contents.check(expected, known, config.num_layers + config.num_mtp_layers)
    return found


def ahead_tensors(names: Iterable[str], config: ModelConfig, kind: str, num_ahead: int) -> set[str]:
    """The tensors among `names` that are of prediction layers (MTP), which loaders of transformers
    skip, but for those that `config` trains: of layers behind the last those with modules that no
    other layer has; in families that are not known to have these, the first `num_ahead`."""
    found = {name for name in names if _AHEAD.match(name)}
    behind = {name: layer for name in names if (layer := layer_of(name)) >= config.num_layers}
    layers = {behind[name] for name in behind if _ONLY_AHEAD.match(name)}
    if not layers and not trained_families()["family"][kind].get("predicts_ahead"):
        layers = set(range(config.num_layers, config.num_layers + num_ahead))
    for name, layer in behind.items():
        if layer in layers and (layer not in config.mtp_layers or name.endswith(AHEAD_COPIES)):
            found.add(name)
    return found
