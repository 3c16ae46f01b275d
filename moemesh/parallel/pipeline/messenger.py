"""Messages between pipeline stages: receives in the order of the sender, sends that never block.

Two stages on one rank pass tensors without a message. When a rank waits for a message, it posts the
receive and those of a few later messages, not of all: each holds a buffer.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from moemesh.comm.point_to_point import Channels
from moemesh.comm.staged import PendingWork
from moemesh.monitor import progress
from moemesh.parallel.pipeline.program import Program, TensorSpec
from moemesh.schedule.action import Message, Op, Schedule, messages, predecessor, successor

#: Number of receives posted in advance. It is 0 with NCCL: there a posted receive waits on the
#: device for its send, which may depend on work that this rank has not launched yet. That work may
#: be unable to start, since a first use of a kernel, or an allocation, waits for the receive.
AHEAD = 2


class Messenger(Protocol):
    """Receives the inputs of operations, and sends their outputs."""

    def take(self, program: Program, op: Op) -> list[Tensor]:
        """Inputs of `op` from the neighbouring stage; waits for them."""

    def send(self, op: Op, tensors: list[Tensor]) -> None:
        """Start to send the outputs of `op`; never waits."""

    def finish(self) -> None:
        """End a step: wait for sends, and check that nothing is left over."""


def message_specs(program: Program, producer: Op) -> list[TensorSpec]:
    """The tensors that `producer` sends: outputs, or gradients of the floating inputs."""
    if producer.kind == "F":
        return list(program.output_specs(producer))
    forward = producer._replace(kind="F", stage=producer.stage - 1)
    return [spec for spec in program.output_specs(forward) if spec.dtype.is_floating_point]


class Send(NamedTuple):
    """A send on gloo. `done`: set after its end, or after the failure of it or of an earlier one;
    `tensors`: its tensor, until then."""

    work: PendingWork
    tensors: list[Tensor]
    done: threading.Event


class Wire:
    """Sends and receives of one rank's channels. The storage of a send is held until the send is
    complete. Gloo reports that only to a wait: there a thread waits for the sends of a step, one
    after the other, and :meth:`flush` for the thread."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._sending: list[tuple[PendingWork, Tensor]] = []
        #: Thread of the step, and its sends; None ends it.
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[Send | None] = SimpleQueue()
        self._started: deque[Send] = deque()
        self._failure: BaseException | None = None

    def send(self, tensors: Sequence[Tensor], destination: int, kind: str) -> None:
        """Start to send the output of an operation of this kind."""
        for x in tensors:
            x = x.contiguous()
            if x.numel():
                work = self._channels.send(x, destination, phase=_phase(kind), caller="pipeline")
                self.keep(work, x)

    def keep(self, work: PendingWork, tensor: Tensor) -> None:
        """Hold the storage of a send that was started, until its end."""
        if not self._channels.tagged:
            self._sending = [(work, x) for work, x in self._sending if not work.is_completed()]
            self._sending.append((work, tensor))
            return
        if self._thread is None:
            # A daemon: if another rank has failed, its wait may never end.
            self._thread = threading.Thread(target=self._wait, daemon=True)
            self._thread.start()
            _WAITING.add(self)
        send = Send(work, [tensor], threading.Event())
        while self._started and self._started[0].done.is_set():
            self._started.popleft()
        self._started.append(send)
        self._queue.put(send)

    def _wait(self) -> None:
        """Wait for each send, and free its tensor."""
        while (send := self._queue.get()) is not None:
            try:
                if self._failure is None:
                    send.work.wait_aside()
            except BaseException as error:
                self._failure = error
            send.tensors.clear()
            send.done.set()

    def receive(
        self, specs: Sequence[TensorSpec], source: int, kind: str
    ) -> tuple[list[Tensor], list[PendingWork]]:
        """Start to receive the output of an operation of this kind."""
        tensors: list[Tensor] = []
        works: list[PendingWork] = []
        for spec in specs:
            x = torch.empty(spec.shape, dtype=spec.dtype, device=self._channels.axis.device)
            if x.numel():
                works.append(
                    self._channels.receive(x, source, phase=_phase(kind), caller="pipeline")
                )
            tensors.append(x)
        return tensors, works

    def flush(self) -> None:
        """Wait for all sends."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()
        while self._started:
            send = self._started.popleft()
            progress.waiting(send.work.ticket)
            send.done.wait()
            if self._failure is not None:
                raise self._failure
            progress.left()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
            _WAITING.discard(self)

    def give_up(self) -> None:
        """End the thread of a step that has raised, and with it all waits of the group."""
        assert self._thread is not None
        self._queue.put(None)
        for _ in range(20):
            # The end of a send is given to one wait: that of the thread may need another failure.
            if pending := next((send for send in self._started if not send.done.is_set()), None):
                pending.work.fail()
            self._thread.join(0.1)
            if not self._thread.is_alive():
                break
        self._thread = None
        _WAITING.discard(self)


#: Wires with a thread.
_WAITING: WeakSet[Wire] = WeakSet()


@atexit.register
def _end_threads() -> None:
    """A thread that came back from gloo while the interpreter ends would abort the process."""
    for wire in list(_WAITING):
        wire.give_up()


def _phase(kind: str) -> str:
    return "forward" if kind == "F" else "backward"


class OrderedMessenger:
    """Messages of a schedule: both ends of every queue derive its order from the schedule.
    `may_receive`: whether the receive of an operation's message may be posted now. A refused
    message holds back the later ones of its sender."""

    def __init__(
        self,
        schedule: Schedule,
        channels: Channels,
        *,
        may_receive: Callable[[Op], bool] = lambda op: True,
    ) -> None:
        self._schedule, self._may_receive = schedule, may_receive
        self._wire, self._rank = Wire(channels), channels.axis.index
        self._ahead = AHEAD if channels.tagged else 0
        self._messages = messages(schedule)
        #: Source rank -> the messages that it sends to this rank, in its order.
        self._queues: dict[int, list[Message]] = {}
        for message in sorted(self._messages.values(), key=lambda m: (m.source, m.position)):
            if message.destination == self._rank:
                self._queues.setdefault(message.source, []).append(message)
        #: Number of posted receives, by source; receives that :meth:`take` awaits, by producer.
        self._num_posted = dict.fromkeys(self._queues, 0)
        self._posted: dict[Op, tuple[list[Tensor], list[PendingWork]]] = {}
        #: Outputs for another stage of this rank.
        self._inbox: dict[Op, list[Tensor]] = {}

    def take(self, program: Program, op: Op) -> list[Tensor]:
        producer = predecessor(self._schedule, op)
        if producer is None:
            return []
        if producer not in self._messages:
            return self._inbox.pop(producer)
        message = self._messages[producer]
        self._post(program, message.source, message.position + 1 + self._ahead)
        tensors, works = self._posted.pop(producer)
        for work in works:
            work.wait()
        return tensors

    def send(self, op: Op, tensors: list[Tensor]) -> None:
        message = self._messages.get(op)
        if message is None:
            if successor(self._schedule, op) is not None:
                self._inbox[op] = tensors
            return
        self._wire.send(tensors, message.destination, op.kind)

    def finish(self) -> None:
        self._wire.flush()
        left = [*self._inbox, *self._posted]
        assert not left, f"left over at the end of a step: {left}"
        self._num_posted = dict.fromkeys(self._queues, 0)

    def drop(self, program: Program) -> None:
        """Receive and discard all messages that may be received now."""
        for source, queue in self._queues.items():
            self._post(program, source, len(queue))
        for _, works in self._posted.values():
            for work in works:
                work.wait()
        self._posted.clear()
        self._inbox.clear()
        self._num_posted = dict.fromkeys(self._queues, 0)

    def _post(self, program: Program, source: int, count: int) -> None:
        """Post receives for the first `count` messages of `source`, up to the first one that
        `may_receive` refuses."""
        for message in self._queues[source][self._num_posted[source] : count]:
            if not self._may_receive(message.producer):
                break
            specs = message_specs(program, message.producer)
            received = self._wire.receive(specs, source, message.producer.kind)
            self._posted[message.producer] = received
            self._num_posted[source] += 1
