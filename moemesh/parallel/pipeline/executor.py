"""The executor: one loop that walks a rank's list of operations, for every schedule alike.

| op | receives | runs | sends |
|---|---|---|---|
| F | outputs of the stage before | the stage | its outputs |
| B, I | gradients of its outputs | the backward, or its input half | gradients of its inputs |
| W | nothing | what its I has deferred | nothing |

Messages are asynchronous: a send never blocks, a receive is posted when it is needed and a few
ahead. Two stages on one rank hand over without a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from moemesh.comm.channels import Channels
from moemesh.config.errors import UserError
from moemesh.model.segments import Steps
from moemesh.parallel.pipeline.overlapped import SteppedProgram, is_overlapped
from moemesh.parallel.pipeline.program import Context, Forward, Program, Spec, make_context
from moemesh.parallel.pipeline.virtual import VirtualClock
from moemesh.schedule.action import Entry, Op, Schedule
from moemesh.schedule.messages import Message, messages, successor
from moemesh.trace.timeline import TimelineRecorder

#: Receives posted beyond the one that is waited for. Few: each holds its buffer.
AHEAD = 2

_Key = tuple[int, int, int, int]


class PipelineError(RuntimeError):
    """An operation of the pipeline failed; the message names it."""


class Executor:
    """Runs one schedule, step after step, on one pipeline rank."""

    def __init__(
        self,
        schedule: Schedule,
        channels: Channels,
        *,
        clock: VirtualClock | None = None,
    ) -> None:
        self.schedule, self.channels, self.clock = schedule, channels, clock
        self.rank = channels.axis.index
        self._messages = messages(schedule)
        #: Source rank -> the messages it sends here, in its order.
        self._queues: dict[int, list[Message]] = {}
        for message in sorted(self._messages.values(), key=lambda m: (m.source, m.position)):
            if message.destination == self.rank:
                self._queues.setdefault(message.source, []).append(message)
        self._has_backward = any(op.kind != "F" for op in schedule.ops(self.rank))
        self._contexts: dict[_Key, Context] = {}
        self._inbox: dict[Op, list[Tensor]] = {}
        self._posted: dict[Op, tuple[list[Tensor], list[dist.Work]]] = {}
        self._num_posted: dict[int, int] = {}
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def run(self, program: Program, recorder: TimelineRecorder) -> None:
        """One step: every entry of this rank, in order.

        Raises PipelineError, naming the operation, when one fails.
        """
        self._num_posted = dict.fromkeys(self._queues, 0)
        for entry in self.schedule.orders[self.rank]:
            self._run_entry(program, entry, recorder)
        self._flush()

    def _run_entry(self, program: Program, entry: Entry, recorder: TimelineRecorder) -> None:
        """Wait for the inputs of all operations of a block, then run them: one after the other, or
        in turns where the program can."""
        begun = recorder.clock()
        received: list[list[Tensor]] = []
        for op in entry:
            with self._naming(op):
                received.append(self._take(program, op))
        start = recorder.clock()
        if self.clock is not None:
            self.clock.run(entry)
        if is_overlapped(entry) and isinstance(program, SteppedProgram):
            self._take_turns(program, dict(zip(entry, received, strict=True)))
        else:
            for op, inputs in zip(entry, received, strict=True):
                with self._naming(op):
                    program.starting(op)
                    self._send(op, self._run_op(program, op, inputs))
                    program.finished(op)
        end = recorder.clock()
        for op in entry:
            recorder.add(
                name=str(op),
                start=start,
                end=end,
                wait=start - begun,
                kind=op.kind,
                stage=op.stage,
                microbatch=self.schedule.sample(op),
                pipe=op.pipe,
                slice=op.slice,
            )

    @contextmanager
    def _naming(self, op: Op) -> Iterator[None]:
        """What fails inside fails with the name of the operation; one stage needs no name."""
        if self.schedule.num_ranks == 1:
            yield
            return
        try:
            yield
        except Exception as error:
            where = f"operation {op} (stage {op.stage}, microbatch {self.schedule.sample(op)})"
            problem = f"{where} failed on pipeline rank {self.rank}"
            if isinstance(error, UserError):
                error.add_note(problem)
                raise
            raise PipelineError(f"{problem}: {error}") from error

    def _run_op(self, program: Program, op: Op, received: list[Tensor]) -> list[Tensor]:
        key = op[1:]
        if op.kind == "F":
            leaves = _leaves(received)
            return self._keep(op, leaves, program.forward(op, leaves))
        context = self._contexts[key]
        if op.kind == "W":
            program.weight_gradients(op, context)
            del self._contexts[key]
            return []
        gradients = program.backward(op, context, received)
        if op.kind == "B":
            del self._contexts[key]
        return gradients

    def _keep(self, op: Op, leaves: list[Tensor], forward: Forward) -> list[Tensor]:
        """Keep what the backward needs of a forward; returns what is sent on."""
        if self._has_backward:
            self._contexts[op[1:]] = make_context(leaves, forward)
        return [x.detach() for x in forward.outputs]

    # Blocks.

    def _take_turns(self, program: SteppedProgram, received: dict[Op, list[Tensor]]) -> None:
        """Run a forward and a backward step by step, the forward first."""
        running: dict[Op, Steps[list[Tensor]]] = {}
        for op in sorted(received, key=lambda op: op.kind, reverse=True):
            program.starting(op)
            steps = self._forward_steps if op.kind == "F" else self._backward_steps
            running[op] = steps(program, op, received[op])
        unsent, ended = list(received), dict[Op, list[Tensor]]()
        while running:
            for op in list(running):
                with self._naming(op):
                    try:
                        next(running[op])
                    except StopIteration as end:
                        ended[op] = end.value
                        del running[op]
            # In the order of the list, which the receiver counts on, whatever ends first.
            while unsent and unsent[0] in ended:
                op = unsent.pop(0)
                with self._naming(op):
                    self._send(op, ended.pop(op))
                    program.finished(op)

    def _forward_steps(
        self, program: SteppedProgram, op: Op, received: list[Tensor]
    ) -> Steps[list[Tensor]]:
        leaves = _leaves(received)
        return self._keep(op, leaves, (yield from program.forward_steps(op, leaves)))

    def _backward_steps(
        self, program: SteppedProgram, op: Op, received: list[Tensor]
    ) -> Steps[list[Tensor]]:
        context = self._contexts.pop(op[1:])
        return (yield from program.backward_steps(op, context, received))

    # Messages.

    def _take(self, program: Program, op: Op) -> list[Tensor]:
        """The tensors that `op` works on: from the neighbouring stage, wherever it is."""
        producer = self._producer(op)
        if producer is None:
            return []
        if producer not in self._messages:
            return self._inbox.pop(producer)
        message = self._messages[producer]
        self._post(program, message.source, message.position + 1 + AHEAD)
        tensors, works = self._posted.pop(producer)
        for work in works:
            work.wait()
        if self.clock is not None:
            self.clock.carried(producer, float(tensors.pop()))
        return tensors

    def _producer(self, op: Op) -> Op | None:
        """The operation of another stage whose output `op` takes."""
        kind, stage, microbatch, pipe, slice = op
        if kind == "F" and stage > 0:
            return Op("F", stage - 1, microbatch, pipe, slice)
        if kind in ("B", "I") and stage < self.schedule.num_stages - 1:
            return self.schedule.backward(stage + 1, microbatch, pipe, slice)
        return None

    def _specs(self, program: Program, producer: Op) -> list[Spec]:
        if producer.kind == "F":
            specs = list(program.output_specs(producer))
        else:
            before = producer._replace(kind="F", stage=producer.stage - 1)
            specs = [s for s in program.output_specs(before) if s.dtype.is_floating_point]
        if self.clock is not None:
            specs.append(Spec((1,), torch.float64))
        return specs

    def _post(self, program: Program, source: int, count: int) -> None:
        """Post receives for the first `count` messages of `source`, in its order."""
        queue = self._queues[source]
        for message in queue[self._num_posted[source] : count]:
            phase = "forward" if message.producer.kind == "F" else "backward"
            tensors, works = [], []
            for spec in self._specs(program, message.producer):
                tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self.channels.axis.device)
                if tensor.numel():
                    work = self.channels.receive(tensor, source, phase=phase, caller="pipeline")
                    works.append(work)
                tensors.append(tensor)
            self._posted[message.producer] = (tensors, works)
        self._num_posted[source] = max(self._num_posted[source], min(count, len(queue)))

    def _send(self, op: Op, tensors: list[Tensor]) -> None:
        message = self._messages.get(op)
        if message is None:
            if successor(self.schedule, op) is not None:
                self._inbox[op] = tensors
            return
        if self.clock is not None:
            tensors = [*tensors, torch.tensor([self.clock.end_of(op)], dtype=torch.float64)]
        phase = "forward" if op.kind == "F" else "backward"
        self._sending = [(work, x) for work, x in self._sending if not work.is_completed()]
        for x in tensors:
            x = x.contiguous()
            if x.numel():
                there = message.destination
                work = self.channels.send(x, there, phase=phase, caller="pipeline")
                self._sending.append((work, x))

    def _flush(self) -> None:
        """Wait for what is still being sent; nothing may be left over."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()
        left = [*self._contexts, *self._inbox, *self._posted]
        assert not left, f"left over at the end of a step: {left}"


def _leaves(received: list[Tensor]) -> list[Tensor]:
    """Received tensors as the inputs of a stage, whose gradients will be sent back."""
    return [x.requires_grad_() if x.is_floating_point() else x for x in received]
