"""The routing of a run, from the experts that its tokens chose: what makes a ledger exact."""

from __future__ import annotations

from collections.abc import Mapping

from moemesh.config.layout import Layout, shard_range
from moemesh.config.model import ModelConfig
from moemesh.planner.traffic.dispatch_traffic import Choices, Routing, SentRows, count_choices


def chosen_routing(
    model: ModelConfig, layout: Layout, choices: Mapping[tuple[int, int, int], Choices]
) -> Routing:
    """The counts of a run: `choices` by (rank, forward of the step, layer)."""

    def sent(rank: int, forward: int, layer: int, tokens: int, chunk: int, chunks: int) -> SentRows:
        found = choices[rank, forward, layer]
        if len(found) != tokens:
            raise ValueError(
                f"rank {rank}, forward {forward}: {len(found)} tokens chose, not {tokens}"
            )
        part = shard_range(tokens, chunks, chunk)
        chosen = found[part.start : part.stop]
        return count_choices(chosen, model.num_experts, layout, slots=_slots(model, found))

    return sent


def _slots(model: ModelConfig, found: Choices) -> int:
    return len(found[0]) if found else model.experts_per_token
