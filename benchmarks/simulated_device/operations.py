"""Operations of ATen on the simulated device: how they compute, and what is counted of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from benchmarks.simulated_device.counts import Kernel, bytes_of, current, line, tensors_of
from moemesh.ops.attention import Partial, block_backward_reference, block_forward_reference

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
NO_KERNEL = {
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


def count(func: Any, name: str, args: Any, kwargs: Any, found: Any) -> None:
    """Enter one operation: a wait, an exchange, or a kernel."""
    if not current:
        return
    device = current[-1]
    if func.namespace == "c10d":
        return  # entered where it is called (exchanges.py)
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
        device.is_inside
        or name in NO_KERNEL
        or func.is_view
        or name in ("_local_scalar_dense", "split_with_sizes")
    ):
        return
    num_bytes, dtype = bytes_moved(name, args, kwargs, found)
    device.queue(Kernel(name, flops_of(func, args, kwargs, found), num_bytes, dtype, line()))


def bytes_moved(name: str, args: Any, kwargs: Any, found: Any) -> tuple[int, torch.dtype]:
    """Bytes of the inputs and outputs of an operation, and the dtype that it computes in."""
    outputs = list(tensors_of(found))
    if name.startswith(("new_", "zeros_like", "ones_like", "full_like")):
        args, kwargs = (), {}  # of their argument they take shape and device
    written = [kwargs[key] for key in ("out", "grad_input") if isinstance(kwargs.get(key), Tensor)]
    inputs = [x for x in tensors_of((args, kwargs)) if all(x is not y for y in written)]
    num_bytes = sum(map(bytes_of, inputs)) + sum(map(bytes_of, outputs))
    dtype = next((x.dtype for x in (*outputs, *inputs) if x.is_floating_point()), torch.int64)
    return num_bytes, dtype


def flops_of(func: Any, args: Any, kwargs: Any, found: Any) -> int:
    """Floating-point operations by torch's formulas; 0 for what has none."""
    if func.overloadpacket is _aten._grouped_mm:
        a, b = args[0], args[1]
        return 2 * math.prod(a.shape) * b.shape[-1]
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return 0
    shapes: Any = tree_map_only(Tensor, lambda x: x, (args, kwargs))
    return int(formula(*shapes[0], **shapes[1], out_val=found))


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


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, *args: Any) -> Tensor:
    y = _aten._grouped_mm(a, b, offs, *args)
    if offs is not None and a.dim() == 2 and b.dim() == 3:
        # Rows behind the last group: a device leaves there what was in memory.
        y[int(offs[-1]) :] = torch.nan
    return y


def _rows_of(starts: Tensor) -> list[slice]:
    assert starts.dtype == torch.int32, "the kernel takes int32"
    return [slice(*pair) for pair in pairwise(starts.tolist())]


def _seen(size: int, left: int) -> Tensor:
    """Which keys a query of a document sees, itself and up to `left` (-1: all) before it."""
    seen = torch.ones(1, size, size, dtype=torch.bool).tril()
    return seen if left < 0 else seen.triu(-left)


def _documents_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *_: Any, **options: Any
) -> tuple[Any, ...]:
    assert query.dtype in (torch.float16, torch.bfloat16) and len(query), "flash refuses these"
    assert query.shape[-1] == value.shape[-1] and query.stride(-1) == 1
    y, lse = torch.empty_like(query), query.new_empty(query.shape[1::-1], dtype=torch.float32)
    for rows in _rows_of(starts):
        one = (x[rows].transpose(0, 1)[None] for x in (query, key, value))
        seen = _seen(rows.stop - rows.start, options["window_size_left"])
        found = block_forward_reference(*one, seen, scale=options["scale"])
        y[rows], lse[:, rows] = found.y_BNSD[0].transpose(0, 1).to(y.dtype), found.lse_BNS[0]
    empty = query.new_empty(0)
    return y, lse, empty, empty, empty


def _documents_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    y: Tensor,
    lse: Tensor,
    starts: Tensor,
    *_: Any,
    **options: Any,
) -> tuple[Tensor, ...]:
    assert gradient.dtype == y.dtype == query.dtype and lse.is_contiguous()
    total = tuple(torch.empty_like(x) for x in (query, key, value))
    for rows in _rows_of(starts):
        one, (own, *rest) = (
            [x[rows].transpose(0, 1)[None] for x in group]
            for group in ((gradient, y), (query, key, value))
        )
        seen = _seen(rows.stop - rows.start, options["window_size_left"])
        whole = Partial(one[1], lse[None, :, rows])
        found = block_backward_reference(one[0], whole, own, *rest, seen, scale=options["scale"])
        for into, x in zip(total, found, strict=True):
            into[rows] = x[0].transpose(0, 1)
    return total


SUBSTITUTES: dict[str, Callable[..., Any]] = {
    "histc": _histc,
    "_grouped_mm": _grouped_mm,
    "_flash_attention_forward": _documents_attention,
    "_flash_attention_backward": _documents_attention_backward,
    "_scaled_dot_product_flash_attention": _flash_attention,
    "_scaled_dot_product_flash_attention_backward": _flash_attention_backward,
}
