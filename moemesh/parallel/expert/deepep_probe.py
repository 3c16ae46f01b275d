"""Whether DeepEP can run here: its package, its interface, the device, the configuration."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Literal

from moemesh.config.python import installed_version
from moemesh.config.run import RunConfig

HOME = "https://github.com/deepseek-ai/DeepEP"
INSTEAD = "Use all_to_all or hierarchical"
#: Divisor of the hidden size: rows of bfloat16 travel in pairs of 16-byte words.
_HIDDEN_MULTIPLE = 16


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The installation of DeepEP: its `interface` (v1 if both exist), the requirements that are
    `missing`, and `versions` of packages for a report."""

    interface: Literal["v1", "v2"] | None
    missing: tuple[str, ...]
    versions: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        return not self.missing

    def __str__(self) -> str:
        if self.usable:
            return "deepep: " + ", ".join(self.versions)
        versions = f" (found: {', '.join(self.versions)})" if self.versions else ""
        return f'plan.dispatcher = "deepep" needs {"; ".join(self.missing)}{versions}. {INSTEAD}'


def available() -> Probe:
    """Probe the package, its interface and the GPU that it requires. Never raises. Imports
    `deep_ep` only if it is installed. V1's requirement between nodes, NVSHMEM with IBGDA, cannot be
    checked without using it: only the version of its package is reported."""
    if importlib.util.find_spec("deep_ep") is None:
        return Probe(interface=None, missing=(f"the package deep_ep ({HOME}); not found",))
    versions = [f"deep_ep {installed_version('deep_ep') or 'of unknown version'}"]
    for package in ("nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13"):
        if version := installed_version(package):
            versions.append(f"NVSHMEM {version}")
    try:
        module = importlib.import_module("deep_ep")
    except Exception as error:  # a binary built for another torch or CUDA fails in its own ways
        broken = f"a deep_ep that can be imported ({type(error).__name__}: {error})"
        return Probe(interface=None, missing=(broken,), versions=tuple(versions))
    missing: list[str] = []
    interface: Literal["v1", "v2"] | None = None
    if hasattr(module, "Buffer"):
        interface = "v1"
    elif hasattr(module, "ElasticBuffer"):
        interface = "v2"
        missing.append("deep_ep.Buffer (V1); this one has ElasticBuffer (V2) only")
    else:
        missing.append("deep_ep.Buffer; this module named deep_ep has none")
    import torch  # late: a missing package is found without it

    if not torch.cuda.is_available() or torch.version.cuda is None:
        missing.append("a CUDA device")
    else:
        versions.append(f"CUDA {torch.version.cuda}")
        major, minor = torch.cuda.get_device_capability()
        if major < 9:
            missing.append(f"a device of compute capability 9.0 (this one has {major}.{minor})")
        if tuple(int(part) for part in torch.version.cuda.split(".")[:2]) < (12, 3):
            missing.append("a torch built for CUDA 12.3 or later")
    return Probe(interface=interface, missing=tuple(missing), versions=tuple(versions))


def obstacles(config: RunConfig) -> list[str]:
    """The reasons why a run cannot use this dispatcher on this machine, one sentence each."""
    plan, dtype, hidden = config.plan, config.train.dtype, config.model.hidden_size
    rules = {
        f"etp = 1, not {plan.etp}": plan.etp == 1,
        f"dtype bfloat16, not {dtype}": dtype == "bfloat16",
        f"a hidden size that {_HIDDEN_MULTIPLE} divides, not {hidden}": (
            hidden % _HIDDEN_MULTIPLE == 0
        ),
    }
    broken = [f'plan.dispatcher = "deepep" needs {rule}' for rule, ok in rules.items() if not ok]
    if plan.recompute == "full":
        broken.append("deepep does not dispatch twice in one order, as recompute = full would need")
    return broken if (probe := available()).usable else [str(probe), *broken]
