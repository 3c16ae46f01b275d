"""The pipeline of one rank: its schedule, its stages, and the executor between them.

Legend: B sequences, M key/value heads, S positions, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from moemesh.comm.collectives import gather_json
from moemesh.comm.mesh import Mesh
from moemesh.comm.point_to_point import Channels
from moemesh.config.errors import UserError
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.model.batch import Batch
from moemesh.model.seams import ScopeSums, SliceState
from moemesh.model.transformer import ModelPart, Transformer
from moemesh.ops.weight_gradient import deferral
from moemesh.parallel.data.reducer import GradientReducer
from moemesh.parallel.pipeline.executor import Executor
from moemesh.parallel.pipeline.program import (
    BackwardState,
    Forward,
    GradientHooks,
    ModelProgram,
    Objective,
    Program,
    SteppedModelProgram,
    is_overlapped,
)
from moemesh.schedule.action import Op, Schedule, messages
from moemesh.schedule.generators import forward_only
from moemesh.schedule.text import digest
from moemesh.sharding.parameters import tensors
from moemesh.sharding.stages import cut_layers
from moemesh.trace.timeline import TimelineRecorder

#: Microbatches of a part of an evaluation, for each pipeline rank: the messages of one part are in
#: memory together if the first stage is the fastest.
EVALUATED_PER_RANK = 4

# Parts of the model: the layers of each stage, and the pipeline ranks that hold them.


def stage_parts(config: ModelConfig, plan: Plan, schedule: Schedule) -> tuple[ModelPart, ...]:
    """Part of each stage: the first has the embedding, the last head and prediction layers."""
    layers = cut_layers(config, schedule.num_stages, plan.layers_per_stage)
    last = schedule.num_stages - 1
    return tuple(ModelPart(cut, stage == 0, stage == last) for stage, cut in enumerate(layers))


def parts_of(schedule: Schedule, parts: tuple[ModelPart, ...], rank: int) -> dict[int, ModelPart]:
    """Stage -> part, of every stage that pipeline rank `rank` runs, in all pipes."""
    return {stage: parts[stage] for _, stage in schedule.stages_of(rank)}


def stages_of(model: Transformer, parts: Mapping[int, ModelPart]) -> dict[str, tuple[int, ...]]:
    """Parameter name -> the stages of this rank (``parts``) that use it, ascending."""
    units = {stage: part.units(model.config) for stage, part in sorted(parts.items())}
    return {
        name: tuple(stage for stage, used in units.items() if model.unit_of(name) in used)
        for name, _ in model.named_parameters()
    }


def holders(
    config: ModelConfig, plan: Plan, schedule: Schedule, parts: tuple[ModelPart, ...]
) -> dict[str, tuple[int, ...]]:
    """Parameter name -> the pipeline ranks that hold it, ascending."""
    units = [
        {unit for part in parts_of(schedule, parts, rank).values() for unit in part.units(config)}
        for rank in range(schedule.num_ranks)
    ]
    return {
        tensor.name: tuple(rank for rank, held in enumerate(units) if tensor.unit in held)
        for tensor in tensors(config, plan)
    }


# TeraPipe slices: the state that one slice of a sequence leaves for the next.
#
# | state of a layer | made by | read by | its gradient |
# |---|---|---|---|
# | keys, values | every slice but the last | attention of all later slices | sum over readers |
# | sums of auxiliary losses | every slice but the last | the last slice | that of the reader |
#
# Later slices read leaf copies, cut off the graph. Their backwards run first and accumulate
# gradients on the copies. The backward of the slice that made the state starts from these, as from
# the gradients of its outputs. Nothing is sent: all slices of a stage run on one rank.


@dataclass
class Left:
    """State of one slice of a microbatch on one stage, for later slices, by layer."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    sums: dict[int, ScopeSums] = field(default_factory=dict)
    #: Tensors of the state: the edge of each in the graph of its slice, and the leaf copy.
    carried: list[tuple[GradientEdge | None, Tensor]] = field(default_factory=list)

    def leaf(self, x: Tensor) -> Tensor:
        """A leaf with the values of `x`, for later slices; its gradient is passed to `x`."""
        leaf = x.detach()
        if x.requires_grad:
            # A copy: a view of the projection's output would keep the queries in memory, too.
            leaf = leaf.contiguous().requires_grad_()
            leaf.grad_dtype = torch.promote_types(x.dtype, torch.float32)
            self.carried.append((get_gradient_edge(x), leaf))
        return leaf


class EarlierSlices(SliceState):
    """The :class:`~moemesh.model.seams.SliceState` of one slice, from the states of earlier slices.
    The forward fills `left` for later slices; after :meth:`close` it is complete, and a recomputed
    forward does not change it."""

    def __init__(self, earlier: Sequence[Left], *, is_last: bool) -> None:
        self.earlier, self.is_last = list(earlier), is_last
        self.left = Left()
        self._records = not is_last

    def extend(self, layer: int, key_BMSD: Tensor, value_BMSD: Tensor) -> tuple[Tensor, Tensor]:
        if self._records:
            self.left.keys[layer] = self.left.leaf(key_BMSD)
            self.left.values[layer] = self.left.leaf(value_BMSD)
        if not self.earlier:
            return key_BMSD, value_BMSD
        return (
            torch.cat([*(left.keys[layer] for left in self.earlier), key_BMSD], dim=2),
            torch.cat([*(left.values[layer] for left in self.earlier), value_BMSD], dim=2),
        )

    def total(self, layer: int, sums: ScopeSums) -> ScopeSums | None:
        if self._records:
            self.left.sums[layer] = ScopeSums(*map(self.left.leaf, sums))
        if not self.is_last:
            return None
        parts = [*(left.sums[layer] for left in self.earlier), sums]
        return ScopeSums(*(torch.stack(part).sum(0) for part in zip(*parts, strict=True)))

    def close(self) -> Left:
        """End the forward; returns the state for later slices."""
        self._records = False
        return self.left


class SlicedProgram(ModelProgram):
    """The program of a model over slices of its microbatches. ``lengths(seq_len)`` are the tokens
    of the slices of a sequence."""

    def __init__(self, *arguments: Any, lengths: Callable[[int], tuple[int, ...]]) -> None:
        super().__init__(*arguments)
        self._lengths = lengths
        #: (stage, sample) -> states of its slices so far.
        self._left: dict[tuple[int, int], list[Left]] = {}

    def forward(self, op: Op, inputs: list[Tensor]) -> Forward:
        batch = self.batch_of(op)
        forward = self.forward_of(op, batch, inputs)
        slices = batch.slices
        assert isinstance(slices, EarlierSlices) and len(slices.earlier) == op.slice
        left = slices.close()
        self._left.setdefault((op.stage, self.schedule.sample(op)), []).append(left)
        return forward._replace(state=left)

    def backward(self, op: Op, context: BackwardState, gradients: list[Tensor]) -> list[Tensor]:
        left = self._left[op.stage, self.schedule.sample(op)].pop()
        assert left is context.state, "the slices of a sequence go back in the order they came"
        gradients = list(gradients)
        for edge, leaf in left.carried:
            if leaf.grad is not None:
                context.roots.append(edge)
                gradients.append(leaf.grad.to(leaf.dtype))
        return super().backward(op, context, gradients)

    def batch_of(self, op: Op) -> Batch:
        batch = super().batch_of(op)
        lengths = self._lengths(batch.tokens_BS.shape[1])
        assert len(lengths) == self.schedule.num_slices
        start, stop = ([0, *accumulate(lengths)][op.slice + i] for i in (0, 1))
        earlier = self._left.get((op.stage, self.schedule.sample(op)), [])
        is_last = op.slice == self.schedule.num_slices - 1
        return batch.slice(start, stop, EarlierSlices(earlier, is_last=is_last))


class Pipeline:
    """Runs the microbatches of a step through the stages, by the schedule.
    ``slice_lengths(seq_len)``: where a schedule of slices cuts its sequences. `overlap_blocks`: the
    forward and the backward of a block take turns, instead of running one after the other."""

    def __init__(
        self,
        schedule: Schedule,
        parts: dict[int, ModelPart],
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
        self.channels = Channels(mesh, "pp", pairs)
        self._executor = Executor(schedule, self.channels)
        self._splits_backward = any(op.kind == "W" for op in schedule.ops(self.rank))
        #: Makes the program of a step.
        self._form: Callable[..., Program] = ModelProgram
        in_parts: list[nn.Parameter] = []
        if schedule.num_slices > 1:
            self._form = partial(SlicedProgram, lengths=slice_lengths)
        elif overlap_blocks and any(map(is_overlapped, schedule.orders[self.rank])):
            self._form = SteppedModelProgram
            # Embedding and head are read before and after every extra prediction layer.
            tables = [model.embedding, model.head] if model.config.num_mtp_layers else []
            in_parts = [table.weight for table in tables if table is not None]
        #: Hooks before and after each operation, with the gradients that it completes.
        self.hooks = GradientHooks(
            schedule,
            self.rank,
            {
                stage: list(filter(reducer.has, model.parameters_of(part)))
                for stage, part in parts.items()
            },
            reducer,
            list(filter(reducer.has, in_parts)),
        )

    def run(
        self, batches: Sequence[Batch], objective: Objective, recorder: TimelineRecorder
    ) -> None:
        """Forward and backward of `batches` (by sample). Sums of gradients are started, not waited
        for."""
        self.reducer.begin()
        # Without split backwards, autograd computes weight gradients without a queue.
        deferral.is_possible = self._splits_backward
        try:
            self._executor.run(self.program(batches, objective), recorder)
        finally:
            deferral.is_possible = True

    def program(self, batches: Sequence[Batch], objective: Objective) -> Program:
        """The program of one step."""
        return self._form(self.schedule, self.model, self.parts, batches, objective, self.hooks)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], objective: Objective) -> None:
        """Run the forwards of any number of `batches`, all through the first pipe. They run in
        parts: no message comes back, so nothing else limits how far the first stage is ahead."""
        size = EVALUATED_PER_RANK * self.schedule.num_ranks
        for start in range(0, len(batches), size):
            part = batches[start : start + size]
            schedule = forward_only(self.schedule, len(part))
            program = ModelProgram(schedule, self.model, self.parts, part, objective, self.hooks)
            Executor(schedule, self.channels).run(program, TimelineRecorder(self.rank))
