"""The verbs of the command, one short function each; what a verb needs is imported inside it."""

import importlib
import os
import sys
from collections.abc import Sequence

from moemesh.cli.application import USER_ERROR, app, run

__all__ = ["USER_ERROR", "import_verbs", "main"]

#: Module -> the verbs, or groups of verbs, that it adds; the help shows them in this order.
VERBS: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "insight": ("report", "explain", "profile"),
    "launching": ("launch",),
    "weights": ("convert", "evaluate", "generate"),
    "esft": ("esft",),
    "data": ("tokenize", "data"),
    "configuration": ("config",),
    "doctor": ("doctor",),
    "checkpoints": ("checkpoint",),
    "checkpoint_diff": ("checkpoint",),
    "replaying": ("replay",),
    "planning": ("estimate", "plan", "validate", "calibrate"),
    "layout": ("layout",),
    "dispatch": ("dispatch",),
    "clusters": ("cluster",),
    "partition": ("partition",),
    "pipelines": ("schedule",),
    "balancing": ("balance",),
    "benches": ("bench",),
    "repro": ("repro",),
    "watching": ("watch",),
}


def import_verbs(words: Sequence[str] = ()) -> None:
    """Add the verb that a command line of these words names, or all where it names none: every
    module costs milliseconds that each start and each completion would wait for."""
    verb = words[0] if words else ""
    modules = [name for name, verbs in VERBS.items() if verb in verbs] or list(VERBS)
    for name in modules:
        importlib.import_module(f"moemesh.cli.{name}")
    order = list(VERBS)
    app.registered_commands.sort(
        key=lambda one: order.index(
            getattr(one.callback, "__module__", "").removeprefix("moemesh.cli.")
        )
    )


def main() -> None:
    """Run the command of ``sys.argv``, or complete the line that a shell gives."""
    words = sys.argv[1:]
    if "_MOEMESH_COMPLETE" in os.environ:
        line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
        words = line.split()[1:]
    import_verbs(words)
    run(app, "moemesh")
