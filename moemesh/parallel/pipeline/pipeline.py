"""The pipeline of one rank: its schedule, its stages, and the executor between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from moemesh.comm.channels import Channels
from moemesh.comm.collectives import gather_json
from moemesh.comm.mesh import Mesh
from moemesh.config.errors import UserError
from moemesh.model.batch import Batch
from moemesh.model.transformer import Part, Transformer
from moemesh.parallel.data.reducer import GradientReducer
from moemesh.parallel.expert.replicas import replicated
from moemesh.parallel.pipeline.executor import Executor
from moemesh.parallel.pipeline.hooks import GradientHooks
from moemesh.parallel.pipeline.overlapped import SteppedModelProgram, is_overlapped
from moemesh.parallel.pipeline.parts import parameters_of
from moemesh.parallel.pipeline.program import ModelProgram, Objective, Program
from moemesh.parallel.pipeline.slices import SlicedProgram
from moemesh.schedule.action import Schedule
from moemesh.schedule.forward_only import forward_only
from moemesh.schedule.messages import messages
from moemesh.schedule.text import digest
from moemesh.trace.timeline import TimelineRecorder


class Pipeline:
    """Runs the microbatches of a step through the stages, by the schedule.

    ``slice_lengths(seq_len)``: where a schedule of slices cuts its sequences. `overlap_blocks`:
    the forward and the backward of a block take turns, instead of running one after the other.
    """

    def __init__(
        self,
        schedule: Schedule,
        parts: dict[int, Part],
        model: Transformer,
        reducer: GradientReducer,
        mesh: Mesh,
        slice_lengths: Callable[[int], tuple[int, ...]],
        *,
        overlap_blocks: bool,
    ) -> None:
        self.schedule, self.parts, self.model, self.reducer = schedule, parts, model, reducer
        self.rank = mesh["pp"].index
        self.digest = digest(schedule)
        digests = gather_json(self.digest, mesh.control)
        if len(set(digests)) > 1:
            raise UserError(
                f"ranks hold different schedules, with the digests {', '.join(digests)}: give all "
                "of them the same plan and, where it names a file, the same content"
            )
        pairs = [(message.source, message.destination) for message in messages(schedule).values()]
        self.channels = Channels.create(mesh, "pp", pairs)
        self._executor = Executor(schedule, self.channels)
        self._form: Callable[[ModelProgram], Program] = lambda program: program
        in_parts: list[nn.Parameter] = []
        if schedule.num_slices > 1:
            self._form = partial(SlicedProgram, lengths=slice_lengths)
        elif overlap_blocks and any(map(is_overlapped, schedule.orders[self.rank])):
            self._form = SteppedModelProgram
            # Replica gradients are reduced in a later segment than the home expert's own.
            in_parts = [p for moe in replicated(model) for p in moe.experts.parameters()]
            # Embedding and head are read in front of every extra prediction layer and behind it.
            tables = [model.embedding, model.head] if model.config.num_mtp_layers else []
            in_parts += [table.weight for table in tables if table is not None]
        #: Called before each operation, with what completes gradients behind it.
        self.hooks = GradientHooks(
            schedule,
            self.rank,
            {
                stage: list(filter(reducer.has, parameters_of(model, part)))
                for stage, part in parts.items()
            },
            reducer,
            list(filter(reducer.has, in_parts)),
        )

    def run(
        self, batches: Sequence[Batch], objective: Objective, recorder: TimelineRecorder
    ) -> None:
        """Forward and backward of all `batches` (ordered by sample); the gradients are in the
        reducer, their sums under way."""
        self.reducer.begin()
        self._executor.run(self.program(batches, objective), recorder)

    def program(self, batches: Sequence[Batch], objective: Objective) -> Program:
        """The program of one step."""
        return self._form(
            ModelProgram(self.schedule, self.model, self.parts, batches, objective, self.hooks)
        )

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], objective: Objective) -> None:
        """Only the forwards of `batches`, all through the first pipe; any number of them."""
        schedule = forward_only(self.schedule, len(batches))
        program = ModelProgram(schedule, self.model, self.parts, batches, objective, self.hooks)
        Executor(schedule, self.channels).run(program, TimelineRecorder(self.rank))
