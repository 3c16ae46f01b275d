"""Conversion of checkpoints to transformers folders and back, tensor by tensor."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moemesh.checkpoint import store
from moemesh.checkpoint.files import CheckpointError, read_chunks, reading, replace_by
from moemesh.checkpoint.header import read_header
from moemesh.checkpoint.huggingface.adapters import (
    Adaptation,
    EndWeight,
    adaptations,
    peft_config,
)
from moemesh.checkpoint.huggingface.contents import plain_file, read_json
from moemesh.checkpoint.huggingface.logical import (
    AHEAD_COPIES,
    LogicalTensor,
    ahead_tensors,
    logical_shapes,
    logical_tensors,
)
from moemesh.checkpoint.huggingface.pieces import Read, TensorPiece, slices
from moemesh.checkpoint.huggingface.weight_folder import WeightFolder, torch_dtype
from moemesh.checkpoint.load import DeferredTensor, safetensors_bytes
from moemesh.checkpoint.manifest import DTYPES
from moemesh.checkpoint.remote import Place
from moemesh.checkpoint.store import Checkpoint, Shard
from moemesh.config.huggingface.folder import EMBEDDING, HEAD, INDEX, SINGLE
from moemesh.config.huggingface.keys import first
from moemesh.config.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.sharding.parameters import tensors as tensors_of

#: Name of a stack of experts; a checkpoint stores each expert separately.
_STACK = re.compile(r"(.*\.experts)\.(\w+)")


def checkpoint_weights(checkpoint: Checkpoint) -> Read:
    """Reader of a checkpoint by logical names; the experts of a layer can be read as a stack."""
    names = checkpoint.manifest.tensors.keys()

    def read(name: str, box: Sequence[range]) -> Tensor:
        if f"model.{name}" not in names and (match := _STACK.fullmatch(name)) is not None:
            experts, *rest = box
            return torch.stack([read(f"{match[1]}.{i}.{match[2]}", rest) for i in experts])
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

    All weights are in `dtype`, except for the routers' selection biases, which are always fp32.
    Prediction layers of the folder `origin` that the model lacks are copied, in their dtype unless
    the folder is quantized. Tensors of `delta` replace those of `weights` as they are: see
    :func:`put_delta`.
    """
    tensors = stored_tensors(weights, logical_tensors(model, kind, fused=fused), dtype)
    put_delta(tensors, delta)
    if origin is not None:
        num_ahead = first(config, "num_mtp_layers", 0)
        names = ahead_tensors(origin.tensors, model, kind, num_ahead) - tensors.keys()
        # Trained prediction layers share the model's tables: their copies are replaced too.
        trained = {name.rpartition(".eh_proj.")[0] for name in tensors if ".eh_proj." in name}
        head = HEAD if HEAD in tensors else EMBEDDING
        shared = dict(zip(AHEAD_COPIES, (EMBEDDING, head), strict=True))
        for name in (name for name in origin.tensors if name in names):
            stored, (*layer, leaf) = origin.tensors[name], name.split(".", 3)  # model.layers.N
            if ".".join(layer) in trained:
                tensors[name] = tensors[shared[leaf]]
                continue
            stored_dtype = dtype if origin.packed else torch_dtype(stored.dtype)
            tensors[name] = whole_tensor(origin.read, name, stored.shape, stored_dtype)
    write_folder(out, tensors, config, on_file=on_file)


def put_delta(tensors: dict[str, DeferredTensor], delta: Delta | None) -> None:
    """Replace tensors of a folder by those of `delta`. Raises CheckpointError for one that the
    folder lacks, or has in another shape."""
    if delta is None:
        return
    for name, tensor in delta.tensors.items():
        replaced = tensors.get(name)
        if replaced is None or replaced.shape != tensor.shape:
            has = "no such tensor" if replaced is None else f"{list(replaced.shape)}"
            raise CheckpointError(
                f"{delta.path / SINGLE}: {name} {list(tensor.shape)}; the model has {has}"
            )
        tensors[name] = tensor


def stored_tensors(
    weights: Read, logical: Mapping[str, LogicalTensor], dtype: torch.dtype
) -> dict[str, DeferredTensor]:
    """The stored tensors of a folder, computed from the `logical` tensors of `weights`."""

    def make(name: str, tensor: LogicalTensor, piece: TensorPiece) -> Tensor:
        if tensor.view == tensor.shape:
            part = weights(name, piece.box)
        else:
            whole = weights(name, [range(size) for size in tensor.shape])
            part = whole.reshape(tensor.view)[slices(piece.box)]
        return piece.store(part.to(_stored_dtype(name, dtype)))

    return {
        piece.source: DeferredTensor(
            _stored_dtype(name, dtype), piece.stored, partial(make, name, tensor, piece)
        )
        for name, tensor in logical.items()
        for piece in tensor.pieces
    }


def write_checkpoint(
    weights: Read, model: ModelConfig, folder: Path, state: dict[str, Any], dtype: torch.dtype
) -> None:
    """Write the `weights` of `model`, each expert separately, as ``folder/step-0`` in `dtype`;
    floating-point buffers are fp32, integer buffers keep their dtype. `state`: the checkpoint's
    state of the run."""
    shards: list[Shard] = []
    architecture, stacks = model.architecture, frozenset[str]()
    if architecture is not None:
        stacks = frozenset(x.name for x in architecture.parameters if x.is_expert)
    for stack, shape in logical_shapes(model).items():
        stored_dtype, names = _stored_dtype(stack, dtype), [stack]
        if architecture is not None and stack in architecture.buffers:
            stored_dtype = weights(stack, [range(0) for _ in shape]).dtype
            stored_dtype = torch.float32 if stored_dtype.is_floating_point else stored_dtype
        is_stack = architecture is None or stack in stacks
        if is_stack and (match := _STACK.fullmatch(stack)) is not None:
            names = [f"{match[1]}.{expert}.{match[2]}" for expert in range(shape[0])]
            shape = shape[1:]
        shards += [
            Shard(
                name=f"model.{name}",
                shape=shape,
                offset=(0,) * len(shape),
                tensor=torch.empty(shape, dtype=stored_dtype, device="meta"),
                make=whole_tensor(weights, name, shape, stored_dtype).make,
            )
            for name in names
        ]
    store.save(folder, 0, shards, state)


def _stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name.endswith("selection_bias") else dtype


def whole_tensor(
    weights: Read, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> DeferredTensor:
    """The whole tensor `name` of `weights` in `dtype`, computed at the write."""
    box = [range(size) for size in shape]
    return DeferredTensor(dtype, shape, lambda: weights(name, box).to(dtype))


def newest(folder: Place) -> Checkpoint:
    """The newest checkpoint in `folder` that verifies. Raises CheckpointError without one."""
    reasons: list[str] = []
    checkpoint = store.latest(folder, lambda step, why: reasons.append(f"step {step}: {why}"))
    if checkpoint is None:
        raise CheckpointError("\n  ".join([f"{folder}: holds no readable checkpoint", *reasons]))
    return checkpoint


# A folder of weights in the layout of transformers, written file by file.
#
# Tensors are computed one by one, when they are written. Every file is renamed into place when it
# is complete; the index and config.json come last. An interrupted conversion resumes with the first
# missing file.

#: Largest file of weights in bytes; a larger tensor has a file of its own.
FILE_BYTES = 4 << 30
#: Largest other file in bytes that is copied with the weights.
CARRIED_BYTES = 64 << 20
_METADATA = {"format": "pt"}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def write_folder(
    out: Path,
    tensors: Mapping[str, DeferredTensor],
    config: Mapping[str, object] | bytes,
    *,
    files: Mapping[str, str] | None = None,
    file_bytes: int = FILE_BYTES,
    on_file: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write `tensors` and ``config.json`` to the folder `out`; existing files of the same
    conversion are kept.

    `files`: file of each tensor; None: files of at most `file_bytes`. `on_file` is called for each
    finished file. Raises CheckpointError for a file of another conversion.
    """
    out.mkdir(parents=True, exist_ok=True)
    # File -> its tensors.
    groups: dict[str, list[str]] = {}
    if files is not None:
        for name in tensors:
            groups.setdefault(files[name], []).append(name)
    else:
        parts: list[list[str]] = [[]]
        size = 0
        for name, tensor in tensors.items():
            if parts[-1] and size + tensor.num_bytes > file_bytes:
                parts.append([])
                size = 0
            parts[-1].append(name)
            size += tensor.num_bytes
        numbered = (f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts)))
        groups = dict(zip(numbered if len(parts) > 1 else [SINGLE], parts, strict=True))
    is_single = [*groups] == [SINGLE]
    # Loaders prefer the single file if both exist: one of them would be of another model.
    if (other := out / (INDEX if is_single else SINGLE)).exists():
        raise CheckpointError(f"{other}: is a file of another model: choose an empty folder")
    for done, (file, names) in enumerate(sorted(groups.items())):
        part = {name: tensors[name] for name in names}
        if (out / file).exists():  # finished by an interrupted conversion
            _check_same(out / file, part)
        else:
            replace_by(out / file, safetensors_bytes(part, _METADATA))
        on_file(done + 1, len(groups))
    if not is_single:
        total = sum(tensor.num_bytes for tensor in tensors.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: file for file, names in groups.items() for name in names},
        }
        write_json(out / INDEX, index)
    if isinstance(config, bytes):
        replace_by(out / "config.json", [config])
    else:
        write_json(out / "config.json", config)


def carry_along(
    source: Path, out: Path, wanted: Callable[[str], bool] = lambda name: True
) -> list[str]:
    """Copy the files of `source` other than weights, such as tokenizer and generation settings, for
    whose names `wanted` returns True. config.json, the index, hidden and large files, and links
    outside of the hub's cache are left out. Returns the copied names."""
    out.mkdir(parents=True, exist_ok=True)
    copied: list[str] = []
    for name in sorted(path.name for path in source.iterdir()):
        path = plain_file(source, name)
        is_wanted = path.is_file() and not path.is_symlink() and wanted(name)
        is_other = name.startswith(".") or name in ("config.json", INDEX) or name.endswith(_WEIGHTS)
        if is_wanted and not is_other and path.stat().st_size <= CARRIED_BYTES:
            shutil.copyfile(path, out / name)
            copied.append(name)
    return copied


def _check_same(path: Path, part: Mapping[str, DeferredTensor]) -> None:
    """Raises CheckpointError unless a file holds these tensors, with the same numbers."""
    expected = {
        name: (DTYPES[str(tensor.dtype).removeprefix("torch.")], tensor.shape)
        for name, tensor in part.items()
    }
    header = read_header(path).items()
    if {name: (entry.dtype, entry.shape) for name, entry in header} != expected:
        raise CheckpointError(f"{path}: is a file of another model: choose an empty folder")
    # Folders of other runs and steps have the same names and shapes: compare the numbers.
    with reading(path) as file:
        for content in safetensors_bytes(part, _METADATA):
            num_equal = 0
            for chunk in read_chunks(file, len(content)):
                if chunk != content[num_equal : num_equal + len(chunk)]:
                    break
                num_equal += len(chunk)
            if num_equal != len(content):
                raise CheckpointError(
                    f"{path}: holds other weights, of another source or of an earlier step: "
                    "choose an empty folder, or remove this one first"
                )


def write_json(path: Path, value: object) -> None:
    """Write `value` to a temporary file, then rename it."""
    replace_by(path, [(json.dumps(value, indent=2) + "\n").encode()])


def write_adapters(
    weights: Read,
    model: ModelConfig,
    kind: str,
    out: Path,
    *,
    dtype: torch.dtype,
    base: str | None,
    saved: Sequence[EndWeight] = (),
) -> None:
    """Write the adapters in `weights`, and the weights `saved`, which train as a whole, as a folder
    of PEFT for the family `kind`."""
    shapes = {tensor.name: tensor.shape for tensor in tensors_of(model, Plan())}
    config = peft_config(model, kind, base, saved)
    adapters = list(adaptations(model, kind))
    if config["r"] != model.lora.rank:  # the rank of fused projections, for all
        adapters = [x._replace(rank=2 * x.rank // len(x.parts)) for x in adapters]

    def make(adapter: Adaptation, factor: str) -> Tensor:
        names = [adapter.factor(part, factor) for part in adapter.parts]
        factors = [weights(name, [range(size) for size in shapes[name]]) for name in names]
        padding = adapter.rank - model.lora.rank
        pad = (0, 0, 0, padding) if factor == "A" else (0, padding)  # rows of A, columns of B
        factors = [torch.nn.functional.pad(weight, pad) for weight in factors]
        return adapter.store(factor, factors).to(dtype).contiguous()

    written = {
        adapter.name(factor): DeferredTensor(
            dtype, adapter.shape(factor, adapter.total_rank), partial(make, adapter, factor)
        )
        for adapter in adapters
        for factor in "AB"
    }
    written |= {end.stored: whole_tensor(weights, end.ours, end.shape, dtype) for end in saved}
    out.mkdir(parents=True, exist_ok=True)
    replace_by(out / ADAPTER_WEIGHTS, safetensors_bytes(written, {"format": "pt"}))
    write_json(out / ADAPTER_CONFIG, config)


# Delta folders: the trained tensors of a run without its base model.
#
#     model.safetensors    stored tensors with any trained number, under transformers' names
#     delta.json           the base model, the family and the dtype
#
# The base is identified by a fingerprint: names, shapes and dtypes of all its tensors, and some
# numbers of each. Base and delta together equal an export of the whole run, bit by bit.

DESCRIPTION = "delta.json"
#: Numbers of each tensor that enter the fingerprint of a base.
_SAMPLE = 64
#: Largest delta.json in bytes.
_LIMIT = 1 << 20


class Description(NamedTuple):
    """The content of ``delta.json``. `dtype`: dtype of an export; `fingerprint` and `base`:
    :func:`fingerprint` and folder of the base model."""

    family: str
    dtype: str
    fingerprint: str
    base: str


def trained_sources(
    logical: Mapping[str, LogicalTensor], trains: Callable[[str], bool]
) -> frozenset[str]:
    """Stored tensors with any trained number; `trains` takes names of checkpoints."""
    sources: set[str] = set()
    for name, tensor in logical.items():
        module, _, leaf = name.rpartition(".")
        for piece in tensor.pieces:
            if not module.endswith(".experts"):
                names = [name]
            else:
                first = piece.offset[0]
                experts = range(first, first + piece.shape[0])
                names = [f"{module}.{expert}.{leaf}" for expert in experts]
            if any(map(trains, names)):
                sources.add(piece.source)
    return frozenset(sources)


def fingerprint(folder: WeightFolder) -> str:
    """Fingerprint of a folder's tensors: equal for the same model in the same dtypes."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(folder.tensors):
        stored = folder.tensors[name]
        digest.update(f"{name} torch.{stored.dtype} {list(stored.shape)}\n".encode())
        if all(stored.shape):
            # The first numbers of the middle row; a tensor without dims is read as a whole.
            *outer, inner = stored.shape or (1,)
            box = [*(range(size // 2, size // 2 + 1) for size in outer), range(min(inner, _SAMPLE))]
            sample = folder.read(name, box if stored.shape else [])
            digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return f"blake2b-128:{digest.hexdigest()}"


def write_delta(out: Path, tensors: Mapping[str, DeferredTensor], description: Description) -> None:
    """Write `tensors` and their `description` to the folder `out`, each file by a rename."""
    out.mkdir(parents=True, exist_ok=True)
    replace_by(out / SINGLE, safetensors_bytes(tensors, {"format": "pt"}))
    write_json(out / DESCRIPTION, {"format": 1, **description._asdict()})


class Delta:
    """An opened folder of :func:`write_delta`. Raises CheckpointError for any other folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        file = plain_file(path, DESCRIPTION)
        content = read_json(file, _LIMIT)
        if content.pop("format", None) != 1:
            raise CheckpointError(f"{file}: is of a later version")
        try:
            self.description = Description(**{key: str(value) for key, value in content.items()})
        except TypeError as error:
            raise CheckpointError(f"{file}: does not describe a delta ({error})") from error
        folder = WeightFolder(path)
        self.tensors = {
            name: whole_tensor(folder.read, name, stored.shape, torch_dtype(stored.dtype))
            for name, stored in folder.tensors.items()
        }
