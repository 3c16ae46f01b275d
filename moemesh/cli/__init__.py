"""The verbs of the command, one short function each; what a verb needs is imported inside it."""

import importlib
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from moemesh.cli.application import USER_ERROR, app, run
from moemesh.config.limits import VisibleText

__all__ = ["USER_ERROR", "import_verbs", "main"]

#: Verb, or group of verbs -> the modules that add it; the help shows them in this order.
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
    """Add the verb that a command line of these words names, or all where it names none: every
    module costs milliseconds that each start and each completion would wait for."""
    verb = words[0] if words else ""
    for modules in [VERBS[verb]] if verb in VERBS else VERBS.values():
        for name in modules:
            importlib.import_module(f"moemesh.cli.{name}")
    order = list(VERBS)
    app.registered_commands.sort(
        key=lambda one: order.index(one.name or getattr(one.callback, "__name__", ""))
    )


def main() -> None:
    """Run the command of ``sys.argv``, or complete the line that a shell gives."""
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
