"""A step by its operations and kernels, largest first, with the bytes and FLOPs beside the time.

Times are those of torch's profiler, on a device or (without one) on the CPU; bytes and FLOPs are
counted from the shapes of each operation, in a step of its own. A compiled function has a row among
the kernels alone, without them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.simulated_device.operations import NO_KERNEL, bytes_moved, flops_of
from benchmarks.turns import synchronize

#: Steps that are profiled; figures are those of one.
STEPS = 2


@dataclass
class Measured:
    """Figures of all calls of an operation, or of a kernel, in a step."""

    name: str
    seconds: float = 0.0
    calls: float = 0.0
    bytes: int = 0
    flops: int = 0


class _CountWork(TorchDispatchMode):
    def __init__(self, rows: dict[str, Measured]) -> None:
        super().__init__()
        self.rows = rows

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if func.namespace == "aten" and not func.is_view and name not in NO_KERNEL:
            row = self.rows[f"aten::{name}"]
            row.bytes += bytes_moved(name, args, kwargs, found)[0]
            row.flops += flops_of(func, args, kwargs, found)
        return found


def profile_step(
    step: Callable[[], object], device: torch.device, num_rows: int
) -> dict[str, list[dict[str, Any]]]:
    """The `num_rows` operations, and kernels of a device, that take the most time of a step."""
    rows: dict[str, Measured] = {}
    operations = defaultdict[str, Measured](lambda: Measured(""))
    with _CountWork(operations):
        step()
    is_on_device = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_on_device else [])]
    synchronize(device)
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            step()
        synchronize(device)
    kernels: list[Measured] = []
    for event in profiler.key_averages():
        is_kernel = event.device_type != torch.autograd.DeviceType.CPU
        time = event.self_device_time_total if is_on_device else event.self_cpu_time_total
        measured = Measured(event.key, time / 1e6 / STEPS, event.count / STEPS)
        if is_kernel:
            kernels.append(measured)
        elif event.key in operations:
            work = operations[event.key]
            measured.bytes, measured.flops = work.bytes, work.flops
            rows[event.key] = measured

    def largest(measured: list[Measured]) -> list[dict[str, Any]]:
        ordered = sorted(measured, key=lambda row: -row.seconds)
        return [asdict(row) for row in ordered[:num_rows]]

    return {"operations": largest(list(rows.values())), "kernels": largest(kernels)}
