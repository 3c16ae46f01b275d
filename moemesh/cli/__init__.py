"""Verbs of the command, one short function each, which imports its dependencies inside."""

import importlib
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from moemesh.cli.application import USER_ERROR, app, run
from moemesh.cli.verbs import VERBS
from moemesh.config.limits import VisibleText

__all__ = ["USER_ERROR", "import_verbs", "main"]


def import_verbs(words: Sequence[str] = ()) -> None:
    """Import the modules of the verb in a command line, or of all verbs if it has none: each module
    costs milliseconds at every start and completion."""
    first = {verb: verb.split()[0] for verb in VERBS}
    known = words and words[0] in first.values()
    for verb, row in VERBS.items():
        if not known or first[verb] == words[0]:
            importlib.import_module(row.module, __name__)
    order = list(first.values())
    app.registered_commands.sort(
        key=lambda command: order.index(command.name or getattr(command.callback, "__name__", ""))
    )


def main() -> None:
    """Run the command of ``sys.argv``, or complete a line for a shell."""
    # Open the null device in place of standard streams that the caller has closed (`>&-`), so that
    # no file of a run gets their descriptors, in this process or in its ranks.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    words = sys.argv[1:]
    if "_MOEMESH_COMPLETE" in os.environ:
        line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
        words = line.split()[1:]
    else:
        # Streams that another program has replaced stay as they are.
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is getattr(sys, f"__{name}__") and isinstance(stream, TextIOWrapper):
                setattr(sys, name, VisibleText(stream))
    import_verbs(words)
    run(app, "moemesh")
