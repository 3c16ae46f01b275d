"""Configurations of runs by dotted keys: beside defaults, beside one another, and on a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moemesh.config.changes import flat
from moemesh.config.errors import ConfigError
from moemesh.config.load import config_values
from moemesh.config.plan import Plan
from moemesh.config.schema import SCHEMA_KEY
from moemesh.config.toml import format_value
from moemesh.report.document import MAX_TABLE_ROWS, Chapter, Table, left_out
from moemesh.report.svg import clip, short
from moemesh.sharding.load_run import load_run
from moemesh.trace.run import Run, median_of

_MAX_VALUE = 300

#: (key, value of the first, value of the second); None stands for a key without a value.
Difference = tuple[str, object, object]


def changes(run: Run) -> Chapter:
    """Keys that the user set, and folded away all others."""
    if not run.config:
        return Chapter(missing="No config.toml.")
    found, baseline = differences(run.config)
    tables = [_plans(run)] if len(run.plans) > 1 else []
    if found:
        tables.append(
            Table(
                caption=f"Keys that differ from {baseline}",
                header=("Key", "Value", "Default"),
                rows=[
                    (clip(key, 60), toml_text(value), toml_text(default))
                    for key, value, default in found[:MAX_TABLE_ROWS]
                ],
                num_names=3,
            )
        )
    changed = {key for key, _, _ in found}
    rest = [(key, value) for key, value in flat(run.config).items() if key not in changed]
    if rest:
        tables.append(
            Table(
                caption=f"The other {len(rest)} keys",
                header=("Key", "Value"),
                rows=[
                    (clip(key, 60), toml_text(value)) for key, value in rest[: 4 * MAX_TABLE_ROWS]
                ],
                num_names=2,
                folded=True,
            )
        )
    note = "" if found else f"No key differs from {baseline}."
    note += left_out(len(found), "keys")
    return Chapter(tables=tables, note=note)


def _plans(run: Run) -> Table:
    """Every plan that the run has had, with its steps and its speed."""
    usual = Plan().model_dump(mode="json")
    rows: list[tuple[str, ...]] = []
    for number, steps in enumerate(run.plans, start=1):
        chosen = [f"{key} = {toml_text(value)}" for key, value in steps.record.items()
                  if value != usual.get(key)]  # fmt: skip
        own = [row for row in run.metrics if steps.first <= row.step <= steps.last]
        speed = median_of(own[1:] or own, "tokens_per_second")
        shown = "" if speed is None else short(speed)
        rows.append((str(number), ", ".join(chosen) or "the defaults", steps.words, shown))
    return Table(
        caption="Plans of the run; speed, memory and traffic on this page are those of the last",
        header=("Plan", "Keys that differ from the defaults", "Steps", "Tokens/s, median"),
        rows=rows[-MAX_TABLE_ROWS:],
        num_names=3,
    )


def toml_text(value: object, longest: int = _MAX_VALUE) -> str:
    """A value as in a TOML file, in at most so many characters."""
    return "unset" if value is None else clip(format_value(value), longest)


def differences(config: Mapping[str, Any]) -> tuple[list[Difference], str]:
    """(key, value, default) of the keys of a `config.toml` that differ from the defaults, and what
    these are: those of the model's preset, or of the model in a folder, whose own keys follow from
    the folder. A key that the file does not have stands for its default."""
    values = flat({key: value for key, value in config.items() if key != SCHEMA_KEY})
    path, preset = values.get("model.path"), values.get("model.preset")
    defaults = _defaults(preset if isinstance(preset, str) else None)
    found = [item for item in between(values, defaults) if item[0] in values]
    baseline = "the defaults"
    if path is not None:
        names = ("model.path", "model.preset")
        found = [item for item in found if not item[0].startswith("model.") or item[0] in names]
        baseline = "the defaults and the model's folder"
    elif isinstance(preset, str):
        # The preset's own keys follow from its name, which is itself a choice.
        usual = _defaults(None).get("model.preset")
        if preset != usual:
            found.insert(0, ("model.preset", preset, usual))
        baseline = "the defaults and the preset"
    return found, baseline


def with_defaults(config: Mapping[str, Any]) -> dict[str, object]:
    """Every key of a `config.toml`; one that the file does not have stands for its default."""
    values = flat(config)
    preset = values.get("model.preset")
    return _defaults(preset if isinstance(preset, str) else None) | values


def between(first: Mapping[str, object], second: Mapping[str, object]) -> list[Difference]:
    """The keys of two flat configurations whose values differ, in the order of the keys."""
    return [
        (key, first.get(key), second.get(key))
        for key in sorted(first.keys() | second.keys())
        if _text(first.get(key)) != _text(second.get(key))
    ]


def _text(value: object) -> str:
    """Texts are compared: 1 and 1.0, a tuple and a list mean the same key."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(float(value))
    return "" if value is None else format_value(value)


def _defaults(preset: str | None) -> dict[str, object]:
    """Of every key; of an unknown preset (an older run's) those of no preset."""
    chosen = [] if preset is None else [f"model.preset={format_value(preset)}"]
    try:
        return flat(config_values(load_run([], chosen, environ={}).config))
    except ConfigError:
        return flat(config_values(load_run([], [], environ={}).config))
