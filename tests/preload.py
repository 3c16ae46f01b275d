"""Loads what ranks and commands of the tests need; the fork server imports it before it forks."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import pkgutil

import typer

import moemesh
from moemesh.trace.machine import limit_spinning
from tests import sandbox

# What is loaded here stays: no search for garbage among it, now or in the children.
gc.disable()
# Before torch loads OpenMP, as `moemesh train` does for the processes that it starts.
limit_spinning(os.environ)

_OTHERS = [
    "hypothesis",
    "pytest",
    "torch._dynamo",  # torch loads it at an optimizer's first step: a second in every rank
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torch.distributed.tensor",
    "peft",
    "safetensors.torch",
    "transformers.modeling_utils",
    "tests.commands",
    "tests.ranks",
]
_OURS = [
    module.name
    for module in pkgutil.walk_packages(moemesh.__path__, "moemesh.")
    if not module.name.endswith("__main__")
]


def _write_without_waiting() -> None:
    """No test cuts the power of a rank or command: `tests.checkpoint.test_power_loss` simulates it
    in its own process, and a run waits dozens of times for the disk."""
    os.fsync = lambda handle: None


def _make_what_commands_share() -> None:
    """The tree of verbs, the template of pages, the versions of packages; and measured rates of the
    machine, which take a moment less."""
    from moemesh import cli
    from moemesh.report.document import PageDocument
    from moemesh.train.records import machine_rates, provenance

    cli.import_verbs()
    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(cli.application.app)
    sandbox.compile_pages_once()
    PageDocument(kind="", title="", lines=(), chapters=()).to_html()
    provenance.packages = functools.cache(provenance.packages)
    provenance.packages()
    machine_rates._STEPS, machine_rates._REPEATS, machine_rates._STREAMED = 1, 1, 1 << 16


def _fill_what_fills_later() -> None:
    """Values of modules that a first use sets: a rank with them would count as changed."""
    for name in moemesh.__all__:
        getattr(moemesh, name)
    deferral = importlib.import_module("moemesh.ops.weight_gradient").deferral
    deferral.is_possible = True  # so far the default of its class


for _name in [*_OTHERS, *_OURS]:
    importlib.import_module(_name)
_fill_what_fills_later()
sandbox.use_plain_loops()
_write_without_waiting()
_make_what_commands_share()
sandbox.watch("a process of a test")
gc.freeze()
gc.enable()
