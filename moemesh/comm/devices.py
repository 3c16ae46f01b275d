"""GPUs of this machine, looked for without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shutil import which

from moemesh.config.errors import UserError

#: What the drivers of Nvidia (also under Windows) and AMD show of themselves.
_SIGNS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")
_TOOLS = ("nvidia-smi", "rocm-smi")


class DeviceError(UserError):
    """The device asked for is not there."""


def num_gpus() -> int:
    """Nvidia GPUs that the driver of this machine shows; 0 also where it shows none to us."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def signs_of_gpus() -> list[str]:
    """Files and commands of a driver; where there are none, torch finds no GPU either."""
    return list(_signs())


def _signs() -> Iterator[str]:
    yield from (sign for sign in _SIGNS if Path(sign).exists())
    yield from (found for tool in _TOOLS if (found := which(tool)))


def refuse_missing(device: str, num_ranks: int) -> None:
    """Raises DeviceError where `num_ranks` ranks here ask for CUDA and there is surely no GPU."""
    if device == "cuda" and not signs_of_gpus():
        raise too_few(num_ranks, 0)


def too_few(num_ranks: int, found: int) -> DeviceError:
    """What is said of `num_ranks` ranks and `found` devices."""
    return DeviceError(
        f"{num_ranks} rank(s) on this machine want a CUDA device each, {found} found: "
        'set train.device = "cpu", or use fewer ranks; for another machine '
        "`moemesh config check --elsewhere` checks the settings alone"
    )
