"""Verbs of a configuration: show, check, schema, diff."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from pathlib import Path
from typing import Annotated

import typer

from moemesh.cli.application import AsJson, ConfigFile, Overrides, config_app, load
from moemesh.config.errors import ConfigError, UserError
from moemesh.trace.strict_json import strict_json


@config_app.command("show")
def config_show(
    config: ConfigFile = None,
    overrides: Overrides = None,
    origin: Annotated[
        bool, "Print the source of each value.", {"names": ("--origin/--no-origin",)}
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Print every key with its value and where it came from."""
    from moemesh.config.load import config_values
    from moemesh.config.toml import format_value

    resolved = load(config, overrides)
    values = config_values(resolved.config)
    if as_json:
        origins = {"origins": resolved.origins} if origin else {}
        typer.echo(strict_json({"config": values, **origins}, indent=2))
        return
    rows = {
        f"{section}.{key}": "(not set)" if value is None else format_value(value)
        for section, fields in values.items()
        for key, value in fields.items()
    }
    keys, width = max(map(len, rows)), max(map(len, rows.values()))
    for key, value in rows.items():
        line = f"{key:{keys}} = {value:{width}}  # {resolved.origins[key]}" if origin else ""
        typer.echo(line or f"{key:{keys}} = {value}")


@config_app.command("check")
def config_check(
    config: ConfigFile = None,
    overrides: Overrides = None,
    here: Annotated[
        bool,
        "Look for data, tokenizer, weights, device and memory on this machine, or check "
        "the settings alone, of a run that is for another one.",
        {"names": ("--here/--elsewhere",)},
    ] = True,
) -> None:
    """Check a configuration as train would, without starting it; exit code 2 and every problem."""
    from moemesh.planner.machine_memory import check_room
    from moemesh.train.preparation import (
        check_inputs,
        check_sources,
        preflight_warnings,
        untrainable,
        warnings_before_ranks,
    )

    resolved = load(config, overrides, with_data=here)
    if here:
        check_inputs(resolved, config)
    elif problems := untrainable(resolved):
        raise ConfigError(problems)
    plan = resolved.config.plan
    degrees = " ".join(f"{name}={getattr(plan, name)}" for name in ("pp", "dp", "cp", "tp"))
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    typer.echo(f"ok: {ranks} ({degrees}, ep={plan.ep} etp={plan.etp} edp={plan.edp})")
    warnings = warnings_before_ranks if here else preflight_warnings
    for warning in warnings(resolved.config):
        typer.echo(f"note: {warning}")
    # Notes only: a plan for a cluster may be checked on a laptop, before a download.
    for check in (check_room, check_sources) if here else ():
        try:
            check(resolved.config)
        except UserError as error:
            typer.echo(f"note: it cannot run on this machine now: {error}")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of a configuration file, for editors that complete and check TOML.

    With Taplo or Even Better TOML: moemesh config schema > moemesh.schema.json, and in the first
    line of the file: #:schema ./moemesh.schema.json
    """

    from moemesh.config.json_schema import json_schema

    typer.echo(strict_json(json_schema(), indent=1))


@config_app.command("diff")
def config_diff(
    first: Annotated[Path, "TOML file, or folder of a run.", "<A>"],
    second: Annotated[Path, "Likewise.", "<B>"],
    as_json: AsJson = False,
) -> None:
    """Print the keys in which two resolved configurations differ, with where each value is from.

    The word after a key is the effect of the difference on a resumed run: free, layout (the same
    result), training (another course) or model (refused). Example:

        moemesh config diff runs/first second.toml
    """

    from moemesh.config.changes import compare
    from moemesh.config.load import resolved_toml
    from moemesh.config.schema import all_keys
    from moemesh.config.sources import RUN_CONFIG
    from moemesh.config.toml import format_value
    from moemesh.sharding.load_run import load_recorded, load_run

    texts: list[str] = []
    origins: list[dict[str, str]] = []
    for path in (first, second):
        if path.is_dir():  # the record of a run is read as it is
            texts.append(resolved_toml(load_recorded(path / RUN_CONFIG)))
            origins.append(dict.fromkeys(all_keys(), str(path / RUN_CONFIG)))
        else:
            resolved = load_run([path], (), {})
            texts.append(resolved_toml(resolved.config))
            origins.append(resolved.origins)
    rows: list[dict[str, object]] = []
    for change in compare(*texts):
        from_a, from_b = (origin.get(change.key, "default") for origin in origins)
        values = {"a": change.old, "b": change.new, "from_a": from_a, "from_b": from_b}
        rows.append({"key": change.key, **values, "kind": change.kind})
        if not as_json:
            typer.echo(f"{change.key}   ({change.kind})")
            for path, value, source in ((first, change.old, from_a), (second, change.new, from_b)):
                shown = "(not set)" if value is None else format_value(value)
                typer.echo(f"    {path}: {shown}   # {source}")
    if as_json:
        typer.echo(strict_json(rows))
    elif not rows:
        typer.echo(f"{first} and {second} are the same configuration")
