"""The tensors of a run that trained, as a folder of their own, and a base folder with them.

    model.safetensors    stored tensors of which any number trained, under transformers' names
    delta.json           the base that they belong to, and how they were written

The base is known by a fingerprint: names, shapes and dtypes of all its tensors, and some numbers of
each. Put onto the base, the tensors give what an export of the whole run gives, bit by bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moemesh.checkpoint.files import CheckpointError, file_size, replace_by
from moemesh.checkpoint.huggingface.contents import plain_file
from moemesh.checkpoint.huggingface.logical import LogicalTensor
from moemesh.checkpoint.huggingface.weight_folder import WeightFolder
from moemesh.checkpoint.huggingface.write import write_json
from moemesh.checkpoint.tensor_file import DeferredTensor, safetensors_bytes
from moemesh.config.huggingface.folder import SINGLE

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
                partial(folder.read, name, [range(size) for size in stored.shape]),
            )
            for name, stored in folder.tensors.items()
        }

    def onto(self, whole: Mapping[str, DeferredTensor]) -> dict[str, DeferredTensor]:
        """The tensors of a folder with those of the delta in their places. Raises CheckpointError
        for one that the folder does not have, or has in another shape."""
        for name, tensor in self.tensors.items():
            there = whole.get(name)
            if there is None or there.shape != tensor.shape:
                has = "no such tensor" if there is None else f"{list(there.shape)}"
                raise CheckpointError(
                    f"{self.path / SINGLE}: {name} {list(tensor.shape)}; the model has {has}"
                )
        return {name: self.tensors.get(name, tensor) for name, tensor in whole.items()}
