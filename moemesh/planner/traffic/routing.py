"""Where tokens go: the counts that routing-dependent traffic follows from, expected or measured.

Uniform routing chooses k of E experts with equal probability. A token then has an expert in a given
part of n of them with probability 1 - C(E - n, k) / C(E, k), so it visits

    E[nodes] = N (1 - C(E - E/N, k) / C(E, k))

of N nodes, and of those that are not its own (N - 1)/N. Where a router keeps the best M of N groups
and a group is a node, M (1 - C(E M/N - E/N, k) / C(E M/N, k)).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb

from moemesh.config.layout import Layout, shard_range
from moemesh.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What the tokens of one rank (or of one chunk of them) ask for.

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


#: (rank, forward of the step, layer, its tokens, chunk, chunks) -> what they ask for. Forwards are
#: numbered by microbatch and, where sequences are cut, inside it by slice.
Routing = Callable[[int, int, int, int, int, int], Sent]

#: Expert ids [tokens][slots] (-1: none) of one rank, forward and layer.
Choices = Sequence[Sequence[int]]


def expected_nodes(experts: int, per_token: int, nodes: int, kept: int | None = None) -> float:
    """Mean number of nodes that a token has an expert on, under uniform routing.

    `kept`: the router looks at the best so many nodes only. Raises ValueError when the experts do
    not divide over the nodes.
    """
    if experts % nodes:
        raise ValueError(f"{experts} experts do not divide over {nodes} nodes")
    used = nodes if kept is None else min(kept, nodes)
    pool, part = experts * used // nodes, experts // nodes
    return used * (1 - comb(pool - part, per_token) / comb(pool, per_token))


def remote_copies(
    experts: int,
    per_token: int,
    nodes: int,
    *,
    kept: int | None = None,
    deduplicated: bool = True,
) -> float:
    """Mean copies of a token that leave its node: one per remote node, or one per remote expert."""
    copies = expected_nodes(experts, per_token, nodes, kept) if deduplicated else per_token
    return copies * (nodes - 1) / nodes


def visit_probability(experts: int, per_token: int, part: int) -> float:
    """That a token has at least one of its experts among `part` of them; 0 of no experts."""
    if not experts:
        return 0.0
    return 1 - comb(experts - part, per_token) / comb(experts, per_token)


def uniform_routing(model: ModelConfig, layout: Layout) -> Routing:
    """The expected counts when every expert is as likely as another."""
    experts, k = model.num_experts, model.experts_per_token
    in_rank = visit_probability(experts, k, experts // layout.ep)
    in_node = visit_probability(experts, k, experts // layout.ep_rail)

    def sent(rank: int, forward: int, layer: int, tokens: int, chunk: int, chunks: int) -> Sent:
        count = len(shard_range(tokens, chunks, chunk))
        return Sent(
            tokens=count,
            by_expert=(count * k / max(experts, 1),) * experts,
            rows=(count * k / layout.ep,) * layout.ep,
            visits=(count * in_rank,) * layout.ep,
            node_visits=(count * in_node,) * layout.ep_rail,
            slots=k,
        )

    return sent


def chosen_routing(
    model: ModelConfig, layout: Layout, choices: Mapping[tuple[int, int, int], Choices]
) -> Routing:
    """The counts of a run: `choices` by (rank, forward of the step, layer)."""
    per_rank = model.num_experts // layout.ep

    def sent(rank: int, forward: int, layer: int, tokens: int, chunk: int, chunks: int) -> Sent:
        found = choices[rank, forward, layer]
        if len(found) != tokens:
            raise ValueError(
                f"rank {rank}, forward {forward}: {len(found)} tokens chose, not {tokens}"
            )
        part = shard_range(tokens, chunks, chunk)
        by_expert = [0] * model.num_experts
        visits, nodes = [0] * layout.ep, [0] * layout.ep_rail
        for token in part:
            experts = [expert for expert in found[token] if expert >= 0]
            for expert in experts:
                by_expert[expert] += 1
            ranks = [expert // per_rank for expert in experts]
            for index in set(ranks):
                visits[index] += 1
            for index in {place // layout.ep_node for place in ranks}:
                nodes[index] += 1
        return Sent(
            tokens=len(part),
            by_expert=tuple(by_expert),
            rows=tuple(
                sum(by_expert[index * per_rank : (index + 1) * per_rank])
                for index in range(layout.ep)
            ),
            visits=tuple(visits),
            node_visits=tuple(nodes),
            slots=len(found[0]) if found else model.experts_per_token,
        )

    return sent
