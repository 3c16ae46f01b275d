"""TeraPipe's slices of a sequence: those on which the costliest stage takes equally long.

A slice late in the sequence looks back at more keys than one at its start, so equal times are
unequal lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from moemesh.config.layout import shard_sizes
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.stages import cut_layers, last_stage_cost, layer_costs
from moemesh.schedule.terapipe import best_slices

#: Places at which a sequence may be cut. The dynamic program takes the square of it.
MOST_PLACES = 64


@cache
def slice_lengths(model: ModelConfig, plan: Plan, seq_len: int) -> tuple[int, ...]:
    """Tokens of each of the plan's slices of a sequence, in order; they add up to `seq_len`.

    Forward plus backward work of n tokens after a context of c on a stage with weights W and L
    layers of attention width A, in multiply-adds: ``n W + 2 A L n (c + (n + 1) / 2)``. More slices
    than :data:`MOST_PLACES` are cut evenly. Raises ValueError when there are more slices than
    tokens.
    """
    num_slices = plan.num_slices
    if num_slices > MOST_PLACES:
        return even_lengths(seq_len, num_slices)
    places = min(seq_len, MOST_PLACES)
    layers = cut_layers(model, plan.num_stages, plan.layers_per_stage)
    stages = stage_costs(model, layers)

    def cost(places_here: int, places_before: int) -> float:
        n, c = (count * seq_len / places for count in (places_here, places_before))
        return max(weights * n + scores * n * (c + (n + 1) / 2) for weights, scores in stages)

    pieces = best_slices(cost, places, 1, len(stages), plan.microbatches, num_slices).lengths
    ends = [sum(pieces[: index + 1]) * seq_len // places for index in range(num_slices)]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def even_lengths(seq_len: int, num_slices: int) -> tuple[int, ...]:
    """Slices of (nearly) one length."""
    if num_slices > seq_len:
        raise ValueError(f"{num_slices} slices of a sequence of {seq_len} tokens")
    return shard_sizes(seq_len, num_slices)


def stage_costs(model: ModelConfig, layers: Sequence[range]) -> list[tuple[int, int]]:
    """Per stage: multiply-adds of a token with weights, and with each token that it looks at."""
    weights = layer_costs(model)
    scores = model.num_heads * (model.query_head_dim + model.value_head_dim)
    found = [(sum(weights[index] for index in cut), scores * len(cut)) for cut in layers]
    weight, scored = found[-1]
    found[-1] = (weight + last_stage_cost(model), scored + scores * model.num_mtp_layers)
    return found
