"""The verbs of the command, one short function each; what a verb needs is imported inside it."""

# Importing a module adds its verbs; the help shows them in this order.
from moemesh.cli import train, insight, launching, weights, esft, data  # noqa: F401, I001
from moemesh.cli import configuration, doctor, checkpoints, replaying  # noqa: F401
from moemesh.cli import planning, layout, dispatch, clusters  # noqa: F401
from moemesh.cli import partition, pipelines, balancing, benches, bench_device  # noqa: F401
from moemesh.cli import repro, watching, drill  # noqa: F401
from moemesh.cli.application import USER_ERROR, main

__all__ = ["USER_ERROR", "main"]
