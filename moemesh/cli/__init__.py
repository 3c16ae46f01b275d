"""Verbs of the command, one short function each, which imports its dependencies inside."""

import importlib
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from moemesh.cli.application import USER_ERROR, app, run
from moemesh.config.limits import VisibleText

__all__ = ["USER_ERROR", "import_verbs", "main"]

#: Verb, or group of verbs -> the modules that define it, in the order of the help.
VERBS: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "report": ("insight",),
    "explain": ("insight",),
    "profile": ("insight",),
    "launch": ("train",),
    "convert": ("weights",),
    "evaluate": ("weights",),
    "generate": ("weights",),
    "esft": ("weights",),
    "tokenize": ("data",),
    "data": ("data",),
    "config": ("configuration",),
    "doctor": ("machine",),
    "checkpoint": ("checkpoints",),
    "replay": ("train",),
    "estimate": ("planning",),
    "plan": ("planning",),
    "validate": ("accuracy",),
    "calibrate": ("accuracy",),
    "layout": ("layout",),
    "dispatch": ("layout",),
    "cluster": ("machine",),
    "partition": ("planning",),
    "schedule": ("pipelines",),
    "balance": ("balancing",),
    "bench": ("machine",),
    "repro": ("train",),
    "watch": ("insight",),
}


def import_verbs(words: Sequence[str] = ()) -> None:
    """Import the modules of the verb in a command line, or of all verbs if it has none: each module
    costs milliseconds at every start and completion."""
    verb = words[0] if words else ""
    for modules in [VERBS[verb]] if verb in VERBS else VERBS.values():
        for name in modules:
            importlib.import_module(f"moemesh.cli.{name}")
    order = list(VERBS)
    app.registered_commands.sort(
        key=lambda one: order.index(one.name or getattr(one.callback, "__name__", ""))
    )


def main() -> None:
    """Run the command of ``sys.argv``, or complete a line for a shell."""
    words = sys.argv[1:]
    if "_MOEMESH_COMPLETE" in os.environ:
        line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
        words = line.split()[1:]
    else:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is getattr(sys, f"__{name}__") and isinstance(stream, TextIOWrapper):
                setattr(sys, name, VisibleText(stream))
    import_verbs(words)
    run(app, "moemesh")
