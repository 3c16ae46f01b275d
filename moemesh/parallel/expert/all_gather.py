"""All-gather expert parallelism: every rank gets the group's tokens, and computes its experts.

Legend: G = ep * etp ranks that together hold all experts, T own tokens, A tokens of the group, K
slots, R rows at the local experts, C group tokens that visit one of these, E (L) experts (local
ones), H hidden.

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| plan | experts T x K | rows of its experts | all_gather of token counts and experts | none |
| dispatch | T x H | A x H | all_gather | reduce_scatter |
| combine, dense | A x H partial | T x H | reduce_scatter | all_gather |
| combine, uneven | C x H partial | T x H | all_to_all of routed rows, sum | all_to_all |

The bytes of the gather do not depend on the routing: (G-1) rows per token. The uneven form of the
reduce-scatter leaves out the rows that no local expert computed: each owner derives the rows to
receive from the routing.

The number of rows of local experts depends on the routing: the host waits for its accelerator to
read it. If there are at most `spare_rows` pairs (A * K) and the form may be dense, the host of an
accelerator does not wait: all pairs get rows, those of other ranks' experts as padding at the end,
which is not computed, and the combine is dense.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from moemesh.comm import collectives
from moemesh.comm.mesh import Axis
from moemesh.comm.overlap import Codec, overlapped_all_gather
from moemesh.model.dispatcher import DispatchedRows, Dispatcher, pick_own_weights
from moemesh.ops.host_copy import HostCopy, constant
from moemesh.ops.pending import Pending
from moemesh.ops.permute import (
    OwnSlots,
    RowMap,
    SortedByExpert,
    count_by_owner,
    map_from_sources,
    places_of_true,
    unpermute,
)
from moemesh.parallel.expert.all_to_all import Hop
from moemesh.parallel.expert.site import DispatcherSite
from moemesh.sharding.dispatchers import spare_rows

Form = Literal["dense", "uneven", "fewest_bytes"]


@dataclass(frozen=True, kw_only=True)
class GatheredRows:
    """The rows that this rank computes, and how results return.

    `tokens_A` maps rows to group tokens. `results` maps them to the rows of the combine: group
    tokens in the dense form; in the uneven form the C visited tokens, which the hop `back` sends.
    `none_AK`: whether a pair has no local expert, if such pairs have padding rows.
    """

    tokens_A: RowMap
    slot_R: Tensor
    results: RowMap
    back: Hop | None = None
    none_AK: Tensor | None = None


class AllGatherPlan:
    """Numbers of tokens of each rank (`sizes`) and of rows of each local expert (`counts_L`), and
    the rows themselves (:attr:`kept`). The total number of rows depends on the routing, and the
    gather does not need it: the host waits for it at the first use of :attr:`kept`, after the
    gather has started and later work is queued."""

    def __init__(
        self, sizes: list[int], counts_L: Tensor, decide: Callable[[], GatheredRows]
    ) -> None:
        self.sizes, self.counts_L = sizes, counts_L
        self._decide: Callable[[], GatheredRows] | None = decide

    @cached_property
    def kept(self) -> GatheredRows:
        """The rows; the first use waits for their number."""
        assert self._decide is not None
        kept, self._decide = self._decide(), None
        return kept


class AllGatherDispatcher(Dispatcher):
    """A gather whose size does not depend on the routing, without an exchange of per-expert counts;
    pays when ep is small or K is large."""

    def __init__(
        self,
        ep: Axis,
        ep_etp: Axis,
        num_experts: int,
        form: Form = "fewest_bytes",
        *,
        codec: Codec | None = None,
        host: Axis | None = None,
        spare_rows: int = 0,
    ) -> None:
        """`host`: the same ranks as `ep_etp` (:meth:`Mesh.host`), to exchange the numbers of tokens
        on the CPU without a wait for a device; None: they are exchanged on the device.
        `spare_rows`: largest number of rows, padding included, that an accelerator prepares without
        a wait of its host."""
        self.group, self.form, self.spare_rows = ep_etp, form, spare_rows
        self.host = host or ep_etp
        self.codec = codec
        self.num_experts, self.num_local = num_experts, num_experts // ep.size
        self.ranks_per_shard = ep_etp.size // ep.size
        self.first = ep.index * self.num_local

    @classmethod
    def of(cls, site: DispatcherSite) -> AllGatherDispatcher:
        config, mesh = site.config, site.mesh
        return cls(
            mesh["ep"],
            mesh["ep_etp"],
            config.num_experts,
            codec=site.codec,
            host=mesh.host("ep_etp"),
            spare_rows=spare_rows(config.hidden_size, exact=site.plan.combine == "exact"),
        )

    def plan(self, experts_TK: Tensor) -> AllGatherPlan:
        size = constant([len(experts_TK)], self.host.device)
        sizes: list[int] = collectives.all_gather(size, self.host, caller="moe.counts").tolist()
        experts_AK = collectives.all_gather(experts_TK, self.group, sizes, caller="moe.counts")
        local_AK = experts_AK - self.first
        local_AK = local_AK.masked_fill((local_AK < 0) | (local_AK >= self.num_local), -1)
        sorted_ = SortedByExpert(local_AK, self.num_local)
        on_host = local_AK.device.type == "cpu"
        if not on_host and self.form != "uneven" and local_AK.numel() <= self.spare_rows:
            # All pairs get rows. All ranks of the group have the same pairs, so all come here.
            tokens_A, slot_R = sorted_.rows_and_rest()
            kept = GatheredRows(
                tokens_A=tokens_A, slot_R=slot_R, results=tokens_A, none_AK=local_AK < 0
            )
            return AllGatherPlan(sizes, sorted_.counts_E, lambda: kept)
        # Which group tokens have an expert on which rank of the group. Padding has none.
        shard_AK = torch.where(experts_AK < 0, -1, experts_AK // self.num_local)
        shards = torch.arange(self.group.size, device=experts_TK.device) // self.ranks_per_shard
        visits_AG = (shard_AK[:, :, None] == shards).any(1)
        # Number of tokens that visit a rank [rank of the token, rank of the expert].
        visits = torch.stack([block.sum(0) for block in visits_AG.split(sizes)])
        copied = HostCopy(torch.cat([sorted_.counts_E.sum(0, keepdim=True), visits.flatten()]))

        def decide() -> GatheredRows:
            num_rows, *flat = copied.tolist()
            count = self.group.size
            visits_GG = [flat[start : start + count] for start in range(0, len(flat), count)]
            tokens_A, slot_R = sorted_.rows(num_rows)
            back, results = None, tokens_A
            # These numbers are equal on all ranks of the group, which choose the same form.
            sends_less = sum(flat) < visits_AG.numel()
            if self.form == "uneven" or (self.form == "fewest_bytes" and sends_less):
                index = self.group.index
                start, size = sum(sizes[:index]), sizes[index]
                own_GT = visits_AG[start : start + size].t()  # by rank of the expert, then by token
                places = places_of_true(own_GT.reshape(-1), sum(visits_GG[index]))
                back = Hop(
                    axis=self.group,
                    rows=map_from_sources(places % max(size, 1), size),
                    input_splits=visits_GG[index],
                    output_splits=[visits[index] for visits in visits_GG],
                )
                place_A = visits_AG[:, self.group.index].cumsum(0) - 1
                results = map_from_sources(place_A[tokens_A.source_R], sum(back.output_splits))
            return GatheredRows(tokens_A=tokens_A, slot_R=slot_R, results=results, back=back)

        return AllGatherPlan(sizes, sorted_.counts_E, decide)

    def rows_per_owner(self, plan: AllGatherPlan) -> Tensor:
        device, count = plan.counts_L.device, self.group.size
        owner_A = torch.repeat_interleave(
            torch.arange(count, device=device),
            constant(plan.sizes, device),
            output_size=sum(plan.sizes),
        )
        return count_by_owner(plan.kept.tokens_A, plan.counts_L, owner_A, count)

    def dispatch(
        self, x_TH: Tensor, weights_TK: Tensor, plan: AllGatherPlan
    ) -> Pending[DispatchedRows]:
        weights = overlapped_all_gather(
            weights_TK, self.group, plan.sizes, caller="moe.dispatch.weights"
        )
        gathered = overlapped_all_gather(
            x_TH, self.group, plan.sizes, caller="moe.dispatch", codec=self.codec
        )

        def arrived(pair: tuple[Tensor, Tensor]) -> DispatchedRows:
            x_AH, weights_AK = pair
            kept = plan.kept
            slots = OwnSlots(kept.tokens_A, kept.slot_R, plan.counts_L, kept.none_AK)
            weights_R = pick_own_weights(weights_AK, slots)
            return DispatchedRows(x_AH, kept.tokens_A, weights_R, plan.counts_L)

        return gathered.join(weights).then(arrived)

    def combine(self, y_RH: Tensor, plan: AllGatherPlan) -> Pending[Tensor]:
        partial, back = unpermute(y_RH, plan.kept.results), plan.kept.back
        if back is None:
            return Pending.ready(
                collectives.reduce_scatter(partial, self.group, plan.sizes, caller="moe.combine")
            )
        return back.send_back(partial, "moe.combine")
