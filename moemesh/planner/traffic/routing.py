"""Token counts per expert and rank, expected or chosen: traffic that depends on them follows.

Uniform routing chooses k of E experts with equal probability. A token then has an expert in a given
part of n of them with probability 1 - C(E - n, k) / C(E, k), so it visits N times that of N nodes,
n = E/N.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import ceil, floor

from moemesh.config.layout import Layout, shard_range
from moemesh.config.model import ModelConfig
from moemesh.sharding.dispatchers import visit_probability


@dataclass(frozen=True, kw_only=True)
class SentRows:
    """Rows that the tokens of one rank (or of one chunk of them) ask for.

    `by_expert`: tokens of each expert; `rows`: (token, expert) pairs by ep index; `visits`: tokens
    with at least one expert there;
    `node_visits`: tokens with at least one expert in each part of the ep axis that shares a node;
    `slots`: experts that a token can have (K).
    """

    tokens: float
    by_expert: tuple[float, ...]
    rows: tuple[float, ...]
    visits: tuple[float, ...]
    node_visits: tuple[float, ...]
    slots: int


#: Expert ids of each slot of each token (-1: none).
Choices = Sequence[Sequence[int]]


def count_choices(choices: Choices, num_experts: int, layout: Layout, *, slots: int) -> SentRows:
    """Rows that tokens with these `choices` ask for; `slots` where there is no token."""
    per_rank = num_experts // layout.ep
    by_expert = [0] * num_experts
    visits, nodes = [0] * layout.ep, [0] * layout.ep_rail
    for token in choices:
        chosen = [expert for expert in token if expert >= 0]
        for expert in chosen:
            by_expert[expert] += 1
        ranks = {expert // per_rank for expert in chosen}
        for index in ranks:
            visits[index] += 1
        for index in {place // layout.ep_node for place in ranks}:
            nodes[index] += 1
    return SentRows(
        tokens=len(choices),
        by_expert=tuple(by_expert),
        rows=tuple(
            sum(by_expert[index * per_rank : (index + 1) * per_rank]) for index in range(layout.ep)
        ),
        visits=tuple(visits),
        node_visits=tuple(nodes),
        slots=len(choices[0]) if choices else slots,
    )


#: (rank, forward of the step, layer, its tokens, chunk, chunks) -> what they ask for. Forwards are
#: numbered by microbatch and, where sequences are cut, inside it by slice.
Routing = Callable[[int, int, int, int, int, int], SentRows]


def uniform_routing(model: ModelConfig, layout: Layout) -> Routing:
    """The expected counts when every expert is as likely as another."""
    experts, k = model.num_experts, model.experts_per_token
    in_rank = visit_probability(experts, k, experts // layout.ep)
    in_node = visit_probability(experts, k, experts // layout.ep_rail)

    def sent(rank: int, forward: int, layer: int, tokens: int, chunk: int, chunks: int) -> SentRows:
        count = len(shard_range(tokens, chunks, chunk))
        return SentRows(
            tokens=count,
            by_expert=(count * k / max(experts, 1),) * experts,
            rows=(count * k / layout.ep,) * layout.ep,
            visits=(count * in_rank,) * layout.ep,
            node_visits=(count * in_node,) * layout.ep_rail,
            slots=k,
        )

    return sent


def capacity_of(model: ModelConfig, layout: Layout, tokens: int, seq_len: int) -> int:
    """The most rows of one expert from `tokens` of a rank, which may take up what all ranks of
    their sequences have in common; `tokens` where nothing is dropped."""
    if not model.capacity_factor:
        return tokens
    exact = Fraction(model.capacity_factor).limit_denominator(10_000)
    each = min(ceil(seq_len * model.experts_per_token * exact / model.num_experts), seq_len)
    sequences = ceil(tokens * layout.cp * layout.tp / seq_len)
    return min(tokens, sequences * each)


def crowded_routing(
    model: ModelConfig, layout: Layout, ep: int, seq_len: int, share: float = 1.0
) -> Routing:
    """The counts when a `share` of all tokens choose as many experts of the ranks with index `ep`
    as they can, and capacity lets through as many of them as it may. With all tokens no routing
    sends more rows there."""
    experts, k = model.num_experts, model.experts_per_token
    first = ep * (experts // layout.ep)
    chosen = [(first + number) % experts for number in range(k)]
    one = count_choices([chosen], experts, layout, slots=k)

    @cache
    def counted(tokens: int, chunk: int, chunks: int) -> SentRows:
        count = len(shard_range(tokens, chunks, chunk))
        crowd = floor(share * count)
        kept = min(crowd, capacity_of(model, layout, tokens, seq_len))
        return SentRows(
            tokens=count,
            by_expert=tuple(kept * number for number in one.by_expert),
            rows=tuple(kept * number for number in one.rows),
            visits=tuple(crowd * number for number in one.visits),
            node_visits=tuple(crowd * number for number in one.node_visits),
            slots=k,
        )

    def sent(rank: int, forward: int, layer: int, tokens: int, chunk: int, chunks: int) -> SentRows:
        return counted(tokens, chunk, chunks)

    return sent
