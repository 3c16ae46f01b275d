"""Mapping of the tensors of our checkpoints to stored tensors of a folder, without torch.

It needs names and shapes only, so a folder is checked before any number is read. ``names.toml`` has
the names of each family of transformers:

    pieces("layers.2.attention.qkv", (M, G + 2, D, H), ...)  ->  its q_proj, k_proj and v_proj

A folder has one of two layouts. The usual names are read and written by every version of
transformers; in the "fused" layout one tensor holds all experts of a layer.
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
#: The weights of the ends of a model, and their names in all families.
ENDS = {"embedding.weight": EMBEDDING, "norm.weight": "model.norm.weight", "head.weight": HEAD}


class BlockNames(NamedTuple):
    """A family's row of ``names.toml``. `returns_pair`: its MoE module returns more than its
    output. `stack`: our leaf -> row of the tensor that stacks all experts of a layer; None if each
    expert has separate tensors."""

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
    """The names of a family in one of the two layouts: the usual names, replaced by those of the
    family's row."""
    table = _table()
    row = {"stack": "fused" if fused else None} | table["fused" if fused else "family"].get(
        kind, {}
    )
    return BlockNames(**{**table["usual"], **row, "stack": table["stack"].get(row["stack"])})


def pieces(name: str, shape: Shape, kind: str, *, fused: bool = False) -> list[TensorPiece]:
    """Pieces of the parameter or buffer `name` in a folder of the family `kind`. `shape`: its dims,
    or those of the table that a vector flattens. Raises KeyError for a name that no family has."""
    if name in ENDS:
        return [whole(ENDS[name], shape)]
    owner, _, rest_of_name = name.partition(".")
    index, _, part = rest_of_name.partition(".")
    layer, names = f"model.layers.{index}", names_of(kind, fused=fused)
    if owner == "ahead_norms":
        return [whole(f"{layer}.shared_head.norm.{part}", shape)]
    if owner != "layers":
        raise KeyError(name)
    if part in _table()["layer"]:
        return [table_piece(layer, _table()["layer"][part], shape)]
    block = f"{layer}.{names.block}"
    match part.split("."):
        case ["attention", "qkv" | "qkv_bias" as leaf]:
            # [M, G + 2, D, ...]: the G query heads of a key/value head, its key and its value.
            heads, packed, size, *rest = shape
            leaf = "bias" if leaf.endswith("bias") else "weight"
            order, zeros = tuple(range(len(shape))), (0,) * (len(shape) - 2)
            return [
                TensorPiece(
                    f"{layer}.self_attn.{word}_proj.{leaf}",
                    (heads * count * size, *rest),
                    (heads, count, size, *rest),
                    order,
                    (0, start, *zeros),
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
            return [table_piece(block, names.selection_bias, shape)]
        case ["feed_forward", "router", leaf]:
            return [whole(f"{block}.{names.router}.{leaf}", shape)]
        case ["feed_forward", "shared_gate"]:
            return [whole(f"{block}.{names.shared}_gate.weight", shape)]
        case ["feed_forward", "shared", leaf]:
            return _mlp(leaf, f"{block}.{names.shared}", shape, names_of("", fused=False))
        case ["feed_forward", "experts", leaf] if names.stack is not None:
            return [table_piece(block, names.stack[leaf], shape)]
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


def table_piece(block: str, row: str | list[str], shape: Shape) -> TensorPiece:
    """Piece of a table row: a name, or a name with a pattern such as "N D H -> (N D) H"."""
    if isinstance(row, str):
        return whole(f"{block}.{row}", shape)
    name, pattern = row
    ours, theirs = pattern.split(" -> ")
    sizes = dict(zip(ours.split(), shape, strict=True))
    stored = [dim.strip("()").split() for dim in re.findall(r"\([^)]*\)|\S+", theirs)]
    dims = [dim for group in stored for dim in group if dim in sizes]  # without dims of size 1
    return TensorPiece(
        f"{block}.{name}",
        tuple(prod(sizes.get(dim, 1) for dim in group) for group in stored),
        tuple(sizes[dim] for dim in dims),
        tuple(map(dims.index, sizes)),
        (0,) * len(shape),
    )


def _mlp(leaf: str, block: str, shape: Shape, names: BlockNames) -> list[TensorPiece]:
    """Pieces of gate and up [2, F, H], or of down [H, F]."""
    if leaf == "down":
        return [whole(f"{block}.{names.down}.weight", shape)]
    _, width, hidden = shape
    return [
        TensorPiece(
            f"{block}.{part}.weight", (width, hidden), (1, width, hidden), (0, 1, 2), (index, 0, 0)
        )
        for index, part in enumerate((names.gate, names.up))
    ]


#: Name by which a folder has the fused layout.
_FUSED = re.compile(r"\.experts\.gate_up_proj$")
#: Ending of tables that old versions of transformers saved, although config.json determines them.
_WITHOUT_USE = ".rotary_emb.inv_freq"
#: Tensors of prediction layers (MTP): their names in some folders; modules that only they have;
#: their copies of the model's tables.
_AHEAD = re.compile(r"(model\.)?mtp[._]")
_ONLY_AHEAD = re.compile(r"model\.layers\.\d+\.(eh_proj|enorm|hnorm)\.")
AHEAD_COPIES = ("embed_tokens.weight", "shared_head.head.weight")


class LogicalTensor(NamedTuple):
    """A parameter or buffer of the whole model, and the pieces that hold it. Pieces have the dims
    of `view`: those of `shape`, or, for a vector, those of the table that the vector flattens."""

    shape: tuple[int, ...]
    view: tuple[int, ...]
    pieces: list[TensorPiece]

    def read(self, box: Sequence[range], read: Read) -> Tensor:
        """The part `box` of the tensor."""
        if self.view == self.shape:
            return assemble(self.pieces, box, read)
        # Read the rows of the table that hold the wanted part of the vector, and cut it out.
        (wanted,), width = box, prod(self.view[1:])
        rows = range(wanted.start // width, -(-wanted.stop // width))
        table = assemble(self.pieces, [rows, *map(range, self.view[1:])], read)
        start = wanted.start - rows.start * width
        return table.reshape(-1)[start : start + len(wanted)]


def logical_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters and buffers by name without "model."; adapters are left out."""
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
    """:func:`logical_shapes` as tensors of folders of the family `kind`, experts `fused` or not."""
    logical: dict[str, LogicalTensor] = {}
    for name, shape in logical_shapes(config).items():
        view = shape
        if name.endswith(".attention.qkv_bias"):  # a vector that flattens a table
            heads = config.num_kv_heads
            view = (heads, config.num_heads // heads + 2, config.head_dim)
        try:
            logical[name] = LogicalTensor(shape, view, pieces(name, view, kind, fused=fused))
        except KeyError:
            raise CheckpointError(
                f"{name} is a part of the model that folders of the family {kind} have no name for"
            ) from None
    return logical


def checked_tensors(
    contents: FolderContents, config: ModelConfig, given: Mapping[str, Any]
) -> dict[str, LogicalTensor]:
    """The logical tensors of an existing folder, in its layout. `given`: its config.json, which
    determines the family and the prediction layers. Raises CheckpointError unless the folder holds
    the tensors of the model; any other tensor must be one that is known to be unused."""
    fused, kind = any(map(_FUSED.search, contents.tensors)), family_of(given)
    logical = logical_tensors(config, kind, fused=fused)
    contents.take_names({piece.source for tensor in logical.values() for piece in tensor.pieces})
    known = ahead_tensors(contents.tensors, config, kind, first(given, "num_mtp_layers", 0))
    # transformers writes shared experts of the width 0 for n_shared_experts = 0.
    known |= {name for name, tensor in contents.tensors.items() if 0 in tensor.shape}
    known |= {name for name in contents.tensors if name.endswith(_WITHOUT_USE)}
    if config.tied_embeddings:
        known.add(HEAD)  # a copy of the embedding
        if HEAD in contents.tensors and EMBEDDING not in contents.tensors:
            table = logical["embedding.weight"]
            logical["embedding.weight"] = table._replace(pieces=[whole(HEAD, table.shape)])
    expected = {p.source: p.stored for tensor in logical.values() for p in tensor.pieces}
    contents.check(expected, known, config.num_layers + config.num_mtp_layers)
    return logical


def ahead_tensors(names: Iterable[str], config: ModelConfig, kind: str, num_ahead: int) -> set[str]:
    """Tensors among `names` of prediction layers (MTP) that `config` does not train, and the copies
    of the model's tables in those that it trains; loaders of transformers skip these. Prediction
    layers follow the last layer and have modules that no other layer has; in families without known
    such modules, they are the first `num_ahead`."""
    ahead = {name for name in names if _AHEAD.match(name)}
    later = {name: layer for name in names if (layer := layer_of(name)) >= config.num_layers}
    layers = {later[name] for name in later if _ONLY_AHEAD.match(name)}
    if not layers and not trained_families()["family"][kind].get("predicts_ahead"):
        layers = set(range(config.num_layers, config.num_layers + num_ahead))
    for name, layer in later.items():
        if layer in layers and (layer not in config.mtp_layers or name.endswith(AHEAD_COPIES)):
            ahead.add(name)
    return ahead
