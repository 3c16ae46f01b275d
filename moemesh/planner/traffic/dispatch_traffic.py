"""Ledger entries of an MoE layer's dispatcher and replicas, for one microbatch and chunk.

Legend: P ranks of ep, X ranks of etp, K slots, H hidden, w bytes of an element, row = w H (forward
in fp8: H + 4 ceil(H / 128)). A :class:`Routing` returns the rows that a rank sends; the rows that
it receives follow from those of its peers. Rows take the hops of
:data:`moemesh.config.dispatcher_table.DISPATCHERS`.

| rows of a hop | exchanged before them |
|---|---|
| pairs of token and expert | counts of all chunks |
| tokens at the ranks or nodes of their experts | counts of all chunks, ids |
| all tokens, gathered | token counts, ids 8 K a token; sums come back dense or uneven |
| fixed slots | headers of fixed size |

Weights (4 or 8 bytes each; K of them if a row is a token) take the same hops as rows. The backward
has the pair of each collective of rows and weights, with rows in full precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from math import ceil, floor

import numpy as np

from moemesh.balance import assign_tokens, plan_quotas, shadow_experts
from moemesh.balance.compiled import plain_loops
from moemesh.config.dispatcher_table import DISPATCHERS, ROW_HOPS, HopRows, dispatcher_row
from moemesh.config.layout import Layout, shard_range, shard_sizes
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.planner.traffic.exchanges import BOTH, LedgerLines, Transfer
from moemesh.sharding.dispatchers import packed_bytes, slots_per_pair, visit_probability

# Token counts per expert and rank, expected or chosen, which determine the traffic.
#
# Uniform routing chooses k of E experts with equal probability. A token then has an expert among n
# given ones with probability p(n) = 1 - C(E - n, k) / C(E, k), so it visits N p(E/N) of N nodes.


@dataclass(frozen=True, kw_only=True)
class SentRows:
    """Rows that one rank sends for its tokens, or for one chunk of them.

    `by_expert`: tokens of each expert; `rows`: (token, expert) pairs by ep index; `visits`: tokens
    with at least one expert at each ep index; `node_visits`: tokens with at least one expert in
    each part of the ep axis that shares a node; `slots`: most experts of a token (K).
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
    """Rows that tokens with these `choices` send; `slots` is used if `choices` is empty."""
    per_rank = num_experts // layout.ep
    starts = [index * per_rank for index in range(layout.ep)]
    by_expert = [0] * num_experts
    visits, nodes = [0] * layout.ep, [0] * layout.ep_rail
    for token in choices:
        chosen = [expert for expert in token if expert >= 0]
        for expert in chosen:
            by_expert[expert] += 1
        ranks = {expert // per_rank for expert in chosen}
        for index in ranks:
            visits[index] += 1
        for index in {rank // layout.ep_node for rank in ranks}:
            nodes[index] += 1
    return SentRows(
        tokens=len(choices),
        by_expert=tuple(by_expert),
        rows=tuple(sum(by_expert[first : first + per_rank]) for first in starts),
        visits=tuple(visits),
        node_visits=tuple(nodes),
        slots=len(choices[0]) if choices else slots,
    )


#: (rank, forward of the step, layer, its tokens, chunk, chunks) -> rows that the rank sends.
#: Forwards are numbered by microbatch and, if sequences are cut, by slice inside it.
Routing = Callable[[int, int, int, int, int, int], SentRows]


def uniform_routing(model: ModelConfig, layout: Layout) -> Routing:
    """Expected counts if all experts are equally likely."""
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
    """Largest number of rows that one expert gets from `tokens` tokens of a rank; `tokens` without
    a capacity. A rank may use up the capacity that it shares with the other ranks of its
    sequences."""
    if not model.capacity_factor:
        return tokens
    exact = Fraction(model.capacity_factor).limit_denominator(10_000)
    per_sequence = min(ceil(seq_len * model.experts_per_token * exact / model.num_experts), seq_len)
    sequences = ceil(tokens * layout.cp * layout.tp / seq_len)
    return min(tokens, sequences * per_sequence)


def crowded_routing(
    model: ModelConfig, layout: Layout, ep: int, seq_len: int, share: float = 1.0
) -> Routing:
    """Counts if a `share` of all tokens choose the experts of ep index `ep` with all their slots,
    up to capacity. ``share = 1`` is the routing that sends the most rows there."""
    experts, k = model.num_experts, model.experts_per_token
    first = ep * (experts // layout.ep)
    chosen = [(first + number) % experts for number in range(k)]
    token = count_choices([chosen], experts, layout, slots=k)

    @cache
    def sent(tokens: int, chunk: int, chunks: int) -> SentRows:
        count = len(shard_range(tokens, chunks, chunk))
        crowd = floor(share * count)
        kept = min(crowd, capacity_of(model, layout, tokens, seq_len))
        return SentRows(
            tokens=count,
            by_expert=tuple(kept * number for number in token.by_expert),
            rows=tuple(kept * number for number in token.rows),
            visits=tuple(crowd * number for number in token.visits),
            node_visits=tuple(crowd * number for number in token.node_visits),
            slots=k,
        )

    return lambda rank, forward, layer, tokens, chunk, chunks: sent(tokens, chunk, chunks)


# Exchanges of a dispatch.

_COUNTS, _WEIGHTS = "moe.counts", "moe.dispatch.weights"
_DISPATCH, _COMBINE = "moe.dispatch", "moe.combine"
_INT64, _INT32 = 8, 4


@dataclass(kw_only=True)
class DispatchTraffic:
    """Plan, dispatch and combine of one chunk, forward and backward."""

    lines: LedgerLines
    model: ModelConfig
    plan: Plan
    #: Bytes of a number of the model.
    element: int
    #: Maximum number of tokens of a rank.
    max_tokens: int
    #: Rows that a rank sends.
    sent_by: Callable[[int], SentRows]
    #: Number of chunks whose counts this exchange carries (`plans_all_chunks`); 0 if another
    #: chunk's exchange carries them.
    counts: int = 1
    #: Number of rows up to which all_gather always sums densely (on an accelerator).
    spare_rows: int = 0

    def __post_init__(self) -> None:
        model, plan = self.model, self.plan
        # Bytes of a row in the backward and the combine, and of a dispatched row.
        self.plain: float = model.hidden_size * self.element
        self.coded = packed_bytes(model.hidden_size) if plan.payload == "fp8" else self.plain
        #: Fixed row slots per pair of ranks.
        sizes = model.experts_per_token, model.num_experts, plan.ep
        self._slots = slots_per_pair(self.max_tokens, *sizes)
        self._rows = cache(self._rows_of)

    def exchanges(self) -> Iterator[Transfer]:
        """All collectives of one chunk, in the order of `moemesh dispatch --json`."""
        plan, lines, dispatcher = self.plan, self.lines, dispatcher_row(self.plan.dispatcher)
        if plan.ep * plan.etp == 1:
            return
        sent = [self.sent_by(peer) for peer in lines.members("ep_etp")]
        # Announcements of rows: headers of fixed slots, or counts and ids.
        if dispatcher.has_slots:
            header, headers = [self._slots + 1.0] * plan.ep, ("forward", "moe.headers")
            yield _sized("ep", "all_to_all", *headers, (header, header), _INT32)
            yield _sized("etp", "all_gather", *headers, ([sum(header)] * plan.etp,), _INT32)
            if any(rows > self._slots for item in sent for rows in item.rows):
                dispatcher = DISPATCHERS[dispatcher.fallback]
        hops = dispatcher.hops
        # A row that represents a token carries the ids and weights of all its experts.
        peers = lines.members("ep_etp" if dispatcher.is_gathered else "ep")
        chosen = max(self.sent_by(peer).slots for peer in peers)
        for hop in hops:
            yield from self._plan_messages(hop, chosen)
        # Weights and rows to the experts, results back, each through all hops.
        callers = (_WEIGHTS, _DISPATCH, _COMBINE)
        entries = [(caller, hop) for caller in callers for hop in hops]
        if dispatcher.is_node_aware:  # all exchanges of a hop together
            entries.sort(key=lambda entry: hops.index(entry[1]))
        exact = plan.combine == "exact"
        for caller, hop in entries:
            if caller == _WEIGHTS:
                width = max(self.element, 4) * (chosen if hop.is_of_tokens else 1)
                yield self._travel(hop, "forward", caller, width)
                yield self._travel(hop, "backward", caller, width, home=True)
            elif caller == _DISPATCH:
                width = self.plain if hop.axis == "etp" else self.coded
                yield self._travel(hop, "forward", caller, width)
                if not exact:
                    yield self._travel(hop, "backward", caller, self.plain, home=True)
            elif not exact:
                # Gathered rows return in a dense sum, or unevenly if these are fewer rows: each
                # lane of an ep index holds a shard of its experts, so a visit is a row on each
                # lane.
                is_dense = True
                if hop.axis == "ep_etp":
                    tokens = sum(item.tokens for item in sent)
                    visited = plan.etp * sum(sum(item.visits) for item in sent)
                    is_dense = tokens * chosen <= self.spare_rows or visited >= tokens * len(sent)
                if is_dense:
                    yield self._travel(hop, "forward", caller, self.plain, home=True)
                    yield self._travel(hop, "backward", caller, self.plain)
                else:
                    out = [item.visits[lines.coordinates["ep"]] for item in sent]
                    visits = self.sent_by(lines.rank).visits
                    rows = out, [visits[index // plan.etp] for index in range(len(sent))]
                    uneven = "ep_etp", "all_to_all"
                    yield _sized(*uneven, "forward", caller, rows, self.plain)
                    yield _sized(*uneven, "backward", caller, rows[::-1], self.plain)
        if exact:
            # Each (token, expert) row is returned on its own: sums over etp, then over ep.
            home = ROW_HOPS[::-1]
            for caller, phase in ((_DISPATCH, "backward"), (_COMBINE, "forward")):
                for hop in home:
                    yield self._travel(hop, phase, caller, self.plain, home=True)
            for hop in home:
                yield self._travel(hop, "backward", _COMBINE, self.plain)

    def _plan_messages(self, hop: HopRows, chosen: int) -> Iterator[Transfer]:
        """Messages that announce the rows of a hop: counts, and ids of `chosen` experts a token."""
        plan, counts = self.plan, ("forward", _COUNTS)
        if hop.rows == "slots":
            return  # their headers carry both
        if hop.rows == "tokens":
            block = [1.0] * plan.ep * plan.etp
            yield _sized(hop.axis, "all_gather", *counts, (block,), _INT64)
            yield self._travel(hop, *counts, chosen * _INT64)
            return
        # Counts for each member of the axis. If rows are pairs, ep has one for each expert and
        # spare slot of the member, etp the same from each ep index. If rows are tokens, both have
        # the numbers of tokens and of pairs. ep_rail has the tokens of the node, and for each of
        # its ranks tokens and pairs packed into one number; ep_node has tokens and pairs, each
        # packed from those of this node and those of other nodes.
        local = plan.spare_slots * (plan.ep > 1) + self.model.num_experts // plan.ep
        numbers = {"ep": local, "etp": local * plan.ep, "ep_node": 2}
        if hop.is_of_tokens:
            numbers |= {"ep": 2, "etp": 2}
        numbers["ep_rail"] = 1 + self.lines.layout.ep_node
        block = [float(self.counts * numbers[hop.axis])] * len(self.lines.members(hop.axis))
        if hop.is_gathered and self.counts:
            yield _sized(hop.axis, "all_gather", *counts, (block,), _INT64)
        elif self.counts:
            yield _sized(hop.axis, "all_to_all", *counts, (block, block), _INT64)
        if hop.is_of_tokens:
            yield self._travel(hop, *counts, _INT32 * (chosen + 1))

    def _travel(
        self, hop: HopRows, phase: str, caller: str, width: float, *, home: bool = False
    ) -> Transfer:
        """The exchange of rows of `width` bytes to the experts, or back from them (`home`)."""
        rows = self._rows(hop)[::-1] if home else self._rows(hop)
        return _sized(hop.axis, hop.ops[home], phase, caller, rows, width)

    def _rows_of(self, hop: HopRows) -> tuple[list[float], ...]:
        """Numbers of rows to and from each member of the hop's axis; of a gather, each member's
        number."""
        lines, sent_by = self.lines, self.sent_by
        sent = sent_by(lines.rank)
        match hop.axis:
            case "ep":
                return self._by_ep_index(hop, lines.rank), self._arriving(hop, lines.rank)
            case "etp":
                return ([sum(self._arriving(hop, lane)) for lane in lines.members("etp")],)
            case "ep_rail":
                rail, index = lines.members("ep_rail"), lines.coordinates["ep_rail"]
                return [*sent.node_visits], [sent_by(peer).node_visits[index] for peer in rail]
            case "ep_node":
                # A rank forwards the rows of its rail inside its node.
                def forwarded(rank: int, ep_index: int) -> float:
                    rail = lines.members("ep_rail", rank)
                    return sum(sent_by(peer).visits[ep_index] for peer in rail)

                layout, at = lines.layout, lines.coordinates
                ep_indices = shard_range(layout.ep, layout.ep_rail, at["ep_rail"])
                node = lines.members("ep_node")
                out = [forwarded(lines.rank, index) for index in ep_indices]
                return out, [forwarded(peer, at["ep"]) for peer in node]
            case _:
                return ([sent_by(peer).tokens for peer in lines.members("ep_etp")],)

    def _arriving(self, hop: HopRows, rank: int) -> list[float]:
        """Rows that `rank` has received from each ep index."""
        at = self.lines.layout.coordinates(rank)["ep"]
        return [self._by_ep_index(hop, peer)[at] for peer in self.lines.members("ep", rank)]

    def _by_ep_index(self, hop: HopRows, rank: int) -> list[float]:
        """Rows that `rank` sends to each ep index."""
        if hop.rows == "slots":
            return [float(self._slots)] * self.plan.ep
        sent = self.sent_by(rank)
        return [*(sent.visits if hop.rows == "visits" else sent.rows)]


def _sized(
    axis: str, op: str, phase: str, caller: str, rows: tuple[Sequence[float], ...], width: float
) -> Transfer:
    """A collective with rows of `width` bytes to and from each member of the axis, or with each
    member's rows in a gather or a reduce-scatter."""
    amounts = tuple([number * width for number in side] for side in rows)
    return Transfer(axis, op, phase, caller, amounts)


# Traffic that transient replicas add to an MoE layer: counts of all ranks, weights, rerouted rows.
#
# Legend: P ranks of ep, X ranks of etp, E experts, W numbers of one expert's local shard, w bytes.
#
# | what | over | bytes |
# |---|---|---|
# | counts of every rank | all-gather over ep_etp, all chunks at once | 8 E a rank and chunk |
# | weights of replicas, their gradients back | all-to-all over ep | w W a replica |
# | rows | as all_to_all, to the places of the quotas | |
#
# :mod:`moemesh.balance` chooses the replicas and their tokens from the counts alone, both in a
# prediction and in a run. Even loads of ranks (within 2 %), as under uniform routing, get none.


#: Cost of a shadow in rows, per channel of an expert's width (`moemesh.parallel.expert.replicas`).
_SHADOW_ROWS = 3 * 2 / 4
#: Largest ratio of the busiest rank's load to the mean without replicas: 51 / 50, as
#: (denominator, numerator).
_EVEN = (50, 51)


def replicated(
    lines: LedgerLines,
    model: ModelConfig,
    plan: Plan,
    element: int,
    routed: Callable[[int], SentRows],
) -> tuple[list[Transfer], Callable[[int], SentRows]]:
    """Transfers of the weights of replicas for one chunk of one layer, and a function rank -> rows
    that it sends with these replicas: to the ranks of the replicas instead of the experts' home.
    Without replicas the ranks of the ep_etp group of `lines` send the rows `routed`."""
    experts, ep_index = model.num_experts, lines.coordinates["ep"]
    table = np.array([routed(peer).by_expert for peer in lines.members("ep_etp")], dtype=np.int64)
    #: Tokens of every rank of the group, [P, X, E]; and of all lanes of an ep index, [P, E].
    counts = table.reshape(plan.ep, plan.etp, experts)
    requested = counts.sum(axis=1)
    home = np.arange(experts, dtype=np.int64) // (experts // plan.ep)
    # The tables are small: compilation would take longer than plain loops.
    with plain_loops():
        quotas = plan_quotas(requested, home, 0)
        tokens = quotas.rank_tokens
        is_even = int(tokens.max()) * len(tokens) * _EVEN[0] <= int(tokens.sum()) * _EVEN[1]
        if not is_even and plan.spare_policy == "quota":
            quotas = plan_quotas(requested, home, plan.spare_slots)
        elif not is_even:
            cost, most = _SHADOW_ROWS * model.expert_intermediate_size, plan.spare_slots
            quotas = shadow_experts(requested, home, shadow_rows=cost, max_shadows=most)
        #: [P, places] tokens that all lanes of a rank send to each place.
        assigned = assign_tokens(quotas, requested, ranks_per_node=lines.layout.ep_node)
    weights: list[Transfer] = []
    if quotas.num_replicas:
        # Gate, up and down of one expert, and their biases.
        width = model.expert_intermediate_size // plan.etp
        numbers = 3 * width * model.hidden_size
        if model.expert_bias:
            numbers += (
                2 * width + shard_sizes(model.hidden_size, plan.etp)[lines.coordinates["etp"]]
            )
        size, spare = numbers * element, quotas.spare_expert
        filled = spare >= 0
        is_local = filled & (quotas.home[spare] == ep_index)
        out = [float(count * size) for count in is_local.sum(axis=1)]
        homes = quotas.home[spare[ep_index][filled[ep_index]]]
        into = [float(count * size) for count in np.bincount(homes, minlength=plan.ep)]
        weights.append(Transfer("ep", "all_to_all", BOTH, "moe.replicas", (out, into)))

    @cache
    def sent(rank: int) -> SentRows:
        ep, lane = (lines.layout.coordinates(rank)[axis] for axis in ("ep", "etp"))
        # An ep index's tokens of an expert are ordered by lane and cut into runs, one per place.
        rows = np.zeros(plan.ep, np.int64)
        for expert in range(experts):
            first = int(counts[ep, :lane, expert].sum())
            last = first + int(counts[ep, lane, expert])
            start = 0
            for place in np.flatnonzero(quotas.place_expert == expert):
                stop = start + int(assigned[ep, place])
                rows[quotas.place_rank[place]] += max(min(stop, last) - max(start, first), 0)
                start = stop
        return replace(routed(rank), rows=tuple(float(count) for count in rows))

    return weights, sent
