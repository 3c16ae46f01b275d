"""Stored tensors of a folder that hold a tensor of our checkpoints, without torch.

Names and shapes alone say it, so that a folder is checked before anything is read or started. Where
the parts of a model are in the files of a family of transformers is in ``names.toml``:

    pieces("layers.2.attention.qkv", (M, G + 2, D, H), ...)  ->  its q_proj, k_proj and v_proj

Names are those that every version of transformers reads and writes by default, or those of the
second layout, "fused".
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.huggingface.contents import FolderContents, layer_of
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

Shape = tuple[int, ...]
_ENDS = {"embedding.weight": EMBEDDING, "norm.weight": "model.norm.weight", "head.weight": HEAD}


class BlockNames(NamedTuple):
    """A family's row of ``names.toml``; `stack`: rows of our leaf -> theirs where all experts of a
    layer are one tensor, None where each is by itself."""

    block: str
    router: str
    selection_bias: str | list[str]
    gate: str
    up: str
    down: str
    shared: str
    returns_pair: bool
    stack: dict[str, Any] | None = None


@cache
def _table() -> dict[str, Any]:
    file = files("moemesh.checkpoint.huggingface") / "names.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def names_of(kind: str, *, fused: bool) -> BlockNames:
    """The names of a family in one of the two layouts."""
    table = _table()
    row = {"stack": "fused" if fused else None} | table["fused" if fused else "family"].get(
        kind, {}
    )
    return BlockNames(**{**table["usual"], **row, "stack": table["stack"].get(row["stack"])})


def pieces(name: str, shape: Shape, kind: str, *, fused: bool = False) -> list[TensorPiece]:
    """Places of the parameter or buffer `name`, of the dims `shape` (of a vector those of the table
    that it stands for), in a folder of the family `kind`. Raises KeyError for a name that no family
    has."""
    if name in _ENDS:
        return [whole(_ENDS[name], shape)]
    owner, _, below = name.partition(".")
    index, _, part = below.partition(".")
    layer, names = f"model.layers.{index}", names_of(kind, fused=fused)
    if owner == "ahead_norms":
        return [whole(f"{layer}.shared_head.norm.{part}", shape)]
    if owner != "layers":
        raise KeyError(name)
    if part in _table()["layer"]:
        return [_piece(layer, _table()["layer"][part], shape)]
    block = f"{layer}.{names.block}"
    match part.split("."):
        case ["attention", "qkv" | "qkv_bias" as leaf]:
            # Of [M, G + 2, D, ...]: the query heads of a key/value head, its key and its value.
            (heads, packed, size, *rest), ones = shape, (0,) * (len(shape) - 2)
            leaf, order = "bias" if leaf.endswith("bias") else "weight", tuple(range(len(shape)))
            return [
                TensorPiece(
                    f"{layer}.self_attn.{word}_proj.{leaf}",
                    (heads * count * size, *rest),
                    (heads, count, size, *rest),
                    order,
                    (0, start, *ones),
                )
                for word, count, start in (
                    ("q", packed - 2, 0),
                    ("k", 1, packed - 2),
                    ("v", 1, packed - 1),
                )
            ]
        case ["feed_forward", "gate_up" | "down" as leaf]:
            return _mlp(leaf, f"{layer}.mlp", shape, names_of("", fused=False))
        case ["feed_forward", "router", "selection_bias"]:
            return [_piece(block, names.selection_bias, shape)]
        case ["feed_forward", "router", leaf]:
            return [whole(f"{block}.{names.router}.{leaf}", shape)]
        case ["feed_forward", "shared_gate"]:
            return [whole(f"{block}.{names.shared}_gate.weight", shape)]
        case ["feed_forward", "shared", leaf]:
            return _mlp(leaf, f"{block}.{names.shared}", shape, names_of("", fused=False))
        case ["feed_forward", "experts", leaf] if names.stack is not None:
            return [_piece(block, names.stack[leaf], shape)]
        case ["feed_forward", "experts", "gate_up" | "down" as leaf]:
            return [
                # The piece of one expert as a piece of the stack of all.
                piece._replace(
                    view=(1, *piece.view),
                    order=(0, *(dim + 1 for dim in piece.order)),
                    offset=(expert, *piece.offset),
                )
                for expert in range(shape[0])
                for piece in _mlp(leaf, f"{block}.experts.{expert}", shape[1:], names)
            ]
        case _:
            raise KeyError(name)


def _piece(block: str, row: str | list[str], shape: Shape) -> TensorPiece:
    """The tensor of a row, a name or a name and a pattern."""
    if isinstance(row, str):
        return whole(f"{block}.{row}", shape)
    name, pattern = row
    ours, theirs = pattern.split(" -> ")
    sizes = dict(zip(ours.split(), shape, strict=True))
    stored = [dim.strip("()").split() for dim in re.findall(r"\([^)]*\)|\S+", theirs)]
    dims = [dim for group in stored for dim in group if dim in sizes]
    return TensorPiece(
        f"{block}.{name}",
        tuple(prod(sizes.get(dim, 1) for dim in group) for group in stored),
        tuple(sizes[dim] for dim in dims),
        tuple(map(dims.index, sizes)),
        (0,) * len(shape),
    )


def _mlp(leaf: str, block: str, shape: Shape, names: BlockNames) -> list[TensorPiece]:
    """Pieces of [2, F, H], gate and up; or of down [H, F]."""
    if leaf == "down":
        return [whole(f"{block}.{names.down}.weight", shape)]
    _, width, hidden = shape
    return [
        TensorPiece(
            f"{block}.{part}.weight", (width, hidden), (1, width, hidden), (0, 1, 2), (at, 0, 0)
        )
        for at, part in enumerate((names.gate, names.up))
    ]


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
    if config.architecture is not None:
        return shapes | config.architecture.buffers
    if config.router_selection_bias:
        routers = [name for name in shapes if name.endswith(".router.weight")]
        biases = [f"{name.removesuffix('weight')}selection_bias" for name in routers]
        shapes |= dict.fromkeys(biases, (config.num_experts,))
    return shapes


def logical_tensors(
    config: ModelConfig, kind: str, *, fused: bool = False
) -> dict[str, LogicalTensor]:
    """The :func:`logical_shapes` of a model in folders of the family `kind`, with `fused` experts
    or without."""
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
    contents.take_names({piece.source for one in found.values() for piece in one.pieces})
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
