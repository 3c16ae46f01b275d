"""A folder of adapters of PEFT as a source of values: its base model and the keys of [lora]."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from moemesh.config.errors import ConfigError
from moemesh.config.hub import local_folder
from moemesh.config.huggingface.folder import CONFIG, TOKENIZER, read_config, read_header
from moemesh.config.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_DEFAULTS
from moemesh.config.schema import PATH_KEY, PRESET_KEY
from moemesh.config.sources import ConfigSource, Leaf
from moemesh.config.suggest import nearest_path

LORA_PATH, TOKENIZER_KEY = "lora.path", "data.tokenizer"
RANK_KEY, ALPHA_KEY = "lora.rank", "lora.alpha"
#: Field of PEFT's configurations with the folder or name of the base model.
BASE = "base_model_name_or_path"
#: Field of PEFT's LoraConfig -> key of [lora].
_FIELDS = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rslora"}
#: Files of an adapter's repository on the Hub.
_FILES = ("adapter*", "*.json", "*.jinja", "*.txt", "*.model")
#: The parameter of a stack of experts that holds two projections, and those projections.
_PAIR, _PARTS = "gate_up_proj", ("gate_proj", "up_proj")
#: Part of the pattern with which `moemesh convert --adapter` writes adapters of both parts as one
#: of twice the rank. Under other patterns each part may use all of the rank.
OWN_PAIR = rf"experts\.{_PAIR}|"


def with_adapters(chosen: Mapping[str, Leaf]) -> ConfigSource:
    """`chosen` with values that follow from the adapters in ``lora.path``, or in ``model.path`` as
    in ``from_pretrained`` of transformers: their rank, alpha and targets, their base model if none
    is chosen, and their tokenizer if they have one. Faults of the folder outside of its
    adapter_config.json are reported later, when the adapters are read."""
    leaves = dict(chosen)
    path = leaves.get(PATH_KEY, Leaf(value=None, origin="")).value
    if LORA_PATH not in leaves and isinstance(path, str) and is_adapter_folder(Path(path)):
        leaves[LORA_PATH] = leaves.pop(PATH_KEY)
    given = leaves.get(LORA_PATH)
    if given is None or not isinstance(given.value, str):
        return ConfigSource(leaves=leaves)
    try:
        folder = local_folder(given.value, "model", LORA_PATH, _FILES)
    except ConfigError as error:
        return ConfigSource(leaves=leaves, problems=error.problems)
    if str(folder) != given.value:
        leaves[LORA_PATH] = replace(given, value=str(folder))
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        if RANK_KEY in leaves:  # a recorded run, whose checkpoints hold the adapters
            return ConfigSource(leaves=leaves)
        state = f"holds no {ADAPTER_CONFIG}" if folder.is_dir() else "is not a folder"
        fix = f"a folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}"
        fix += "" if folder.exists() else f"; {nearest_path(folder)}"
        problem = given.problem("no-file", LORA_PATH, f"{folder} {state}", fix)
        return ConfigSource(leaves=leaves, problems=(problem,))
    try:
        config = read_config(file, LORA_PATH)
    except ConfigError as error:
        return ConfigSource(leaves=leaves, problems=error.problems)
    values = _settings(folder, config)
    notes: tuple[str, ...] = ()
    if not leaves.keys() & {PATH_KEY, PRESET_KEY}:
        base = config.get(BASE)
        if not isinstance(base, str) or not base:
            message = f"{file} names no {BASE}"
            fix = f"the folder of the base as the model, and lora.path={folder}"
            problem = given.problem("missing", LORA_PATH, message, fix)
            return ConfigSource(leaves=leaves, problems=(problem,))
        values[PATH_KEY] = base
        notes = (f"model.path: {base}, the base of the adapters in {folder}",)
    follows = {key: Leaf(value=value, origin=str(file)) for key, value in values.items()}
    return ConfigSource(leaves=follows | leaves, notes=notes)


def is_adapter_folder(folder: Path) -> bool:
    """Whether `folder` has adapters of PEFT, and no model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file()


def _settings(folder: Path, config: Mapping[str, Any]) -> dict[str, object]:
    """Key -> value of [lora], and of the tokenizer if the folder has one. The rank is the largest
    of a module, with the alpha that leaves the scaling of the usual rank as it is."""
    values: dict[str, object] = {
        f"lora.{key}": PEFT_DEFAULTS[field] if config.get(field) is None else config[field]
        for field, key in _FIELDS.items()
    }
    rank, alpha, patterns = values[RANK_KEY], values[ALPHA_KEY], config.get("rank_pattern")
    if isinstance(rank, int) and isinstance(alpha, int | float) and isinstance(patterns, dict):
        ranks = [rank]
        for module, other in cast("dict[str, object]", patterns).items():
            if isinstance(other, int) and not (OWN_PAIR in module and other == 2 * rank):
                ranks.append(other)
        if max(ranks) > rank > 0:
            factor = max(ranks) / rank
            factor = math.sqrt(factor) if values["lora.rslora"] else factor
            values |= {RANK_KEY: max(ranks), ALPHA_KEY: alpha * factor}
    # Targets are the projections with an adapter in the file of weights. All stacks of experts have
    # the same names of tensors there, so theirs come from `target_parameters`.
    entries: object = config.get("target_parameters")
    targets: set[str] = set()
    for entry in cast("list[object]", entries) if isinstance(entries, list) else ():
        leaf = str(entry).removesuffix(".weight").rpartition(".")[2]
        targets |= {*_PARTS} if leaf == _PAIR else {leaf}
    for name in read_header(folder / ADAPTER_WEIGHTS) or {}:
        module, leaf, _ = name.partition(".lora_A.")
        if leaf:
            targets.add(module.removesuffix(".base_layer").rpartition(".")[2])
    if targets := targets - {"experts"}:  # the module of stacks
        values["lora.targets"] = sorted(targets)
    if (folder / TOKENIZER).is_file():
        values[TOKENIZER_KEY] = str(folder)
    return values
