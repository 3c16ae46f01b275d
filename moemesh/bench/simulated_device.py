"""A simulated CUDA device: tensors say ``cuda:0``, are on the CPU, and what they do is counted.

    with SimulatedDevice() as device:
        x = torch.randn(8, 8, device="cuda")
        with device.region("forward"):
            y = x @ x
    device.totals("forward").kernels      # 1

Code runs the branches of an accelerator without one. A tensor is a wrapper: Python sees the device,
torch's autograd engine the CPU, which is why it needs no accelerator. Counted are

* *kernels*: operations of ATen that are no view and allocate more than they compute. A bound from
  above of what a device launches, but for operations that a library cuts in several kernels;
* *bytes*: inputs and outputs of each, which a device whose memory bounds it moves;
* *waits*: operations for which the host waits until the device has done all that was queued:
  numbers read by the host, sizes that depend on data, copies between the device and memory that is
  not pinned, each with the line that caused it.

An operation on a device tensor and a tensor of the CPU of more than 0 dims raises
:class:`MixedDevices`, as it does on a real device. Collectives run through the process group of the
CPU (gloo) on the numbers themselves.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from moemesh.ops import host_copy

#: What every simulated tensor answers.
CUDA = torch.device("cuda", 0)

_CPU = torch.device("cpu")
_aten = torch.ops.aten
#: The host reads a number, or learns a size.
_WAITING = {
    "_local_scalar_dense",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "nonzero_numpy",
    "unique_consecutive",
    "unique_dim",
    "_unique",
    "_unique2",
}
#: No work on a device: memory, metadata, random seeds.
_NO_KERNEL = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_to_copy_nothing",
    "lift_fresh",
    "detach",
    "detach_",
    "alias",
    "is_same_size",
    "record_stream",
    "resize_",
}
#: Files of this package that are never the cause of a wait: their callers are.
_OWN_FILES = {__file__, host_copy.__file__}


class MixedDevices(RuntimeError):
    """An operation was given a tensor of the device and one of the CPU."""


class Kernel(NamedTuple):
    """One operation: its name in ATen, floating-point operations, bytes, the dtype it computes in,
    and the line of Python that launched it."""

    name: str
    flops: int
    bytes: int
    dtype: torch.dtype
    line: str


class Wait(NamedTuple):
    """Why the host waited, and the line of Python that made it."""

    why: str
    line: str


@dataclass
class Totals:
    """Of one region."""

    launched: list[Kernel] = field(default_factory=list)
    waited: list[Wait] = field(default_factory=list)
    #: Collectives and messages, which are no kernels of ours.
    exchanged: list[str] = field(default_factory=list)

    @property
    def kernels(self) -> int:
        return len(self.launched)

    @property
    def bytes(self) -> int:
        return sum(kernel.bytes for kernel in self.launched)

    @property
    def waits(self) -> int:
        return len(self.waited)


class _State(threading.local):
    """Which device counts in this thread."""

    device: SimulatedDevice | None = None


_state = _State()
#: Threads that a run starts count for the device that is on.
_current: list[SimulatedDevice] = []


class SimulatedDevice:
    """See the module. A context manager; one at a time in a process."""

    def __init__(
        self,
        *,
        capability: tuple[int, int] = (9, 0),
        num_devices: int = 8,
        fuses: bool = True,
    ) -> None:
        """`capability` and `num_devices` are what ``torch.cuda`` answers. `fuses`: what torch would
        compile (:mod:`moemesh.ops.fusion`) counts as one kernel that reads its arguments and writes
        its results, else operation by operation."""
        self.fuses = fuses
        self.capability, self.num_devices = capability, num_devices
        self.regions: dict[str, Totals] = {}
        self._region, self._is_inside = "", False
        self._stack = ExitStack()

    def __enter__(self) -> SimulatedDevice:
        assert not _current, "one simulated device at a time"
        _current.append(self)
        self._stack.callback(_current.clear)
        for target, name, value in self._answers():
            self._stack.enter_context(mock.patch.object(target, name, value))
        # Module.to must make parameters anew: those of the CPU cannot become wrappers.
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self._stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        self._stack.enter_context(_Factories())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def region(self, name: str) -> Generator[Totals]:
        """Count under this name until the end; regions of one name add up."""
        before, self._region = self._region, name
        try:
            yield self.totals(name)
        finally:
            self._region = before

    def totals(self, name: str) -> Totals:
        """What was counted in the regions of this name."""
        return self.regions.setdefault(name, Totals())

    @property
    def here(self) -> Totals:
        """The region that is counted in now."""
        return self.totals(self._region)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What stands for ``torch.compile(function)``."""
        if not self.fuses:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            self._is_inside = True
            try:
                found = function(*args, **kwargs)
            finally:
                self._is_inside = False
            touched = list(_tensors((args, kwargs, found)))
            num_bytes = sum(_bytes(x.numbers) for x in touched if isinstance(x, DeviceTensor))
            kernel = Kernel(function.__name__, 0, num_bytes, touched[0].dtype, _line())
            self.here.launched.append(kernel)
            return found

        return call

    def wait(self, why: str) -> None:
        """Count a wait that the calling line causes."""
        self.here.waited.append(Wait(why, _line()))

    def _answers(self) -> list[tuple[Any, str, Any]]:
        """What ``torch.cuda`` and the process groups answer meanwhile."""
        from moemesh.comm.mesh import Axis
        from moemesh.ops import fusion

        cuda: Any = torch.cuda
        return [
            (torch.autograd, "_make_grads", _make_device_grads),
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
            (cuda, "Stream", Stream),
            (cuda, "stream", lambda stream: contextlib.nullcontext()),
            (cuda, "Event", Event),
            (fusion, "compiled", self.compiled),
            # As NCCL moves them: what is sent is the same on gloo.
            (Axis, "backend", property(lambda axis: "nccl")),
        ]


class Stream:
    """A stream of which every operation has been done."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device = CUDA

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        _count_wait("Stream.synchronize")


class Event:
    """An event that has happened."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _count_wait("Event.synchronize")


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
    found = _SUBSTITUTES.get(name, func)(*own_args, **own_kwargs)

    def wrap(x: Tensor) -> Tensor:
        # An operation in place gives back what it was given.
        return wrappers[id(x)] if id(x) in wrappers else DeviceTensor(x)

    wrapped = tree_map_only(Tensor, wrap, found)
    _count(func, name, own_args, own_kwargs, found)
    return wrapped


# Operations that torch has for CUDA only, computed by their siblings for the CPU.


def _histc(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    wide = x if x.is_floating_point() else x.double()
    return _aten.histc(wide, *args, **kwargs).to(x.dtype)


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    assert query.dtype in (torch.float16, torch.bfloat16) and len(query), "flash refuses these"
    y, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, scale=scale
    )
    empty = query.new_empty(0)
    return y, lse, None, None, query.shape[2], key.shape[2], empty, empty, empty


def _flash_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    y: Tensor,
    lse: Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: Any,
    max_k: Any,
    dropout_p: float,
    is_causal: bool,
    *_: Any,
    scale: float | None = None,
) -> Any:
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, y, lse, dropout_p, is_causal, scale=scale
    )


_SUBSTITUTES: dict[str, Callable[..., Any]] = {
    "histc": _histc,
    "_scaled_dot_product_flash_attention": _flash_attention,
    "_scaled_dot_product_flash_attention_backward": _flash_attention_backward,
}


def _refuse_host(func: Any, name: str, host: list[Tensor]) -> None:
    # Places may be on the CPU: torch copies them to the device, and waits.
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        _count_wait(f"{name}: places from the CPU")
        return
    shapes = ", ".join(str(list(x.shape)) for x in host if x.dim())
    raise MixedDevices(f"{func}: given tensors of the device and of the CPU ({shapes}), {_line()}")


def _count_copy(args: Any, kwargs: dict[str, Any], host: list[Tensor]) -> None:
    """A copy between the device and the CPU makes the host wait unless it is asynchronous."""
    if host and not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking"):
        is_download = not isinstance(args[0], DeviceTensor)
        _count_wait("copy to the CPU" if is_download else "copy from the CPU")


def _count(func: Any, name: str, args: Any, kwargs: Any, found: Any) -> None:
    if not _current:
        return
    device = _current[-1]
    if func.namespace == "c10d":
        device.here.exchanged.append(name)
        return
    if name in _WAITING:
        device.wait(name)
    elif name in ("index", "index_put", "index_put_") and any(
        isinstance(place, Tensor) and place.dtype in (torch.bool, torch.uint8) for place in args[1]
    ):
        device.wait(f"{name} with a mask")
    elif name == "repeat_interleave" and kwargs.get("output_size") is None:
        device.wait("repeat_interleave without output_size")
    elif name == "_grouped_mm" and args[0].dtype != torch.bfloat16:
        # The fallback loops over the groups, whose ends it copies to the host.
        device.wait(f"grouped_mm of {str(args[0].dtype).removeprefix('torch.')}")
    if (
        device._is_inside
        or name in _NO_KERNEL
        or func.is_view
        or name in ("_local_scalar_dense", "split_with_sizes")
    ):
        return
    outputs = list(_tensors(found))
    if name.startswith(("new_", "zeros_like", "ones_like", "full_like")):
        args, kwargs = (), {}  # of their argument they take shape and device
    written = [kwargs[key] for key in ("out", "grad_input") if isinstance(kwargs.get(key), Tensor)]
    inputs = [x for x in _tensors((args, kwargs)) if all(x is not y for y in written)]
    num_bytes = sum(map(_bytes, inputs)) + sum(map(_bytes, outputs))
    dtype = next((x.dtype for x in (*outputs, *inputs) if x.is_floating_point()), torch.int64)
    device.here.launched.append(
        Kernel(name, _flops(func, args, kwargs, found), num_bytes, dtype, _line())
    )


def _flops(func: Any, args: Any, kwargs: Any, found: Any) -> int:
    if func.overloadpacket is _aten._grouped_mm:
        a, b = args[0], args[1]
        return 2 * math.prod(a.shape) * b.shape[-1]
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return 0
    shapes: Any = tree_map_only(Tensor, lambda x: x, (args, kwargs))
    return int(formula(*shapes[0], **shapes[1], out_val=found))


def _tensors(tree: Any) -> Iterable[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
    elif isinstance(tree, (list, tuple)):
        for one in tree:
            yield from _tensors(one)


def _bytes(x: Tensor) -> int:
    """Of the numbers that are there: an expanded dim repeats them."""
    sizes = [size for size, step in zip(x.shape, x.stride(), strict=True) if step or size == 0]
    return math.prod(sizes) * x.element_size()


def _count_wait(why: str) -> None:
    if _current:
        _current[-1].wait(why)


def _line() -> str:
    """The innermost line outside of torch and of this file."""
    frame = sys._getframe(1)
    torch_root = str(Path(torch.__file__).parent)
    while frame is not None:
        name = frame.f_code.co_filename
        is_ours = name in _OWN_FILES or "/contextlib.py" in name
        if not is_ours and not name.startswith((torch_root, "<")):
            return f"{'/'.join(Path(name).parts[-3:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


# What Python sees of a tensor of the device.


class _Move(torch.autograd.Function):
    """Between the CPU and the device; the gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_asynchronous: bool) -> Tensor:
        to_host = isinstance(x, DeviceTensor)
        ctx.is_asynchronous = is_asynchronous
        if x.dim() == 0 and not to_host and not is_asynchronous:
            _count_wait("copy from the CPU")
        elif not is_asynchronous:
            _count_wait("copy to the CPU" if to_host else "copy from the CPU")
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
    _count_wait("tolist")
    return x.numbers.tolist()


def _numpy(x: DeviceTensor, **_: Any) -> Any:
    raise TypeError(f"can't convert cuda:0 device type tensor to numpy, {_line()}")


def _set_data(x: DeviceTensor, value: Tensor) -> None:
    assert isinstance(value, DeviceTensor), "data of another device"
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.data.__set__(x, value)  # pyright: ignore
    x.numbers = value.numbers


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
    **given: Any,
) -> None:
    """``Tensor.backward`` and ``torch.autograd.backward``, which would run the backward with
    :meth:`DeviceTensor.__torch_function__` off."""
    roots, chosen = _sequence(tensors), () if inputs is None else _sequence(inputs)
    grads = _sequence(given.get("gradient", grad_tensors))
    grads = grads if len(grads) == len(roots) else (None,) * len(roots)
    torch.autograd.Variable._execution_engine.run_backward(  # pyright: ignore
        roots,
        torch.autograd._make_grads(roots, grads, is_grads_batched=False),  # pyright: ignore
        bool(retain_graph or create_graph),
        create_graph,
        chosen,
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _sequence(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (list, tuple)) else (x,)


def _grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad``, as :func:`_backward`."""
    roots, grads = _sequence(outputs), _sequence(grad_outputs)
    grads = grads if len(grads) == len(roots) else (None,) * len(roots)
    return torch.autograd.Variable._execution_engine.run_backward(  # pyright: ignore
        roots,
        torch.autograd._make_grads(roots, grads, is_grads_batched=False),  # pyright: ignore
        bool(retain_graph or create_graph),
        create_graph,
        _sequence(inputs),
        bool(allow_unused),
        accumulate_grad=False,
    )


_make_grads = torch.autograd._make_grads  # pyright: ignore


def _make_device_grads(outputs: Any, grads: Any, is_grads_batched: bool) -> tuple[Any, ...]:
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
    Tensor.backward: _backward,
    torch.autograd.backward: _backward,
    torch.autograd.grad: _grad,
}


class _Factories(TorchFunctionMode):
    """Makes what is asked for on "cuda" on the CPU, and wraps it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.pin_memory:
            return args[0]
        if func in (Tensor.to, Tensor.cuda):
            return _ANSWERS[func](*args, **kwargs)
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if device is None or _kind(device) != "cuda":
            return func(*args, **kwargs)
        if any(isinstance(x, DeviceTensor) for x in _tensors((args, kwargs))):
            del kwargs["device"]  # new_zeros and its like: where their tensor is
            return func(*args, **kwargs)
        kwargs["device"] = _CPU
        requires_grad = bool(kwargs.pop("requires_grad", False))
        made = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("tensor", "as_tensor", "asarray", "from_numpy"):
            _count_wait(f"torch.{name} from the CPU")
        elif _current and name not in _NO_KERNEL:
            _current[-1].here.launched.append(Kernel(name, 0, _bytes(made), made.dtype, _line()))
        return DeviceTensor(made).requires_grad_(requires_grad)
