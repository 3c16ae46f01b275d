"""The routing of a run, from the experts that its tokens chose: what makes a ledger exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moemesh.config.layout import Layout, shard_range
from moemesh.config.model import ModelConfig
from moemesh.planner.traffic.routing import Routing, Sent

#: Expert ids [tokens][slots] (-1: none) of one rank, forward and layer.
Choices = Sequence[Sequence[int]]


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
