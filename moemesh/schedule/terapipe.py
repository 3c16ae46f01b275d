"""TeraPipe: slices of a sequence follow one another through the pipeline.

Li et al., "TeraPipe: Token-Level Pipeline Parallelism for Training Large-Scale Language Models",
2021, arXiv:2102.07988. For causal models: a slice needs the keys and values of the slices before.
A late slice attends to more keys than an early one, so slices on which the costliest stage takes
equally long have unequal lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

from moemesh.config.conditions import at_most, require
from moemesh.config.layout import shard_sizes
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.schedule.action import Op, Schedule, linear, one_pipe, single
from moemesh.sharding.stages import cut_layers, last_stage_cost, layer_costs

#: Largest number of places at which a sequence may be cut. The time of the dynamic program grows
#: with its square.
MOST_PLACES = 64


def terapipe(num_ranks: int, num_microbatches: int, num_slices: int) -> Schedule:
    """GPipe over (sequence, slice); a microbatch is a sequence.

    Bubble (p-1)(max tF + max tB) over the slices; every rank holds all of them.

    >>> print(draw(simulate(terapipe(2, 2, 2)).timeline))
    rank 0: F0.0 F0.1 F1.0 F1.1 .    .    .    B1.1----- B1.0----- B0.1----- B0.0-----
    rank 1: .    F0.0 F0.1 F1.0 F1.1 B1.1----- B1.0----- B0.1----- B0.0-----
    """
    pieces = [(m, part) for m in range(num_microbatches) for part in range(num_slices)]
    orders = tuple(
        single(
            *(Op("F", rank, microbatch, 0, part) for microbatch, part in pieces),
            *(Op("B", rank, microbatch, 0, part) for microbatch, part in reversed(pieces)),
        )
        for rank in range(num_ranks)
    )
    placement = linear(num_ranks)
    return one_pipe("terapipe", placement, orders, num_microbatches, num_slices=num_slices)


def best_slices(
    cost: Callable[[int, int], float],
    length: int,
    num_stages: int,
    num_sequences: int,
    num_slices: int,
) -> tuple[int, ...]:
    """The lengths of the best `num_slices` slices of a sequence of `length` tokens.

    ``cost(n, c)`` is the time (forward plus backward) of `n` tokens after a context of `c`, on one
    stage. Minimises ``num_sequences * sum + (num_stages - 1) * max`` of the slices' times. The
    formula is the time of a pass when the slowest forward and the slowest backward fall on the same
    slice, and a lower bound otherwise: simulate the result.

    Dynamic program of section 3.3 of the paper. It bounds the slowest slice from above by ever
    smaller times and drops to the slowest slice really used, since no solution lies in between.
    Raises ValueError when there are fewer tokens than slices.

    >>> best_slices(lambda n, c: 1 + n * (n / 2 + c) / 2, 8, 4, 1, 4)
    (4, 2, 1, 1)
    """
    require("best_slices", [at_most("num_slices", length)], num_slices=num_slices)
    # table[i][n]: n tokens that end at token i, n >= 1.
    table = [[math.inf, *(cost(n, i - n) for n in range(1, i + 1))] for i in range(length + 1)]
    best, least, limit = list[int](), math.inf, math.inf
    while pieces := _shortest(table, limit, num_slices):
        ends = [sum(pieces[: index + 1]) for index in range(len(pieces))]
        costs = [table[end][piece] for end, piece in zip(ends, pieces, strict=True)]
        busy = num_sequences * math.fsum(costs)
        if busy >= least:
            # Tighter bounds only make the sum grow.
            break
        seconds = busy + (num_stages - 1) * max(costs)
        if seconds < least:
            best, least = pieces, seconds
        limit = max(costs)
    return tuple(best)


def _shortest(table: list[list[float]], limit: float, num_slices: int) -> list[int]:
    """Lengths of the slices with the least total time, all below `limit`; [] when there is none."""
    length = len(table) - 1
    least = [0.0] + [math.inf] * length
    choices: list[list[int]] = []
    for _ in range(num_slices):
        before, least = least, [math.inf] * (length + 1)
        choice = [0] * (length + 1)
        for end in range(1, length + 1):
            row = table[end]
            for piece in range(1, end + 1):
                if row[piece] < limit and before[end - piece] + row[piece] < least[end]:
                    least[end] = before[end - piece] + row[piece]
                    choice[end] = piece
        choices.append(choice)
    if math.isinf(least[length]):
        return []
    pieces: list[int] = []
    for choice in reversed(choices):
        pieces.append(choice[length - sum(pieces)])
    return pieces[::-1]


@cache
def slice_lengths(model: ModelConfig, plan: Plan, seq_len: int) -> tuple[int, ...]:
    """Tokens of each of the plan's slices of a sequence, in order; they add up to `seq_len`.

    Cost of n tokens after a context of c on a stage with weights W and L layers, whose queries and
    values have the width A together, in multiply-adds: ``n W + A L n (c + (n + 1) / 2)``. More
    slices than :data:`MOST_PLACES` are cut evenly. Raises ValueError when there are more slices
    than tokens.
    """
    num_slices = plan.num_slices
    if num_slices > MOST_PLACES:
        if num_slices > seq_len:
            raise ValueError(f"{num_slices} slices of a sequence of {seq_len} tokens")
        return shard_sizes(seq_len, num_slices)
    places = min(seq_len, MOST_PLACES)
    layers = cut_layers(model, plan.num_stages, plan.layers_per_stage)
    stages = stage_costs(model, layers)

    def cost(num_places: int, num_before: int) -> float:
        n, c = (count * seq_len / places for count in (num_places, num_before))
        return max(weights * n + scores * n * (c + (n + 1) / 2) for weights, scores in stages)

    pieces = best_slices(cost, places, len(stages), plan.microbatches, num_slices)
    ends = [sum(pieces[: index + 1]) * seq_len // places for index in range(num_slices)]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def stage_costs(model: ModelConfig, layers: Sequence[range]) -> list[tuple[int, int]]:
    """Per stage: multiply-adds of a token with weights, and with each token that it attends to."""
    weights = layer_costs(model)
    scores = model.num_heads * (model.query_head_dim + model.value_head_dim)
    costs = [(sum(weights[index] for index in cut), scores * len(cut)) for cut in layers]
    weight, scored = costs[-1]
    costs[-1] = (weight + last_stage_cost(model), scored + scores * model.num_mtp_layers)
    return costs
