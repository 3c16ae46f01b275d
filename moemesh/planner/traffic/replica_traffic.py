"""Traffic that transient replicas add to a MoE layer: shared counts, weights, rerouted rows.

Legend: P ranks of ep, X ranks of etp, E experts, W numbers of one expert's local shard, w bytes.

| what | over | bytes |
|---|---|---|
| counts of every rank | all-gather over ep_etp, all chunks at once | 8 E a rank and chunk |
| weights of replicas, their gradients back | all-to-all over ep | w W a replica |
| rows | as all_to_all, to the places that the quotas name | |

Which replicas there are, and which tokens go to them, is decided by :mod:`moemesh.balance` from
the counts alone, here as in a run. Where the ranks' loads are even (within 2 %), as under uniform
routing, there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moemesh.balance import QuotaPlan, assign_tokens, plan_quotas, shadow_experts
from moemesh.balance.compiled import plain_loops
from moemesh.config.layout import Layout, shard_sizes
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.planner.traffic.ledger_lines import LedgerLines, members
from moemesh.planner.traffic.routing import SentRows

Ints = NDArray[np.int64]

_INT64 = 8
#: Rows that a shadow costs, times the width of an expert (`moemesh.parallel.expert.replicas`).
_SHADOW_ROWS = 3 * 2 / 4
#: Busiest rank over the mean up to which no replica is made: 51 / 50.
_EVEN = (50, 51)


class ReplicaTraffic:
    """One chunk of tokens of one layer, of the ep_etp group around the rank of `lines`.

    `routed` tells what the tokens of a rank ask for. `is_uniform`: counts are expected ones, the
    same for all experts.
    """

    def __init__(
        self,
        lines: LedgerLines,
        model: ModelConfig,
        plan: Plan,
        element: int,
        routed: Callable[[int], SentRows],
        *,
        is_uniform: bool,
    ) -> None:
        self.lines, self.model, self.plan, self.routed = lines, model, plan, routed
        self.layout: Layout = lines.layout
        self.element, self.is_uniform = element, is_uniform
        self.group = members(self.layout, "ep_etp", lines.rank)

    def enter(self, times: int, counts: int) -> None:
        """Counts (of `counts` chunks at once; 0: they went with those of another) and weights; rows
        follow from :meth:`sent`."""
        model, plan, lines = self.model, self.plan, self.lines
        if counts:
            gathered = [float(counts * model.num_experts * _INT64)] * len(self.group)
            lines.all_gather("ep_etp", gathered, "forward", "moe.counts", times)
        if self.is_uniform or not self.quotas.num_replicas:
            return
        width = model.expert_intermediate_size // plan.etp
        numbers = 3 * width * model.hidden_size
        if model.expert_bias:
            numbers += 2 * width + shard_sizes(model.hidden_size, plan.etp)[lines.here["etp"]]
        size = numbers * self.element
        here = lines.here["ep"]
        spare, home = self.quotas.spare_expert, self.quotas.home
        filled = spare >= 0
        own = filled & (home[spare] == here)
        out = [float(count * size) for count in own.sum(axis=1)]
        wanted = home[spare[here][filled[here]]]
        into = [float(count * size) for count in np.bincount(wanted, minlength=plan.ep)]
        lines.all_to_all("ep", out, into, "forward", "moe.replicas", times)
        lines.all_to_all("ep", into, out, "backward", "moe.replicas", times)

    def sent(self, rank: int) -> SentRows:
        """Rows that `rank` sends, by the rank of their place instead of their home."""
        asked = self.routed(rank)
        if self.is_uniform:
            return asked
        at = self.layout.coordinates(rank)
        rows = self._rows(at["ep"], at["etp"])
        return replace(asked, rows=tuple(float(count) for count in rows))

    @cached_property
    def counts(self) -> Ints:
        """[P, X, E] tokens of every rank of the group."""
        table = np.array([self.routed(peer).by_expert for peer in self.group], dtype=np.int64)
        return table.reshape(self.plan.ep, self.plan.etp, self.model.num_experts)

    @cached_property
    def quotas(self) -> QuotaPlan:
        plan, model = self.plan, self.model
        counts = self.counts.sum(axis=1)
        home = np.arange(model.num_experts, dtype=np.int64) // (model.num_experts // plan.ep)
        # Small tables, and no compiler to wait for.
        with plain_loops():
            quotas = plan_quotas(counts, home, 0)
            tokens = quotas.rank_tokens
            if int(tokens.max()) * len(tokens) * _EVEN[0] <= int(tokens.sum()) * _EVEN[1]:
                return quotas
            if plan.spare_policy == "quota":
                return plan_quotas(counts, home, plan.spare_slots)
            cost = _SHADOW_ROWS * model.expert_intermediate_size
            return shadow_experts(counts, home, shadow_rows=cost, max_shadows=plan.spare_slots)

    @cached_property
    def assigned(self) -> Ints:
        """[P, places] tokens that all lanes of a rank send to each place."""
        with plain_loops():
            return assign_tokens(
                self.quotas, self.counts.sum(axis=1), ranks_per_node=self.layout.ep_node
            )

    def _rows(self, rank: int, lane: int) -> Ints:
        """[P] tokens of one lane by the rank that computes them.

        A rank's tokens of an expert are cut into runs, one a place, and its lanes share them in
        order: lane by lane, each from where the one before has ended.
        """
        found = np.zeros(self.plan.ep, np.int64)
        place_expert, place_rank = self.quotas.place_expert, self.quotas.place_rank
        for expert in range(self.model.num_experts):
            first = int(self.counts[rank, :lane, expert].sum())
            last = first + int(self.counts[rank, lane, expert])
            start = 0
            for place in np.flatnonzero(place_expert == expert):
                stop = start + int(self.assigned[rank, place])
                found[place_rank[place]] += max(min(stop, last) - max(start, first), 0)
                start = stop
        return found
