"""Differences of two resolved configurations, and whether a run may resume with each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from moemesh.config.errors import UserError
from moemesh.config.limits import parse_toml
from moemesh.config.rules import ASYNCHRONOUS_SCHEDULES
from moemesh.config.schema import SCHEMA_KEY, SECTIONS
from moemesh.config.toml import format_value

Kind = Literal["free", "layout", "training", "model"]
#: Keys without effect on the result but rounding (compile, device, experts) and the step at which a
#: run ends (patience), by section. The preset is only a name: the model's own fields count.
_FREE = {
    "model": ("preset",),
    "data": ("bad_record_share", "cache"),
    "train": (
        *("checkpoint_async", "checkpoint_folder", "checkpoint_every", "checkpoints_kept"),
        *("cluster", "compile", "device", "experts", "load_bins", "log_every", "patience"),
        *("restarts", "resume", "sinks", "timeout_seconds", "validate_every"),
        "validation_batches",
    ),
}
FREE = frozenset(f"{section}.{key}" for section, keys in _FREE.items() for key in keys)
#: Keys outside [train] and [data] that change the course of training, but no stored tensor.
TRAINING = frozenset(
    {
        "model.path",  # its numbers are in the checkpoints
        "lora.path",
        "model.aux_loss_coefficient",
        "model.aux_loss_layers",
        "model.aux_loss_probabilities",
        "model.z_loss_coefficient",
        "model.router_bias_rate",
        "model.init_std",
        "plan.payload",
    }
)

#: Kind of the other keys, by section, unless :func:`kind_of` names them.
_KIND_OF: dict[str, Kind] = {
    "plan": "layout",
    "model": "model",
    "lora": "model",
    "train": "training",
    "data": "training",
}


@dataclass(frozen=True, kw_only=True)
class Change:
    """One key that differs between two resolved configurations; None means "not set"."""

    key: str
    old: object
    new: object
    kind: Kind

    def __str__(self) -> str:
        old, new = ("(not set)" if v is None else format_value(v) for v in (self.old, self.new))
        return f"{self.key}: {old} -> {new} ({self.kind})"


def compare(old: str, new: str) -> list[Change]:
    """The keys that differ between two resolved config.toml texts, sorted, each with its kind.

    free: no effect on the result. layout: the same result from other ranks. training: another
    course of training. model: another model, which the saved tensors do not fit. A key that is not
    in a text, as in one of an older version, has its default. Raises UserError if
    :func:`parse_toml` refuses a text.
    """
    try:
        before, after = flat(parse_toml(old)), flat(parse_toml(new))
    except ValueError as error:
        raise UserError(f"the config.toml of the run is not TOML: {error}") from error
    # Defaults of keys, with lists for tuples, as TOML reads them.
    defaults: dict[str, object] = {
        f"{name}.{key}": [*field.default]  # pyright: ignore[reportUnknownMemberType]
        if isinstance(field.default, tuple)
        else field.default
        for name, section in SECTIONS.items()
        for key, field in section.model_fields.items()
        if field.default is not None
    }
    for keys in (before, after):
        keys.pop(SCHEMA_KEY, None)
    before, after = defaults | before, defaults | after
    return [
        Change(key=key, old=before.get(key), new=after.get(key), kind=kind_of(key, before, after))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def kind_of(key: str, before: dict[str, object], after: dict[str, object]) -> Kind:
    """The kind of a change of `key` between two flat tables of keys."""
    old, new = before.get(key), after.get(key)
    if key in FREE:
        return "free"
    if key in TRAINING:
        return "training"
    if key == "train.epochs" or (key == "train.steps" and after.get("train.epochs") is not None):
        return "free"  # the steps are compared when the data is known
    if key == "train.steps":
        longer = isinstance(old, int) and isinstance(new, int) and new > old
        return "free" if longer else "training"
    if key == "train.dtype" and "float64" in (old, new):
        return "model"  # masters are fp32 or fp64, and a checkpoint is never cast
    if key == "train.esft" and None not in (old, new):
        return "free"  # compared with the run folder's copy of the table
    if key == "train.esft":
        return "model"
    if key == "plan.schedule" and {old, new} & {*ASYNCHRONOUS_SCHEDULES}:
        return "training"  # moving to or from stale weights changes more than the layout
    if key in ("data.tokenizer", "train.freeze", "train.train_only"):
        return "model"  # a checkpoint has the moments of trained parameters only
    return _KIND_OF.get(key.partition(".")[0], "free")


def flat(table: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """{"plan": {"ep": 2}} -> {"plan.ep": 2}."""
    keys: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            keys |= flat(cast("Mapping[str, object]", value), f"{prefix}{key}.")
        else:
            keys[prefix + key] = value
    return keys
