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

from collections.abc import Sequence
from dataclasses import asdict

from torch import Tensor

from moemesh.comm.collectives import gather_json
from moemesh.model.batch import Batch
from moemesh.model.transformer import Output, Part
from moemesh.parallel.expert.replicas import take_rank_tokens
from moemesh.parallel.parallelize import ParallelModel
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.finding import Finding, Sighting, origin, sighting
from moemesh.train.optimizer import Optimizer
from moemesh.train.sightings import Look, is_finite
from moemesh.train.step import StepSums, count_over_step


def first_look(parallel: ParallelModel) -> tuple[str, ...]:
    """Names of the parameters whose sums of gradients, of the step that just ended, are not finite
    on any rank; all ranks call."""
    reducer = parallel.reducer
    own = [name for name, gradient in reducer.gradients.items() if not is_finite(gradient)]
    found = gather_json(own, parallel.mesh.control)
    seen = {name for names in found for name in names}
    return tuple(name for name in parallel.trained if name in seen)


def examine(
    parallel: ParallelModel,
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
            _forget_tokens(parallel)

            def objective(part: Part, output: Output, batch: Batch) -> Tensor:
                share = sums.objective(part, output, batch)
                look.at_losses(output, batch)
                return share

            pipeline.run(microbatches, objective, TimelineRecorder(mesh.rank))
            parallel.reducer.finish()
            _forget_tokens(parallel)
        look.at_sums()
        sightings = _of_all_ranks(look)
    return origin(parallel, sightings, sample_ids, parameters)


def examine_state(parallel: ParallelModel, optimizer: Optimizer) -> Finding | None:
    """Where weights or moments are not finite; None where all are. All ranks call."""
    look = Look(parallel, ())
    look.at_weights(optimizer)
    sightings = _of_all_ranks(look)
    return origin(parallel, sightings, (), ()) if sightings else None


def _of_all_ranks(look: Look) -> list[Sighting]:
    own = [asdict(one) for one in look.first_sightings()]
    return [sighting(one) for rank in gather_json(own, look.mesh.control) for one in rank]


def _forget_tokens(parallel: ParallelModel) -> None:
    if parallel.has_replicas:
        take_rank_tokens(parallel.model, parallel.mesh)
