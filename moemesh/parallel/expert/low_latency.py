"""Low-latency expert parallelism: every rank sends every rank the same number of row slots.

Legend: T own tokens, K slots per token, P ep ranks, C row slots per pair of ranks, B = P * C slots
of one buffer, S rows sent, N = etp * B received slots, R rows at the experts, E (L) experts (local
ones), O owners (ranks of the ep*etp group), H hidden.

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| plan | experts T x K | slots of rows | all_to_all of P headers, all_gather(etp) | none |
| dispatch | T x H | N x H | all_to_all of B slots over ep, all_gather(etp) | the way back |
| combine | N x H | T x H | reduce_scatter(etp), all_to_all of B slots over ep | the way there |

Sizes do not depend on the routing: no counts and no splits are exchanged. The host waits once for
a plan, for the flags below and two numbers of rows. A header has, for each slot, the local expert
of its row (-1: none). An empty slot carries a copy of token 0 that is neither read nor computed.

Bytes that a rank sends, whatever the routing: ``(P-1) * C * row`` over ep for dispatch, for combine
and for the backward of each, ``(P-1) * (C+1) * 4`` for the headers, ``(P-1) * C`` weights; over etp
``(etp-1) * B`` rows, headers and weights likewise. Memory of one layer: a send and a receive buffer
of B rows, and N rows that the experts keep for the backward, filled or not.

A rank with more rows for some destination than C raises a flag in its headers. All ranks of the
ep*etp group see it, and all take the two-phase all-to-all for this plan: nothing is ever dropped.
Source: the fixed-size buffers of DeepEP's low-latency mode (DeepSeek-AI, "DeepSeek-V3 Technical
Report", 2024), here with an even all-to-all, and with a backward.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moemesh.comm import collectives
from moemesh.comm.mesh import Axis
from moemesh.comm.overlap import Codec
from moemesh.config.errors import UserError
from moemesh.model.dispatcher import DispatchedRows, Dispatcher
from moemesh.ops.host_copy import HostCopy
from moemesh.ops.pending import Pending
from moemesh.ops.permute import (
    RowMap,
    SortedByExpert,
    at_least_one_row,
    count_ids,
    map_from_sources,
)
from moemesh.parallel.expert.all_to_all import AllToAllDispatcher, AllToAllPlan, Hop
from moemesh.parallel.expert.site import DispatcherSite
from moemesh.sharding.dispatchers import CAPACITY_FACTOR, slots_per_pair


class SlotPlan(NamedTuple):
    """An exchange of slots for `num_tokens` tokens, or of rows if the slots do not suffice.

    In an exchange of slots, ``hop.rows`` maps B slots to tokens (at least one: a rank without
    tokens sends a row of zeros), its bags list the S slots that hold a row, and ``slot_S`` [B] is
    the position ``token * K + k`` of the pair in each slot.
    """

    num_tokens: int
    exchange: AllToAllPlan


class LowLatencyDispatcher(Dispatcher):
    """Wins with a few tokens per rank, where the latency of an exchange outweighs its bytes.
    `num_plans` and `num_fallbacks` count the plans made and those that took the two-phase path; the
    ranks of an ep*etp group agree on both. Raises UserError for sizes without a slot."""

    def __init__(
        self,
        ep: Axis,
        etp: Axis,
        num_experts: int,
        *,
        experts_per_token: int,
        max_tokens: int,
        capacity_factor: float = CAPACITY_FACTOR,
        codec: Codec | None = None,
    ) -> None:
        self.ep, self.etp, self.num_experts = ep, etp, num_experts
        self.num_local = num_experts // ep.size
        if max_tokens < 1 or not 0 < capacity_factor < math.inf:
            raise UserError(
                f"the low_latency dispatcher needs max_tokens >= 1 and a capacity factor > 0, "
                f"got {max_tokens} and {capacity_factor}"
            )
        #: C: rows that `max_tokens` tokens send to one of the ranks under uniform routing, times
        #: `capacity_factor`, and at most those that they can send; the same on every rank.
        self.num_slots = slots_per_pair(
            max_tokens, experts_per_token, num_experts, ep.size, capacity_factor
        )
        self.two_phase = AllToAllDispatcher(ep, etp, num_experts, codec=codec)
        self.num_plans = self.num_fallbacks = 0

    @classmethod
    def of(cls, site: DispatcherSite) -> LowLatencyDispatcher:
        return cls(
            site.mesh["ep"],
            site.mesh["etp"],
            site.config.num_experts,
            experts_per_token=site.config.experts_per_token,
            max_tokens=site.tokens_per_rank,
            codec=site.codec,
        )

    def plan(self, experts_TK: Tensor) -> SlotPlan:
        self.num_plans += 1
        by_expert = SortedByExpert(experts_TK, self.num_experts)
        sent_P = by_expert.counts_E.view(self.ep.size, self.num_local).sum(1)
        # Expert of each pair, in ascending order; pairs without an expert (-1) are at the end.
        expert_S = experts_TK.reshape(-1).gather(0, by_expert.order)
        # Slot of each pair. Pairs without an expert get the place after all slots, as do pairs
        # beyond the C-th of their rank: with such pairs this plan is discarded below.
        rank_S, start_P = expert_S // self.num_local, sent_P.cumsum(0) - sent_P
        number_S = torch.arange(len(rank_S), device=rank_S.device)
        index_S = number_S - start_P.gather(0, rank_S.clamp(min=0))  # among the pairs of its rank
        fits_S = (index_S < self.num_slots) & (expert_S >= 0)
        place_S = rank_S * self.num_slots + index_S
        place_S = torch.where(fits_S, place_S, self.ep.size * self.num_slots)
        local_B = self._fill(place_S, expert_S % self.num_local, -1)
        header_PC = local_B.view(self.ep.size, self.num_slots).to(torch.int32)
        overflow = (sent_P > self.num_slots).any().to(torch.int32).expand(self.ep.size, 1)
        # Headers [P, C + 1] are sent; local experts [etp, P, C] and flags of overflow arrive. The
        # host waits once, for three numbers: flags, rows received, rows sent.
        header = torch.cat([header_PC, overflow], dim=1)
        header = collectives.all_to_all(header, self.ep, caller="moe.headers")
        lanes = collectives.all_gather(header[None], self.etp, caller="moe.headers").long()
        local = lanes[:, :, :-1]
        numbers = (lanes[:, :, -1].sum(), (local >= 0).sum(), by_expert.counts_E.sum())
        num_overflows, num_rows, num_sent = HostCopy(torch.stack(numbers)).tolist()
        if num_overflows > 0:
            self.num_fallbacks += 1
            return SlotPlan(len(experts_TK), self.two_phase.plan(experts_TK))
        # Rows by expert, then owner (= ep * ETP + etp), then token.
        num_lanes, num_sources, _ = local.shape
        num_owners = num_lanes * num_sources
        lane = torch.arange(num_lanes, device=local.device)[:, None, None]
        source = torch.arange(num_sources, device=local.device)[:, None]
        key = torch.where(local < 0, -1, local * num_owners + source * num_lanes + lane).flatten()
        filled_R = torch.argsort(key, stable=True)[len(key) - num_rows :]  # empty slots sort first
        counts = count_ids(key, self.num_local * num_owners)
        tokens, slot_S = by_expert.rows(num_sent)
        place_S = place_S[:num_sent]  # without pairs that have no expert
        hop = Hop(
            axis=self.ep,
            rows=RowMap(
                source_R=self._fill(place_S, tokens.source_R, 0),
                copies_R=place_S.index_select(0, tokens.copies_R),
                starts_N=tokens.starts_N if len(experts_TK) else slot_S.new_zeros(1),
            ),
            input_splits=[self.num_slots] * self.ep.size,
            output_splits=[self.num_slots] * self.ep.size,
        )
        exchange = AllToAllPlan(
            hop=hop,
            slot_S=self._fill(place_S, slot_S, 0),
            lane_rows=[self.ep.size * self.num_slots] * num_lanes,
            by_expert=map_from_sources(filled_R, len(key)),
            counts_LO=counts.view(self.num_local, num_owners),
        )
        return SlotPlan(len(experts_TK), exchange)

    def _fill(self, place_S: Tensor, value_S: Tensor, empty: int) -> Tensor:
        """One value per slot [B]: that of its row, or `empty`."""
        slots = value_S.new_full((self.ep.size * self.num_slots + 1,), empty)
        return slots.scatter(0, place_S, value_S)[:-1]

    def dispatch(self, x_TH: Tensor, weights_TK: Tensor, plan: SlotPlan) -> Pending[DispatchedRows]:
        if plan.exchange.hop.rows.num_sources:
            x_TH, weights_TK = at_least_one_row(x_TH), at_least_one_row(weights_TK)
        return self.two_phase.dispatch(x_TH, weights_TK, plan.exchange)

    def rows_per_owner(self, plan: SlotPlan) -> Tensor:
        return plan.exchange.counts_LO

    def combine(self, y_RH: Tensor, plan: SlotPlan) -> Pending[Tensor]:
        sums = self.two_phase.combine(y_RH, plan.exchange)
        return sums.then(lambda y_TH: y_TH[: plan.num_tokens])
