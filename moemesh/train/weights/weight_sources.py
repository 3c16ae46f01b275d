"""Sources of weights for a verb, runs or folders of transformers: checks without torch."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.header import read_header
from moemesh.checkpoint.huggingface.contents import FolderContents
from moemesh.checkpoint.huggingface.logical import checked_tensors
from moemesh.checkpoint.manifest import DTYPES, ITEM_BYTES, MANIFEST
from moemesh.checkpoint.retention import best_step
from moemesh.checkpoint.stored import candidates, read_manifest
from moemesh.comm import slurm
from moemesh.config.errors import ConfigError, Problem, found_by
from moemesh.config.hub import local_folder
from moemesh.config.huggingface.adapters import is_adapter_folder
from moemesh.config.huggingface.folder import (
    CONFIG,
    INDEX,
    SINGLE,
    has_weights,
    lacks_weights,
    other_folder,
    read_config,
)
from moemesh.config.huggingface.model import family_of, quantization_of
from moemesh.config.limits import few, parse_json
from moemesh.config.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from moemesh.config.run import RunConfig
from moemesh.config.sources import RUN_CONFIG
from moemesh.config.suggest import nearest_choice, nearest_path, nearest_run
from moemesh.config.trainable import refusals
from moemesh.sharding.load_run import load_recorded, load_run
from moemesh.trace.memory_profile import format_bytes
from moemesh.train.records.run_folder import (
    CHECKPOINTS,
    answers_chats,
    checkpoints_of,
    names_in,
)

Target = Literal["huggingface", "moemesh"]
ExpertLayout = Literal["per-expert", "fused"]
#: Results of a conversion.
Written = Literal["run", "folder", "adapter", "delta"]


def config_of(source: Path, given: Sequence[str], *, prints_notes: bool = False) -> RunConfig:
    """The configuration for the use of the model in `source`: with its tokenizer, on one device,
    unless the overrides `given` (``plan.tp=2``) change that. Raises ConfigError with all
    problems. `prints_notes`: print its notes, once for all ranks."""
    if (source / CONFIG).exists() or is_adapter_folder(source):
        resolved = load_run([], [f"model.path={source}", *given])
        config = resolved.config
        if prints_notes and slurm.prints_notes(os.environ):
            for note in resolved.notes:
                print(f"moemesh: note: {note}", file=sys.stderr, flush=True)
    elif (source / RUN_CONFIG).exists():
        sections = ("model", "data", "train", "lora")
        config = load_recorded(source / RUN_CONFIG, given, sections=sections)
    else:
        raise neither(source)
    if problems := refusals(config):
        raise ConfigError(problems)
    return config


def local_source(source: Path) -> Path:
    """The folder of `source`: for a name of the Hub that of its snapshot, else `source`. Raises
    ConfigError for a repository that is not available."""
    return local_folder(str(source), "model", "MODEL")


def neither(source: Path) -> ConfigError:
    """The refusal of a path that holds no model."""
    state = "is" if source.exists() else "does not exist: it is"
    message = f"{source} {state} neither a run nor a folder of transformers"
    fix = f"a folder with config.toml and {CHECKPOINTS}, or one with {CONFIG} and weights"
    if not source.exists():
        fix += f"; {nearest_path(source)}"
    elif near := nearest_run(source):
        fix = near
    elif (other := other_folder(source)) is not None:
        message, fix = f"{source} holds {other[0]}, and no {CONFIG}", other[1]
    return ConfigError([Problem.of("no-file", str(source), None, message, fix)])


def check_weights(source: Path, *, takes_adapters: bool = False) -> None:
    """Raises a UserError if `source` (a run, one of its checkpoints, a folder of transformers, or
    with `takes_adapters` one of PEFT) has no weights; the files themselves are checked when they
    are opened."""
    if (source / MANIFEST).exists():
        return
    if (source / CONFIG).exists():
        check_folder(source)
    elif takes_adapters and is_adapter_folder(source):
        check_adapters(source)
    elif not (source / RUN_CONFIG).exists():
        raise neither(source)
    elif not candidates(checkpoints_of(source)):
        raise CheckpointError(
            f"{checkpoints_of(source)}: holds no checkpoint: the run has not saved yet, or what it "
            "saved is gone"
        )


def check_best(source: Path, best: bool) -> None:
    """Raises a UserError if `best` is set and `source` is not a run with a best checkpoint."""
    if not best:
        return
    if (source / MANIFEST).exists() or not (source / RUN_CONFIG).exists():
        message = f"{source} is not a run: one checkpoint, or a folder, has nothing to choose from"
        raise refused("--best", str(source), message, "leave it out")
    best_step(checkpoints_of(source))


def check_folder(source: Path) -> None:
    """Raises CheckpointError for a folder of transformers without weights, or without a file of its
    index."""
    if not has_weights(source):
        raise CheckpointError(lacks_weights(source))
    if (source / SINGLE).exists():
        return
    try:
        index: Any = parse_json((source / INDEX).read_text(encoding="utf-8"))
        files = sorted({str(file) for file in index["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # reported when the folder is opened
    if missing := [file for file in files if not (source / file).exists()]:
        raise CheckpointError(
            f"{source / missing[0]} is missing, which {INDEX} names "
            f"({len(missing)} of {len(files)} files are not there)"
        )


def check_headers(config: RunConfig) -> None:
    """Raises a UserError if the weights that a run starts from are damaged or those of another
    model; reads headers only. Missing files are left to :func:`check_folder`."""
    if config.model.architecture is not None:
        return  # only the code of transformers, with torch, can map tensors to parameters
    if config.model_path is None or found_by(partial(check_folder, Path(config.model_path))):
        return
    path, given = Path(config.model_path), read_config(Path(config.model_path))
    checked_tensors(FolderContents(path, quantization_of(given)), config.model, given)


def check_adapter_headers(config: RunConfig) -> None:
    """Same as :func:`check_headers`, for the adapters that a run starts from."""
    if config.lora.path is None or found_by(partial(check_adapters, Path(config.lora.path))):
        return
    # Late: few runs start from adapters.
    from moemesh.checkpoint.huggingface.adapters import check_adapter_folder

    path, family = Path(config.lora.path), family_of_run(config)
    check_adapter_folder(path, config.model, family, trains=True).check_tuning(config.tuning)


def family_of_run(config: RunConfig) -> str:
    """The family of a run's model."""
    if config.model.architecture is not None:
        return config.model.architecture.model_type
    if config.model_path is not None and (Path(config.model_path) / CONFIG).exists():
        return family_of(read_config(Path(config.model_path)))
    from moemesh.config.huggingface.export import family_or_refusal  # late: few runs need it

    return family_or_refusal(config.model)


def check_adapters(path: Path) -> None:
    """Raises CheckpointError for a folder without the two files of PEFT."""
    files = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    if missing := [name for name in files if not (path / name).exists()]:
        state = f"holds no {missing[0]}" if path.is_dir() else "is not a folder"
        near = "" if path.exists() else f" ({nearest_path(path)})"
        raise CheckpointError(
            f"lora.path {path} {state}: name one with {' and '.join(files)}{near}"
        )


def refuse_occupied(source: Path, out: Path, kind: Written) -> None:
    """Raises a UserError if `out`, the target of a conversion of `source`, holds more than an
    interrupted conversion of this `kind` leaves: nothing is replaced or mixed."""
    begun = {"run": CHECKPOINTS, "folder": r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"}
    leftover = rf"\..*|{begun.get(kind, '')}"
    foreign = sorted(name for name in names_in(out) if not re.fullmatch(leftover, name))
    foreign += [f"{CHECKPOINTS}/step-{step}" for step in candidates(out / CHECKPOINTS)]
    if foreign:
        mixed = f"the conversion of {source} would be mixed with it"
        message = f"{out} holds {few(foreign, 5)}; {mixed}"
        raise refused("OUT", str(out), message, "choose a new folder")


def written_text(source: Path, out: Path, kind: Written) -> str:
    """A summary of a conversion into `out`, and a command that uses the result."""
    written: list[tuple[str, int]] = []  # dtype and bytes of each tensor
    if kind == "run":
        for entry in read_manifest(out / CHECKPOINTS / "step-0").tensors.values():
            written.append((entry.dtype, prod(entry.shape) * ITEM_BYTES[entry.dtype]))
    elif kind == "adapter":
        file = out / ADAPTER_WEIGHTS
        names = {name: key for key, name in DTYPES.items()}
        entries = read_header(file).values()
        written += [(names[entry.dtype], entry.num_bytes) for entry in entries]
    else:
        for tensor in FolderContents(out).stored.values():
            written.append((tensor.dtype, prod(tensor.shape) * ITEM_BYTES[tensor.dtype]))
    dtypes = Counter(dtype for dtype, _ in written)
    # An adapter has the tokenizer of its base.
    tokenizer = config_of(out, []).data.tokenizer if kind == "adapter" else str(out)
    # A source without config.toml is a checkpoint, RUN/checkpoints/step-N, or a folder of
    # transformers, where this path has no meaning.
    run = source if (source / RUN_CONFIG).exists() else source.resolve().parent.parent
    name = shlex.quote(str(out))
    generate = f"moemesh generate {name} --prompt TEXT{' --chat' * answers_chats(run, tokenizer)}"
    command = {
        "run": f"moemesh train {name} --set data.path=PATH",
        "folder": generate,
        "adapter": generate,
        "delta": f"moemesh convert BASE NEW_FOLDER --apply {name}",
    }[kind]
    size = format_bytes(sum(number for _, number in written))
    kinds = ", ".join(f"{count:,} of {dtype}" for dtype, count in dtypes.most_common())
    if len(dtypes) == 1:
        kinds = next(iter(dtypes))
    return f"wrote {len(written):,} tensors ({kinds}), {size}, into {out}\nnext: {command}"


def target_of(
    source: Path, to: Target | None, dtype: str | None, expert_layout: ExpertLayout | None
) -> Target:
    """The format that `moemesh convert` writes. Raises ConfigError for a `source` that is neither a
    run, nor one of its checkpoints, nor a folder of transformers or PEFT, and for an unchanged
    format."""
    check_weights(source, takes_adapters=True)
    if is_adapter_folder(source):
        if to == "moemesh":
            fix = f"moemesh train --set lora.path={source}"
            raise refused("--to", to, f"{source} holds adapters, which a run can start from", fix)
        return "huggingface"
    is_huggingface = (source / CONFIG).exists()
    changes = dtype is not None or expert_layout is not None
    if to is None:
        to = "moemesh" if is_huggingface and expert_layout is None else "huggingface"
    if to == "moemesh" and expert_layout is not None:
        raise refused("--expert-layout", expert_layout, "runs have one layout", "leave it out")
    # An unchanged format is refused, unless a folder gets another layout of experts or dtype.
    if is_huggingface == (to == "huggingface") and not (is_huggingface and changes):
        fix = "--expert-layout or --dtype for another folder of transformers"
        raise refused("--to", to, f"{source} is in this format already", fix)
    return to


def refused(option: str, value: str, message: str, fix: str = "") -> ConfigError:
    """The refusal of an option of `moemesh convert`."""
    return ConfigError([Problem.of("conflict", option, value, message, fix)])


# The recipe of `moemesh convert --upcycle`: the experts of a formerly dense model.


class UpcycleRecipe(NamedTuple):
    """The values of ``--upcycle``: `experts` in every `every`-th layer, of which a token takes `k`,
    and arguments of :func:`moemesh.checkpoint.huggingface.derived.upcycled`."""

    experts: int = 8
    k: int = 2
    every: int = 1
    noise: float = 0.0
    drop: float = 0.0
    seed: int = 0


def read_recipe(text: str) -> UpcycleRecipe:
    """Parses ``experts=8,k=2,noise=0.01``. Raises ConfigError for anything else."""
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in UpcycleRecipe._fields:
            fix = nearest_choice(key, UpcycleRecipe._fields)
            raise refused("--upcycle", text, f"a recipe has no key {key}", fix)
        if key in values:
            raise refused("--upcycle", text, f"{key} is given twice", f"{key}={values[key]}")
        default = UpcycleRecipe._field_defaults[key]
        kind = type(default)
        try:
            values[key] = kind(value)
        except ValueError:
            message = f"{key} must be {'an integer' if kind is int else 'a number'}, not {value!r}"
            raise refused("--upcycle", text, message, f"{key}={default}") from None
    recipe = UpcycleRecipe(**values)
    least = {"experts": 2, "k": 1, "every": 1, "noise": 0, "drop": 0, "seed": 0}
    most = {"k": recipe.experts, "drop": 1}
    for key, low in least.items():
        value, high = getattr(recipe, key), most.get(key)
        if not (low <= value and (high is None or value <= high)):
            range_ = f"at least {low}" if high is None else f"from {low} to {high}"
            nearest = low if not low <= value else high
            message = f"{key} must be {range_}, not {value}"
            raise refused("--upcycle", text, message, f"{key}={nearest}")
    return recipe
