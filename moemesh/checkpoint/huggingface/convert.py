"""Checkpoints into folders of transformers and back, one tensor in memory at a time."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moemesh.checkpoint import store
from moemesh.checkpoint.files import CheckpointError, file_size, replace_by
from moemesh.checkpoint.huggingface.contents import plain_file
from moemesh.checkpoint.huggingface.logical import (
    AHEAD_COPIES,
    LogicalTensor,
    ahead_tensors,
    logical_shapes,
    logical_tensors,
)
from moemesh.checkpoint.huggingface.pieces import Read, TensorPiece, slices
from moemesh.checkpoint.huggingface.weight_folder import WeightFolder
from moemesh.checkpoint.huggingface.write import write_folder, write_json
from moemesh.checkpoint.remote import Place
from moemesh.checkpoint.store import Checkpoint, Shard
from moemesh.checkpoint.tensor_file import DeferredTensor, safetensors_bytes
from moemesh.config.huggingface.folder import EMBEDDING, HEAD, SINGLE
from moemesh.config.huggingface.keys import first
from moemesh.config.model import ModelConfig

#: A stack of experts; a checkpoint has each expert by itself.
_STACK = re.compile(r"(.*\.experts)\.(\w+)")


def checkpoint_weights(checkpoint: Checkpoint) -> Read:
    """The weights of a checkpoint by logical names, stacks of experts put together."""

    def read(name: str, box: Sequence[range]) -> Tensor:
        if (match := _STACK.fullmatch(name)) is not None:
            experts, *rest = box
            return torch.stack([read(f"{match[1]}.{one}.{match[2]}", rest) for one in experts])
        offset, shape = [part.start for part in box], [len(part) for part in box]
        return checkpoint.read(f"model.{name}", offset, shape)

    return read


def write_huggingface(
    weights: Read,
    model: ModelConfig,
    kind: str,
    out: Path,
    config: Mapping[str, object],
    *,
    dtype: torch.dtype,
    fused: bool = False,
    origin: WeightFolder | None = None,
    delta: Delta | None = None,
    on_file: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write `weights` as a folder of the family `kind` with this `config`.

    All weights in `dtype`, but the routers' selection biases, which are fp32 everywhere. Prediction
    layers that the folder `origin` has and the model has not are copied from there. With `delta`
    its tensors take the places of those of `weights`: CheckpointError for one that the folder does
    not have, or has in another shape.
    """
    tensors = stored_tensors(weights, logical_tensors(model, kind, fused=fused), dtype)
    for name, tensor in delta.tensors.items() if delta is not None else ():
        there = tensors.get(name)
        if there is None or there.shape != tensor.shape:
            has = "no such tensor" if there is None else f"{list(there.shape)}"
            assert delta is not None
            raise CheckpointError(
                f"{delta.path / SINGLE}: {name} {list(tensor.shape)}; the model has {has}"
            )
        tensors[name] = tensor
    if origin is not None:
        num_ahead = first(config, "num_mtp_layers", 0)
        names = ahead_tensors(origin.tensors, model, kind, num_ahead) - tensors.keys()
        # Layers that are trained share the model's tables: copies beside them follow.
        trained = {name.rpartition(".eh_proj.")[0] for name in tensors if ".eh_proj." in name}
        head = HEAD if HEAD in tensors else EMBEDDING
        shared = dict(zip(AHEAD_COPIES, (EMBEDDING, head), strict=True))
        for name in (name for name in origin.tensors if name in names):
            stored, (*layer, leaf) = origin.tensors[name], name.split(".", 3)
            if ".".join(layer) in trained:
                tensors[name] = tensors[shared[leaf]]
                continue
            kept = dtype if origin.is_quantized else stored.dtype
            make = partial(_whole, origin.read, name, stored.shape, kept)
            tensors[name] = DeferredTensor(kept, stored.shape, make)
    write_folder(out, tensors, config, on_file=on_file)


def stored_tensors(
    weights: Read, logical: Mapping[str, LogicalTensor], dtype: torch.dtype
) -> dict[str, DeferredTensor]:
    """The tensors of a folder that the `logical` ones of `weights` make."""

    def make(name: str, tensor: LogicalTensor, piece: TensorPiece, kept: torch.dtype) -> Tensor:
        if tensor.view == tensor.shape:
            return piece.store(weights(name, piece.box).to(kept))
        table = _whole(weights, name, tensor.shape, kept).reshape(tensor.view)
        return piece.store(table[slices(piece.box)])

    tensors: dict[str, DeferredTensor] = {}
    for name, tensor in logical.items():
        kept = _kept(name, dtype)
        for piece in tensor.pieces:
            made = partial(make, name, tensor, piece, kept)
            tensors[piece.source] = DeferredTensor(kept, piece.stored, made)
    return tensors


def write_checkpoint(
    weights: Read, model: ModelConfig, folder: Path, state: dict[str, Any], dtype: torch.dtype
) -> None:
    """Write the `weights` of `model`, experts also one by one, as ``folder/step-0``, in `dtype`;
    buffers are fp32. `state` is that of a run before its first step."""
    shards: list[Shard] = []
    for stack, shape in logical_shapes(model).items():
        kept, names = _kept(stack, dtype), [stack]
        if (match := _STACK.fullmatch(stack)) is not None:
            names = [f"{match[1]}.{expert}.{match[2]}" for expert in range(shape[0])]
            shape = shape[1:]
        shards += [
            Shard(
                name=f"model.{name}",
                shape=shape,
                offset=(0,) * len(shape),
                tensor=torch.empty(shape, dtype=kept, device="meta"),
                make=partial(_whole, weights, name, shape, kept),
            )
            for name in names
        ]
    store.save(folder, 0, shards, state)


def _kept(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name.endswith("selection_bias") else dtype


def _whole(weights: Read, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return weights(name, [range(size) for size in shape]).to(dtype)


def newest(folder: Place) -> Checkpoint:
    """The newest checkpoint of a run's folder that verifies. Raises CheckpointError without one."""
    reasons: list[str] = []
    found = store.latest(folder, lambda step, why: reasons.append(f"step {step}: {why}"))
    if found is None:
        raise CheckpointError("\n  ".join([f"{folder}: holds no readable checkpoint", *reasons]))
    return found


# The tensors of a run that trained, as a folder of their own, and a base folder with them.
#
#     model.safetensors    stored tensors of which any number trained, under transformers' names
#     delta.json           the base that they belong to, and how they were written
#
# The base is known by a fingerprint: names, shapes and dtypes of all its tensors, and some numbers
# of each. Put onto the base, the tensors give what an export of the whole run gives, bit by bit.

DESCRIPTION = "delta.json"
#: Numbers of each tensor of a base that its fingerprint reads.
_SAMPLE = 64
_LIMIT = 1 << 20


class Description(NamedTuple):
    """The content of ``delta.json``: the family, the dtype of an export, and the base."""

    family: str
    dtype: str
    fingerprint: str
    base: str


def trained_sources(
    logical: Mapping[str, LogicalTensor], trains: Callable[[str], bool]
) -> frozenset[str]:
    """The stored tensors in which any number trained; `trains` of a name in checkpoints, where
    every expert stands by itself."""
    found: set[str] = set()
    for name, tensor in logical.items():
        module, _, leaf = name.rpartition(".")
        for piece in tensor.pieces:
            if not module.endswith(".experts"):
                names = [name]
            else:
                first = piece.offset[0]
                names = [f"{module}.{one}.{leaf}" for one in range(first, first + piece.shape[0])]
            if any(map(trains, names)):
                found.add(piece.source)
    return frozenset(found)


def fingerprint(folder: WeightFolder) -> str:
    """Fingerprint of a folder's tensors: equal for the same model in the same files' dtypes."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(folder.tensors):
        stored = folder.tensors[name]
        digest.update(f"{name} {stored.dtype} {list(stored.shape)}\n".encode())
        if all(stored.shape):
            *outer, inner = stored.shape or (1,)
            box = [*(range(size // 2, size // 2 + 1) for size in outer), range(min(inner, _SAMPLE))]
            sample = folder.read(name, box if stored.shape else [])
            digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return f"blake2b-128:{digest.hexdigest()}"


def write_delta(out: Path, tensors: Mapping[str, DeferredTensor], description: Description) -> None:
    """Write `tensors` and what they belong to into the folder `out`, each file by a rename."""
    out.mkdir(parents=True, exist_ok=True)
    replace_by(out / SINGLE, safetensors_bytes(tensors, {"format": "pt"}))
    write_json(out / DESCRIPTION, {"format": 1, **description._asdict()})


class Delta:
    """An opened folder of :func:`write_delta`. Raises CheckpointError for any other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        file = plain_file(path, DESCRIPTION)
        if file_size(file) > _LIMIT:
            raise CheckpointError(f"{file}: is too large to describe a delta")
        try:
            found: Any = json.loads(file.read_text(encoding="utf-8"))
            if found.pop("format") != 1:
                raise CheckpointError(f"{file}: is of a later version")
            self.description = Description(**{key: str(value) for key, value in found.items()})
        except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file}: does not describe a delta ({error})") from error
        folder = WeightFolder(path)
        self.tensors = {
            name: DeferredTensor(
                stored.dtype,
                stored.shape,
                partial(_whole, folder.read, name, stored.shape, stored.dtype),
            )
            for name, stored in folder.tensors.items()
        }
