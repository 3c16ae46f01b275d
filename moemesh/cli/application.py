"""Command `moemesh`: its groups of verbs, shared options, and exit codes."""

# No `from __future__ import annotations` here: typer reads the annotations, and nothing heavy may
# be imported at the top, or `moemesh --help` becomes slow.
import errno
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moemesh import __version__
from moemesh.cli.arguments import Group, Verb
from moemesh.cli.options import Complete, settings, with_options
from moemesh.cli.terminal import folded
from moemesh.config.errors import ConfigError, is_user_error, refuse_together
from moemesh.trace.machine import limit_spinning
from moemesh.trace.strict_json import strict_json

#: Columns of an example in the help, after two of indentation by click and four of its own.
_COLUMNS, _INDENT = 72, "    "
#: System errors of a path that the user chose, a full disk included.
_OF_A_PATH = (
    *(errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS),
)


class Verbs(typer.Typer):
    """Commands with examples in their docstrings: paragraphs that are indented by four."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(
            cls=Group,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            no_args_is_help=True,
            **keywords,
        )

    def command(
        self, *names: Any, completions: dict[str, Complete] | None = None, **keywords: Any
    ) -> Callable[[Any], Any]:
        """Add a verb; :func:`moemesh.cli.options.with_options` creates its options."""
        register = super().command(*names, cls=Verb, **keywords)

        def add(verb: Any) -> Any:
            verb.__doc__ = with_examples(verb.__doc__ or "")
            return register(with_options(verb, completions or {}))

        return add


def with_examples(text: str) -> str:
    """The docstring `text` with every example marked to be kept, one line per command; a long
    command is continued after a backslash."""
    paragraphs: list[str] = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if all(line.startswith(_INDENT) for line in paragraph.splitlines()):
            commands = inspect.cleandoc(paragraph).replace("\\\n", "").splitlines()
            lines: list[str] = []
            for command in commands:  # an option and its value stay on the same line
                joined = re.sub(r"(--\S+) (?!-)", "\\1\0", " ".join(command.split()))
                lines += folded(joined, _COLUMNS, _INDENT, kept="\0")
            # click keeps the lines of a paragraph that begins with a backspace.
            paragraph = "\n".join(["\b", *(_INDENT + line for line in lines)])
        paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)


if TYPE_CHECKING:
    from moemesh.config.load import Resolved

#: Exit code of a mistake in the user's input.
USER_ERROR = 2

app = Verbs(name="moemesh", help="Train mixture-of-experts transformers over a mesh of devices.")
config_app = Verbs(help="Configurations: show, check, schema, diff.")
cluster_app = Verbs(help="Descriptions of machines: init, show, list.")
data_app = Verbs(help="Training data: show a batch with its loss mask.")
checkpoint_app = Verbs(help="Checkpoints of a run: ls, verify, diff, prune.")
bench_app = Verbs(help="Measure the links between ranks.")
esft_app = Verbs(help="Expert-specialised fine-tuning: scores of experts.")
app.add_typer(config_app, name="config")
app.add_typer(cluster_app, name="cluster")
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(bench_app, name="bench")
app.add_typer(esft_app, name="esft")

ConfigFile = Annotated[
    Path | None,
    "TOML file of the run, or the folder of one; every key has a default.",
    "<CONFIG.toml>",
]
Overrides = Annotated[
    list[str] | None,
    "Set one key, over the file and the environment. May be repeated.",
    {"names": ("--set",), "metavar": "SECTION.KEY=VALUE", "autocompletion": settings},
]
AsJson = Annotated[bool, "Print JSON, and nothing else.", {"names": ("--json",)}]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moemesh {__version__}")
        raise typer.Exit


_Version = typer.Option(
    "--version", callback=_print_version, is_eager=True, help="Print the version."
)


@app.callback()
def root(version: Annotated[bool, _Version] = False) -> None:
    """Train mixture-of-experts transformers over a mesh of devices."""


def run(commands: typer.Typer, program: str, words: Sequence[str] | None = None) -> None:
    """Run the command line `words` (None: this process's) of `program`, and exit with its code.
    A user's mistake prints one message on stderr and exits with code 2."""
    if isinstance(sys.stdout, TextIOWrapper):
        # Same as stderr: characters that the terminal cannot show are escaped.
        sys.stdout.reconfigure(errors="backslashreplace")
    limit_spinning(os.environ)
    try:
        code = commands(words, prog_name=program, standalone_mode=False)
        with suppress(BrokenPipeError):  # the verb has done its work
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader of the output has closed the pipe (`moemesh ... | head`).
        sys.stderr.close()
        code = 1
    except Exception as error:
        # typer has its own copy of click, whose exceptions have no public name: recognise them by
        # class name and attributes.
        if type(error).__name__ == "Abort":
            sys.exit(130)
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            error.show()
            sys.exit(USER_ERROR)
        from moemesh.comm.slurm import rank_of

        message, code = str(error), USER_ERROR
        if isinstance(error, RuntimeError) and "home directory" in message:  # raised by pathlib
            message = "a path begins with ~ and the name of an unknown user: write it in full"
        elif isinstance(error, OSError) and error.filename == getattr(sys.stdout, "name", ""):
            # The interpreter flushes the rest of the buffer at its exit: into the null device.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            message, code = f"standard output cannot be written: {error.strerror}", 1
        elif (
            isinstance(error, OSError)
            and error.filename
            and error.errno in _OF_A_PATH
            and "RANK" not in os.environ  # the launcher of a rank reports its traceback
        ):
            message = f"{error.filename}: {error.strerror}"
        elif not is_user_error(error):
            raise  # a bug
        # Every rank has the same configuration: rank 0 prints.
        if not isinstance(error, ConfigError) or rank_of(os.environ) == 0:
            # An undecodable byte of the command line must not raise in the message.
            text = message.encode(errors="backslashreplace").decode()
            print(f"moemesh: {text}", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def print_answer(
    as_json: bool, content: Callable[[], Any], text: Callable[[], str], *, indent: int | None = None
) -> None:
    """Print the answer of a verb as one JSON object, or as text."""
    typer.echo(strict_json(content(), indent=indent) if as_json else text())


def load(
    config: Path | None, overrides: list[str] | None, *, with_data: bool = False
) -> "Resolved":
    """The configuration of a file and of --set. Its notes are printed to stderr, once for all
    ranks.

    A rank of our launcher reads the configuration that the launcher has resolved. Raises
    ConfigError with every problem, with `with_data` SeveralErrors if the data has problems, too.
    """
    from moemesh.comm.slurm import prints_notes, rank_of
    from moemesh.config.load import Resolved, UnresolvedError
    from moemesh.monitor.devices import FOLDER_VARIABLE, RESOLVED
    from moemesh.sharding.load_run import load_resolved, load_run

    resolved_file = Path(os.environ.get(FOLDER_VARIABLE, os.devnull)) / RESOLVED
    if resolved_file.is_file():
        return Resolved(config=load_resolved(resolved_file), origins={})
    try:
        resolved = load_run([config] if config else [], overrides or [])
    except UnresolvedError as error:
        if with_data and rank_of(os.environ) == 0:
            from moemesh.data.sources import with_vocabulary
            from moemesh.train.preparation import data_errors

            valid = error.valid
            if "data.tokenizer" not in error.broken:
                valid = with_vocabulary(valid)
            refuse_together([error, *data_errors(valid.config, config, error.broken)])
        raise
    if prints_notes(os.environ):
        for note in resolved.notes:
            print(f"moemesh: note: {note}", file=sys.stderr)
    if resolved.config.data.tokenizer != "bytes":
        from moemesh.data.sources import with_vocabulary

        resolved = with_vocabulary(resolved)
    return resolved
