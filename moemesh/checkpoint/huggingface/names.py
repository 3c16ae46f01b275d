"""The names that the families of transformers give to the parts of a model on disk.

Legend: E experts, F expert width, H hidden, M key/value heads, G query heads of each,
D head size.

    pieces("layers.2.attention.qkv", (M, G + 2, D, H), ...)  ->  its q_proj, k_proj and v_proj

Names are those that every version of transformers reads and writes by default. Folders may have a
second layout, "fused", which version 5 reads: that of its modules in memory, where all experts of a
layer are one tensor. Sources: the published model code of each family.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from moemesh.checkpoint.huggingface.pieces import TensorPiece, whole
from moemesh.config.huggingface.folder import EMBEDDING, HEAD
from moemesh.config.model import ModelConfig

Shape = tuple[int, ...]


class Names(NamedTuple):
    """Names of one family, below ``model.layers.<index>``: the block of router and experts, what is
    there in it, how a stack of experts is stored (None: each expert by itself), and whether the
    block's module returns more than its output."""

    block: str = "mlp"
    router: str = "gate"
    selection_bias: str = "gate.e_score_correction_bias"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    stack: Callable[[str, str, Shape], list[TensorPiece]] | None = None
    returns_pair: bool = False


def _fused(
    leaf: str,
    block: str,
    shape: Shape,
    gate_up: str = "experts.gate_up_proj",
    down: str = "experts.down_proj",
) -> list[TensorPiece]:
    """[E, 2F, H] with the rows of the gate first, and [E, H, F]: modules of transformers 5."""
    if leaf == "down":
        return [whole(f"{block}.{down}", shape)]
    experts, two, width, hidden = shape
    stored = (experts, two * width, hidden)
    return [TensorPiece(f"{block}.{gate_up}", stored, shape, (0, 1, 2, 3), (0, 0, 0, 0))]


_granite = partial(_fused, gate_up="input_linear.weight", down="output_linear.weight")


def _gpt_oss(leaf: str, block: str, shape: Shape) -> list[TensorPiece]:
    """[E, H, 2F] with gate and up side by side, and [E, F, H]; biases [E, 2F] and [E, H]."""
    block = f"{block}.experts"
    match leaf:
        case "gate_up":
            experts, two, width, hidden = shape
            stored, view = (experts, hidden, width * two), (experts, hidden, width, two)
            return [TensorPiece(f"{block}.gate_up_proj", stored, view, (0, 3, 2, 1), (0, 0, 0, 0))]
        case "down":
            experts, hidden, width = shape
            stored = (experts, width, hidden)
            return [TensorPiece(f"{block}.down_proj", stored, stored, (0, 2, 1), (0, 0, 0))]
        case "gate_up_bias":
            experts, two, width = shape
            stored, view = (experts, width * two), (experts, width, two)
            return [TensorPiece(f"{block}.gate_up_proj_bias", stored, view, (0, 2, 1), (0, 0, 0))]
        case _:
            return [whole(f"{block}.down_proj_bias", shape)]


_MIXTRAL = Names(
    block="block_sparse_moe",
    gate="w1",
    up="w3",
    down="w2",
    selection_bias="e_score_correction_bias",
)
#: model_type -> names; a family that is not here has the usual ones.
FAMILIES: dict[str, Names] = {
    "mixtral": _MIXTRAL,
    "minimax_m2": _MIXTRAL,
    "qwen2_moe": Names(shared="shared_expert"),
    "hy_v3": Names(router="router.gate", selection_bias="expert_bias", shared="shared_mlp"),
    "granitemoe": Names(block="block_sparse_moe", router="router.layer", stack=_granite),
    "gpt_oss": Names(router="router", stack=_gpt_oss, returns_pair=True),
    "ernie4_5_moe": Names(selection_bias="moe_statics.e_score_correction_bias"),
}
#: The same of the fused layout; gpt-oss has one layout.
FUSED: dict[str, Names] = {
    "minimax_m2": Names(selection_bias="e_score_correction_bias", stack=_fused),
    "qwen2_moe": Names(shared="shared_expert", stack=_fused),
    "hy_v3": Names(selection_bias="e_score_correction_bias", stack=_fused),
    "granitemoe": Names(block="block_sparse_moe", router="router", stack=_fused),
    "gpt_oss": FAMILIES["gpt_oss"],
    "ernie4_5_moe": Names(selection_bias="gate.moe_statics.e_score_correction_bias", stack=_fused),
}
_NORMS = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
_ENDS = {
    "embedding.weight": EMBEDDING,
    "norm.weight": "model.norm.weight",
    "head.weight": HEAD,
}


#: Of DeepSeek's extra prediction layers, in front of the layer itself.
_AHEAD = {"projection": "eh_proj", "embedding_norm": "enorm", "stream_norm": "hnorm"}


def view_of(name: str, shape: Shape, model: ModelConfig) -> Shape:
    """The dims that :func:`pieces` speaks of: those of the tensor itself, but for a vector that
    stands for a table."""
    if name.endswith(".attention.qkv_bias"):
        heads = model.num_kv_heads
        return (heads, model.num_heads // heads + 2, model.head_dim)
    return shape


def names_of(kind: str, *, fused: bool) -> Names:
    """The names of a family in one of the two layouts."""
    return FUSED.get(kind, Names(stack=_fused)) if fused else FAMILIES.get(kind, Names())


def pieces(name: str, shape: Shape, kind: str, *, fused: bool = False) -> list[TensorPiece]:
    """Places of the parameter or buffer `name`, of the dims `shape` (:func:`view_of`), in a folder
    of the family `kind`. Raises KeyError for a name that no family has."""
    if name in _ENDS:
        return [whole(_ENDS[name], shape)]
    owner, index, module, *rest = name.split(".")
    layer, leaf = f"model.layers.{index}", ".".join(rest)
    if owner == "ahead_norms":
        return [whole(f"{layer}.shared_head.norm.{module}", shape)]
    if owner != "layers":
        raise KeyError(name)
    if module in _AHEAD:
        return [whole(f"{layer}.{_AHEAD[module]}.weight", shape)]
    names = names_of(kind, fused=fused)
    if module in _NORMS:
        return [whole(f"{layer}.{_NORMS[module]}.{leaf}", shape)]
    if module == "attention":
        return _attention(leaf, f"{layer}.self_attn", shape)
    if rest[0] in ("gate_up", "down"):
        return _mlp(rest[0], f"{layer}.mlp", shape, Names())
    return _experts(rest, f"{layer}.{names.block}", shape, names)


def _attention(leaf: str, block: str, shape: Shape) -> list[TensorPiece]:
    match leaf:
        case "qkv":
            return _packed(block, shape, "weight")
        case "qkv_bias":
            return _packed(block, shape, "bias")
        case "output":
            return [whole(f"{block}.o_proj.weight", shape)]
        case "output_bias":
            return [whole(f"{block}.o_proj.bias", shape)]
        case "query_norm.weight":
            return [whole(f"{block}.q_norm.weight", shape)]
        case "key_norm.weight":
            return [whole(f"{block}.k_norm.weight", shape)]
        case "sinks":
            return [whole(f"{block}.sinks", shape)]
        case _:  # latent attention; projections up, [N, D, rank], have the heads in their rows
            name = f"{block}.{_LATENT[leaf]}"
            if len(shape) < 3:
                return [whole(name, shape)]
            heads, size, rank = shape
            return [TensorPiece(name, (heads * size, rank), shape, (0, 1, 2), (0, 0, 0))]


#: Parts of latent attention: ours -> theirs.
_LATENT = {
    "query_down": "q_a_proj.weight",
    "query_down_bias": "q_a_proj.bias",
    "query_latent_norm.weight": "q_a_layernorm.weight",
    "query_up": "q_b_proj.weight",
    "query": "q_proj.weight",
    "key_value_down": "kv_a_proj_with_mqa.weight",
    "key_value_down_bias": "kv_a_proj_with_mqa.bias",
    "key_value_latent_norm.weight": "kv_a_layernorm.weight",
    "key_value_up": "kv_b_proj.weight",
}


def _packed(block: str, shape: Shape, leaf: str) -> list[TensorPiece]:
    """Pieces of [M, G + 2, D, ...]: the query heads of a key/value head, its key and its value."""
    heads, packed, size, *rest = shape
    order = tuple(range(len(shape)))
    found: list[TensorPiece] = []
    for name, count, start in (("q", packed - 2, 0), ("k", 1, packed - 2), ("v", 1, packed - 1)):
        stored, view = (heads * count * size, *rest), (heads, count, size, *rest)
        offset = tuple(start if dim == 1 else 0 for dim in order)
        found.append(TensorPiece(f"{block}.{name}_proj.{leaf}", stored, view, order, offset))
    return found


def _mlp(leaf: str, block: str, shape: Shape, names: Names) -> list[TensorPiece]:
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


def _experts(path: list[str], block: str, shape: Shape, names: Names) -> list[TensorPiece]:
    match path:
        case ["router", "selection_bias"]:
            stored = (1, *shape) if "moe_statics" in names.selection_bias else shape
            return [TensorPiece(f"{block}.{names.selection_bias}", stored, shape, (0,), (0,))]
        case ["router", leaf]:
            return [whole(f"{block}.{names.router}.{leaf}", shape)]
        case ["shared_gate"] | ["shared_gate", "weight"]:
            return [
                TensorPiece(
                    f"{block}.{names.shared}_gate.weight",
                    (1, *shape[-1:]),
                    shape,
                    tuple(range(len(shape))),
                    (0,) * len(shape),
                )
            ]
        case ["shared", leaf]:
            return _mlp(leaf, f"{block}.{names.shared}", shape, Names())
        case ["experts", leaf] if names.stack is not None:
            return names.stack(leaf, block, shape)
        case ["experts", leaf]:
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
            raise KeyError(".".join(path))
