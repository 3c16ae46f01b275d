"""Pointwise functions as one kernel: by ``torch.compile`` on a device, by numba on a CPU.

On an accelerator every operation is a kernel, a launch of a few microseconds and a pass over the
numbers. A chain of pointwise operations, a sum over rows at its end included, compiles into one.
That needs Triton, which the CUDA builds of torch bring along. On a CPU ``torch.compile`` would need
a C++ compiler at run time, and seconds at every start: there :mod:`moemesh.ops.cpu_kernels` has the
functions that pay, for enough numbers; a call is divided over torch's threads.
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
    """`function` of tensors, the first argument one of them, compiled where that is possible. It
    must be functional: read its arguments, write none, and be the same for every number of rows."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor)
        # Torch would compile separately for zero rows and for one, in the middle of a run.
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
    """`fast` until it fails for the first time, then `plain` for good."""
    failed = False

    @functools.wraps(plain)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal failed
        if not failed:
            try:
                return fast(*args, **kwargs)
            except (torch.AcceleratorError, torch.cuda.OutOfMemoryError):  # not the compiler
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


#: Most threads of a call; one does as much as three of torch's (docs/results/layer.md).
MOST_THREADS = 8


def is_worth_compiling(x: Tensor, tensors: int = 1) -> bool:
    """Whether numba's code is faster than torch's operations on a CPU tensor of the size of
    `tensors` operands of the function together."""
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.bfloat16, torch.float32)
        and x.numel() >= tensors * ONE_PASS_NUMBERS
    )


def num_parts() -> int:
    """Threads that a call is divided over."""
    return min(torch.get_num_threads(), MOST_THREADS)


def run_in_one_pass(function: str, *arguments: Any) -> None:
    """Run a function of :mod:`moemesh.ops.cpu_kernels`: every thread does a share of the rows.
    Tensors go as numpy's arrays of the same memory. numba is imported at the first call."""
    from moemesh.ops import cpu_kernels

    kernel = getattr(cpu_kernels, function)
    given = [memory_of(one) if isinstance(one, Tensor) else one for one in arguments]
    parts = num_parts()
    others = [_threads().submit(kernel, part, parts, *given) for part in range(1, parts)]
    kernel(0, parts, *given)
    for other in others:
        other.result()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS - 1, thread_name_prefix="one-pass")


def memory_of(x: Tensor) -> Any:
    """The same memory for numpy, which knows no bfloat16: its bits."""
    x = x.detach()
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
