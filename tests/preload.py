"""Loads what ranks and commands of the tests need; the fork server imports it before it forks."""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil

import moemesh
from moemesh.trace.machine import limit_spinning
from tests import sandbox

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
    "safetensors.torch",
    "tests.commands",
    "tests.ranks",
]
_OURS = [
    module.name
    for module in pkgutil.walk_packages(moemesh.__path__, "moemesh.")
    if not module.name.endswith("__main__")
]

for _name in [*_OTHERS, *_OURS]:
    importlib.import_module(_name)
sandbox.use_plain_loops()
sandbox.watch("a process of a test")
# Collections of the children then neither visit nor copy what is loaded here.
gc.freeze()
