"""Examination of a step that was not finite: run it once more, looking at every number.

Healthy steps pay nothing: only when the ranks have agreed that a loss or a gradient is not finite
do they run the step's forward and backward again, on the same samples and with the same random
numbers, and look at weights, at the output of every module, at losses, at the gradient of every
module's input and of every weight, each before ranks exchange it, and at the sums. What is found
on all ranks is put in the order of the computation, and the first of it is the origin:

    weights  ->  forward, microbatch by microbatch, layer by layer  ->  loss
             ->  backward, from the last layer to the first  ->  sums over ranks

A fault that does not repeat (a bit that flipped in a register, say) is found by none of them; then
the report says so and names the parameters whose gradients were not finite in the step itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from moemesh.comm.collectives import gather_json
from moemesh.model.batch import Batch, Context
from moemesh.model.faults import NO_FAULT
from moemesh.model.router import Routing
from moemesh.model.transformer import ModelPart, Output
from moemesh.parallel.parallelize import RankModel
from moemesh.parallel.pipeline.pipeline import Pipeline
from moemesh.schedule.action import Op
from moemesh.schedule.generators import one_f_one_b
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.numerics.finding import (
    MOST_NAMED,
    PHASES,
    Finding,
    Sighting,
    layer_in,
    order,
    origin,
)
from moemesh.train.optimizer import Optimizer
from moemesh.train.step import StepSums, count_over_step, forget_rank_tokens

# All that one rank sees of a step: its weights, and by hooks every module, loss and gradient.


#: So many sightings of each phase travel to the other ranks: the first ones.
_MOST_SIGHTINGS = 32


class Look:
    """The sightings of this rank in the step of `microbatches`."""

    def __init__(self, parallel: RankModel, microbatches: Sequence[Batch]) -> None:
        self._parallel, self.mesh = parallel, parallel.mesh
        self._num_microbatches = len(microbatches)
        self._seen: dict[tuple[object, ...], Sighting] = {}
        self._microbatch_of = {
            sequence: index
            for index, batch in enumerate(microbatches)
            for sequence in batch.sequences_B.tolist()
        }
        self._names = {p: name for name, p in parallel.model.named_parameters()}
        #: Of the operation that runs now, or of the gradient that was seen last.
        self._current = 0
        #: Of each layer, the context of its forward now; that of the last layer that began.
        self._contexts: dict[int, Context] = {}
        self._latest: Context | None = None
        self._watched = WeakTensorKeyDictionary()
        self._started: dict[tuple[int, str], int] = {}
        self._ended: dict[tuple[int, str], int] = {}

    def of_all_ranks(self) -> list[Sighting]:
        """The first sightings of each phase, of every rank; all ranks call."""
        own: list[Sighting] = []
        for phase in PHASES:
            ordered = sorted((one for one in self._seen.values() if one.phase == phase), key=order)
            own += ordered[:_MOST_SIGHTINGS]
        told = gather_json([asdict(one) for one in own], self.mesh.control)
        tuples = ("experts", "sequences")  # which come as lists from JSON
        return [
            Sighting(**{**values, **{key: tuple(values[key]) for key in tuples}})
            for rank in told
            for values in rank
        ]

    def at_weights(self, optimizer: Optimizer | None) -> None:
        """Parameters, buffers, masters and moments."""
        model, reducer = self._parallel.model, self._parallel.reducer
        held: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
        held += reducer.held_weights.items()
        if optimizer is not None:
            held += optimizer.masters.items()
            for kind, tensors in optimizer.state().items():
                held += [(f"optimizer.{kind}.{name}", one) for name, one in tensors.items()]
        for name, tensor in held:
            self._at_parameter("weight", name, tensor)

    @contextmanager
    def looking_on(self) -> Iterator[Pipeline]:
        """The pipeline to run the step with, while everything in it is looked at: the own one, or
        of an asynchronous schedule one that does not update in between."""
        pipeline, reducer = self._parallel.pipeline, self._parallel.reducer
        if pipeline.schedule.update is not None:
            pipeline = Pipeline(
                one_f_one_b(pipeline.schedule.num_ranks, self._num_microbatches),
                pipeline.parts,
                self._parallel.model,
                reducer,
                self.mesh,
                lambda seq_len: (seq_len,),
                overlap_blocks=False,
            )
        handles = [
            handle
            for name, module in self._parallel.model.named_modules()
            if (layer := self._layer(name)) is not None
            for handle in self._hooks(name, layer, module)
        ]

        def watched(parameter: nn.Parameter, gradient: Tensor) -> None:
            if (name := self._names.get(parameter)) is not None:
                self._at_parameter("gradient", name, gradient, self._current)

        def started(op: Op) -> None:
            self._current = pipeline.schedule.sample(op)

        pipeline.hooks.watch = started
        reducer.watch = watched
        try:
            yield pipeline
        finally:
            pipeline.hooks.watch = reducer.watch = None
            for handle in handles:
                handle.remove()
        for name, gradient in reducer.gradients.items():  # behind the sums over ranks
            self._at_parameter("sum", name, gradient)

    def at_losses(self, output: Output, batch: Batch) -> None:
        """The losses of a forward, by sequence."""
        if output.losses_T is None:
            return
        depths = dict(enumerate(output.ahead_losses, start=1))
        for depth, losses_T in {0: output.losses_T, **depths}.items():
            mask_T = batch.loss_mask_T() if not depth else batch.ahead(depth).loss_BS.flatten()
            bad_T = ~torch.isfinite(losses_T)
            bad_T = bad_T if mask_T is None else bad_T & mask_T
            if bad_T.any():
                rows = bad_T.view(len(batch.sequences_B), -1).any(1)
                sequences = tuple(batch.sequences_B[rows].tolist())
                learns = torch.ones_like(bad_T) if mask_T is None else mask_T
                num_looked = int(learns.view(len(batch.sequences_B), -1).any(1).sum())
                where = {"sequences": sequences, "num_looked": num_looked}
                self._add("loss", "loss", losses_T[bad_T], **where)
        if not is_finite(output.aux):
            sequences = tuple(batch.sequences_B.tolist())
            where = {"sequences": sequences, "num_looked": len(sequences)}
            self._add("loss", "auxiliary loss", output.aux, place=1, **where)

    # Modules.

    def _layer(self, name: str) -> int | None:
        """The layer of a module; the norms before heads count as a layer behind all."""
        if (layer := layer_in(name)) >= 0:
            return layer
        parts = name.split(".")
        if parts[0] == "norm" or (parts[0] == "ahead_norms" and len(parts) > 1):
            config = self._parallel.model.config
            return config.num_layers + config.num_mtp_layers
        return None

    def _hooks(self, name: str, layer: int, module: nn.Module) -> Iterator[Any]:
        def begin(_: nn.Module, args: tuple[Any, ...], keys: dict[str, Any]) -> None:
            for value in (*args, *keys.values()):
                if isinstance(value, Context):
                    self._contexts[layer] = self._latest = value
            place = self._started.setdefault((layer, name), len(self._started))
            microbatch = self._microbatch(layer)
            for x in _floats((*args, *keys.values())):
                # Modules inside that are given the same tensor cannot be told apart by it.
                if x.requires_grad and x not in self._watched:
                    self._watched[x] = True
                    look = partial(
                        self._at_gradient,
                        name=name,
                        layer=layer,
                        place=place,
                        microbatch=microbatch,
                        context=self._contexts.get(layer),
                    )
                    x.register_hook(look)

        def end(_: nn.Module, args: tuple[Any, ...], keys: dict[str, Any], output: Any) -> None:
            place = self._ended.setdefault((layer, name), len(self._ended))
            microbatch = self._microbatch(layer)
            bad = [x for x in _floats(output) if not is_finite(x)]
            context = self._contexts.get(layer)
            experts, sequences = (), ()
            if isinstance(output, Routing) and int(output.fault) != NO_FAULT:
                code, size = int(output.fault), output.logits_TE.shape[1]
                experts = (code % size,)
                sequences = (code // size // self._contexts[layer].length,)
                bad = bad or [output.logits_TE]
            for x in bad[:1]:
                self._add(
                    "forward",
                    name,
                    x,
                    microbatch=microbatch,
                    layer=layer,
                    place=place,
                    is_fresh=all(is_finite(x) for x in _floats((*args, *keys.values()))),
                    experts=experts or self._experts_of(name, args, x),
                    **({"sequences": sequences} if sequences else _sequences(context, x)),
                )

            def follow(_: Tensor) -> None:
                self._current = microbatch

            for x in _floats(output):
                if x.requires_grad:
                    x.register_hook(follow)

        yield module.register_forward_pre_hook(begin, with_kwargs=True)
        yield module.register_forward_hook(end, with_kwargs=True)

    def _at_gradient(
        self,
        gradient: Tensor,
        *,
        name: str,
        layer: int,
        place: int,
        microbatch: int,
        context: Context | None,
    ) -> None:
        self._current = microbatch
        if not is_finite(gradient):
            where = {"microbatch": microbatch, "layer": layer, "place": place}
            self._add("backward", name, gradient, **where, **_sequences(context, gradient))

    def _microbatch(self, layer: int) -> int:
        """The microbatch of the forward of `layer` that runs now."""
        context = self._contexts.get(layer, self._latest)
        if context is None or not len(context.token_ids_T):
            return self._current
        sequence = int(context.token_ids_T[0]) // max(context.length, 1)
        return self._microbatch_of.get(sequence, self._current)

    def _experts_of(self, name: str, args: tuple[Any, ...], x: Tensor) -> tuple[int, ...]:
        """The experts of the rows that are not finite, where a module computes experts."""
        counts_L = getattr(args[0], "counts_L", None) if args else None
        where = self._parallel.placements.get(f"{name}.gate_up")
        if not isinstance(counts_L, Tensor) or where is None or int(counts_L.sum()) != len(x):
            return ()
        bad_R = ~torch.isfinite(x).all(1)
        experts_R = torch.repeat_interleave(
            torch.arange(len(counts_L), device=x.device), counts_L.to(x.device)
        )
        own = where.experts(self.mesh)
        return tuple(own[place] for place in experts_R[bad_R].unique().tolist())

    def _at_parameter(self, phase: str, name: str, tensor: Tensor, microbatch: int = 0) -> None:
        tensor = tensor.detach()
        if tensor.untyped_storage().size() < tensor.numel() * tensor.element_size():
            return  # its memory is not here between steps (zero3)
        if not tensor.is_floating_point() or is_finite(tensor):
            return
        experts: tuple[int, ...] = ()
        where = self._parallel.placements.get(name)
        if where is not None and where.is_expert and tensor.ndim == len(where.shape):
            bad_L = ~torch.isfinite(tensor.flatten(1)).all(1)
            own = where.experts(self.mesh)
            experts = tuple(own[place] for place in bad_L.nonzero().flatten().tolist())
        elif where is not None and where.is_expert:
            experts = self._experts_of_range(name, tensor)
        self._add(
            phase,
            name,
            tensor,
            microbatch=microbatch,
            layer=layer_in(name),
            place=list(self._parallel.placements).index(name) if where is not None else 0,
            experts=experts,
        )

    def _experts_of_range(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """The same of the range of a stack that this rank owns."""
        where, own = self._parallel.placements[name], self._parallel.reducer.held.get(name)
        if own is None or len(own.numbers) != tensor.numel():
            return ()
        row = 1
        for part in where.slices(self.mesh)[1:]:
            row *= len(part)
        bad = (~torch.isfinite(tensor.flatten())).nonzero().flatten() + own.numbers.start
        held = where.experts(self.mesh)
        return tuple(held[place] for place in (bad // row).unique().tolist())

    def _add(self, phase: str, name: str, tensor: Tensor, **where: Any) -> None:
        where.setdefault("microbatch", self._current if phase == "loss" else 0)
        key = phase, name, where["microbatch"]
        if key not in self._seen:
            where["experts"] = tuple(where.get("experts", ()))[:MOST_NAMED]
            value = "NaN" if bool(torch.isnan(tensor).any()) else "infinite"
            rank = self.mesh.rank
            self._seen[key] = Sighting(rank=rank, phase=phase, name=name, value=value, **where)


def _sequences(context: Context | None, x: Tensor) -> dict[str, Any]:
    """The sequences of the rows that are not finite, and how many there are, where rows are this
    rank's tokens."""
    if context is None or x.ndim != 2 or len(x) != len(context.token_ids_T):
        return {}
    of_row_T = context.token_ids_T // context.length
    bad_T = ~torch.isfinite(x).all(1)
    sequences = tuple(of_row_T[bad_T].unique().tolist())
    return {"sequences": sequences, "num_looked": len(of_row_T.unique())}


def is_finite(x: Tensor) -> bool:
    """Whether all its numbers are."""
    return bool(torch.isfinite(x.detach()).all())


def _floats(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in a value: a tensor, or tuples of them."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, tuple | list):
        for part in cast(Sequence[Any], value):
            yield from _floats(part)


def first_look(parallel: RankModel) -> tuple[str, ...]:
    """Names of the parameters whose sums of gradients, of the step that just ended, are not finite
    on any rank; all ranks call."""
    reducer = parallel.reducer
    own = [name for name, gradient in reducer.gradients.items() if not is_finite(gradient)]
    found = gather_json(own, parallel.mesh.control)
    seen = {name for names in found for name in names}
    return tuple(name for name in parallel.trained if name in seen)


def examine(
    parallel: RankModel,
    optimizer: Optimizer | None,
    microbatches: Sequence[Batch],
    sample_ids: Sequence[int],
    parameters: tuple[str, ...] = (),
) -> Finding:
    """Run the step of `microbatches`, this rank's, again and find where it is not finite first.

    All ranks call. `sample_ids` of all sequences of the step; `parameters`: see
    :class:`Finding`. The gradients in ``parallel.reducer`` are those of this run; weights, the
    optimizer and the ledger stay as they are.
    """
    mesh = parallel.mesh
    with mesh.ledger.paused():
        look = Look(parallel, microbatches)
        look.at_weights(optimizer)
        with look.looking_on() as pipeline:
            counts = count_over_step(parallel, microbatches)
            sums = StepSums(parallel, counts)
            forget_rank_tokens(parallel)

            def objective(part: ModelPart, output: Output, batch: Batch) -> Tensor:
                share = sums.objective(part, output, batch)
                look.at_losses(output, batch)
                return share

            pipeline.run(microbatches, objective, TimelineRecorder(mesh.rank))
            parallel.reducer.finish()
            forget_rank_tokens(parallel)
        sightings = look.of_all_ranks()
    return origin(parallel, sightings, sample_ids, parameters)


def examine_state(parallel: RankModel, optimizer: Optimizer) -> Finding | None:
    """The first weight or moment that is not finite; None where all are. All ranks call."""
    look = Look(parallel, ())
    look.at_weights(optimizer)
    sightings = look.of_all_ranks()
    return origin(parallel, sightings, (), ()) if sightings else None
