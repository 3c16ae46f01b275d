"""The command itself: its groups, the options that verbs share, and how mistakes are told."""

# No `from __future__ import annotations` here: typer reads the annotations, and nothing heavy may
# be imported at the top, or `moemesh --help` becomes slow.
import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moemesh import __version__
from moemesh.cli.completion import settings
from moemesh.cli.examples import Verbs

if TYPE_CHECKING:
    from moemesh.config.load import Resolved

#: Exit code of every mistake in what the user gave.
USER_ERROR = 2

_PLAIN = {"rich_markup_mode": None, "pretty_exceptions_enable": False}

app = Verbs(
    name="moemesh",
    help="Train mixture-of-experts transformers over a mesh of devices.",
    no_args_is_help=True,
    **_PLAIN,
)
config_app = Verbs(help="Show or check a configuration.", no_args_is_help=True, **_PLAIN)
data_app = Verbs(help="Look at training data.", no_args_is_help=True, **_PLAIN)
bench_app = Verbs(help="Measure parts of the library.", no_args_is_help=True, **_PLAIN)
checkpoint_app = Verbs(
    help="Look at checkpoints, verify, compare and delete them.", no_args_is_help=True, **_PLAIN
)
esft_app = Verbs(
    help="Expert-specialised fine-tuning: the experts of a task.",
    no_args_is_help=True,
    **_PLAIN,
)
cluster_app = Verbs(
    help="Write, explain or list descriptions of machines.", no_args_is_help=True, **_PLAIN
)
app.add_typer(config_app, name="config")
app.add_typer(cluster_app, name="cluster")
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(bench_app, name="bench")
app.add_typer(esft_app, name="esft")

ConfigFile = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG.toml", help="TOML file of the run; every key has a default."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        autocompletion=settings,
        help="Set one key, over the file and the environment. May be repeated.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moemesh {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Train mixture-of-experts transformers over a mesh of devices."""


def main() -> None:
    """Run the command. Mistakes of the user end in one message on stderr and exit code 2."""
    if isinstance(sys.stdout, TextIOWrapper):
        # As stderr: a name in a file of others that the terminal cannot show is escaped.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = app(prog_name="moemesh", standalone_mode=False)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader of our output left (`moemesh ... | head`): nobody is there to be told.
        sys.stderr.close()
        code = 1
    except Exception as error:
        code = _fail(error)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(error: Exception) -> int:
    """Print a user's mistake and return its exit code; anything else is ours and goes on."""
    if type(error).__name__ == "Abort":
        return 130
    # typer carries its own copy of click, whose exceptions have no public name: they are known by
    # what they can do.
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        error.show()
        if given := _given(error):
            print(f"given: {given}", file=sys.stderr)
        if hint := _option_hint(error):
            print(hint, file=sys.stderr)
        return USER_ERROR
    from moemesh.comm.slurm import rank_of
    from moemesh.config.errors import ConfigError, is_user_error

    if not is_user_error(error):
        raise error
    if isinstance(error, ConfigError) and rank_of(os.environ) > 0:
        return USER_ERROR  # every rank was given the same configuration: the first one tells
    # A stray byte of the command line must not turn the message into another error.
    message = str(error).encode(errors="backslashreplace").decode()
    print(f"moemesh: {message}", file=sys.stderr)
    return USER_ERROR


def _given(error: Exception) -> str:
    """The option with its value, where a message about the value does not show it."""
    parameter = getattr(error, "param", None)
    arguments = sys.argv[1:]
    for name in getattr(parameter, "opts", ()):
        for number, word in enumerate(arguments):
            option, equals, value = word.partition("=")
            if option != name:
                continue
            value = value if equals else next(iter(arguments[number + 1 :]), "")
            return "" if not value or value in str(error) else f"{name} {value}"
    return ""


def _option_hint(error: Any) -> str:
    """For an unknown option that names a key, or nearly, of a verb with --set: how keys are set."""
    option: str = getattr(error, "option_name", "")
    command = getattr(getattr(error, "ctx", None), "command", None)
    if not option or not any("--set" in one.opts for one in getattr(command, "params", ())):
        return ""
    from moemesh.config.schema import sections_with
    from moemesh.config.suggest import alias_hint, aliases, resembling_keys

    name = option.lstrip("-").replace("-", "_")
    keys = [name] if "." in name else [f"{section}.{name}" for section in sections_with(name)]
    if name in aliases():
        keys = [aliases()[name]]
    if keys:
        return f"Keys of the configuration are set with --set {keys[0]}=VALUE"
    if hint := alias_hint(name):
        return f"{hint[0].upper()}{hint[1:]}"
    near = resembling_keys(name)
    return f"Did you mean --set {near[0]}=VALUE?" if near else ""


def load(config: Path | None, overrides: list[str] | None) -> "Resolved":
    """The configuration of these sources; notes about them go to stderr, once for all ranks.

    Raises ConfigError with every problem found.
    """
    from moemesh.comm.slurm import rank_of
    from moemesh.config.load import load_run

    resolved = load_run([config] if config else [], overrides or [])
    if "TORCHELASTIC_RUN_ID" not in os.environ or rank_of(os.environ) == 0:
        for note in resolved.notes:
            print(f"moemesh: note: {note}", file=sys.stderr)
    return resolved
