"""Checks of torch for `moemesh doctor`, in two processes of their own: versions, devices, a link.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=... python -m moemesh.bench.torch_check

Rank 0 prints one JSON object a line: first the versions and devices, then the link.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from moemesh.comm import launch
from moemesh.comm.collectives import all_reduce_
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout

#: Bytes of the tensor that both ranks sum, and how often.
LINK_BYTES, ROUNDS = 4 << 20, 3


def torch_facts() -> dict[str, Any]:
    """Versions, and each device with its name and memory."""
    devices: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            capability = f"{found.major}.{found.minor}"
            devices.append(
                {"name": found.name, "capability": capability, "free": free, "total": total}
            )
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "gloo": dist.is_gloo_available(),
        "devices": devices,
    }


def link_seconds() -> float:
    """Seconds of one all-reduce of :data:`LINK_BYTES` between two processes of this machine."""
    launch.start("cpu", 15.0)
    mesh = Mesh.create(Layout(dp=2), torch.device("cpu"))
    tensor = torch.ones(LINK_BYTES // 4)
    times: list[float] = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        all_reduce_(tensor, mesh["world"], caller="doctor", phase="forward")
        times.append(time.perf_counter() - start)
    assert tensor[0].item() == 2 ** (ROUNDS + 1), "a sum of two ranks is wrong"
    launch.stop()
    return min(times[1:])


def main() -> None:
    """Print what was found; the first line comes even where the link does not work."""
    is_first = os.environ.get("RANK") == "0"
    if is_first:
        print(json.dumps(torch_facts()), flush=True)
    seconds = link_seconds()
    if is_first:
        print(json.dumps({"bytes": LINK_BYTES, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
