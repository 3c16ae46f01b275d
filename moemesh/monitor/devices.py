"""GPUs of this machine and settings of ranks, without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from shutil import which

from moemesh.config.errors import UserError
from moemesh.trace.machine import NVIDIA_DRIVER

#: Files of the drivers of Nvidia (also under Windows) and AMD.
_SIGNS = (NVIDIA_DRIVER, "/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")
_TOOLS = ("nvidia-smi", "rocm-smi")
#: Variable with the rendezvous folder of our launcher, set for each of its ranks.
FOLDER_VARIABLE = "MOEMESH_LAUNCHER"
#: File of this folder with the configuration that the launcher has resolved for its ranks.
RESOLVED = "config.toml"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
#: Variables with default and synonyms; CUDA and torch read them at their first use of a device.
_SETTINGS = {
    # A queue for each group of ranks: with fewer, unrelated streams wait for one another.
    "CUDA_DEVICE_MAX_CONNECTIONS": ("32", ()),
    # Numbers of rows change with the routing: blocks of fixed size would leave gaps between them.
    "PYTORCH_ALLOC_CONF": ("expandable_segments:True", ("PYTORCH_CUDA_ALLOC_CONF",)),
}


class DeviceError(UserError):
    """The requested device is missing."""


def num_gpus() -> int:
    """Number of Nvidia GPUs that the driver of this machine shows; 0 if this process may open none
    (a container without GPUs on a machine that has some)."""
    if not any(
        os.access(device, os.R_OK | os.W_OK) for device in Path("/dev").glob("nvidia[0-9]*")
    ):
        return 0
    return len(list((NVIDIA_DRIVER / "gpus").glob("*")))


def num_visible_gpus(environment: Mapping[str, str]) -> int:
    """Number of the GPUs of :func:`num_gpus` that CUDA_VISIBLE_DEVICES leaves to a process."""
    present, chosen = num_gpus(), environment.get(_VISIBLE)
    if chosen is None:
        return present
    names = list[str]()
    for name in (part.strip() for part in chosen.split(",")):
        is_number = name.lstrip("-").isdigit()
        is_known = 0 <= int(name) < present if is_number else name.startswith(("GPU-", "MIG-"))
        if not is_known:  # CUDA ends its list here, too
            break
        names.append(name)
    return len(names) if present else 0


def settings_for_gpus(environment: Mapping[str, str]) -> dict[str, str]:
    """Recommended variables for ranks with GPUs, without those that `environment` sets; empty on a
    machine without a driver."""
    if not signs_of_gpus():
        return {}
    return {
        name: value
        for name, (value, synonyms) in _SETTINGS.items()
        if not any(other in environment for other in (name, *synonyms))
    }


def signs_of_gpus() -> list[str]:
    """Files and commands of a driver; without any of them torch finds no GPU."""
    files = [str(sign) for sign in _SIGNS if Path(sign).exists()]
    return files + [path for tool in _TOOLS if (path := which(tool))]


def refuse_missing(device: str, num_ranks: int) -> None:
    """Raises DeviceError if `num_ranks` ranks need CUDA and this machine has surely no GPU."""
    if device == "cuda" and not signs_of_gpus():
        raise too_few(num_ranks, 0)


def too_few(num_ranks: int, available: int) -> DeviceError:
    """The error of `num_ranks` ranks that need a device each, with `available` devices."""
    return DeviceError(
        f"{num_ranks} rank(s) on this machine want a CUDA device each, {available} found: "
        'set train.device = "cpu", or use fewer ranks; for another machine '
        "`moemesh config check --elsewhere` checks the settings alone"
    )
