"""Node-aware expert parallelism: a token crosses to each node once, whatever its experts there.

Legend: T own tokens, N rows on this rank (gathered over etp), R rows by expert, K slots per token,
L local experts, O owners, H hidden. The ep axis is cut into `rail` (ranks in the same place of each
node) and `node` (ranks inside one node).

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| plan | experts T x K | two hops | counts of all chunks, ids: over rail, node, etp | none |
| dispatch | T x H | N x H | all_to_all over rail, then over node; all_gather(etp) | the way back |
| combine | N x H | T x H | reduce_scatter(etp); all_to_all over node, then rail | the way there |

Results are summed on the expert's rank, then inside the node, and cross back once: DeepEP's
asymmetric-domain forwarding. With one node only the inner hop is left, which sends a token once to
each rank instead of once to each expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moemesh.comm import collectives
from moemesh.comm.mesh import Axis
from moemesh.comm.overlap import Codec, overlapped_exchange
from moemesh.comm.worker_thread import WorkerThread
from moemesh.model.dispatcher import DispatchedRows, Dispatcher, pick_weights
from moemesh.ops.pending import Pending
from moemesh.ops.permute import RowMap, SortedByExpert, count_ids, unpermute
from moemesh.parallel.expert.relay import (
    CombinePath,
    DispatchPath,
    Relay,
    count_rows,
    plan_relay,
)


@dataclass(frozen=True, kw_only=True)
class HierarchicalPlan:
    """The way there and back, and the order at the experts."""

    relay: Relay
    lane_rows: list[int]
    by_expert: RowMap
    slot_R: Tensor
    counts_L: Tensor
    owner_N: Tensor
    #: Rows at the experts of tokens that did not cross between nodes (without etp).
    num_near: int


class HierarchicalDispatcher(Dispatcher):
    """Wins where links between nodes are slow and tokens have several experts in a node."""

    def __init__(
        self,
        ep: Axis,
        rail: Axis,
        node: Axis,
        etp: Axis,
        num_experts: int,
        *,
        codec: Codec | None = None,
    ) -> None:
        self.ep, self.rail, self.node, self.etp = ep, rail, node, etp
        self.num_experts, self.num_local = num_experts, num_experts // ep.size
        self.codec, self.worker = codec, WorkerThread()

    def plan(self, experts_TK: Tensor) -> HierarchicalPlan:
        return self.plan_chunks([experts_TK])[0]

    def plan_chunks(
        self, chunks: Sequence[Tensor], *, is_complete: bool = False
    ) -> list[HierarchicalPlan]:
        counts = count_rows(
            chunks, self.num_local, self.rail, self.node, self.etp, caller="moe.counts"
        )
        owner, num_owners = (
            self.ep.index * self.etp.size + self.etp.index,
            self.ep.size * self.etp.size,
        )
        plans: list[HierarchicalPlan] = []
        for experts_TK, sizes in zip(chunks, counts, strict=True):
            relay, rows = plan_relay(
                experts_TK,
                owner,
                self.num_local,
                self.rail,
                self.node,
                sizes,
                self.worker,
                caller="moe.counts",
            )
            rows = collectives.all_gather(rows, self.etp, sizes.lane_rows, caller="moe.counts")
            rows = rows.long()
            experts_NK, owner_N = rows[:, :-1], rows[:, -1]
            found = SortedByExpert(experts_NK, self.num_local, owner_N, num_owners)
            by_expert, slot_R = found.rows(sum(sizes.lane_pairs))
            plans.append(
                HierarchicalPlan(
                    relay=relay,
                    lane_rows=sizes.lane_rows,
                    by_expert=by_expert,
                    slot_R=slot_R,
                    counts_L=found.counts_E,
                    owner_N=owner_N,
                    num_near=sizes.near_pairs,
                )
            )
        return plans

    def rows_per_owner(self, plan: HierarchicalPlan) -> Tensor:
        num_owners = self.ep.size * self.etp.size
        expert = torch.arange(self.num_local, device=plan.owner_N.device)
        expert_R = torch.repeat_interleave(
            expert, plan.counts_L, output_size=plan.by_expert.num_rows
        )
        key_R = expert_R * num_owners + plan.owner_N[plan.by_expert.source_R]
        return count_ids(key_R, self.num_local * num_owners).view(self.num_local, num_owners)

    def dispatch(
        self, x_TH: Tensor, weights_TK: Tensor, plan: HierarchicalPlan
    ) -> Pending[DispatchedRows]:
        # Weights start first and are waited for with the rows: behind rows on a slow link they
        # would hold up whatever this rank could compute meanwhile.
        caller, relay = "moe.dispatch.weights", plan.relay
        weights = overlapped_exchange(
            weights_TK, DispatchPath(relay, caller), CombinePath(relay, caller)
        )
        out = DispatchPath(relay, "moe.dispatch", codec=self.codec)
        sent = overlapped_exchange(x_TH, out, CombinePath(relay, "moe.dispatch"))

        def arrived(pair: tuple[Tensor, Tensor]) -> DispatchedRows:
            gather = partial(collectives.all_gather, axis=self.etp, sizes=plan.lane_rows)
            weights_NK = gather(pair[0], caller=caller)
            x_NH = gather(pair[1], caller="moe.dispatch")
            return DispatchedRows(
                x_NH, plan.by_expert, pick_weights(weights_NK, plan.slot_R), plan.counts_L
            )

        return weights.join(sent).then(arrived)

    def combine(self, y_RH: Tensor, plan: HierarchicalPlan) -> Pending[Tensor]:
        relay, by_expert, caller = plan.relay, plan.by_expert, "moe.combine"
        if self.etp.size > 1:
            y_RH = unpermute(y_RH, by_expert)
            y_RH = collectives.reduce_scatter(y_RH, self.etp, plan.lane_rows, caller=caller)
            by_expert = None
        return overlapped_exchange(
            y_RH,
            CombinePath(relay, caller, by_expert=by_expert, num_near=plan.num_near),
            DispatchPath(relay, caller, by_expert=by_expert),
        )
