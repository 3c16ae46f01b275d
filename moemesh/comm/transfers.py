"""Collectives without autograd: what each one does on gloo and on NCCL, and its ledger entry.

`moemesh.comm.collectives` pairs these up for autograd; use them directly only where no gradient may
flow (optimizer states, checkpoints). dim 0 of every tensor is rows; `phase` and `caller` go to the
ledger. Over an axis of size 1 everything is the identity and nothing is entered.

NCCL's own operations are used on NCCL; uneven all_gathers and reduce_scatters, and sums in a tree,
are built on its all_to_all.
What differs from torch's own on gloo, and why (measured with 4 ranks, 32 MiB):

* reduce_scatter is an all-to-all and a local sum in rank order: 0.65 of the time of gloo's own, the
  same bits every time, uneven blocks, and sums of bf16 and fp16 kept in fp32 until the end.
* all_gather is n-1 sends and receives straight into the result: 0.7 of the time of gloo's own,
  uneven blocks, no copies but that of the own block.
* all_to_all is n-1 receives, then n-1 sends. gloo's own posts each send before its receive: a rank
  that comes late then fills the connection with its rows before it announces that it is ready to
  receive, and the two directions of a slow link take turns (docs/results/dispatch.md). For small
  tensors that does not matter, and gloo's own all_to_all takes a third of the processor time: it
  also gathers and reduce-scatters small tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moemesh.comm import staged
from moemesh.comm.mesh import Axis
from moemesh.comm.staged import PendingWork
from moemesh.config.layout import shard_sizes
from moemesh.monitor import progress
from moemesh.monitor.progress import Ticket
from moemesh.ops.exact_experts import tree_sum
from moemesh.trace import wire
from moemesh.trace.wire import WireBytes

# All-gather and all-to-all from single messages, so that both directions of a link are used.


# Tags of the messages inside all_gather and all_to_all, which no other messages on the group of an
# axis have. Messages of one tag between two ranks arrive in the order they were started.
_GATHER_TAG = 7401
_EXCHANGE_TAG = 7402
#: First tag that is free for exchanges that number themselves.
FIRST_FREE_TAG = 1 << 21


def send_and_receive(
    blocks: Sequence[Tensor], into: Sequence[Tensor], axis: Axis, tag: int
) -> PendingWork:
    """Start to receive ``into[i]`` from each rank i, then to send it ``blocks[i]``; both sides skip
    empty blocks. This rank's block is copied, unless its `into` is empty."""
    works: list[Any] = []
    for distance in range(1, axis.size):
        source = (axis.index - distance) % axis.size
        if into[source].numel():
            works.append(staged.receive(into[source], axis, source, tag=tag))
    for distance in range(1, axis.size):
        to = (axis.index + distance) % axis.size
        if blocks[to].numel():
            works.append(staged.send(blocks[to], axis, to, tag=tag))
    if into[axis.index].numel():
        into[axis.index].copy_(blocks[axis.index])
    return PendingWork(works, kept=blocks)


# torch 2.13 renamed these two functions and warns about the old names.
_all_gather_nccl = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_nccl = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# Up to these sizes gloo's own all_to_all is used. All ranks must decide alike: by the bytes of all
# rows if every rank has all block sizes, else by the bytes of one row (rows of weights and of ids
# are short).
_FEW_BYTES = 1 << 16
_SHORT_ROW_BYTES = 64


class Work(Protocol):
    """An asynchronous operation of the backend."""

    def wait(self) -> object: ...


def all_gather(
    x: Tensor, axis: Axis, sizes: Sequence[int] | None = None, *, phase: str, caller: str
) -> Tensor:
    """[own rows, ...] to [all rows, ...] in rank order; `sizes`: each rank's rows, None = equal."""
    return all_gather_start(x, axis, sizes, phase=phase, caller=caller)()


def all_gather_start(
    x: Tensor,
    axis: Axis,
    sizes: Sequence[int] | None = None,
    *,
    into: Tensor | None = None,
    phase: str,
    caller: str,
) -> Callable[[], Tensor]:
    """Asynchronous all_gather: call the returned function exactly once for the result. `into`:
    where it goes, contiguous; `x` may be this rank's rows of it. None makes a new tensor."""
    if axis.size == 1:
        return lambda: x if into is None else into.copy_(x)
    blocks = _blocks(x.shape[0] * axis.size, axis, sizes)
    if x.shape[0] != blocks[axis.index]:
        raise ValueError(f"{caller}: {x.shape[0]} rows, but sizes has {blocks[axis.index]}")
    row_bytes = _row_bytes(x)
    moved = wire.all_gather([rows * row_bytes for rows in blocks], axis.index)
    ticket = record(axis, "all_gather", phase, caller, moved)
    x = x.contiguous()
    gathered = x.new_empty(sum(blocks), *x.shape[1:]) if into is None else into
    if not _is_nccl(axis) and sum(blocks) * row_bytes > _FEW_BYTES:
        parts = _raw(gathered).split(blocks)
        work = send_and_receive([_raw(x)] * axis.size, parts, axis, _GATHER_TAG)
    elif _is_nccl(axis) and len(set(blocks)) == 1:
        work = _all_gather_nccl(_raw(gathered), _raw(x), group=axis.group, async_op=True)
    else:  # small, or uneven on NCCL: an all-to-all that sends the same rows to every rank
        repeated = _raw(x).repeat(axis.size, *(1 for _ in x.shape[1:]))
        inputs = [blocks[axis.index]] * axis.size
        work = staged.all_to_all_single(_raw(gathered), repeated, blocks, inputs, axis)
    return partial(_after, ticket, work, lambda: gathered)


def reduce_scatter(
    x: Tensor, axis: Axis, sizes: Sequence[int] | None = None, *, phase: str, caller: str
) -> Tensor:
    """[all rows, ...] of partial sums to [own rows, ...] summed; `sizes` as in all_gather."""
    return reduce_scatter_start(x, axis, sizes, phase=phase, caller=caller)()


def reduce_scatter_start(
    x: Tensor,
    axis: Axis,
    sizes: Sequence[int] | None = None,
    *,
    in_tree: bool = False,
    in_place: bool = False,
    phase: str,
    caller: str,
) -> Callable[[], Tensor]:
    """Asynchronous reduce_scatter: call the returned function exactly once for the result.
    `in_tree`: added in a balanced binary tree over the ranks, as in :func:`all_reduce_in_tree_`.
    `in_place`: the result may be a view of all received blocks, whose memory it then keeps."""
    if axis.size == 1:
        return lambda: x
    blocks = _blocks(x.shape[0], axis, sizes)
    if x.shape[0] != sum(blocks):
        raise ValueError(f"{caller}: {x.shape[0]} rows, but sizes {blocks} add up to {sum(blocks)}")
    row_bytes = _row_bytes(x)
    moved = wire.reduce_scatter([rows * row_bytes for rows in blocks], axis.index)
    ticket = record(axis, "reduce_scatter", phase, caller, moved)
    x, dtype = x.contiguous(), x.dtype
    num_rows = blocks[axis.index]
    if _is_nccl(axis) and len(set(blocks)) == 1 and not in_tree:
        reduced = x.new_empty(num_rows, *x.shape[1:])
        work = _reduce_scatter_nccl(reduced, x, group=axis.group, async_op=True)
        return partial(_after, ticket, work, lambda: reduced)
    splits = [num_rows] * axis.size
    if _is_nccl(axis) or sum(blocks) * row_bytes <= _FEW_BYTES:
        received = x.new_empty(sum(splits), *x.shape[1:])
        work = staged.all_to_all_single(received, x, splits, blocks, axis)
        parts = list(received.split(splits))
    else:
        splits[axis.index] = 0  # this rank's block is added from `x`, without a copy
        received = x.new_empty(sum(splits), *x.shape[1:])
        parts, sent = list(received.split(splits)), x.split(blocks)
        work = send_and_receive(sent, parts, axis, _EXCHANGE_TAG)
        parts[axis.index] = sent[axis.index]
    if in_tree:
        return partial(_after, ticket, work, lambda: tree_sum(parts))

    def sum_in_rank_order() -> Tensor:
        """16-bit dtypes are summed in fp32 and rounded once."""
        if dtype in (torch.bfloat16, torch.float16):
            total = torch.add(parts[0].float(), parts[1])
        else:
            # The sum of the first two has the same bits in either order.
            into = parts[1 if axis.index == 0 else 0] if in_place else None
            total = torch.add(parts[0], parts[1], out=into)
        for part in parts[2:]:
            total += part
        return total.to(dtype)

    return partial(_after, ticket, work, sum_in_rank_order)


def _after(ticket: Ticket | None, work: Work | None, result: Callable[[], Tensor]) -> Tensor:
    """Wait for `work`; returns ``result()``."""
    assert work is not None
    progress.waiting(ticket)
    work.wait()
    progress.left()
    return result()


def all_reduce(x: Tensor, axis: Axis, *, phase: str, caller: str) -> Tensor:
    """The sum over the axis, on every rank, as a new tensor."""
    if axis.size == 1:
        return x
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce_(total, axis, phase=phase, caller=caller)
    return total


def all_reduce_(
    tensor: Tensor,
    axis: Axis,
    *,
    op: str = "sum",
    caller: str,
    phase: str,
    async_op: bool = False,
) -> Any:
    """Reduce `tensor` over the axis in place; `op`: "sum", "max" or "min". Returns the work to wait
    for when `async_op` (None over an axis of size 1), else None."""
    if axis.size == 1:
        return None
    moved = wire.all_reduce(tensor.numel(), tensor.element_size(), axis.size, axis.index)
    ticket = record(axis, "all_reduce", phase, caller, moved)
    if async_op:
        assert tensor.is_contiguous(), "an asynchronous all_reduce_ needs a contiguous tensor"
        return PendingWork([staged.all_reduce(tensor, _OPS[op], axis)], ticket=ticket)
    dense = tensor.contiguous()
    progress.waiting(ticket)
    staged.all_reduce(dense, _OPS[op], axis).wait()
    progress.left()
    if dense is not tensor:
        tensor.copy_(dense)
    return None


def all_reduce_in_tree_(tensor: Tensor, axis: Axis, *, phase: str, caller: str) -> None:
    """Sum over the axis in place, added in a balanced binary tree over its ranks: the bits of the
    sum depend on the ranks' order alone. A reduce-scatter (as an all-to-all), then an all-gather:
    these send the bytes of a ring, and take longer, because nothing overlaps."""
    if axis.size == 1:
        return
    flat = tensor.view(-1)
    blocks = list(shard_sizes(flat.numel(), axis.size))
    size = blocks[axis.index]
    moved = wire.all_reduce(flat.numel(), flat.element_size(), axis.size, axis.index)
    record(axis, "all_reduce", phase, caller, moved)
    with axis.ledger.paused():
        parts = all_to_all(flat, axis, blocks, [size] * axis.size, phase=phase, caller=caller)
        total = tree_sum(parts.split(size)) if size else parts
        flat.copy_(all_gather(total, axis, blocks, phase=phase, caller=caller))


def all_to_all(
    x: Tensor,
    axis: Axis,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    *,
    phase: str,
    caller: str,
) -> Tensor:
    """`input_splits[i]` rows go to rank i, `output_splits[i]` come from it; None = equal splits."""
    return all_to_all_start(x, axis, input_splits, output_splits, phase=phase, caller=caller)()


def all_to_all_start(
    x: Tensor,
    axis: Axis,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    *,
    phase: str,
    caller: str,
) -> Callable[[], Tensor]:
    """Asynchronous all_to_all: call the returned function exactly once for the result."""
    if axis.size == 1:
        return lambda: x
    if (input_splits is None) != (output_splits is None):
        raise ValueError(f"{caller}: give both input_splits and output_splits, or neither")
    inputs = _blocks(x.shape[0], axis, input_splits)
    outputs = inputs if output_splits is None else _blocks(0, axis, output_splits)
    if sum(inputs) != x.shape[0]:
        raise ValueError(
            f"{caller}: {x.shape[0]} rows, but input_splits {inputs} add up to {sum(inputs)}"
        )
    row_bytes = _row_bytes(x)
    moved = wire.all_to_all(
        [rows * row_bytes for rows in inputs], [rows * row_bytes for rows in outputs], axis.index
    )
    ticket = record(axis, "all_to_all", phase, caller, moved)
    received, x = x.new_empty(sum(outputs), *x.shape[1:]), x.contiguous()
    is_small = row_bytes <= _SHORT_ROW_BYTES
    if input_splits is None:
        is_small = sum(inputs) * row_bytes <= _FEW_BYTES
    if _is_nccl(axis) or is_small:
        work = staged.all_to_all_single(_raw(received), _raw(x), outputs, inputs, axis)
    else:
        sent, parts = _raw(x).split(inputs), _raw(received).split(outputs)
        work = send_and_receive(sent, parts, axis, _EXCHANGE_TAG)
    return partial(_after, ticket, work, lambda: received)


def exchange_start(
    x: Tensor,
    into: Tensor,
    axis: Axis,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    *,
    tag: int,
) -> Work | None:
    """all_to_all into a preallocated tensor; the caller records it in the ledger. On gloo exchanges
    of different `tag` (at most 2^20) may be started in any order, by any thread; NCCL has no tags:
    all ranks must start them in one order."""
    if axis.size == 1:
        into.copy_(x)
        return None
    x = _raw(x.contiguous())
    inputs, outputs = list(input_splits), list(output_splits)
    if _is_nccl(axis):
        return staged.all_to_all_single(_raw(into), x, outputs, inputs, axis)
    sent, parts = x.split(inputs), _raw(into).split(outputs)
    return send_and_receive(sent, parts, axis, tag + FIRST_FREE_TAG)


def broadcast(x: Tensor, axis: Axis, source_index: int, *, phase: str, caller: str) -> Tensor:
    """The tensor of rank `source_index` on every rank; `x` gives shape and dtype on the others."""
    if axis.size == 1:
        return x
    num_bytes = x.numel() * x.element_size()
    moved = wire.broadcast(num_bytes, axis.size, axis.index, source_index)
    ticket = record(axis, "broadcast", phase, caller, moved)
    is_source = axis.index == source_index
    copy = torch.empty_like(x, memory_format=torch.contiguous_format)
    if is_source:
        copy.copy_(x)
    progress.waiting(ticket)
    staged.broadcast(_raw(copy), axis, source_index)
    progress.left()
    return copy


def record(
    axis: Axis,
    op: str,
    phase: str,
    caller: str,
    moved: WireBytes,
    *,
    pair: tuple[int, int] | None = None,
) -> Ticket | None:
    """Enter one operation in the ledger of `axis` and in this rank's progress record. Returns the
    ticket for :func:`moemesh.monitor.progress.waiting`. `pair`: (source, destination) of a message
    (:func:`pair_of`); None for a collective."""
    axis.ledger.record(axis=axis.name, op=op, phase=phase, caller=caller, **moved._asdict())
    if pair is not None:
        return progress.entered(op, axis.name, caller, pair, moved.payload_bytes, separator=">")
    return progress.entered(op, axis.name, caller, axis.ranks, moved.payload_bytes)


@cache
def pair_of(source: int, destination: int) -> tuple[int, int]:
    """(source, destination) as global ranks: always the same object for the same pair, by which
    :func:`moemesh.monitor.progress.entered` identifies a group."""
    return source, destination


def equal_blocks(num_rows: int, axis: Axis) -> list[int]:
    """Rows of each rank, equally many. Raises ValueError if the ranks do not divide `num_rows`."""
    if num_rows % axis.size:
        raise ValueError(
            f"{num_rows} rows do not divide evenly over {axis.name} ({axis.size} ranks): give sizes"
        )
    return [num_rows // axis.size] * axis.size


def _blocks(num_rows: int, axis: Axis, sizes: Sequence[int] | None) -> list[int]:
    """`sizes`, checked to have one per rank; None divides `num_rows` equally."""
    if sizes is None:
        return equal_blocks(num_rows, axis)
    if len(sizes) != axis.size:
        raise ValueError(f"{len(sizes)} sizes {list(sizes)} for {axis.size} ranks of {axis.name}")
    return [int(size) for size in sizes]


def _raw(x: Tensor) -> Tensor:
    """`x` as the backends accept it: float8 travels as bytes."""
    return x.view(torch.uint8) if x.is_floating_point() and x.element_size() == 1 else x


def _row_bytes(x: Tensor) -> int:
    """Bytes of one row of `x`, which may have no rows."""
    return x.shape[1:].numel() * x.element_size()


def _is_nccl(axis: Axis) -> bool:
    return axis.backend == "nccl"
