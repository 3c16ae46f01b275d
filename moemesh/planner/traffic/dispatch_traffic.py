"""Ledger entries of an MoE layer's dispatcher and replicas, for one microbatch and chunk.

Legend: P ranks of ep, X ranks of etp, K slots, H hidden, w bytes of an element, row = w H (forward
in fp8: H + 4 ceil(H / 128)). What a rank sends is asked of a :class:`Routing`; what it receives is
what the others send it.

| dispatcher | plan | dispatch | combine |
|---|---|---|---|
| all_to_all | counts of all chunks over ep, etp | rows over ep; gathered over etp | the way back |
| all_gather | token counts, ids 8 K a token over ep_etp | tokens gathered | sums, dense or uneven |
| hierarchical | per hop: counts of all chunks, ids | a row per node, then per rank | the way back |
| low_latency | headers of fixed size | fixed slots | fixed slots |

Weights (4 or 8 bytes a row) travel as rows do. Backward: each one's pair, rows in full precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moemesh.balance import QuotaPlan, assign_tokens, plan_quotas, shadow_experts
from moemesh.balance.compiled import plain_loops
from moemesh.config.layout import Layout, shard_range, shard_sizes
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.planner.traffic.ledger_lines import LedgerLines, members
from moemesh.planner.traffic.routing import SentRows
from moemesh.sharding.dispatchers import packed_bytes, slots_per_pair

_COUNTS, _WEIGHTS, _DISPATCH, _COMBINE = (
    "moe.counts",
    "moe.dispatch.weights",
    "moe.dispatch",
    "moe.combine",
)
_INT64, _INT32 = 8, 4


def low_latency_slots(model: ModelConfig, plan: Plan, max_tokens: int) -> int:
    """Row slots per pair of ranks."""
    return slots_per_pair(max_tokens, model.experts_per_token, model.num_experts, plan.ep)


class DispatchTraffic:
    """Enters the plan, dispatch and combine of one chunk; `sent_by` tells what a rank asks for."""

    def __init__(
        self,
        lines: LedgerLines,
        model: ModelConfig,
        plan: Plan,
        element: int,
        max_tokens: int,
        sent_by: Callable[[int], SentRows],
        times: int,
        counts: int = 1,
        spare_rows: int = 0,
    ) -> None:
        """`element` bytes of a number of the model. `counts`: of how many chunks the counts are
        exchanged with those of this one (all_to_all and hierarchical); 0: they have gone with those
        of another. `spare_rows`: up to so many rows all_gather sums densely, whatever visits (on an
        accelerator)."""
        self.counts, self.spare_rows = counts, spare_rows
        self.lines, self.model, self.plan = lines, model, plan
        #: Bytes of a row as it is dispatched; in the backward and the combine; and of its weight.
        self.plain: float = model.hidden_size * element
        self.coded = self.plain
        if plan.payload == "fp8":
            self.coded = packed_bytes(model.hidden_size)
        self.weight = max(element, 4)
        self.sent_by, self.times, self.max_tokens = sent_by, times, max_tokens
        self.layout = lines.layout
        #: Experts of a rank that rows can go to: its own, and those in its spare slots.
        spare = plan.spare_slots if plan.ep > 1 else 0
        self.num_local = model.num_experts // plan.ep + spare
        self.ep = lines.here["ep"]
        self.exact = plan.combine == "exact"

    def enter(self) -> None:
        """Everything of one chunk, forward and backward."""
        if self.plan.ep * self.plan.etp == 1:
            return
        match self.plan.dispatcher:
            case "all_gather":
                self._all_gather()
            case "hierarchical":
                self._hierarchical()
            case "low_latency":
                self._low_latency()
            case _:
                self._all_to_all()

    # Who sends what.

    def _pairs(self, rank: int) -> tuple[list[float], list[float]]:
        """(rows to, rows from) each ep index, of `rank`."""
        at = self.layout.coordinates(rank)["ep"]
        group = self.lines.members("ep", rank)
        return list(self.sent_by(rank).rows), [self.sent_by(peer).rows[at] for peer in group]

    def _scaled(self, counts: list[float], width: float) -> list[float]:
        return [count * width for count in counts]

    # The forms.

    def _all_to_all(self) -> None:
        lines, times, plan = self.lines, self.times, self.plan
        if self.counts:
            block = float(self.counts * self.num_local * _INT64)
            lines.all_to_all("ep", [block] * plan.ep, [block] * plan.ep, "forward", _COUNTS, times)
            lines.all_gather("etp", [block * plan.ep] * plan.etp, "forward", _COUNTS, times)
        out, into = self._pairs(lines.rank)
        lanes = [sum(self._pairs(lane)[1]) for lane in lines.members("etp")]
        self._rows_there_and_back("ep", out, into, lanes)

    def _rows_there_and_back(
        self, axis: str, out: list[float], into: list[float], lanes: list[float]
    ) -> None:
        """Dispatch and combine of rows over `axis` and then over etp."""
        self._exchange(axis, out, into, self.weight, self.weight, _WEIGHTS)
        self._lanes(lanes, self.weight, _WEIGHTS)
        self._exchange(axis, out, into, self.coded, None if self.exact else self.plain, _DISPATCH)
        self._lanes(lanes, self.plain, _DISPATCH, backward=not self.exact)
        if self.exact:
            self._way_home(_DISPATCH, "backward")
            self._way_home(_COMBINE, "forward")
            return
        self._exchange(axis, into, out, self.plain, self.plain, _COMBINE)
        self.lines.scattered("etp", self._scaled(lanes, self.plain), _COMBINE, self.times)

    def _exchange(
        self,
        axis: str,
        out: list[float],
        into: list[float],
        width: float,
        width_back: float | None,
        caller: str,
    ) -> None:
        lines, times = self.lines, self.times
        there, here = self._scaled(out, width), self._scaled(into, width)
        lines.all_to_all(axis, there, here, "forward", caller, times)
        if width_back is not None:
            there, here = self._scaled(out, width_back), self._scaled(into, width_back)
            lines.all_to_all(axis, here, there, "backward", caller, times)

    def _lanes(
        self, lanes: list[float], width: float, caller: str, *, backward: bool = True
    ) -> None:
        """Rows gathered over etp, and the pair of it."""
        blocks = self._scaled(lanes, width)
        self.lines.all_gather("etp", blocks, "forward", caller, self.times)
        if backward:
            self.lines.reduce_scatter("etp", blocks, "backward", caller, self.times)

    def _way_home(self, caller: str, phase: str) -> None:
        """Every (token, expert) row by itself: sums over etp, then over ep; combine has a pair."""
        lines, times, width = self.lines, self.times, self.plain
        out, into = self._pairs(lines.rank)
        lanes = [sum(self._pairs(lane)[1]) for lane in lines.members("etp")]
        blocks = self._scaled(lanes, width)
        lines.reduce_scatter("etp", blocks, phase, caller, times)
        there, here = self._scaled(into, width), self._scaled(out, width)
        lines.all_to_all("ep", there, here, phase, caller, times)
        if phase == "forward":
            lines.all_gather("etp", blocks, "backward", caller, times)
            lines.all_to_all("ep", here, there, "backward", caller, times)

    def _all_gather(self) -> None:
        lines, times = self.lines, self.times
        group = lines.members("ep_etp")
        sent = [self.sent_by(peer) for peer in group]
        slots = max(item.slots for item in sent)
        tokens = [item.tokens for item in sent]
        lines.all_gather("ep_etp", [float(_INT64)] * len(group), "forward", _COUNTS, times)
        ids = self._scaled(tokens, slots * _INT64)
        lines.all_gather("ep_etp", ids, "forward", _COUNTS, times)
        weights = self._scaled(tokens, slots * self.weight)
        lines.gathered("ep_etp", weights, _WEIGHTS, times)
        lines.all_gather("ep_etp", self._scaled(tokens, self.coded), "forward", _DISPATCH, times)
        blocks = self._scaled(tokens, self.plain)
        if self.exact:
            self._way_home(_DISPATCH, "backward")
            self._way_home(_COMBINE, "forward")
            return
        lines.reduce_scatter("ep_etp", blocks, "backward", _DISPATCH, times)
        # Every lane of an ep index holds a shard of each of its experts: visits count per rank.
        visited = self.plan.etp * sum(sum(item.visits) for item in sent)
        is_spared = sum(tokens) * slots <= self.spare_rows
        if is_spared or visited >= sum(tokens) * len(group):
            lines.scattered("ep_etp", blocks, _COMBINE, times)
            return
        out = [item.visits[self.ep] * self.plain for item in sent]
        mine = self.sent_by(lines.rank).visits
        into = [mine[place // self.plan.etp] * self.plain for place in range(len(group))]
        lines.exchanged("ep_etp", out, into, _COMBINE, times)

    def _hierarchical(self) -> None:
        lines, times, layout = self.lines, self.times, self.layout
        rail, node = lines.members("ep_rail"), lines.members("ep_node")
        own, sent_by = lines.here["ep_rail"], self.sent_by

        def forwarded(rail: tuple[int, ...], ep_index: int) -> float:
            """Rows that a rank forwards inside its node to `ep_index`: what its rail sent it."""
            return sum(sent_by(peer).visits[ep_index] for peer in rail)

        places = shard_range(layout.ep, layout.ep_rail, own)
        hops = (
            (
                "ep_rail",
                list(sent_by(lines.rank).node_visits),
                [sent_by(peer).node_visits[own] for peer in rail],
            ),
            (
                "ep_node",
                [forwarded(rail, place) for place in places],
                [forwarded(lines.members("ep_rail", peer), self.ep) for peer in node],
            ),
        )
        lanes = [
            sum(sent_by(peer).visits[self.ep] for peer in lines.members("ep", lane))
            for lane in lines.members("etp")
        ]
        slots = max(sent_by(peer).slots for peer in lines.members("ep"))
        ids = _INT32 * (slots + 1)
        # Tokens to a node, tokens and pairs to each rank there (two counts in a number); then
        # tokens and pairs, of the node and of others; then rows and pairs.
        counts = {"ep_rail": 1 + layout.ep_node, "ep_node": 2}
        for axis, out, into in hops:
            if self.counts:
                block = [float(self.counts * counts[axis] * _INT64)] * len(out)
                lines.all_to_all(axis, block, block, "forward", _COUNTS, times)
            self._exchange(axis, out, into, ids, None, _COUNTS)
        if self.counts:
            lane = [2.0 * self.counts * _INT64] * self.plan.etp
            lines.all_gather("etp", lane, "forward", _COUNTS, times)
        self._lanes(lanes, ids, _COUNTS, backward=False)
        exact = self.exact
        for axis, out, into in hops:
            width = self.weight * slots
            self._exchange(axis, out, into, width, width, _WEIGHTS)
            self._exchange(axis, out, into, self.coded, None if exact else self.plain, _DISPATCH)
            if not exact:
                self._exchange(axis, into, out, self.plain, self.plain, _COMBINE)
        self._lanes(lanes, self.weight * slots, _WEIGHTS)
        self._lanes(lanes, self.plain, _DISPATCH, backward=not exact)
        if exact:
            self._way_home(_DISPATCH, "backward")
            self._way_home(_COMBINE, "forward")
        else:
            lines.scattered("etp", self._scaled(lanes, self.plain), _COMBINE, times)

    def _low_latency(self) -> None:
        lines, times, plan = self.lines, self.times, self.plan
        slots = low_latency_slots(self.model, plan, self.max_tokens)
        header = [float((slots + 1) * _INT32)] * plan.ep
        lines.all_to_all("ep", header, header, "forward", "moe.headers", times)
        lines.all_gather("etp", [sum(header)] * plan.etp, "forward", "moe.headers", times)
        group = lines.members("ep_etp")
        if any(rows > slots for peer in group for rows in self.sent_by(peer).rows):
            self._all_to_all()
            return
        even = [float(slots)] * plan.ep
        lanes = [float(slots * plan.ep)] * plan.etp
        self._rows_there_and_back("ep", even, even, lanes)


# Traffic that transient replicas add to a MoE layer: shared counts, weights, rerouted rows.
#
# Legend: P ranks of ep, X ranks of etp, E experts, W numbers of one expert's local shard, w bytes.
#
# | what | over | bytes |
# |---|---|---|
# | counts of every rank | all-gather over ep_etp, all chunks at once | 8 E a rank and chunk |
# | weights of replicas, their gradients back | all-to-all over ep | w W a replica |
# | rows | as all_to_all, to the places that the quotas name | |
#
# Which replicas there are, and which tokens go to them, is decided by :mod:`moemesh.balance` from
# the counts alone, here as in a run. Where the ranks' loads are even (within 2 %), as under uniform
# routing, there are none.


Ints = NDArray[np.int64]

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
        lines.exchanged("ep", out, into, "moe.replicas", times)

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
