"""Where a model is cut into pipeline stages: contiguous layers, embedding and head at the ends."""

from __future__ import annotations

from collections.abc import Sequence

from moemesh.config.model import ModelConfig


def layer_costs(model: ModelConfig) -> list[int]:
    """Matrix-product weights that a token meets in each layer: forward work, up to the factor 2.

    Attention scores are left out: they weigh the same in every layer.
    """
    if model.attention == "mla":
        rank, heads = model.q_lora_rank or 0, model.num_heads
        query_size = heads * (model.qk_nope_head_dim + model.qk_rotary_head_dim)
        query = (
            model.hidden_size * rank + rank * query_size
            if rank
            else (model.hidden_size * query_size)
        )
        latent = model.hidden_size * (model.kv_lora_rank + model.qk_rotary_head_dim)
        expanded = model.kv_lora_rank * heads * (model.qk_nope_head_dim + model.v_head_dim)
        attention = query + latent + expanded + heads * model.v_head_dim * model.hidden_size
    else:
        heads = 2 * model.num_heads + 2 * model.num_kv_heads
        attention = model.hidden_size * heads * model.head_dim
    dense = 3 * model.hidden_size * model.intermediate_size
    width = model.experts_per_token * model.expert_intermediate_size + model.shared_width
    routed = model.hidden_size * (3 * width + model.num_experts)
    return [
        attention + (routed if model.is_moe_layer(index) else dense)
        for index in range(model.num_layers)
    ]


def head_cost(model: ModelConfig) -> int:
    """The head's share in the unit of :func:`layer_costs`; looking up the embedding is free."""
    return model.vocab_size * model.hidden_size


def cut_layers(
    model: ModelConfig, num_stages: int, sizes: Sequence[int] | None = None
) -> tuple[range, ...]:
    """The layers of each stage: `sizes` of them, or such that the costliest stage is cheapest.

    Every stage has a layer; the last also has the head. Among the best cuts the one that gives
    earlier stages more layers, as far as the balance allows. Raises ValueError when there are more
    stages than layers, or `sizes` do not add up.
    """
    if not 1 <= num_stages <= model.num_layers:
        raise ValueError(
            f"{num_stages} stages need at least as many layers, num_layers is {model.num_layers}"
        )
    if sizes is None:
        sizes = balanced_sizes(layer_costs(model), head_cost(model), num_stages)
    if len(sizes) != num_stages or sum(sizes) != model.num_layers or min(sizes) < 1:
        raise ValueError(
            f"layers per stage {list(sizes)} must be {num_stages} positive numbers that add up to "
            f"num_layers ({model.num_layers})"
        )
    ends = [sum(sizes[: stage + 1]) for stage in range(num_stages)]
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))


def balanced_sizes(costs: Sequence[int], last_extra: int, num_stages: int) -> list[int]:
    """Layers per stage that minimise the largest sum of `costs`, the last stage's plus
    `last_extra`; then the sum of squares, so that no stage is needlessly long.

    Dynamic programming over (stages, layers), from the end: O(stages * layers^2).
    """
    num_layers = len(costs)
    prefix = [0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    # best[layer]: (largest, sum of squares, sizes) of cutting layers[layer:] into `stages` stages.
    best: dict[int, tuple[int, int, list[int]]] = {}
    for first in range(num_layers):
        cost = prefix[num_layers] - prefix[first] + last_extra
        best[first] = (cost, cost * cost, [num_layers - first])
    for stages in range(2, num_stages + 1):
        longer: dict[int, tuple[int, int, list[int]]] = {}
        for first in range(num_layers - stages + 1):
            choices: list[tuple[int, int, list[int]]] = []
            for end in range(first + 1, num_layers - stages + 2):
                cost = prefix[end] - prefix[first]
                largest, squares, sizes = best[end]
                choices.append((max(largest, cost), squares + cost * cost, [end - first, *sizes]))
            # Ties go to the longer first stage.
            longer[first] = min(choices, key=lambda choice: (choice[0], choice[1], -choice[2][0]))
        best = longer
    return best[0][2]
