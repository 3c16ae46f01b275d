"""Tensors of the simulated device: Python sees ``cuda:0``, autograd's engine the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from benchmarks.simulated_device.backward import backward, grad
from benchmarks.simulated_device.counts import (
    Kernel,
    bytes_of,
    count_wait,
    current,
    line,
    tensors_of,
)
from benchmarks.simulated_device.operations import NO_KERNEL, SUBSTITUTES, count
from benchmarks.simulated_device.streams import CUDA

_CPU = torch.device("cpu")


class MixedDevices(RuntimeError):
    """An operation was given a tensor of the device and one of the CPU."""


class DeviceTensor(Tensor):
    """A tensor of the simulated device; `numbers` is its memory."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(  # pyright: ignore
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            layout=numbers.layout,
            device="cpu",  # with "cuda" the engine of autograd asks for an accelerator
            requires_grad=False,
        )
        made.numbers = numbers
        return made

    def __repr__(self, *_: object, **__: object) -> str:
        return f"{self.numbers.__repr__()[:-1]}, device='cuda:0')"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _on_device, (self.numbers, self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceTensor:
        copied = _on_device(self.numbers.clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _on_device(numbers: Tensor, requires_grad: bool = False) -> DeviceTensor:
    return DeviceTensor(numbers.detach()).requires_grad_(requires_grad)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation of ATen, or of c10d, on the numbers."""
    if func.namespace == "c10d" and current and current[-1].is_shared:
        raise RuntimeError(f"{func}: gloo does not move tensors of a device")
    wrappers: dict[int, DeviceTensor] = {}
    host: list[Tensor] = []

    def unwrap(x: Tensor) -> Tensor:
        if isinstance(x, DeviceTensor):
            wrappers[id(x.numbers)] = x
            return x.numbers
        host.append(x)
        return x

    own_args, own_kwargs = tree_map_only(Tensor, unwrap, (args, kwargs))
    name = func._schema.name.partition("::")[2]
    if name == "copy_" or name == "_to_copy":
        _count_copy(args, kwargs, host)
    elif any(x.dim() for x in host):
        _refuse_host(func, name, host)
    if kwargs.get("device") is not None:
        own_kwargs["device"] = _CPU
    found = SUBSTITUTES.get(name, func)(*own_args, **own_kwargs)

    def wrap(x: Tensor) -> Tensor:
        # An operation in place gives back what it was given.
        return wrappers[id(x)] if id(x) in wrappers else DeviceTensor(x)

    wrapped = tree_map_only(Tensor, wrap, found)
    count(func, name, own_args, own_kwargs, found)
    return wrapped


def _refuse_host(func: Any, name: str, host: list[Tensor]) -> None:
    # Places may be on the CPU: torch copies them to the device, and waits.
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        count_wait(f"{name}: places from the CPU")
        return
    if _is_autograd(sys._getframe(3)) and not any(x.any() for x in host):
        return  # zeros that autograd makes for a missing gradient: it believes in the CPU
    shapes = ", ".join(str(list(x.shape)) for x in host if x.dim())
    raise MixedDevices(f"{func}: given tensors of the device and of the CPU ({shapes}), {line()}")


def _is_autograd(frame: FrameType) -> bool:
    """Whether an operation comes from the engine's own code and not from a Function of Python."""
    return Path(frame.f_code.co_filename).name in ("graph.py", "backward.py")


def _count_copy(args: Any, kwargs: dict[str, Any], host: list[Tensor]) -> None:
    """A copy between the device and the CPU makes the host wait unless it is asynchronous."""
    if host and not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking"):
        is_download = not isinstance(args[0], DeviceTensor)
        count_wait("copy to the CPU" if is_download else "copy from the CPU")


# What Python sees of a tensor of the device.


class _Move(torch.autograd.Function):
    """Between the CPU and the device; the gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_asynchronous: bool) -> Tensor:
        to_host = isinstance(x, DeviceTensor)
        ctx.is_asynchronous = is_asynchronous
        if x.dim() == 0 and not to_host and not is_asynchronous:
            count_wait("copy from the CPU")
        elif not is_asynchronous:
            count_wait("copy to the CPU" if to_host else "copy from the CPU")
        return x.numbers.clone() if isinstance(x, DeviceTensor) else DeviceTensor(x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Move.apply(gradient, ctx.is_asynchronous), None


def _kind(device: Any) -> str:
    return "cuda" if isinstance(device, int) else torch.device(device).type


def _to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``Tensor.to`` in all its forms."""
    device, dtype, rest = kwargs.pop("device", None), kwargs.pop("dtype", None), list(args)
    if rest and isinstance(rest[0], Tensor):
        other = rest.pop(0)
        device, dtype = other.device, other.dtype
    elif rest and (rest[0] is None or isinstance(rest[0], (torch.device, str, int))):
        device = rest.pop(0)
    if rest and isinstance(rest[0], torch.dtype):
        dtype = rest.pop(0)
    flags = dict(zip(("non_blocking", "copy"), rest, strict=False)) | kwargs
    is_asynchronous = bool(flags.pop("non_blocking", False))
    moved = x
    if device is not None and _kind(device) != "meta" and _kind(device) != x.device.type:
        moved = _Move.apply(x, is_asynchronous)
    elif device is not None and _kind(device) == "meta":
        return torch.empty(x.shape, dtype=dtype or x.dtype, device="meta")
    with torch._C.DisableTorchFunctionSubclass():
        if dtype is None and not flags:
            return moved
        return Tensor.to(moved, dtype or moved.dtype, **flags)


def _cpu(x: Tensor, **_: Any) -> Tensor:
    return _to(x, "cpu")


def _cuda(x: Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> Tensor:
    return _to(x, "cuda", non_blocking=non_blocking)


def _tolist(x: DeviceTensor) -> Any:
    count_wait("tolist")
    return x.numbers.tolist()


def _numpy(x: DeviceTensor, **_: Any) -> Any:
    raise TypeError(f"can't convert cuda:0 device type tensor to numpy, {line()}")


def _set_data(x: DeviceTensor, value: Tensor) -> None:
    assert isinstance(value, DeviceTensor), "data of another device"
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.data.__set__(x, value)  # pyright: ignore
    x.numbers = value.numbers


_make_grads = torch.autograd._make_grads  # pyright: ignore


def make_device_grads(outputs: Any, grads: Any, is_grads_batched: bool) -> tuple[Any, ...]:
    """The gradient 1 of a root is where the root is."""
    found = _make_grads(outputs, grads, is_grads_batched)

    def place(root: Any, gradient: Any) -> Any:
        # A root that is an edge of the graph has forgotten its tensor: it was one of ours.
        is_ours = not isinstance(root, Tensor) and isinstance(gradient, Tensor)
        return DeviceTensor(gradient) if is_ours and type(gradient) is Tensor else gradient

    return tuple(place(*pair) for pair in zip(outputs, found, strict=True))


_ANSWERS: dict[Any, Callable[..., Any]] = {
    Tensor.device.__get__: lambda x: CUDA if isinstance(x, DeviceTensor) else _CPU,  # pyright: ignore
    Tensor.is_cuda.__get__: lambda x: True,  # pyright: ignore
    Tensor.is_cpu.__get__: lambda x: False,  # pyright: ignore
    Tensor.get_device: lambda x: 0,
    Tensor.to: _to,
    Tensor.cpu: _cpu,
    Tensor.cuda: _cuda,
    Tensor.tolist: _tolist,
    Tensor.numpy: _numpy,
    Tensor.data_ptr: lambda x: x.numbers.data_ptr(),
    Tensor.untyped_storage: lambda x: x.numbers.untyped_storage(),
    Tensor.is_pinned: lambda x, *a: False,
    Tensor.__repr__: lambda x, **_: DeviceTensor.__repr__(x),
    Tensor.__deepcopy__: lambda x, memo: DeviceTensor.__deepcopy__(x, memo),
    Tensor.data.__set__: _set_data,  # pyright: ignore
    Tensor.backward: backward,
    torch.autograd.backward: backward,
    torch.autograd.grad: grad,
}


class Factories(TorchFunctionMode):
    """Makes what is asked for on "cuda" on the CPU, and wraps it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.pin_memory:
            return args[0]
        if func in (Tensor.to, Tensor.cuda):
            return _ANSWERS[func](*args, **kwargs)
        if func in (Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            with self:  # a mode is off in its own handler, and a backward makes tensors, too
                return _ANSWERS[func](*args, **kwargs)
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if device is None or _kind(device) != "cuda":
            return func(*args, **kwargs)
        if any(isinstance(x, DeviceTensor) for x in tensors_of((args, kwargs))):
            del kwargs["device"]  # new_zeros and its like: where their tensor is
            return func(*args, **kwargs)
        kwargs["device"] = _CPU
        requires_grad = bool(kwargs.pop("requires_grad", False))
        made = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("tensor", "as_tensor", "asarray", "from_numpy"):
            count_wait(f"torch.{name} from the CPU")
        elif current and name not in NO_KERNEL:
            current[-1].queue(Kernel(name, 0, bytes_of(made), made.dtype, line()))
        return DeviceTensor(made).requires_grad_(requires_grad)
