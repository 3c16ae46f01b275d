"""Collectives as autograd pairs: each names its axis, states its pair, and enters the ledger.

Dim 0 of every tensor counts rows; dtype and further dims are free. A ledger entry has the phase
"backward", or "forward", which a scope of the ledger renames ("recompute", ...). Over an axis of
size 1 the functions on tensors are the identity and enter nothing. A rank without rows takes part
in the forward and in the backward. A backward that communicates runs on all ranks or hangs: `x`
must require a gradient on all of them or on none, and every rank's loss must depend on its output.

The sum convention (no function averages):

| function | forward | backward |
|---|---|---|
| all_gather | all_gather | reduce_scatter |
| reduce_scatter | reduce_scatter | all_gather |
| all_reduce | all_reduce | identity |
| all_reduce_both | all_reduce | all_reduce |
| take_shard | the rows of this rank | all_gather |
| all_to_all | all_to_all | all_to_all, transposed |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moemesh.comm import transfers
from moemesh.comm.mesh import Axis
from moemesh.comm.transfers import all_reduce_
from moemesh.monitor import progress
from moemesh.ops.permute import linear_map

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "all_reduce_both",
    "all_to_all",
    "barrier",
    "exchange_counts",
    "gather_json",
    "reduce_scatter",
    "take_shard",
]


def all_gather(x: Tensor, axis: Axis, sizes: Sequence[int] | None = None, *, caller: str) -> Tensor:
    """all_gather along axis; backward: reduce_scatter. [rows of this rank, ...] to [all rows, ...].
    `sizes` are the rows of each rank, None when all ranks hold the same number."""
    run = partial(transfers.all_gather, axis=axis, sizes=sizes, caller=caller)
    pair = partial(transfers.reduce_scatter, axis=axis, sizes=sizes, caller=caller)
    return _pair(x, axis, run, pair)


def reduce_scatter(
    x: Tensor, axis: Axis, sizes: Sequence[int] | None = None, *, caller: str
) -> Tensor:
    """reduce_scatter along axis; backward: all_gather. [all rows, ...] of addends to the sums of
    [rows of this rank, ...]. `sizes` are the rows that each rank keeps, None when all keep the same
    number."""
    run = partial(transfers.reduce_scatter, axis=axis, sizes=sizes, caller=caller)
    pair = partial(transfers.all_gather, axis=axis, sizes=sizes, caller=caller)
    return _pair(x, axis, run, pair)


def all_reduce(x: Tensor, axis: Axis, *, caller: str) -> Tensor:
    """all_reduce (sum) along axis; backward: identity. For consumers that are the same on every
    rank and so hold the same full gradient (g in M. Shoeybi et al., "Megatron-LM", 2019)."""
    run = partial(transfers.all_reduce, axis=axis, caller=caller)
    return _pair(x, axis, run, lambda gradient, phase: gradient.view_as(gradient))


def all_reduce_both(x: Tensor, axis: Axis, *, caller: str) -> Tensor:
    """all_reduce (sum) along axis; backward: all_reduce. For consumers that differ between the
    ranks, so that each rank holds one addend of the gradient."""
    run = partial(transfers.all_reduce, axis=axis, caller=caller)
    return _pair(x, axis, run, run)


def take_shard(x: Tensor, axis: Axis, sizes: Sequence[int] | None = None, *, caller: str) -> Tensor:
    """This rank's rows of a tensor that is equal on all ranks; backward: all_gather along axis.
    `sizes` are the rows that each rank takes, None when all take the same number. The result is a
    copy, so that the full tensor can be freed."""
    if axis.size == 1:
        return x
    blocks = list(sizes) if sizes is not None else transfers.equal_blocks(x.shape[0], axis)
    if len(blocks) != axis.size or sum(blocks) != x.shape[0]:
        raise ValueError(f"{caller}: sizes {blocks} do not cut {x.shape[0]} rows for {axis.name}")

    def run(x: Tensor, phase: str) -> Tensor:
        return x.narrow(0, sum(blocks[: axis.index]), blocks[axis.index]).clone()

    pair = partial(transfers.all_gather, axis=axis, sizes=blocks, caller=caller)
    return _pair(x, axis, run, pair)


def all_to_all(
    x: Tensor,
    axis: Axis,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    *,
    caller: str,
) -> Tensor:
    """all_to_all along axis; backward: all_to_all with the splits exchanged.

    `input_splits[i]` rows go to rank i and `output_splits[i]` rows come from it, in rank order;
    None for equal splits. Where receivers do not know their splits, :func:`exchange_counts` comes
    first (the two-phase all-to-all).
    """
    begin = partial(transfers.all_to_all, axis=axis, caller=caller)
    run = partial(begin, input_splits=input_splits, output_splits=output_splits)
    pair = partial(begin, input_splits=output_splits, output_splits=input_splits)
    return _pair(x, axis, run, pair)


def exchange_counts(counts: Tensor, axis: Axis, *, caller: str) -> Tensor:
    """all_to_all of row i to rank i; no gradient. counts [n, ...] int64 to the same shape. Row i of
    the result is what rank i wrote in its row for this rank."""
    assert counts.dtype == torch.int64 and counts.shape[0] == axis.size
    return transfers.all_to_all(counts, axis, phase="forward", caller=caller)


def barrier(axis: Axis) -> None:
    """Wait until every rank of axis calls it. Not entered in the ledger: it carries no data."""
    if axis.size > 1:
        ticket = progress.entered("barrier", axis.name, "barrier", axis.ranks, 0)
        progress.waiting(ticket)
        dist.barrier(group=axis.group)
        progress.left()


def gather_json(value: Any, axis: Axis) -> list[Any]:
    """`value` of every rank of axis, in rank order, on every rank. Values travel as JSON, never as
    pickle: tuples come back as lists and keys as strings, also over an axis of size 1. The bytes
    are not entered in the ledger: the prediction of a plan excludes control messages."""
    text = json.dumps(value).encode()
    if axis.size == 1:
        return [json.loads(text)]
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(axis.device)
    size = torch.tensor([len(text)], dtype=torch.int64, device=axis.device)
    with axis.ledger.paused():
        sizes = transfers.all_gather(size, axis, phase="control", caller="gather_json").tolist()
        data = transfers.all_gather(data, axis, sizes, phase="control", caller="gather_json")
    return [json.loads(part.cpu().numpy().tobytes()) for part in data.split(sizes)]


def _pair(x: Tensor, axis: Axis, run: Callable[..., Tensor], pair: Callable[..., Tensor]) -> Tensor:
    """``run(x)``, with `pair` as the backward."""
    if axis.size == 1:
        return x
    return linear_map(x, partial(run, phase="forward"), partial(pair, phase="backward"))
