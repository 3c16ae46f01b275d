"""Export of a model of transformers' own code: a copy of its source folder with new weights.

Names, dtypes and files are those of the folder that a run started from (of ``--like`` if given);
the run folder has a record of them. Tensors that did not train, and tensors outside of the model,
are copied byte by byte, unless the folder is gone or another dtype is requested.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.huggingface.contents import (
    WEIGHT_DTYPES,
    StoredTensor,
    read_json,
    refuse_problems,
)
from moemesh.checkpoint.huggingface.convert import (
    Delta,
    carry_along,
    put_delta,
    whole_tensor,
    write_folder,
)
from moemesh.checkpoint.huggingface.hub_weights import HubTensors, HubWeights, stored_hub_tensors
from moemesh.checkpoint.huggingface.pieces import Read
from moemesh.checkpoint.huggingface.weight_folder import EXPERT, WeightFolder, torch_dtype
from moemesh.checkpoint.load import DeferredTensor
from moemesh.config.huggingface.folder import CONFIG, has_weights, read_config
from moemesh.config.run import RunConfig
from moemesh.train.records.run_folder import RunFolder
from moemesh.train.weights.weight_sources import refused

#: Name of the record in the folder of a run, and its largest size in bytes.
RECORD, RECORD_LIMIT = "source_tensors.json", 256 << 20


def keep_record(weights: HubWeights, folder: RunFolder) -> None:
    """Record the ``config.json`` and the tensors of the folder that a run starts from."""
    stored = {name: [x.file, x.dtype, x.shape] for name, x in weights.folder.stored.items()}
    folder.write_json(RECORD, {"config": weights.values, "tensors": stored})


class HubSource(NamedTuple):
    """The layout of an export. `config`: its ``config.json``; `folder`: the folder that has this
    layout, None if only the record of a run has it."""

    config: bytes
    tensors: HubTensors
    folder: WeightFolder | None

    @property
    def dtype(self) -> str:
        """The dtype of most tensors."""
        dtypes = Counter(tensor.dtype for tensor in self.tensors.stored.values())
        return max((x for x in dtypes if x in WEIGHT_DTYPES), key=dtypes.__getitem__)


def open_source(origin: Path | None, run: Path | None = None) -> HubSource:
    """The layout of the folder `origin`, or the one that `run` recorded. Raises ConfigError without
    either, CheckpointError if it is that of another model."""
    if origin is not None and has_weights(origin):
        folder = WeightFolder(origin)
        config, values, stored = (origin / CONFIG).read_bytes(), read_config(origin), folder.stored
    elif run is not None and (run / RECORD).exists():
        folder, record = None, read_json(run / RECORD, RECORD_LIMIT)
        values = record["config"]
        config = (json.dumps(values, indent=2) + "\n").encode()
        stored = {
            name: StoredTensor(file, dtype, tuple(shape))
            for name, (file, dtype, shape) in record["tensors"].items()
        }
    else:
        message = f"{origin or run} holds no weights of transformers, whose names are needed"
        raise refused("--like", str(origin), message, "the folder that the run started from")
    tensors = HubTensors.of(values, stored)
    refuse_problems(origin or Path(RECORD), tensors.problems)
    return HubSource(config, tensors, folder)


def export_tensors(
    weights: Read, source: HubSource, trains: Callable[[str], bool], dtype: str | None = None
) -> tuple[dict[str, DeferredTensor], frozenset[str]]:
    """The tensors of a folder like `source` with the parameters of `weights`, and the names of
    those with a trained element. `trains`: whether a parameter was trained, by its name in
    checkpoints. `dtype` replaces the most common dtype of the folder; None: all keep theirs.

    Raises CheckpointError for tensors that neither the parameters nor `source` can provide.
    """
    tensors, stored = source.tensors, source.tensors.stored
    usual = source.dtype

    def dtype_of(name: str) -> torch.dtype:
        before = stored[name].dtype
        return torch_dtype(before if dtype is None or before != usual else dtype)

    computed = dict(stored_hub_tensors(weights, tensors, dtype_of))
    trained, lost = tensors.trained_names(trains), frozenset(tensors.irreversible())
    result: dict[str, DeferredTensor] = {}
    missing: list[str] = []
    for name, tensor in stored.items():
        if source.folder is not None and name not in trained:
            result[name] = whole_tensor(source.folder.read, name, tensor.shape, dtype_of(name))
        elif name in computed and name not in lost:
            result[name] = computed[name]
        else:
            missing.append(name)
    if missing:
        several = f"{missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        why = "transformers' conversion cannot write it back"
        if source.folder is None:
            why = "no checkpoint holds it: --like FOLDER with the folder that the run started from"
        raise CheckpointError(f"{several}: {why}")
    return result, trained


def changes(config: RunConfig) -> Callable[[str], bool]:
    """Function of a parameter's name in checkpoints: whether the run has changed it, by training it
    or an adapter of it, or by rounding it to NF4."""
    assert config.model.architecture is not None
    lora = config.lora
    adapted = {
        record.name
        for record in config.model.architecture.parameters
        if record.adapted(lora) or (lora.is_packed and record.parts)
    }

    def is_changed(name: str) -> bool:
        match = EXPERT.fullmatch(name)
        weight = name if match is None else f"{match[1]}.{match[3]}"
        return weight in adapted or config.tuning.trains(name)

    return is_changed


def export(
    weights: Read,
    source: HubSource,
    out: Path,
    *,
    trains: Callable[[str], bool] = lambda name: True,
    dtype: str | None = None,
    delta: Delta | None = None,
    on_file: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the folder `source` with the parameters of `weights`; see :func:`export_tensors`.
    `delta`: tensors that replace those of the export."""
    tensors, _ = export_tensors(weights, source, trains, dtype)
    put_delta(tensors, delta)
    config = source.config
    if dtype not in (None, source.dtype):
        values = json.loads(config)
        # Parts of a model, such as text_config, have a dtype, too.
        inner = [part for part in values.values() if isinstance(part, dict) and "dtype" in part]
        for part in (values, *inner):
            part["dtype"] = dtype
        values.pop("torch_dtype", None)
        config = (json.dumps(values, indent=2) + "\n").encode()
    files = {name: tensor.file for name, tensor in source.tensors.stored.items()}
    write_folder(out, tensors, config, files=files, on_file=on_file)
    if source.folder is not None:
        carry_along(source.folder.path, out)
