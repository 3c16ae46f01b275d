"""The cut of a model into pipeline stages: contiguous layers, embedding and head at the ends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod

from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.sharding.parameters import attention_tensors


def layer_costs(model: ModelConfig) -> list[int]:
    """Number of matrix elements that multiply a token in each layer: half its forward FLOPs.
    Attention scores are left out: without windows they cost the same in every layer."""
    weights = attention_tensors(model, Plan())
    attention = sum(prod(tensor.shape) for tensor in weights if len(tensor.shape) > 1)
    dense = 3 * model.hidden_size * model.intermediate_size
    width = model.experts_per_token * model.expert_intermediate_size + model.shared_width
    routed = model.hidden_size * (3 * width + model.num_experts + model.shared_gate)
    return [
        attention + (routed if model.is_moe_layer(index) else dense)
        for index in range(model.num_layers)
    ]


def last_stage_cost(model: ModelConfig) -> int:
    """Cost of the last stage besides its layers, in the unit of :func:`layer_costs`: the head, and
    extra prediction layers with their projection 2 H -> H and another use of the head. The
    lookup of the embedding is free."""
    head = model.vocab_size * model.hidden_size
    projection = 2 * model.hidden_size**2
    return head + model.num_mtp_layers * (layer_costs(model)[-1] + projection + head)


def cut_layers(
    model: ModelConfig, num_stages: int, sizes: Sequence[int] | None = None
) -> tuple[range, ...]:
    """The layers of each stage: `sizes` of them, or the cut whose costliest stage is cheapest.

    Every stage has a layer; the last also has the head. Ties are broken as in
    :func:`balanced_sizes`. Raises ValueError if there are more stages than layers, or if `sizes` do
    not add up.
    """
    if not 1 <= num_stages <= model.num_layers:
        raise ValueError(
            f"{num_stages} stages need at least as many layers, num_layers is {model.num_layers}"
        )
    if sizes is None:
        sizes = balanced_sizes(layer_costs(model), last_stage_cost(model), num_stages)
    if len(sizes) != num_stages or sum(sizes) != model.num_layers or min(sizes) < 1:
        raise ValueError(
            f"layers per stage {list(sizes)} must be {num_stages} positive numbers that add up to "
            f"num_layers ({model.num_layers})"
        )
    return layer_runs(sizes)


def layer_runs(sizes: Sequence[int]) -> tuple[range, ...]:
    """The layers of each stage, for stages of `sizes` layers."""
    return tuple(range(*ends) for ends in pairwise(accumulate(sizes, initial=0)))


def balanced_sizes(costs: Sequence[int], last_extra: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage that minimise the cost of the costliest stage, the sum of its layers'
    `costs`, to which the last stage adds `last_extra`; of equal cuts the one with the least sum of
    squared costs, so that no stage is needlessly long, then the one with longer early stages.
    Dynamic programming over (stages, layers), from the end: O(stages * layers^2)."""
    if not 1 <= num_stages <= len(costs):
        raise ValueError(
            f"{num_stages} stages need at least as many layers, there are {len(costs)}"
        )
    cuts: dict[int, _Cut] = {}
    for stages in range(1, num_stages + 1):  # ascending, so that the recursion is one level deep
        cuts = _best_cuts(tuple(costs), last_extra, stages)
    return cuts[0][2]


#: Largest cost of a stage, sum of the squared costs, number of layers of each stage.
_Cut = tuple[int, int, tuple[int, ...]]


@lru_cache(maxsize=1024)
def _best_cuts(costs: tuple[int, ...], last_extra: int, stages: int) -> dict[int, _Cut]:
    """Index `first` -> the best cut of layers[first:] into `stages` stages."""
    prefix = (0, *accumulate(costs))
    cuts: dict[int, _Cut] = {}
    for first in range(len(prefix) - stages):
        if stages == 1:
            cost = prefix[-1] - prefix[first] + last_extra
            cuts[first] = cost, cost * cost, (len(costs) - first,)
            continue
        best, choices = _best_cuts(costs, last_extra, stages - 1), list[tuple[int, int, int]]()
        for end in range(first + 1, len(prefix) - stages + 1):
            cost = prefix[end] - prefix[first]
            largest, squares, _ = best[end]
            choices.append((max(largest, cost), squares + cost * cost, first - end))
        # Ties go to the longer first stage: its length is compared with a minus.
        largest, squares, minus_length = min(choices)
        end = first - minus_length
        cuts[first] = largest, squares, (end - first, *best[end][2])
    return cuts
