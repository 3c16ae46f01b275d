"""Node-aware expert parallelism: a token crosses to each node once, whatever its experts there.

Legend: T own tokens, N rows on this rank (gathered over etp), R rows by expert, K slots per token,
L local experts, O owners, H hidden. The ep axis is cut into `rail` (ranks in the same place of each
node) and `node` (ranks inside one node).

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| plan | experts T x K | two hops | counts and expert ids over rail, then node, etp | none |
| dispatch | T x H | N x H | all_to_all over rail, then over node; all_gather(etp) | the way back |
| combine | N x H | T x H | reduce_scatter(etp); all_to_all over node, then rail | the way there |

Results are summed on the expert's rank, then inside the node, and cross back once: DeepEP's
asymmetric-domain forwarding. With one node only the inner hop is left, which sends a token once to
each rank instead of once to each expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moemesh.comm import collectives
from moemesh.comm.mesh import Axis
from moemesh.comm.overlap import Codec
from moemesh.model.dispatcher import Rows, pick_weights
from moemesh.ops.pending import Pending
from moemesh.ops.permute import RowMap, group_by_expert, identity, permute, unpermute
from moemesh.parallel.expert.exact import WayHome, dispatch_exact, plan_way_home
from moemesh.parallel.expert.hop import Hop, hop_by_visits


@dataclass(frozen=True, kw_only=True)
class HierarchicalPlan:
    """The hop between nodes, the hop inside the node, and the order at the experts."""

    across: Hop
    inside: Hop
    lane_rows: list[int]
    by_expert: RowMap
    slot_R: Tensor
    counts_L: Tensor
    counts_LO: Tensor | None
    home: WayHome | None


class HierarchicalDispatcher:
    """Wins where links between nodes are slow and tokens have several experts in a node."""

    def __init__(
        self,
        ep: Axis,
        rail: Axis,
        node: Axis,
        etp: Axis,
        num_experts: int,
        *,
        exact: bool = False,
        codec: Codec | None = None,
    ) -> None:
        self.ep, self.rail, self.node, self.etp = ep, rail, node, etp
        self.num_experts, self.num_local = num_experts, num_experts // ep.size
        self.exact, self.codec = exact, codec

    def plan(self, experts_TK: Tensor) -> HierarchicalPlan:
        per_node = self.num_local * self.node.size
        owner = self.ep.index * self.etp.size + self.etp.index
        across, rows = self._hop(experts_TK, owner, per_node, self.rail)
        inside, rows = self._hop(rows[:, :-1], rows[:, -1:], self.num_local, self.node)
        own = torch.tensor([len(rows)], device=rows.device)
        lane_rows = collectives.all_gather(own, self.etp, caller="moe.counts").tolist()
        rows = collectives.all_gather(rows, self.etp, lane_rows, caller="moe.counts").long()
        experts_NK, owner_N = rows[:, :-1], rows[:, -1]
        by_expert, slot_R, counts_L = group_by_expert(experts_NK, self.num_local, owner_N)
        counts_LO = home = None
        if self.exact:
            num_owners = self.ep.size * self.etp.size
            expert_R = torch.repeat_interleave(
                torch.arange(self.num_local, device=rows.device), counts_L
            )
            counts_LO = torch.bincount(
                expert_R * num_owners + owner_N[by_expert.source_R],
                minlength=self.num_local * num_owners,
            ).view(self.num_local, num_owners)
            home = plan_way_home(experts_TK, counts_LO, self.ep, self.etp)
        return HierarchicalPlan(
            across=across,
            inside=inside,
            lane_rows=lane_rows,
            by_expert=by_expert,
            slot_R=slot_R,
            counts_L=counts_L,
            counts_LO=counts_LO,
            home=home,
        )

    def _hop(
        self, experts_TK: Tensor, owner: int | Tensor, experts_per_rank: int, axis: Axis
    ) -> tuple[Hop, Tensor]:
        """Send each row once to each rank of `axis` that it visits.

        `experts_TK` counts from the first expert of the axis. Returns the hop and the rows that
        arrive: experts counted from this rank's first one, -1 elsewhere, and the owner (int32).
        """
        rank_TK = torch.where(experts_TK < 0, -1, experts_TK // experts_per_rank)
        ranks = torch.arange(axis.size, device=experts_TK.device)
        visits_TP = (rank_TK[:, :, None] == ranks).any(1)
        hop = hop_by_visits(visits_TP, axis, caller="moe.counts")
        owner_T1 = experts_TK.new_full((len(experts_TK), 1), 0) + owner
        sent = torch.cat([experts_TK, owner_T1], dim=1).to(torch.int32)
        received = hop.send(sent, "moe.counts").wait()
        local = received[:, :-1] - axis.index * experts_per_rank
        local = local.masked_fill((local < 0) | (local >= experts_per_rank), -1)
        return hop, torch.cat([local, received[:, -1:]], dim=1)

    def dispatch(self, x_TH: Tensor, weights_TK: Tensor, plan: HierarchicalPlan) -> Pending[Rows]:
        # Weights start first and are waited for with the rows: behind rows on a slow link they
        # would hold up whatever this rank could compute meanwhile.
        caller = "moe.dispatch.weights"
        weights = plan.across.send(weights_TK, caller)
        started = None if plan.home else plan.across.send(x_TH, "moe.dispatch", self.codec)

        def weights_of(inside: Pending[Tensor]) -> Tensor:
            weights_NK = inside.wait()
            weights_NK = collectives.all_gather(weights_NK, self.etp, plan.lane_rows, caller=caller)
            return pick_weights(weights_NK, plan.slot_R)

        def gathered(inside: Pending[Tensor]) -> Tensor:
            x_NH = inside.wait()
            return collectives.all_gather(x_NH, self.etp, plan.lane_rows, caller="moe.dispatch")

        def rows_of(received: Tensor) -> Rows:
            weights_inside = plan.inside.send(weights.wait(), caller)
            inside = plan.inside.send(received, "moe.dispatch", self.codec)
            weights_R = weights_of(weights_inside)
            return Rows(gathered(inside), plan.by_expert, weights_R, plan.counts_L)

        if started is not None:
            return started.then(rows_of)
        assert plan.home is not None
        weights_R = weights_of(plan.inside.send(weights.wait(), caller))

        def travel(x: Tensor) -> Tensor:
            received = plan.across.send(x, "moe.dispatch", self.codec).wait()
            inside = plan.inside.send(received, "moe.dispatch", self.codec)
            return permute(gathered(inside), plan.by_expert)

        x_RH = dispatch_exact(x_TH, travel, plan.home, caller="moe.dispatch")
        own = identity(len(x_RH), x_RH.device)
        return Pending.ready(Rows(x_RH, own, weights_R, plan.counts_L, plan.counts_LO))

    def combine(self, y_RH: Tensor, plan: HierarchicalPlan) -> Pending[Tensor]:
        if plan.home is not None:
            return Pending.ready(plan.home.bring(y_RH, "moe.combine"))
        y_NH = unpermute(y_RH, plan.by_expert)
        y_NH = collectives.reduce_scatter(y_NH, self.etp, plan.lane_rows, caller="moe.combine")
        y_NH = plan.inside.send_back(y_NH, "moe.combine").wait()
        return plan.across.send_back(y_NH, "moe.combine")
