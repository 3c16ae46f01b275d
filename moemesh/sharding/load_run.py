"""Loading the configuration of a run with every check, also those that need its parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from re import sub
from typing import cast

from pydantic import ValidationError

from moemesh.config.errors import Problem
from moemesh.config.load import Resolved, following, read_recorded, resolve
from moemesh.config.lora import is_adapter
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.run import RunConfig
from moemesh.config.schema import SECTIONS
from moemesh.config.sources import ConfigSource, Leaf
from moemesh.config.toml import format_value
from moemesh.config.tuning import matcher
from moemesh.sharding.parameters import logical_names, tensors


def load_run(
    files: Sequence[Path] = (),
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    """Merge defaults, preset, `files`, environment and `overrides` (weakest first) and check all.
    `environ` None reads the process environment. Raises ConfigError with every problem found."""
    return resolve(files, overrides, environ, [contradictions], [tuning_problems])


def load_recorded(
    path: Path, overrides: Sequence[str] = (), *, sections: Sequence[str] = tuple(SECTIONS)
) -> RunConfig:
    """The configuration that a run has written (``config.toml``), with `overrides`. Other sections
    than `sections` get their defaults. The file has every key, so presets are not read; of the
    folder of the weights only config.json is, for a model of transformers.

    Raises ConfigError with every problem found.
    """
    return read_recorded(path, overrides, sections, [tuning_problems])


def load_resolved(path: Path) -> RunConfig:
    """The configuration that a launcher has written for its ranks
    (:func:`moemesh.config.load.resolved_toml`). Keys whose values follow from others count as
    not set."""
    config = load_recorded(path)
    follows = following(path.read_text(encoding="utf-8"))
    config.train.model_fields_set.difference_update(key.removeprefix("train.") for key in follows)
    return config


#: The number of a layer or of an expert in the name of a parameter.
_NUMBER = r"(?<=\.)\d+(?=\.)"
#: Keys that may differ from the folder: any number of its extra prediction layers may train.
_FREE = frozenset({"num_mtp_layers"})


def contradictions(
    folder: ConfigSource, chosen: Mapping[str, Leaf], broken: Collection[str]
) -> Iterator[Problem]:
    """A problem for each key of `chosen` whose value gives the model other tensors than those of
    the `folder`; for a model of transformers, for each changed key without effect. Keys that are
    `broken` have a problem already."""
    values = {
        key.removeprefix("model."): leaf.value
        for key, leaf in folder.leaves.items()
        if key.startswith("model.")
    }
    # A model of transformers is built from config.json: of [model] only `_BALANCING` has an effect.
    if values.get("implementation") == "transformers":
        for key, leaf in chosen.items():
            section, _, name = key.partition(".")
            if section != "model" or key in broken or name not in ModelConfig.model_fields:
                continue
            default = ModelConfig.model_fields[name].default
            usual = values.get(name, default)
            listed = list(cast("tuple[object, ...]", usual)) if isinstance(usual, tuple) else usual
            if name in _BALANCING or leaf.value in (usual, listed):
                continue
            message = f"the code of transformers reads config.json, and {name} is none of its keys"
            fix = f"leave {key} out, or change config.json; {', '.join(sorted(_BALANCING))} count"
            yield leaf.problem("conflict", key, message, fix)
        return
    # For our own model: does the key, changed alone, change the shapes of the weights?
    shapes = _shapes(values)
    if shapes is None:
        return
    for key, leaf in chosen.items():
        name = key.removeprefix("model.")
        if key in broken or name == key or name not in ModelConfig.model_fields or name in _FREE:
            continue
        changed = _shapes({**values, name: leaf.value})
        if changed is None or changed == shapes:
            continue
        default = ModelConfig.model_fields[name].default
        recorded = values.get(name, default)
        origin = folder.leaves[key].origin if key in folder.leaves else "the default"
        given = f"{name} = {format_value(recorded)} ({origin})"
        message = f"the weights of model.path have {given}, and fit no other"
        yield leaf.problem("conflict", key, message, f"leave {key} out, or choose another folder")


#: Keys of [model] that count for a model of transformers: its `implementation`, and how its experts
#: are balanced.
_BALANCING = frozenset(
    {"aux_loss_coefficient", "aux_loss_layers", "aux_loss_scope", "z_loss_coefficient"}
    | {"router_bias_rate", "implementation"}
)


def _shapes(values: Mapping[str, object]) -> dict[str, tuple[int, ...]] | None:
    """Name -> shape of every parameter, and of a selection bias if routers have one; None for
    values that make no legal model."""
    try:
        model = ModelConfig.model_validate(dict(values))
    except ValidationError:
        return None
    if model.check():
        return None
    shapes = {tensor.name: tensor.shape for tensor in tensors(model, Plan())}
    if model.router_selection_bias:
        shapes["selection_bias"] = (model.num_experts,)
    return shapes


def tuning_problems(config: RunConfig) -> list[Problem]:
    """Problems of a choice of parameters: patterns that match nothing, with the nearest names;
    nothing left to train; weights that cannot train, or not for these experts alone."""
    tuning, model, plan = config.tuning, config.model, config.plan
    if tuning.is_full:
        return []
    # Patterns that match nothing.
    names = list(logical_names(model, plan))
    problems: list[Problem] = []
    for key in ("freeze", "train_only"):
        for pattern in getattr(tuning, key):
            if any(map(matcher((pattern,)), names)):
                continue
            # Near names are compared without the numbers of layers and experts.
            kinds = list(dict.fromkeys(sub(_NUMBER, "*", name) for name in names))
            near = get_close_matches(sub(_NUMBER, "*", pattern), kinds, n=3, cutoff=0.3)
            message = f"the pattern {pattern!r} matches none of the {len(names)} parameters"
            fix = f"names like it: {', '.join(near or kinds[:3])}"
            problems.append(Problem.of("no-match", f"train.{key}", (pattern,), message, fix))
    if problems:
        return problems
    # Nothing left to train.
    key = "freeze" if tuning.freeze else "train_only" if tuning.train_only else "esft"
    value, parameters = getattr(tuning, key, None), list(tensors(model, plan))
    if not any(tensor.trained_rows(tuning) for tensor in parameters):
        message = f"none of the {len(parameters)} parameter tensors is left to train"
        fix = f"choose fewer in train.{key}"
        return [Problem.of("conflict", f"train.{key}", value, message, fix)]
    # Weights that cannot train, or not for these experts alone. `trained`: module of experts -> one
    # of its weights, and the experts for which this weight trains.
    trained: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensor in parameters:
        rows, size = tensor.trained_rows(tuning), tensor.shape[0]
        module, _, leaf = tensor.name.rpartition(".")
        message = fix = ""
        if tensor.is_packed and rows:
            key = "train_only" if config.train.esft is None else "esft"
            value = getattr(config.train, key)
            message = f"{tensor.name} would train, and lora.base = nf4 holds it in 4 bits"
            fix = f'leave it out of {key}, or lora.base = "same"'
        elif tensor.is_expert and is_adapter(tensor.name):
            if 0 < len(rows) < size:
                message = f"{len(rows)} of the {size} adapters of {tensor.name} would train"
                fix = "choose the adapters of all experts, or of none"
        elif tensor.is_expert and rows:
            other, before = trained.setdefault(module, (leaf, rows))
            if rows != before:
                message = (
                    f"{len(before)} of the {size} experts of {module} would train their {other}, "
                    f"{len(rows)} their {leaf}: the weights of a layer's experts train of the same "
                    "ones, or of none"
                )
                fix = f"a pattern like {module}.{rows[0]}.*"
        if message:
            return [Problem.of("not-available", f"train.{key}", value, message, fix)]
    return []
