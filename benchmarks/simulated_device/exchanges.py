"""Collectives and messages of the simulated device: what starts, and where it is waited for.

Those of torch that `comm/` calls are recorded and then run. As on NCCL, a wait holds up the stream
of the caller and not the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.simulated_device.counts import Arrival, Counts, Exchange, bytes_of
from benchmarks.simulated_device.tensor import DeviceTensor
from moemesh.comm import transfers
from moemesh.trace.ledger import Ledger


class Exchanges:
    """Records the exchanges of one rank in `counts`."""

    def __init__(self, counts: Counts) -> None:
        self._counts, self._caller = counts, ""
        self._numbers: Counter[str] = Counter()

    def answers(self) -> list[tuple[Any, str, Any]]:
        """What stands for the functions of torch, and sees who calls."""
        found: list[tuple[Any, str, Any]] = [
            (dist, "all_to_all_single", self._all_to_all),
            (transfers, "_all_gather_nccl", self._all_gather),
            (transfers, "_reduce_scatter_nccl", self._reduce_scatter),
            (dist, "all_reduce", self._all_reduce),
            (dist, "broadcast", self._broadcast),
            (dist, "isend", self._send),
            (dist, "irecv", self._receive),
            (dist, "P2POp", self._operation),
            (dist, "batch_isend_irecv", self._batch),
            (Ledger, "record", self._noting_the_caller(Ledger.record)),
        ]
        names = "all_to_all_single all_reduce broadcast isend irecv P2POp batch_isend_irecv"
        self._torch = {name: getattr(dist, name) for name in names.split()}
        self._torch["all_gather"] = transfers._all_gather_nccl  # pyright: ignore
        self._torch["reduce_scatter"] = transfers._reduce_scatter_nccl  # pyright: ignore
        return found

    def _noting_the_caller(self, record: Callable[..., None]) -> Callable[..., None]:
        def noting(ledger: Ledger, **entry: Any) -> None:
            self._caller = entry["caller"]
            record(ledger, **entry)

        return noting

    def _all_to_all(
        self,
        output: Tensor,
        input: Tensor,  # torch's name
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        ranks, own = _ranks(group), dist.get_rank(group)

        def others(x: Tensor, splits: Sequence[int] | None) -> int:
            kept = splits[own] / max(sum(splits), 1) if splits is not None else 1 / len(ranks)
            return round(bytes_of(x) * (1 - kept))

        moved = max(others(input, input_splits), others(output, output_splits))
        work = self._torch["all_to_all_single"](
            output, input, output_splits, input_splits, group=group, async_op=async_op
        )
        return self._collective("all_to_all", input, moved, group, work, async_op)

    def _all_gather(self, output: Tensor, input: Tensor, group: Any, async_op: bool) -> Any:
        moved = bytes_of(output) - bytes_of(input)
        work = self._torch["all_gather"](output, input, group=group, async_op=async_op)
        return self._collective("all_gather", input, moved, group, work, async_op)

    def _reduce_scatter(self, output: Tensor, input: Tensor, group: Any, async_op: bool) -> Any:
        moved = bytes_of(input) - bytes_of(output)
        work = self._torch["reduce_scatter"](output, input, group=group, async_op=async_op)
        return self._collective("reduce_scatter", input, moved, group, work, async_op)

    def _all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        size = len(_ranks(group))
        moved = round(2 * (size - 1) / size * bytes_of(tensor))
        work = self._torch["all_reduce"](tensor, op, group=group, async_op=async_op)
        return self._collective("all_reduce", tensor, moved, group, work, async_op)

    def _broadcast(self, tensor: Tensor, src: int, group: Any = None) -> Any:
        work = self._torch["broadcast"](tensor, src=src, group=group)
        return self._collective("broadcast", tensor, bytes_of(tensor), group, work, False)

    def _send(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Any:
        work = self._torch["isend"](tensor, dst, group=group, tag=tag)
        return self._message(tensor, (dist.get_rank(), dst), group, tag, work)

    def _receive(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Any:
        work = self._torch["irecv"](tensor, src, group=group, tag=tag)
        return self._message(tensor, (src, dist.get_rank()), group, tag, work)

    def _operation(
        self, op: Callable[..., Any], tensor: Tensor, peer: int, group: Any, tag: int
    ) -> Any:
        # torch knows its own functions only.
        known = self._torch["isend" if op == self._send else "irecv"]
        return self._torch["P2POp"](known, tensor, peer, group, tag)

    def _batch(self, operations: Sequence[Any]) -> list[Any]:
        works, found = self._torch["batch_isend_irecv"](operations), list[Any]()
        for one, work in zip(operations, works, strict=True):
            own, is_sent = dist.get_rank(), one.op == self._torch["isend"]
            pair = (own, one.peer) if is_sent else (one.peer, own)
            found.append(self._message(one.tensor, pair, one.group, one.tag, work))
        return found

    def _collective(
        self, name: str, tensor: Tensor, moved: int, group: Any, work: Any, async_op: bool
    ) -> Any:
        if not isinstance(tensor, DeviceTensor):
            return work  # of the host, beside the device
        ranks = _ranks(group)
        entered = self._enter(name, moved, ranks, f"{_name(group)} {ranks}")
        if async_op:
            return _RecordedWork(work, self._counts, entered)
        self._counts.queue(Arrival(entered.stream, entered.number))
        return work

    def _message(
        self, tensor: Tensor, pair: tuple[int, int], group: Any, tag: int, work: Any
    ) -> Any:
        if not isinstance(tensor, DeviceTensor):
            return work
        entered = self._enter("send", bytes_of(tensor), pair, f"{_name(group)} {pair} {tag}")
        return _RecordedWork(work, self._counts, entered)

    def _enter(self, name: str, moved: int, ranks: tuple[int, ...], stream: str) -> Exchange:
        self._numbers[stream] += 1
        entered = Exchange(name, self._caller, moved, ranks, stream, self._numbers[stream])
        self._counts.queue(entered)
        return entered


class _RecordedWork:
    """As the work it wraps; where it is waited for is entered."""

    def __init__(self, work: Any, counts: Counts, exchange: Exchange) -> None:
        self._work, self._counts, self._exchange = work, counts, exchange

    def wait(self, *args: Any) -> Any:
        self._counts.queue(Arrival(self._exchange.stream, self._exchange.number))
        return self._work.wait(*args)

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))


def _name(group: Any) -> str:
    return (group or dist.group.WORLD).group_name
