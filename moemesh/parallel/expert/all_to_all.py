"""All-to-all expert parallelism: counts first, then each row straight to its expert's rank.

Legend: T own tokens, K slots per token, S rows sent, N rows received (gathered over etp), R the
same rows by expert, E (L) experts (local ones), O owners (ranks of the ep*etp group), H hidden.

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| plan | experts T x K | splits, order | counts of all chunks: over ep, then etp | none |
| dispatch | T x H | N x H | all_to_all over ep, all_gather over etp | reduce_scatter, all_to_all |
| combine | N x H | T x H | reduce_scatter over etp, all_to_all over ep | all_gather, all_to_all |

With expert-tensor parallelism each lane (same etp index) exchanges its own tokens; the lanes of one
ep index then gather each other's rows, since each holds a shard of every local expert's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from moemesh.comm import collectives
from moemesh.comm.mesh import Axis
from moemesh.comm.overlap import Codec, overlapped_all_to_all
from moemesh.model.dispatcher import DispatchedRows, Dispatcher, pick_weights
from moemesh.ops.host_copy import HostCopy
from moemesh.ops.pending import Pending
from moemesh.ops.permute import RowMap, SortedByExpert, permutation, permute, unpermute
from moemesh.parallel.expert.site import DispatcherSite


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One exchange of token rows along one axis, forward and back: `rows` maps the S rows sent
    (ordered by destination) to the T own rows that they copy."""

    axis: Axis
    rows: RowMap
    input_splits: list[int]
    output_splits: list[int]

    def send_back(self, y_NH: Tensor, caller: str) -> Pending[Tensor]:
        """Results [N, H] -> their sum per own row [T, H]."""
        sent = overlapped_all_to_all(
            y_NH, self.axis, self.output_splits, self.input_splits, caller=caller
        )
        return sent.then(lambda y_SH: unpermute(y_SH, self.rows))


@dataclass(frozen=True, kw_only=True)
class AllToAllPlan:
    """`hop`: the exchange over ep; `slot_S`: the flat (token, slot) index of each row sent;
    `lane_rows`: rows of each lane after the gather over etp; `by_expert`: the order of the N rows
    received; `counts_LO`: rows of each local expert and owner."""

    hop: Hop
    slot_S: Tensor
    lane_rows: list[int]
    by_expert: RowMap
    counts_LO: Tensor
    #: ``counts_L`` on the host; empty if it was not copied.
    rows_L: list[int] = field(default_factory=list)

    @property
    def counts_L(self) -> Tensor:
        return self.counts_LO.sum(1)


class AllToAllDispatcher(Dispatcher):
    """The reference dispatcher: exact for any load; under uniform routing K(EP-1)/EP rows per token
    on the wire."""

    def __init__(
        self,
        ep: Axis,
        etp: Axis,
        num_experts: int,
        *,
        codec: Codec | None = None,
    ) -> None:
        self.ep, self.etp, self.num_experts = ep, etp, num_experts
        self.num_local = num_experts // ep.size
        self.codec = codec

    @classmethod
    def of(cls, site: DispatcherSite) -> AllToAllDispatcher:
        mesh = site.mesh
        return cls(mesh["ep"], mesh["etp"], site.config.num_experts, codec=site.codec)

    def plan_chunks(
        self, chunks: Sequence[Tensor], *, is_complete: bool = False
    ) -> list[AllToAllPlan]:
        # Experts are contiguous per rank: sorted by expert is sorted by destination.
        sorted_chunks = [SortedByExpert(experts_TK, self.num_experts) for experts_TK in chunks]
        shape = self.ep.size, self.num_local
        sent = torch.stack(
            [chunk.counts_E.view(shape) for chunk in sorted_chunks], dim=1
        )  # [ep, chunks, L]
        received = collectives.exchange_counts(sent, self.ep, caller="moe.counts")
        # What each lane receives from each source: [etp, ep, chunks, L].
        lanes = collectives.all_gather(received[None], self.etp, caller="moe.counts")
        # For each chunk: rows to each rank, from each rank, of each lane, of each local expert.
        counts = (sent.sum(2), received.sum(2), lanes.sum((1, 3)), lanes.sum((0, 1)).t())
        # The only numbers that the host needs: it waits for this copy, not for work queued later.
        copied = HostCopy(torch.cat(counts).t())
        # Received rows are sorted by expert, then by owner (= ep * ETP + etp), hence by token id:
        # a key for each lane, source and expert [etp, ep, L].
        owned = self.etp.size, self.ep.size, self.num_local
        places = (torch.arange(size, device=lanes.device) for size in owned)
        lane, source, expert = torch.meshgrid(*places, indexing="ij")
        key = ((expert * self.ep.size + source) * self.etp.size + lane).flatten()
        sizes = [self.ep.size, self.ep.size, self.etp.size, self.num_local]
        plans: list[AllToAllPlan] = []
        for chunk, lane_counts, numbers in zip(
            sorted_chunks, lanes.unbind(2), copied.tensor(), strict=True
        ):
            to_ranks, from_ranks, lane_rows, rows_L = (p.tolist() for p in numbers.split(sizes))
            tokens, slot_S = chunk.rows(sum(to_ranks))
            key_N = torch.repeat_interleave(key, lane_counts.flatten(), output_size=sum(lane_rows))
            plans.append(
                AllToAllPlan(
                    hop=Hop(
                        axis=self.ep, rows=tokens, input_splits=to_ranks, output_splits=from_ranks
                    ),
                    slot_S=slot_S,
                    lane_rows=lane_rows,
                    by_expert=permutation(torch.argsort(key_N, stable=True)),
                    counts_LO=lane_counts.permute(2, 1, 0).reshape(self.num_local, -1),
                    rows_L=rows_L,
                )
            )
        return plans

    def dispatch(
        self, x_TH: Tensor, weights_TK: Tensor, plan: AllToAllPlan
    ) -> Pending[DispatchedRows]:
        # Weights start first and are waited for with the rows: queued after rows on a slow link
        # they would delay all other work of this rank.
        hop, weights_S = plan.hop, pick_weights(weights_TK, plan.slot_S)
        route = self.ep, hop.input_splits, hop.output_splits
        weights = overlapped_all_to_all(weights_S, *route, caller="moe.dispatch.weights")
        rows_SH = permute(x_TH, hop.rows)
        sent = overlapped_all_to_all(rows_SH, *route, caller="moe.dispatch", codec=self.codec)

        def arrived(pair: tuple[Tensor, Tensor]) -> DispatchedRows:
            gather = partial(collectives.all_gather, axis=self.etp, sizes=plan.lane_rows)
            weights_N = gather(pair[1], caller="moe.dispatch.weights")
            weights_R = weights_N.gather(0, plan.by_expert.source_R)
            x_NH = gather(pair[0], caller="moe.dispatch")
            return DispatchedRows(x_NH, plan.by_expert, weights_R, plan.counts_L)

        return sent.join(weights).then(arrived)

    def rows_per_owner(self, plan: AllToAllPlan) -> Tensor:
        return plan.counts_LO

    def combine(self, y_RH: Tensor, plan: AllToAllPlan) -> Pending[Tensor]:
        y_NH = unpermute(y_RH, plan.by_expert)
        y_NH = collectives.reduce_scatter(y_NH, self.etp, plan.lane_rows, caller="moe.combine")
        return plan.hop.send_back(y_NH, "moe.combine")
