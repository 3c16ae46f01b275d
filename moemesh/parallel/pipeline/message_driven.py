"""Message-driven execution: a rank runs operations as inputs arrive, and records a schedule.

AMPNet (Gaunt et al., 2017, arXiv:1705.09786) fixes no order: its policy
(:mod:`moemesh.schedule.ampnet`) decides. The next message is unknown in advance, so each begins
with a header that names its operation. Headers travel on the control axis, payloads on the channels
of the pipeline. A special header marks the end of the stream, in both directions.

Ranks that share a stage (tp, ep, dp) must run one order: the first of them decides and broadcasts
its choice to the others, whose messages arrive in that order, too.
"""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from moemesh.comm import transfers
from moemesh.comm.collectives import gather_json
from moemesh.comm.mesh import Mesh
from moemesh.comm.point_to_point import Channels, start_receive, start_send
from moemesh.parallel.pipeline.asynchronous_stage import AsynchronousProgram
from moemesh.parallel.pipeline.executor import Executor
from moemesh.parallel.pipeline.messenger import Wire, message_specs
from moemesh.parallel.pipeline.program import Program
from moemesh.schedule.action import Op, Schedule, UpdateRule, linear, predecessor, single
from moemesh.schedule.ampnet import OldestFirst
from moemesh.schedule.text import parse_op
from moemesh.trace.timeline import TimelineRecorder

_LEDGER = {"phase": "control", "caller": "pipeline"}
#: Keeps headers apart from other messages between the same two ranks.
HEADER_TAG = 41

#: Kinds in a header and a broadcast choice: (kind, microbatch), or (end, number of microbatches).
_FORWARD, _BACKWARD, _END = 0, 1, 2


class MessageDrivenExecutor:
    """Runs one stream of up to `num_microbatches` on one pipeline rank, once."""

    def __init__(
        self,
        channels: Channels,
        mesh: Mesh,
        num_microbatches: int,
        *,
        window: int,
        max_in_flight: int,
    ) -> None:
        size = channels.axis.size
        self.schedule = Schedule(
            name="ampnet",
            num_ranks=size,
            num_stages=size,
            placement=(linear(size),),
            orders=((),) * size,
            num_microbatches=(num_microbatches,),
            update=UpdateRule(kind="newest", window=window),
            parameters={"max_in_flight": max_in_flight},
        )
        self.rank, self._wire = channels.axis.index, Wire(channels)
        self._executor = Executor(self.schedule, channels, self, has_backward=True)
        self._mesh, self._peers = mesh, mesh["stage"]
        self._leads = self._peers.index == 0
        self._policy = OldestFirst(self.rank, size, num_microbatches, max_in_flight=max_in_flight)
        #: Pipeline ranks that send inputs of forwards, and of backwards; None at the ends.
        self._earlier = self.rank - 1 if self.rank else None
        self._later = self.rank + 1 if self.rank < size - 1 else None
        self._neighbours = [rank for rank in (self._earlier, self._later) if rank is not None]
        #: Received inputs of operations that have not run yet.
        self._arrived: dict[Op, list[Tensor]] = {}
        #: Neighbours whose stream has ended.
        self._ended: set[int] = set()
        #: Operations that this rank has run.
        self._order: list[Op] = []
        self._num_forwards, self._has_sent_end = 0, False

    def run(self, program: AsynchronousProgram, recorder: TimelineRecorder) -> None:
        """Run the whole stream until all microbatches have ended; :meth:`recorded` returns the
        operations."""
        with _Listener(self._mesh) as self._listener:
            self._listener.listen(*self._neighbours)
            while (op := self._decide(program)) is not None:
                self._order.append(op)
                self._executor.run_entry(program, (op,), recorder)
                self._policy.finish(op)
                self._num_forwards += op.kind == "F"
                self._end_forwards()
            # Receive and send until both directions of the stream have ended.
            self._end_forwards()
            if self._earlier is not None:
                self._send_header(self._earlier, _END, self._policy.num_microbatches)
            for source in self._neighbours:
                while source not in self._ended:
                    self._accept(program, source, self._listener.next_of(source))
        self._executor.finish()

    def recorded(self) -> Schedule:
        """The operations of all ranks as a schedule; all ranks of the mesh call."""
        orders_of_ranks = gather_json([str(op) for op in self._order], self._mesh.control)
        orders: dict[int, tuple[Op, ...]] = {}
        for rank, texts in enumerate(orders_of_ranks):
            ops = [parse_op(text) for text in texts]
            order = tuple(op for op in ops if op is not None)
            stage = self._mesh.layout.coordinates(rank)["pp"]
            assert orders.setdefault(stage, order) == order, "ranks of a stage ran other orders"
        return replace(
            self.schedule,
            orders=tuple(single(*orders[stage]) for stage in range(self.schedule.num_ranks)),
            num_microbatches=(self._policy.num_microbatches,),
        )

    # What to do next.

    def _decide(self, program: AsynchronousProgram) -> Op | None:
        """The next operation, None at the end of the stream: the same on all ranks of the stage."""
        policy, op = self._policy, None
        while self._leads and op is None:
            # The policy decides with all messages that have arrived so far.
            with suppress(queue.Empty):
                while True:
                    self._accept(program, *self._listener.next(waits=False))
            if policy.done:
                break
            op = policy.next()
            if op is None:
                self._accept(program, *self._listener.next())
            elif op.kind == "F" and program.stream.end(op.microbatch) <= op.microbatch:
                # The stream has ended. Only the first pipeline rank reads it: no other rank has
                # received this microbatch.
                assert self._earlier is None
                policy.order.pop()
                policy.num_microbatches, op = op.microbatch, None
                self._end_forwards()
        if self._peers.size > 1:
            kind = _END if op is None else _FORWARD if op.kind == "F" else _BACKWARD
            number = policy.num_microbatches if op is None else op.microbatch
            header = torch.tensor([kind, number], device=self._mesh.device)
            header = transfers.broadcast(header, self._peers, 0, **_LEDGER)
            op = self._op_of(*header.tolist())
        if not self._leads:
            if op is None:
                return None
            while op not in self._arrived and (source := self._source(op)) is not None:
                self._accept(program, source, self._listener.next_of(source))
            if op.kind == "F":
                program.stream.end(op.microbatch)
        return op

    def _end_forwards(self) -> None:
        """Send the end to the next rank after the last forward."""
        last = self._num_forwards == self._policy.num_microbatches
        if last and not self._has_sent_end and self._later is not None:
            self._has_sent_end = True
            self._send_header(self._later, _END, self._num_forwards)

    # Messages.

    def _source(self, op: Op) -> int | None:
        return self._earlier if op.kind == "F" else self._later

    def _op_of(self, kind: int, number: int) -> Op | None:
        """The operation of this rank that a header names; None at the end of the stream."""
        if kind == _END:
            self._policy.num_microbatches = number
            return None
        return Op("F" if kind == _FORWARD else "B", self.rank, number)

    def _accept(self, program: AsynchronousProgram, source: int, header: Tensor) -> None:
        """Receive the tensors that follow a header from `source`, or note the end of its stream."""
        kind, number = header.tolist()
        op = self._op_of(kind, number)
        if op is None:
            self._ended.add(source)
            self._end_forwards()
            return
        producer = predecessor(self.schedule, op)
        assert producer is not None
        tensors, works = self._wire.receive(message_specs(program, producer), source, op.kind)
        for work in works:
            work.wait()
        self._arrived[op] = tensors
        if self._leads:
            self._policy.receive(op)
        self._listener.listen(source)

    def take(self, program: Program, op: Op) -> list[Tensor]:
        """See :class:`Messenger`: the inputs of `op`, which have arrived."""
        return [] if self._source(op) is None else self._arrived.pop(op)

    def send(self, op: Op, tensors: list[Tensor]) -> None:
        """See :class:`Messenger`: the header of an operation, then its outputs."""
        destination = self._later if op.kind == "F" else self._earlier
        if destination is not None:
            kind = _FORWARD if op.kind == "F" else _BACKWARD
            self._send_header(destination, kind, op.microbatch)
            self._wire.send(tensors, destination, op.kind)

    def finish(self) -> None:
        """See :class:`Messenger`: the end of the stream."""
        self._wire.flush()
        assert not self._arrived, f"left over at the end of a stream: {list(self._arrived)}"

    def _send_header(self, destination: int, kind: int, number: int) -> None:
        header = torch.tensor([kind, number])
        rank = self._mesh["pp"].ranks[destination]
        work = start_send(header, self._mesh.control, rank, **_LEDGER, tag=HEADER_TAG)
        self._wire.keep(work, header)


class _Listener:
    """Waits for headers of several ranks at once; a context manager.

    A receive on gloo cannot be polled, only waited for: one thread for each source waits. Only the
    thread of the caller starts receives and enters them in the ledger.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        #: Started receives of each source, for its thread; None ends the thread.
        self._waiting: dict[int, queue.SimpleQueue[tuple[dist.Work, Tensor] | None]] = {}
        #: (source, header) in the order of arrival, or the exception of a receive.
        self._arrived: queue.SimpleQueue[tuple[int, Tensor | BaseException]] = queue.SimpleQueue()
        #: Headers of other sources that arrived during :meth:`next_of`.
        self._kept: dict[int, list[Tensor]] = {}

    def __enter__(self) -> _Listener:
        return self

    def __exit__(self, *failure: object) -> None:
        for works in self._waiting.values():
            works.put(None)

    def listen(self, *sources: int) -> None:
        """Start to receive the next header of each."""
        for source in sources:
            if source not in self._waiting:
                self._waiting[source] = queue.SimpleQueue()
                # A daemon: if another rank has failed, this wait never ends.
                threading.Thread(target=self._wait, args=(source,), daemon=True).start()
            header = torch.zeros(2, dtype=torch.int64)
            rank = self._mesh["pp"].ranks[source]
            work = start_receive(header, self._mesh.control, rank, **_LEDGER, tag=HEADER_TAG)
            self._waiting[source].put((work, header))

    def next(self, *, waits: bool = True) -> tuple[int, Tensor]:
        """(source, header) of the next header to arrive. Without `waits`, raises queue.Empty if
        none has arrived."""
        source, header = self._arrived.get(block=waits)
        if isinstance(header, BaseException):
            raise header
        return source, header

    def next_of(self, source: int) -> Tensor:
        """The next header of one rank; those of others are kept for later."""
        while not self._kept.get(source):
            other, header = self.next()
            self._kept.setdefault(other, []).append(header)
        return self._kept[source].pop(0)

    def _wait(self, source: int) -> None:
        while (item := self._waiting[source].get()) is not None:
            work, header = item
            try:
                work.wait()
            except BaseException as error:
                self._arrived.put((source, error))
                return
            self._arrived.put((source, header))
