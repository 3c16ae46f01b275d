"""moemesh: mixture-of-experts training over a mesh of devices, planned, shown and explained.

``import moemesh as mm`` costs nothing: each name below is imported at its first use, and torch with
the first that needs it. They are described in docs/api.md.
"""

from __future__ import annotations

import importlib  # and nothing slower: Ctrl-C is handled from moemesh.__main__ on

__version__ = "0.2.0"

#: Public name -> the module that holds it, or that it is; their types are in __init__.pyi.
_HOMES = {
    "ConfigError": "moemesh.config.errors",
    "Mesh": "moemesh.comm.mesh",
    "MoELayer": "moemesh.parallel.expert.layer",
    "Run": "moemesh.trace.run",
    "Sharded": "moemesh.checkpoint.store",
    "clip_grad_norm_": "moemesh.parallel.expert.spread",
    "estimate": "moemesh.api.planning",
    "expert_parameters": "moemesh.parallel.expert.spread",
    "full_state_dict": "moemesh.parallel.expert.spread",
    "load": "moemesh.api.runs",
    "load_checkpoint": "moemesh.api.checkpoints",
    "parallelize": "moemesh.api.training",
    "partition": "moemesh.planner.stages.partition",
    "plan": "moemesh.api.planning",
    "rebalance_experts": "moemesh.balance.rebalance",
    "save_checkpoint": "moemesh.api.checkpoints",
    "schedules": "moemesh.api.schedules",
    "simulate": "moemesh.schedule.simulate",
    # The module itself is callable: `mm.train(...)` runs the verb.
    "train": "moemesh.train",
    "use_experts": "moemesh.parallel.expert.hub_layer",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """The public name, imported now; AttributeError with the nearest one for any other."""
    if name not in _HOMES:
        if name.startswith("__"):
            raise AttributeError(f"module 'moemesh' has no attribute {name!r}")
        from difflib import get_close_matches

        near = get_close_matches(name, _HOMES, n=1) or sorted(_HOMES)
        hint = f"did you mean {near[0]!r}?" if len(near) == 1 else f"it has {', '.join(near)}"
        raise AttributeError(f"module 'moemesh' has no attribute {name!r}: {hint}")
    importlib.import_module("moemesh.api.pictures")  # for notebooks; it imports nothing heavy
    home = importlib.import_module(_HOMES[name])
    value = globals()[name] = getattr(home, name, home)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
