"""The architecture of a model that only transformers knows, for code that never imports torch.

:func:`read_architecture` returns the record of a ``config.json``. Another interpreter builds the
model on the meta device (:mod:`moemesh.model.hub.architecture`) and prints the record, which takes
some seconds; it is then kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from moemesh.config.errors import ConfigError, Problem
from moemesh.config.huggingface.keys import wrong

#: Version of the record: an older one in the cache is read from the model once more.
RECORD_VERSION = 1
#: The oldest and the first untested version of transformers whose modelling code is run.
TESTED = ((5, 20), (6, 0))


@dataclass(frozen=True, kw_only=True)
class ParameterRecord:
    """One parameter, under the name that its module has in transformers. ``unit``: the part of the
    forward that reads it ("embedding", "layers.3", "head"); ``is_expert``: a stack with an entry of
    its first dim for each expert; ``is_fp32``: float32 in a bfloat16 model; ``is_idle``: no
    gradient ever reaches it."""

    name: str
    shape: tuple[int, ...]
    unit: str
    is_expert: bool = False
    is_fp32: bool = False
    is_idle: bool = False


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and parameters of a model of transformers. ``values``: its ``config.json``;
    ``layers``: the module that holds the decoder layers; ``layer_kinds``: the class of the mixer
    and of the MLP of each layer; ``has_plain_head``: logits are the last hidden states times the
    head's weight; ``documents``: how documents in one row are kept apart ("positions", "masks",
    or "rows": they are not); ``notes``: what a run is to know; ``costs``: figures of the planner.
    """

    model_type: str
    transformers: str
    values: dict[str, Any]
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    routed_layers: tuple[int, ...]
    max_positions: int
    tied_embeddings: bool
    has_plain_head: bool
    layers: str
    parameters: tuple[ParameterRecord, ...]
    #: Persistent buffers, name -> shape: routers' selection biases.
    buffers: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    documents: str = "rows"
    notes: tuple[str, ...] = ()
    costs: dict[str, Any] = field(default_factory=dict[str, Any])

    def to_json(self) -> str:
        """One line, as the cache has it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Architecture:
        """The record of a line of :meth:`to_json`. Raises ValueError for another text."""
        given = json.loads(text)
        if not isinstance(given, dict) or {one.name for one in fields(cls)} != given.keys():
            raise ValueError("not the record of an architecture")
        values = cast("dict[str, Any]", given)
        parameters = (
            ParameterRecord(**{**one, "shape": tuple(one["shape"])}) for one in values["parameters"]
        )
        values |= {
            "parameters": tuple(parameters),
            "routed_layers": tuple(values["routed_layers"]),
            "notes": tuple(values["notes"]),
            "buffers": {name: tuple(shape) for name, shape in values["buffers"].items()},
        }
        return cls(**values)


def transformers_version() -> str:
    """The installed version. Raises ConfigError where it is missing or too old."""
    least = ".".join(map(str, TESTED[0]))
    try:
        found = version("transformers")
    except PackageNotFoundError:
        message = "model.implementation = transformers needs the package transformers"
        raise _refusal("transformers", message, f"pip install 'transformers>={least}'") from None
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if numbers < TESTED[0]:
        message = f"transformers {found} is too old to run its models: {least} and later"
        raise _refusal(found, message, f"pip install 'transformers>={least}'")
    return found


def read_architecture(values: dict[str, Any]) -> Architecture:
    """The architecture of a parsed ``config.json``, from the cache or from transformers.

    Raises ConfigError where transformers is missing, does not know the model, or cannot train it.
    """
    return _read(json.dumps(values, sort_keys=True), transformers_version())


@lru_cache
def _read(text: str, installed: str) -> Architecture:
    key = hashlib.sha256(f"{RECORD_VERSION}/{installed}/{text}".encode()).hexdigest()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = home / "moemesh" / "architectures" / f"{key}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        return Architecture.from_json(kept.read_text(encoding="utf-8"))
    command = [sys.executable, "-m", "moemesh.model.hub.architecture"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    *_, answer = done.stdout.splitlines() or [""]
    if done.returncode == 2:
        problem = json.loads(answer)
        raise ConfigError([Problem(**problem)])
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        kind = json.loads(text).get("model_type")
        message = f"transformers {installed} cannot build this model: {last[0]}"
        raise _refusal(kind, message, "another version of transformers")
    found = Architecture.from_json(answer)
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        begun = kept.with_suffix(f".{os.getpid()}")
        begun.write_text(answer, encoding="utf-8")
        begun.replace(kept)
    return found


def _refusal(value: object, message: str, fix: str) -> ConfigError:
    return wrong("not-available", "model.implementation", value, message, fix)
