"""A folder with a model of transformers as a source of values: its ``config.json``."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from moemesh.config.data import NUM_BYTES, DataConfig
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.huggingface.architecture import (
    hub_values,
    read_architecture,
    read_refused,
)
from moemesh.config.huggingface.keys import CONFIG
from moemesh.config.huggingface.model import model_values
from moemesh.config.limits import parse_json
from moemesh.config.schema import PATH_KEY
from moemesh.config.sources import ConfigSource, Leaf
from moemesh.config.suggest import nearest_path

#: Family without ``layer_types``: all layers have the window, or none.
SAME_WINDOWS = "mistral"
TOKENIZER = "tokenizer.json"
#: Name of the file with all tensors, and of the index of several such files.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Remedy for weights in the shards of a trainer, with its command.
_JOINED = "the folder that `{}` writes, with the config.json of the model"
#: (pattern of a file in a folder without a config.json, kind of such folders, remedy). In a remedy
#: PATH is replaced by the folder, MATCH by the folder of the matching file.
OTHER_FOLDERS = (
    ("adapter_config.json", "adapters of PEFT", "their base model; lora.path=PATH reads them"),
    ("*.gguf", "weights in GGUF", "the folder of the original weights, in safetensors"),
    ("checkpoints/step-*", "a run of moemesh",
     "the folder that `moemesh convert PATH FOLDER` writes"),
    ("latest_checkpointed_iteration.txt", "a checkpoint of Megatron",
     "the folder that Megatron-Bridge exports of it"),
    ("zero_to_fp32.py", "a checkpoint of DeepSpeed",
     _JOINED.format("python PATH/zero_to_fp32.py PATH FOLDER --safe_serialization")),
    ("*.distcp", "a distributed checkpoint of torch",
     _JOINED.format("accelerate merge-weights PATH FOLDER")),
    ("*/*.distcp", "a distributed checkpoint of torch",
     _JOINED.format("accelerate merge-weights MATCH FOLDER")),
    ("model_index.json", "a pipeline of diffusers", "the folder of a causal language model"),
    ("params.json", "weights in their author's own format",
     "the release of the model for transformers"),
    ("*/config.json", "folders of models", "model.path=MATCH"),
    ("*.safetensors", "weights alone", "the config.json of the same model beside them"),
)  # fmt: skip
#: Upper bound of a config.json that will be parsed, in bytes.
CONFIG_LIMIT = 4 << 20
#: Names of the tables that a model with ``tie_word_embeddings`` shares.
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: Address of a model's page as a path, in which repeated slashes are one.
_ON_HUB = r"^(?:https?:/+(?:www\.)?(?:huggingface\.co|hf\.co)/|hf:/+)([\w.-]+/[\w.-]+)"
_CHUNK_BYTES, _HEADER_LIMIT = 4 << 20, 32 << 20
#: A tensor in a file: path, time of the file's change (ns; it keys a cache), first byte, number of
#: bytes, dtype and shape.
_Place = tuple[Path, int, int, int, str]


def read_config(path: Path, key: str = PATH_KEY) -> dict[str, Any]:
    """The JSON object of a ``config.json``, or of that in a folder. As in transformers, a head in
    the weights that differs from the embedding overrides ``tie_word_embeddings``, and a mistral
    with ``layer_types`` is a ministral.

    Raises ConfigError, under `key`, for a file that is missing, too long, or not a JSON object.
    """
    file = path / CONFIG if path.is_dir() else path
    if path.is_file() and path.suffix != ".json":
        message = f"{path} is a file; a model is the folder of a {CONFIG} with its weights"
        if (path.parent / CONFIG).is_file():
            fix = f"{key}={path.parent}"
        else:
            fix = (other_folder(path.parent, path.name) or ("", f"a folder with {CONFIG}"))[1]
        raise _refused("wrong-type", key, path, message, fix)
    try:
        with file.open("rb") as stream:
            raw = stream.read(CONFIG_LIMIT + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        message, fix = f"cannot read {file}: {reason}", "a folder with config.json"
        if (repository := re.search(_ON_HUB, str(path))) is not None:
            fix = f"{key}={repository[1]}"
        elif not path.exists():
            fix = f"{fix}; {nearest_path(path)}"
        elif (other := other_folder(path)) is not None:
            message, fix = f"{path} holds {other[0]}, and no {CONFIG}", other[1]
        raise _refused("no-file", key, path, message, fix) from None
    if len(raw) > CONFIG_LIMIT:
        raise _refused("too-large", key, path, f"{file} has more than {CONFIG_LIMIT} bytes")
    try:
        parsed: object = parse_json(raw)
    except ValueError as error:
        raise _refused("syntax", key, path, f"{file} is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise _refused("wrong-type", key, path, f"{file} is not a JSON object")
    values = cast("dict[str, Any]", parsed)
    if values.get("model_type") == SAME_WINDOWS and "layer_types" in values:
        values["model_type"] = "ministral"
    is_tied = values.get("tie_word_embeddings") is not False
    if is_tied and path.is_dir() and differ(path, EMBEDDING, HEAD):
        values["tie_word_embeddings"] = False
    return values


def other_folder(folder: Path, name: str | None = None) -> tuple[str, str] | None:
    """Kind of a folder without a model, or of its file `name`, and the remedy; None if unknown."""
    for pattern, kind, remedy in OTHER_FOLDERS:
        match = next(iter(sorted(folder.glob(pattern))), None)
        if match is not None and (name is None or fnmatch(name, pattern)):
            remedy = remedy.replace("PATH", str(folder)).replace("MATCH", str(match.parent))
            return kind, remedy
    return None


def differ(folder: Path, first: str, second: str, single: str = SINGLE) -> bool:
    """Whether a folder has both of two tensors, in the file `single` or those of its index, and
    they differ in dtype, shape or any byte. Two tensors of fp8 count as different, because their
    scales are stored elsewhere. False for a damaged folder: opening its weights reports the
    fault."""
    try:
        index: dict[str, str] = {}
        if not (folder / single).exists():
            index = parse_json((folder / INDEX).read_bytes())["weight_map"]
        files = {name: folder / Path(index.get(name, single)).name for name in (first, second)}
        if not all(file.is_file() for file in files.values()):
            return False
        places: list[_Place] = []
        for name, file in files.items():
            length, header = _header(file)
            status, entry = file.stat(), header[name]
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= status.st_size:
                return False
            kind = f"{entry['dtype']} {entry['shape']}"
            places.append((file, status.st_mtime_ns, 8 + length + begin, end - begin, kind))
        return not _are_equal(*places)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def read_header(file: Path) -> dict[str, Any] | None:
    """Name -> entry of each tensor of a file of safetensors; None for another file."""
    try:
        header: object = _header(file)[1]
    except (OSError, ValueError):
        return None
    return cast("dict[str, Any]", header) if isinstance(header, dict) else None


def _header(file: Path) -> tuple[int, Any]:
    """Length in bytes and content of the header of a file of safetensors."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        return length, parse_json(stream.read(min(length, _HEADER_LIMIT)))


@lru_cache
def _are_equal(first: _Place, second: _Place) -> bool:
    (path, _, start, length, kind), (other_path, _, other_start, *other_form) = first, second
    if [length, kind] != other_form or "F8" in kind:  # fp8 tensors have separate scales
        return False
    with path.open("rb") as file, other_path.open("rb") as other_file:
        file.seek(start)
        other_file.seek(other_start)
        sizes = (min(_CHUNK_BYTES, length - done) for done in range(0, length, _CHUNK_BYTES))
        return all(file.read(size) == other_file.read(size) for size in sizes)


def has_weights(path: Path) -> bool:
    """Whether a folder holds weights as transformers stores them."""
    return (path / SINGLE).exists() or (path / INDEX).exists()


def lacks_weights(path: Path) -> str:
    """A sentence on a folder without readable weights."""
    if path.is_file():
        return f"{path} is a file; the weights are in its folder: model.path={path.parent}"
    text = f"{path} holds no weights: neither {SINGLE} nor {INDEX}"
    pickled = sorted(file.name for kind in ("bin", "pt", "pth") for file in path.glob(f"*.{kind}"))
    if pickled:
        text += (
            f"; {pickled[0]} is never read, since reading it runs code of its author: load it with "
            "transformers where that is safe, and write it by save_pretrained"
        )
    return text


def read_folder(
    path: Path, implementation: object = "auto", *, has_tokenizer: bool = False
) -> ConfigSource:
    """Values from a folder: the fields of [model] from its ``config.json``, its tokenizer, and a
    sequence length if the model has fewer positions than the default length; or the problems of a
    model that cannot be trained. `implementation`: the value of `model.implementation`;
    `has_tokenizer`: whether `data.tokenizer` is set."""
    origin = str(path / CONFIG)
    try:
        values, notes = _values(read_config(path), implementation)
    except ConfigError as error:
        problems = tuple(
            problem if problem.origin else replace(problem, origin=origin)
            for problem in error.problems
        )
        return ConfigSource(problems=problems)
    leaves = {f"model.{key}": Leaf(value=value, origin=origin) for key, value in values.items()}
    longest = values.get("max_position_embeddings")
    if isinstance(longest, int) and 0 < longest < DataConfig.model_fields["seq_len"].default:
        leaves["data.seq_len"] = Leaf(value=longest, origin=origin)
    if (tokenizer := path / TOKENIZER).exists():
        rules = byte_tokenizer().encode()
        is_bytes = tokenizer.stat().st_size == len(rules) and tokenizer.read_bytes() == rules
        leaves["data.tokenizer"] = Leaf(
            value="bytes" if is_bytes else str(path), origin=str(tokenizer)
        )
    elif not has_tokenizer:
        text = f"{path} holds no {TOKENIZER}: text is read by bytes, unless data.tokenizer is set"
        notes = (*notes, text)
    return ConfigSource(leaves=leaves, notes=notes)


def byte_tokenizer() -> str:
    """The tokenizer "bytes" as a ``tokenizer.json``: the ids of a text are its bytes in UTF-8.

    A byte is a character of GPT-2's byte-level alphabet: the character of a printable byte has
    its code, and the other bytes, in their order, have the characters from U+0100 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    code = {byte: NUM_BYTES + number for number, byte in enumerate(others)}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    vocabulary = {chr(code.get(byte, byte)): byte for byte in range(NUM_BYTES)}
    model: dict[str, Any] = {"type": "BPE", "vocab": vocabulary, "merges": []}
    rules: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level,
        "decoder": level,
    }
    return json.dumps(rules | {"model": model})


def _values(
    config: dict[str, Any], implementation: object
) -> tuple[dict[str, object], tuple[str, ...]]:
    """Keys and values of [model], for our code of the family or for that of transformers, and notes
    for the user."""
    if implementation == "transformers":
        architecture = read_architecture(config)
    else:
        try:
            return {**model_values(config), "implementation": "moemesh"}, ()
        except ConfigError as error:
            if implementation == "moemesh":
                raise
            architecture = read_refused(config, error)
    kind, version = architecture.model_type, architecture.transformers
    note = f"{kind} is computed by the code of transformers {version}"
    if architecture.num_experts:
        note += ", its experts by ours"
    return hub_values(architecture), (note, *architecture.notes)


def _refused(code: str, key: str, path: Path, message: str, fix: str = "") -> ConfigError:
    return ConfigError([Problem.of(code, key, str(path), message, fix)])
