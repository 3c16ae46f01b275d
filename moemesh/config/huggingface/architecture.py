"""The reader of :class:`~moemesh.config.architecture.Architecture`, without torch.

A subprocess builds the model on the meta device (:mod:`moemesh.model.hub.architecture`) and prints
its record. This takes some seconds, so the record is kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from moemesh.config.architecture import Architecture
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.huggingface.keys import CONFIG, real, table, wrong
from moemesh.config.model import ModelConfig
from moemesh.config.python import python_command

#: Version of the record: an older one in the cache is left there and not read.
RECORD_VERSION = 11
#: Problem codes of our own reading for models that the code of transformers may still run.
_BEYOND_US = frozenset({"not-available", "unknown-layer", "unknown-model", "missing"})
#: The oldest supported and the first untested version of transformers.
TESTED = ((5, 20), (6, 0))


def transformers_version() -> str:
    """The installed version. Raises ConfigError where it is missing or too old."""
    least = ".".join(map(str, TESTED[0]))
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        message = "the code of transformers computes this model, and the package is not installed"
        raise _refusal("transformers", message, f"pip install 'transformers>={least}'") from None
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if numbers < TESTED[0]:
        message = f"transformers {installed} is too old to run its models: {least} and later"
        raise _refusal(installed, message, f"pip install 'transformers>={least}'")
    return installed


def read_architecture(values: dict[str, Any]) -> Architecture:
    """The architecture of a parsed ``config.json``, from the cache or from transformers.

    Raises ConfigError if transformers is missing or too old, lacks the model, or cannot train it.
    """
    return _read(json.dumps(values, sort_keys=True), transformers_version())


def read_refused(values: dict[str, Any], error: ConfigError) -> Architecture:
    """The architecture of a parsed ``config.json`` that our own reading refuses with `error`.

    Raises `error` itself if the weights are quantized, the file names no family, or `error` names
    wrong values of a family that we read. If transformers lacks the model, too, raises the problems
    of both readings; if it refuses a value, only that. If transformers is missing, raises that
    problem and, from `error`, only an unknown family.
    """
    is_beyond_us = {problem.code for problem in error.problems} <= _BEYOND_US
    if not (is_beyond_us and values.get("model_type")) or table(values, "quantization_config"):
        raise error
    try:
        transformers_version()
    except ConfigError as missing:
        unknown = [problem for problem in error.problems if problem.code == "unknown-model"]
        raise ConfigError([*unknown, *missing.problems]) from error
    try:
        return read_architecture(values)
    except ConfigError as other:
        if all(problem.key in {CONFIG, *values} - {"model_type"} for problem in other.problems):
            raise
        raise ConfigError([*error.problems, *other.problems]) from other


def unknown_family(values: Mapping[str, Any], installed: str) -> ConfigError:
    """The refusal of a ``config.json`` whose family transformers `installed` does not know."""
    message = f"transformers {installed} does not know this family"
    fix = (
        _later(values, installed)
        or "the version of transformers that the folder's model card names"
    )
    if "auto_map" in values:
        message += ", and code in the folder is never run"
        fix = "a version of transformers that has the family itself"
    return wrong("not-available", "model_type", str(values.get("model_type") or ""), message, fix)


def _later(values: Mapping[str, Any], installed: str) -> str:
    """The version of transformers that has written `values`, if it is later than `installed`."""
    from packaging.version import InvalidVersion, Version  # a requirement of transformers

    with suppress(InvalidVersion):
        saved = Version(str(values.get("transformers_version")))
        if saved > Version(installed):
            return f"transformers {saved} or later: this version has written the folder"
    return ""


def _unbuildable(values: Mapping[str, Any], installed: str, reason: str) -> ConfigError:
    """The refusal of a ``config.json`` of which transformers `installed` makes no model; `reason`:
    the last line of its error. The key is the first of those that the reason names, or whose value
    it names."""
    message = f"transformers {installed} cannot build a model of these values: {reason}"
    words = (*re.findall(r"\w+", reason),)
    named = [key for key in values if key in words]
    for key, value in values.items():
        inner = (
            (*cast("dict[str, object]", value).values(),) if isinstance(value, dict) else (value,)
        )
        if key != "model_type" and any(text in words for text in inner):
            named.append(key)
    fix = f"mend {' or '.join(named) or 'them'} in {CONFIG}"
    later = _later(values, installed)
    fix += f", or take {later}" * bool(later)
    key = named[0] if named else CONFIG
    return wrong("not-available", key, values.get(key), message, fix)


@lru_cache
def _read(text: str, installed: str) -> Architecture:
    """The record of the ``config.json`` `text` by transformers `installed`: from the cache, else
    from a subprocess, which prints a problem as JSON and exits with code 2."""
    # What a layer computes and keeps is counted in torch.
    versions = f"{RECORD_VERSION}/{installed}/{version('torch')}"
    key = hashlib.sha256(f"{versions}/{text}".encode()).hexdigest()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cached = home / "moemesh" / "architectures" / f"{key}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        return Architecture.from_json(cached.read_text(encoding="utf-8"))
    values = cast("dict[str, Any]", json.loads(text))
    kind = values.get("model_type")
    # The automatic classes of transformers name every family. Their files are read as text,
    # because their import takes seconds.
    package = find_spec("transformers")
    homes = (package and package.submodule_search_locations) or ()
    files = [file for home in homes for file in Path(home, "models", "auto").glob("*.py")]
    texts = (file.read_text(encoding="utf-8") for file in files)
    names = (f'"{kind}"', f"'{kind}'") if kind else ()
    if files and not any(name in text for text in texts for name in names):
        raise unknown_family(values, installed)
    command = python_command("moemesh.model.hub.architecture")
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    *_, answer = done.stdout.splitlines() or [""]
    if done.returncode == 2:
        problem = json.loads(answer)
        raise ConfigError([Problem(**problem)])
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        # The values are not at fault if a package is missing or the process was killed.
        missing = [line for line in lines if re.match(r"(Import|ModuleNotFound)Error\b", line)]
        if missing or done.returncode < 0:
            reason = (missing or [f"killed by signal {-done.returncode}"])[-1]
            fix = "more memory, or another version of transformers"
            fix = "install the package that is missing" if missing else fix
            raise _refusal(kind, f"transformers {installed} cannot build this model: {reason}", fix)
        raise _unbuildable(values, installed, lines[-1].strip())
    architecture = Architecture.from_json(answer)
    with suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        unfinished = cached.with_suffix(f".{os.getpid()}")
        unfinished.write_text(answer, encoding="utf-8")
        unfinished.replace(cached)
    return architecture


def hub_values(architecture: Architecture) -> dict[str, object]:
    """Keys and values of the section [model] for a model of transformers. As in transformers, the
    routers have a balance loss, one for all layers, if ``output_router_logits`` and the coefficient
    are set."""
    layers, values = architecture.routed_layers, architecture.values
    keys: dict[str, object] = {
        "implementation": "transformers",
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.hidden_size,
        "num_layers": architecture.num_layers,
        "num_experts": architecture.num_experts,
        "experts_per_token": architecture.experts_per_token or None,
        "expert_intermediate_size": architecture.expert_width,
        "tied_embeddings": architecture.tied_embeddings,
        "num_shared_experts": 0,
        "first_dense_layers": layers[0] if layers else architecture.num_layers,
        "router_bias_rate": 0.0,
        "aux_loss_coefficient": 0.0,
        "aux_loss_layers": "together",
        "aux_loss_scope": "global",
        "aux_loss_probabilities": "softmax",
    }
    if layers and layers != tuple(range(layers[0], architecture.num_layers)):
        keys |= {"moe_layers": list(layers), "first_dense_layers": None}
    if architecture.max_positions:
        keys["max_position_embeddings"] = architecture.max_positions
    text: dict[str, Any] = {**values, **dict(values.get("text_config") or {})}
    coefficient = text.get("router_aux_loss_coef")
    if text.get("output_router_logits") and coefficient is not None:
        # transformers counts selections per token and ours per choice: a factor of `chosen`.
        chosen = architecture.experts_per_token
        keys["aux_loss_coefficient"] = real("router_aux_loss_coef", coefficient) * chosen
    return {name: value for name, value in keys.items() if value is not None}


def hub_model(architecture: Architecture) -> ModelConfig:
    """The section [model] of a model of transformers."""
    values = hub_values(architecture)
    lists = {
        key: tuple(cast("list[object]", value))
        for key, value in values.items()
        if isinstance(value, list)
    }
    return ModelConfig.model_validate({**values, **lists}).with_architecture(architecture)


def _refusal(value: object, message: str, fix: str) -> ConfigError:
    return wrong("not-available", "model.implementation", value, message, fix)
