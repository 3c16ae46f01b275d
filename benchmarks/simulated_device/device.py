"""The device as a whole: a context in which torch answers as with CUDA, and counts."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _foreach_utils

from benchmarks.simulated_device.counts import (
    Counts,
    Kernel,
    bytes_of,
    current,
    line,
    tensors_of,
)
from benchmarks.simulated_device.exchanges import Exchanges
from benchmarks.simulated_device.streams import Event, Stream
from benchmarks.simulated_device.tensor import DeviceTensor, Factories, make_device_grads
from moemesh.comm.mesh import Axis
from moemesh.ops import fusion, grouped_gemm, permute

_FOREACH_TYPES: list[Any] = _foreach_utils._foreach_supported_types  # pyright: ignore
_run_thread = threading.Thread.run


def _run(thread: threading.Thread) -> None:
    # Modes belong to a thread.
    with Factories():
        _run_thread(thread)


_rms_norm = torch.rms_norm


class _FusedNorm(torch.autograd.Function):
    """RMSNorm as CUDA has it: a kernel forward, one for each gradient backward."""

    @staticmethod
    def forward(
        ctx: Any, device: SimulatedDevice, x: Tensor, shape: Any, weight: Tensor, epsilon: float
    ) -> Tensor:
        ctx.device, ctx.rest = device, (shape, epsilon)
        ctx.save_for_backward(x, weight)

        def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
            return _rms_norm(x, shape, weight, epsilon)

        return device.one_kernel(rms_norm)(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, weight), (shape, epsilon) = ctx.saved_tensors, ctx.rest
        size, dtype = math.prod(shape), torch.promote_types(x.dtype, torch.float32)

        def root(x: Tensor) -> Tensor:
            return torch.rsqrt(x.to(dtype).square().mean(-1, keepdim=True) + epsilon)

        def input_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
            scaled, normed = grad.to(dtype) * weight, x.to(dtype) * root(x)
            along = (scaled * normed).mean(-1, keepdim=True)
            return ((scaled - along * normed) * root(x)).to(x.dtype)

        def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
            product = grad.to(dtype) * x.to(dtype) * root(x)
            return product.reshape(-1, size).sum(0).to(weight.dtype)

        kernel = ctx.device.one_kernel
        grad_x = kernel(input_gradient)(grad, x, weight)
        return None, grad_x, None, kernel(weight_gradient)(grad, x), None


class SimulatedDevice(Counts):
    """See the package. A context manager; one at a time in a process."""

    def __init__(
        self,
        *,
        capability: tuple[int, int] = (9, 0),
        num_devices: int = 8,
        fuses: bool = True,
        is_shared: bool = False,
    ) -> None:
        """`capability` and `num_devices` are what ``torch.cuda`` answers. `fuses`: what torch would
        compile (:mod:`moemesh.ops.fusion`) counts as one kernel that reads its arguments and writes
        its results, else operation by operation. `is_shared`: ranks share the device, and gloo
        carries their tensors through the host."""
        super().__init__()
        self.fuses, self.capability, self.num_devices = fuses, capability, num_devices
        self.is_shared = is_shared
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> SimulatedDevice:
        assert not current, "one simulated device at a time"
        current.append(self)
        self._stack.callback(current.clear)
        # Tensors and answers kept for the next step are those of one device, simulated or real.
        for kept in (permute.multiples_on_device, grouped_gemm.leaves_empty_experts):
            kept.cache_clear()
            self._stack.callback(kept.cache_clear)
        for target, name, value in self._answers():
            self._stack.enter_context(mock.patch.object(target, name, value))
        # Module.to must make parameters anew: those of the CPU cannot become wrappers.
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self._stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        self._stack.enter_context(Factories())
        self._stack.enter_context(mock.patch.object(threading.Thread, "run", _run))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What stands for ``torch.compile(function)``."""
        return self.one_kernel(function) if self.fuses else function

    def one_kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` counted as one kernel that reads its arguments and writes its results."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.is_inside = True
            try:
                found = function(*args, **kwargs)
            finally:
                self.is_inside = False
            touched = list(tensors_of((args, kwargs, found)))
            num_bytes = sum(bytes_of(x.numbers) for x in touched if isinstance(x, DeviceTensor))
            self.queue(Kernel(function.__name__, 0, num_bytes, touched[0].dtype, line()))
            return found

        return call

    def _answers(self) -> list[tuple[Any, str, Any]]:
        """What ``torch.cuda`` and the process groups answer meanwhile."""
        cuda: Any = torch.cuda
        # As NCCL moves them: what is sent is the same on gloo.
        nccl = [(Axis, "backend", property(lambda axis: "nccl")), *Exchanges(self).answers()]
        return [
            (torch.autograd, "_make_grads", make_device_grads),
            (cuda, "is_available", lambda: True),
            (cuda, "device_count", lambda: self.num_devices),
            (cuda, "current_device", lambda: 0),
            (cuda, "set_device", lambda device: None),
            (cuda, "get_device_capability", lambda device=None: self.capability),
            (cuda, "get_device_name", lambda device=None: "simulated CUDA device"),
            (cuda, "is_bf16_supported", lambda including_emulation=True: self.capability >= (8, 0)),
            (cuda, "synchronize", lambda device=None: self.wait("synchronize")),
            (cuda, "max_memory_allocated", lambda device=None: 0),
            (cuda, "reset_peak_memory_stats", lambda device=None: None),
            (cuda, "current_stream", lambda device=None: Stream()),
            (cuda, "is_current_stream_capturing", lambda: False),
            # A CUDA build would ask its driver, which is missing where no device is.
            (torch.accelerator, "current_accelerator", lambda check_available=False: None),
            (cuda, "Stream", Stream),
            (cuda, "stream", lambda stream: contextlib.nullcontext()),
            (cuda, "Event", Event),
            (torch, "rms_norm", partial(_FusedNorm.apply, self)),
            # Several tensors in one operation, as on CUDA: torch looks for their exact type.
            (_foreach_utils, "_foreach_supported_types", [*_FOREACH_TYPES, DeviceTensor]),
            (fusion, "compiled", self.compiled),
            *([] if self.is_shared else nccl),
        ]
