"""Checkpoints into folders of transformers and back, one tensor in memory at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from moemesh.checkpoint import store
from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.huggingface.delta import Delta
from moemesh.checkpoint.huggingface.logical import (
    AHEAD_COPIES,
    LogicalTensor,
    ahead_tensors,
    logical_tensors,
)
from moemesh.checkpoint.huggingface.pieces import TensorPiece, slices
from moemesh.checkpoint.huggingface.weight_folder import WeightFolder
from moemesh.checkpoint.huggingface.write import write_folder
from moemesh.checkpoint.remote import Place
from moemesh.checkpoint.store import Checkpoint, Shard
from moemesh.checkpoint.tensor_file import DeferredTensor
from moemesh.config.huggingface.folder import EMBEDDING, HEAD
from moemesh.config.huggingface.keys import first
from moemesh.config.model import ModelConfig

#: A stack of experts; a checkpoint has each expert by itself.
_STACK = re.compile(r"(.*\.experts)\.(\w+)")
OnFile = Callable[[int, int], None]


class LogicalWeights(Protocol):
    """Weights under logical names: a run's (:class:`CheckpointWeights`), or those of a folder."""

    def read(self, name: str, box: Sequence[range]) -> Tensor:
        """The part `box` of a parameter, buffer or stack of experts."""
        ...


class NamedWeights(LogicalWeights, Protocol):
    """Weights whose names and shapes are known, experts also one by one."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Parameter, buffer or stack of experts -> what has its `shape`."""
        ...


class CheckpointWeights:
    """The weights of a checkpoint, in which every expert stands by itself."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def read(self, name: str, box: Sequence[range]) -> Tensor:
        """The part `box` of a parameter, buffer or stack of experts."""
        match = _STACK.fullmatch(name)
        if match is None:
            return self._part(name, box)
        experts, *rest = box
        return torch.stack([self._part(f"{match[1]}.{one}.{match[2]}", rest) for one in experts])

    def _part(self, name: str, box: Sequence[range]) -> Tensor:
        offset, shape = [part.start for part in box], [len(part) for part in box]
        return self.checkpoint.read(f"model.{name}", offset, shape)


def write_huggingface(
    weights: LogicalWeights,
    model: ModelConfig,
    kind: str,
    out: Path,
    config: Mapping[str, object],
    *,
    dtype: torch.dtype,
    fused: bool = False,
    origin: WeightFolder | None = None,
    delta: Delta | None = None,
    on_file: OnFile = lambda done, total: None,
) -> None:
    """Write `weights` as a folder of the family `kind` with this `config`.

    All weights in `dtype`, but the routers' selection biases, which are fp32 everywhere. Prediction
    layers that the folder `origin` has and the model has not are copied from there. With
    `delta` its tensors take the places of those of `weights`.
    """
    tensors = stored_tensors(weights, logical_tensors(model, kind, fused=fused), dtype)
    if delta is not None:
        tensors = delta.onto(tensors)
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
            box = [range(size) for size in stored.shape]
            kept = dtype if origin.is_quantized else stored.dtype
            make = partial(_converted, origin, name, box, kept)
            tensors[name] = DeferredTensor(kept, stored.shape, make)
    write_folder(out, tensors, config, on_file=on_file)


def stored_tensors(
    weights: LogicalWeights, logical: Mapping[str, LogicalTensor], dtype: torch.dtype
) -> dict[str, DeferredTensor]:
    """The tensors of a folder that the `logical` ones of `weights` make."""
    tensors: dict[str, DeferredTensor] = {}
    for name, tensor in logical.items():
        kept = torch.float32 if name.endswith("selection_bias") else dtype
        for piece in tensor.pieces:
            make = partial(_stored, weights, name, tensor, piece, kept)
            tensors[piece.source] = DeferredTensor(kept, piece.stored, make)
    return tensors


def write_checkpoint(
    weights: NamedWeights, folder: Path, state: dict[str, Any], dtype: torch.dtype
) -> Path:
    """Write the weights of a folder as ``folder/step-0``, in `dtype`; buffers are fp32.

    `state` is that of a run before its first step.
    """
    shards: list[Shard] = []
    for name, tensor in weights.tensors.items():
        kept = torch.float32 if name.endswith("selection_bias") else dtype
        match = _STACK.fullmatch(name)
        for expert in range(tensor.shape[0]) if match else [None]:
            named = name if match is None else f"{match[1]}.{expert}.{match[2]}"
            shape = tensor.shape if match is None else tensor.shape[1:]
            box = [range(size) for size in shape]
            shards.append(
                Shard(
                    name=f"model.{named}",
                    shape=shape,
                    offset=(0,) * len(shape),
                    tensor=torch.empty(shape, dtype=kept, device="meta"),
                    make=partial(_converted, weights, named, box, kept),
                )
            )
    return store.save(folder, 0, shards, state)


def _converted(
    weights: LogicalWeights, name: str, box: Sequence[range], dtype: torch.dtype
) -> Tensor:
    return weights.read(name, box).to(dtype)


def _stored(
    weights: LogicalWeights,
    name: str,
    tensor: LogicalTensor,
    piece: TensorPiece,
    dtype: torch.dtype,
) -> Tensor:
    """The tensor of a folder that `piece` stands for."""
    if tensor.view == tensor.shape:
        return piece.store(weights.read(name, piece.box).to(dtype))
    table = weights.read(name, [range(size) for size in tensor.shape]).reshape(tensor.view)
    return piece.store(table[slices(piece.box)].to(dtype))


def newest(folder: Place) -> Checkpoint:
    """The newest checkpoint of a run's folder that verifies. Raises CheckpointError without one."""
    reasons: list[str] = []
    found = store.latest(folder, lambda step, why: reasons.append(f"step {step}: {why}"))
    if found is None:
        raise CheckpointError("\n  ".join([f"{folder}: holds no readable checkpoint", *reasons]))
    return found
