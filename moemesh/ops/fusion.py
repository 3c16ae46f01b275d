"""Pointwise functions as one kernel: by ``torch.compile`` on a device, by numba on a CPU.

On an accelerator every operation is a kernel, with a launch of a few microseconds and a pass over
the numbers. A chain of pointwise operations, with a sum over rows at its end, compiles into one.
This needs Triton, which the CUDA builds of torch include. On a CPU ``torch.compile`` would need a
C++ compiler at run time, and seconds at every start. There :mod:`moemesh.ops.cpu_kernels` replaces
the slowest chains, for enough numbers; a call is divided over torch's threads.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from moemesh.trace.memory_profile import ONE_PASS_NUMBERS

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """`function` compiled, except on a CPU and for fewer than two rows. Its first argument is a
    tensor; it must not change its arguments, nor branch on the number of rows."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor)
        # torch compiles separately for 0 rows and for 1, which would stop a run for seconds.
        if first.device.type == "cpu" or first.shape[0] < 2:
            return function(*args, **kwargs)
        return compiled(function)(*args, **kwargs)

    return call


@functools.cache
def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`function` compiled at its first call; `function` itself, with one line in the log, if the
    compilation fails or Triton is missing."""
    if importlib.util.find_spec("triton") is None:
        _log.warning("no Triton: %s runs operation by operation", function.__name__)
        return function
    return or_else(torch.compile(function, dynamic=True), function)


def or_else(fast: Callable[P, R], plain: Callable[P, R]) -> Callable[P, R]:
    """`fast` until its first failure, which is logged, then `plain`. Errors of the device are
    raised."""
    failed = False

    @functools.wraps(plain)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal failed
        if not failed:
            try:
                return fast(*args, **kwargs)
            except (torch.AcceleratorError, torch.cuda.OutOfMemoryError):  # not compiler errors
                raise
            except Exception as error:
                failed = True
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                _log.warning(
                    "%s could not be compiled and runs operation by operation: %s",
                    plain.__name__,
                    reason,
                )
        return plain(*args, **kwargs)

    return call


#: Largest number of threads of a call. SwiGLU by numba takes a half to a third of the time of
#: torch's operations (docs/results/layer.md).
MOST_THREADS = 8


def is_worth_compiling(x: Tensor, tensors: int = 1) -> bool:
    """Whether numba's code is faster on `x` than torch's operations: on a CPU, for enough numbers
    of fp32 or bfloat16. `tensors`: number of operands of the function that `x` contains."""
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.bfloat16, torch.float32)
        and x.numel() >= tensors * ONE_PASS_NUMBERS
    )


def num_parts() -> int:
    """Threads that a call is divided over."""
    return min(torch.get_num_threads(), MOST_THREADS)


def run_in_one_pass(function: str, *arguments: Any) -> None:
    """Run a function of :mod:`moemesh.ops.cpu_kernels`, a share of the rows in every thread.
    Tensors are passed as numpy arrays on their memory. numba is imported at the first call."""
    from moemesh.ops import cpu_kernels

    kernel = getattr(cpu_kernels, function)
    arrays = [memory_of(x) if isinstance(x, Tensor) else x for x in arguments]
    parts = num_parts()
    futures = [_threads().submit(kernel, part, parts, *arrays) for part in range(1, parts)]
    kernel(0, parts, *arrays)
    for future in futures:
        future.result()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS - 1, thread_name_prefix="one-pass")


def memory_of(x: Tensor) -> Any:
    """A numpy array on the memory of `x`; of bfloat16, which numpy lacks, its bits as uint16."""
    x = x.detach()
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
