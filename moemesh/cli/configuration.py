"""Verbs of a configuration: show, check."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from typing import TYPE_CHECKING, Annotated

import typer

from moemesh.cli.application import AsJson, ConfigFile, Overrides, config_app, load

if TYPE_CHECKING:
    from moemesh.config.load import Resolved


@config_app.command("show")
def config_show(
    config: ConfigFile = None,
    overrides: Overrides = None,
    origin: Annotated[
        bool, typer.Option("--origin/--no-origin", help="Say where each value came from.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Print every key with its value and where it came from."""
    resolved = load(config, overrides)
    if as_json:
        _show_json(resolved, origin)
    else:
        _show_plain(resolved, origin)


@config_app.command("check")
def config_check(
    config: ConfigFile = None,
    overrides: Overrides = None,
    here: Annotated[
        bool,
        typer.Option(
            "--here/--elsewhere",
            help="Look for data, tokenizer, weights, device and memory on this machine, or check "
            "the settings alone, of a run that is for another one.",
        ),
    ] = True,
) -> None:
    """Check a configuration as train would, without starting it; exit code 2 and every problem."""
    from moemesh.config.errors import ConfigError
    from moemesh.train.preflight import untrainable
    from moemesh.train.preflight_warnings import preflight_warnings, warnings_before_ranks
    from moemesh.train.preparation import check_machine

    resolved = load(config, overrides)
    if here:
        check_machine(resolved, config)
    elif problems := untrainable(resolved):
        raise ConfigError(problems)
    plan = resolved.config.plan
    degrees = " ".join(f"{name}={getattr(plan, name)}" for name in ("pp", "dp", "cp", "tp"))
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    typer.echo(f"ok: {ranks} ({degrees}, ep={plan.ep} etp={plan.etp} edp={plan.edp})")
    warnings = warnings_before_ranks if here else preflight_warnings
    for warning in warnings(resolved.config):
        typer.echo(f"note: {warning}")


def _rows(resolved: "Resolved") -> list[tuple[str, str, str]]:
    """(key, value as TOML, origin) of every key."""
    from moemesh.config.load import config_values
    from moemesh.config.toml import format_value

    return [
        (
            f"{section}.{key}",
            "(not set)" if value is None else format_value(value),
            resolved.origins[f"{section}.{key}"],
        )
        for section, fields in config_values(resolved.config).items()
        for key, value in fields.items()
    ]


def _show_plain(resolved: "Resolved", origin: bool) -> None:
    rows = _rows(resolved)
    key_width = max(len(key) for key, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    for key, value, source in rows:
        line = f"{key:{key_width}} = {value:{value_width}}  # {source}" if origin else ""
        typer.echo(line or f"{key:{key_width}} = {value}")


def _show_json(resolved: "Resolved", origin: bool) -> None:
    import json

    from moemesh.config.load import config_values

    shown: dict[str, object] = {"config": config_values(resolved.config)}
    if origin:
        shown["origins"] = resolved.origins
    typer.echo(json.dumps(shown, indent=2))
