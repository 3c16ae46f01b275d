"""A mode for float64 runs: modelling code that casts to float32 computes in float64 instead.

Norms, rotary positions and routers of transformers cast by ``.float()`` or
``dtype=torch.float32``. A float64 run would round there to 24 bits, and layouts differ by 1e-7.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_SHORT = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = ("float", "half", "bfloat16")


class Float64(TorchFunctionMode):
    """Inside, every shorter floating dtype that a call names is replaced by float64, but for
    ``torch.finfo``; ``type_as`` keeps the dtype of its tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "finfo":
            return func(*args, **kwargs)
        if name in _CASTS and len(args) == 1 and isinstance(args[0], torch.Tensor):
            return args[0].double()
        if name == "type_as":
            return args[0]
        args = tuple(map(_longest, args))
        return func(*args, **{key: _longest(value) for key, value in kwargs.items()})


def _longest(value: Any) -> Any:
    is_short = isinstance(value, torch.dtype) and value in _SHORT
    return torch.float64 if is_short else value


def exactly(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """:class:`Float64` for a float64 model, no mode for others."""
    return Float64() if dtype == torch.float64 else nullcontext()
