"""The places of the parts of a model in the files of a family of transformers, by ``names.toml``.

    pieces("layers.2.attention.qkv", (M, G + 2, D, H), ...)  ->  its q_proj, k_proj and v_proj

Names are those that every version of transformers reads and writes by default, or those of the
second layout, "fused".
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files
from math import prod
from typing import Any, NamedTuple

from moemesh.checkpoint.huggingface.pieces import TensorPiece, whole
from moemesh.config.huggingface.folder import EMBEDDING, HEAD

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
