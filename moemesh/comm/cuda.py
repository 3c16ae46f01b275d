"""The CUDA devices that torch sees, and checks that ranks can compute on them.

The checks run before data is read and before any process group exists: what would be a hang in NCCL
or an error in a kernel is one message here, with a command that works.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import timedelta
from socket import gethostname
from typing import Literal

import torch
import torch.distributed as dist

from moemesh.monitor.devices import DeviceError, num_gpus, too_few

Device = Literal["auto", "cpu", "cuda"]
#: `train.dtype` -> lowest compute capability with hardware for it.
NEEDED_CAPABILITY = {"bfloat16": (8, 0)}
#: Lowest capability with a kernel of ``grouped_mm``; below it torch loops over experts on the host.
GROUPED_CAPABILITY = (9, 0)
#: Variable that lets ranks share devices: "gloo" carries their tensors through the host.
SHARED_VARIABLE = "MOEMESH_COMM"
#: Remedies that several messages suggest.
ON_CPU = 'set train.device = "cpu" (`moemesh train --set train.device=cpu`)'
CUDA_BUILD = "pip install torch --index-url https://download.pytorch.org/whl/cu128"

_log = logging.getLogger(__name__)


def num_devices() -> int:
    """Number of devices of this process; 0 where torch cannot compute on any."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def resolved(device: Device) -> str:
    """ "cpu" or "cuda". Auto is never the CPU on a machine with GPUs, unless CUDA_VISIBLE_DEVICES
    hides all of them (empty or -1): a run that trains on the CPU by mistake would take days."""
    if device != "auto":
        return device
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    return "cuda" if num_devices() or (num_gpus() and not hidden) else "cpu"


def check(device: Device, num_ranks: int, dtype: str = "float32", *, shares: bool = False) -> None:
    """Raises DeviceError if `num_ranks` ranks on this machine cannot have the requested device, or
    cannot compute in `dtype` on it. `shares`: several ranks may have one device."""
    num_ranks = min(num_ranks, 1) if shares else num_ranks  # one device is enough for all
    if resolved(device) == "cpu":
        return
    available = num_devices()
    if not available:
        version = torch.__version__
        if torch.version.cuda is None and torch.version.hip is None:
            raise DeviceError(
                f"torch {version} is a build without CUDA: install one with CUDA "
                f"({CUDA_BUILD}); or {ON_CPU}"
            )
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DeviceError(
                f"CUDA {torch.version.cuda} of torch {version} does not start: {reason}; or "
                f"{ON_CPU}"
            ) from error
    if available < num_ranks:
        raise too_few(num_ranks, available)
    if num_ranks > 1 and not dist.is_nccl_available():
        raise DeviceError(
            f"torch {torch.__version__} has no NCCL, which {num_ranks} ranks on GPUs need: install "
            f"a CUDA build for Linux ({CUDA_BUILD}), train with one rank, or {ON_CPU}"
        )
    needed = NEEDED_CAPABILITY.get(dtype, (0, 0))
    for index in range(min(available, max(num_ranks, 1))):
        capability = torch.cuda.get_device_capability(index)
        name = f"GPU {index} ({torch.cuda.get_device_name(index)}, compute capability "
        name += f"{_dotted(capability)})"
        architectures = (arch.removeprefix("sm_") for arch in torch.cuda.get_arch_list())
        built = [int(arch) for arch in architectures if arch.isdigit()]  # none in a build for ROCm
        if built and capability < (lowest := divmod(min(built), 10)):
            raise DeviceError(
                f"{name} is older than what torch {torch.__version__} has kernels for "
                f"({_dotted(lowest)} and newer): install an older torch, or {ON_CPU}"
            )
        if capability < needed:
            raise DeviceError(
                f'{name} is too old for train.dtype = "{dtype}", which needs {_dotted(needed)}: '
                f'set train.dtype = "float32", or {ON_CPU}'
            )


def choose(
    device: Device, local_rank: int, ranks_per_node: int, dtype: str, *, shares: bool = False
) -> torch.device:
    """The device of a rank, set as the current one; raises what :func:`check` does. `shares`: ranks
    take turns with the devices of this machine. If the launcher makes one device visible to each of
    several ranks, a rank's device is its device 0."""
    if resolved(device) == "cpu":
        return torch.device("cpu")
    sees_one = ranks_per_node > 1 and num_devices() == 1
    check(device, 1 if sees_one else ranks_per_node, dtype, shares=shares)
    index = local_rank % num_devices() if shares else local_rank
    chosen = torch.device("cuda", 0 if sees_one else index)
    torch.cuda.set_device(chosen)
    if torch.cuda.get_device_capability(chosen) < GROUPED_CAPABILITY:
        _log.warning(
            "compute capability %s: grouped products of experts are fast, and do not wait for the "
            "device, from 9.0 on",
            _dotted(torch.cuda.get_device_capability(chosen)),
        )
    return chosen


def agree(
    store: dist.Store,
    rank: int,
    device: torch.device,
    timeout: timedelta,
    *,
    shares: bool = False,
) -> None:
    """Raises DeviceError if this rank's device cannot be in a group with that of rank 0 (CPU and
    CUDA, two compute capabilities), or, unless `shares`, if another rank has the same GPU. Every
    rank calls it; `store` carries what they compare."""
    facts: dict[str, str] = {"type": device.type, "host": gethostname()}
    if device.type == "cuda":
        facts["capability"] = _dotted(torch.cuda.get_device_capability(device))
        key = f"device {facts['host']} {torch.cuda.get_device_properties(device).uuid}"
        if not shares and store.add(key, 1) > 1:
            raise DeviceError(
                f"rank {rank} and another rank on {facts['host']} have the same GPU: start at most "
                "one rank for each, with LOCAL_RANK or CUDA_VISIBLE_DEVICES of its own, or set "
                f"{SHARED_VARIABLE}=gloo, which is slow and for tests"
            )
    if rank == 0:
        store.set("device of rank 0", json.dumps(facts))
        return
    store.wait(["device of rank 0"], timeout)
    first: dict[str, str] = json.loads(store.get("device of rank 0"))
    for key, words in (("type", "computes on"), ("capability", "has compute capability")):
        if facts.get(key) != first.get(key):
            raise DeviceError(
                f"rank 0 on {first['host']} {words} {first.get(key)}, rank {rank} on "
                f"{facts['host']} {facts.get(key)}: use machines of one kind, or {ON_CPU}"
            )


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
