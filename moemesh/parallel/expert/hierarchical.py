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
from moemesh.comm.helper import Helper
from moemesh.comm.mesh import Axis
from moemesh.comm.overlap import Codec, start_way
from moemesh.model.dispatcher import Rows, pick_weights
from moemesh.ops.pending import Pending
from moemesh.ops.permute import RowMap, group_by_expert, identity, permute, unpermute
from moemesh.parallel.expert.exact import WayHome, dispatch_exact, plan_way_home
from moemesh.parallel.expert.relay import Homeward, Outward, Relay, plan_relay


@dataclass(frozen=True, kw_only=True)
class HierarchicalPlan:
    """The way there and back, and the order at the experts."""

    relay: Relay
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
        self.exact, self.codec, self.helper = exact, codec, Helper()

    def plan(self, experts_TK: Tensor) -> HierarchicalPlan:
        owner = self.ep.index * self.etp.size + self.etp.index
        relay, rows = plan_relay(
            experts_TK,
            owner,
            self.num_local,
            self.rail,
            self.node,
            self.helper,
            caller="moe.counts",
        )
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
            relay=relay,
            lane_rows=lane_rows,
            by_expert=by_expert,
            slot_R=slot_R,
            counts_L=counts_L,
            counts_LO=counts_LO,
            home=home,
        )

    def dispatch(self, x_TH: Tensor, weights_TK: Tensor, plan: HierarchicalPlan) -> Pending[Rows]:
        # Weights start first and are waited for with the rows: behind rows on a slow link they
        # would hold up whatever this rank could compute meanwhile.
        caller, relay = "moe.dispatch.weights", plan.relay
        weights = start_way(weights_TK, Outward(relay, caller), Homeward(relay, caller))

        def weights_of() -> Tensor:
            weights_NK = self._gather_lanes(weights.wait(), plan, caller)
            return pick_weights(weights_NK, plan.slot_R)

        out = Outward(relay, "moe.dispatch", codec=self.codec)
        if plan.home is None:
            started = start_way(x_TH, out, Homeward(relay, "moe.dispatch"))

            def rows_of() -> Rows:
                weights_R = weights_of()
                x_NH = self._gather_lanes(started.wait(), plan, "moe.dispatch")
                return Rows(x_NH, plan.by_expert, weights_R, plan.counts_L)

            return Pending(rows_of)
        weights_R = weights_of()

        def travel(x: Tensor) -> Tensor:
            out.start(x, "forward")
            return permute(self._gather_lanes(out.finish(), plan, "moe.dispatch"), plan.by_expert)

        x_RH = dispatch_exact(x_TH, travel, plan.home, caller="moe.dispatch")
        own = identity(len(x_RH), x_RH.device)
        return Pending.ready(Rows(x_RH, own, weights_R, plan.counts_L, plan.counts_LO))

    def _gather_lanes(self, rows: Tensor, plan: HierarchicalPlan, caller: str) -> Tensor:
        return collectives.all_gather(rows, self.etp, plan.lane_rows, caller=caller)

    def combine(self, y_RH: Tensor, plan: HierarchicalPlan) -> Pending[Tensor]:
        if plan.home is not None:
            return Pending.ready(plan.home.bring(y_RH, "moe.combine"))
        relay, by_expert, caller = plan.relay, plan.by_expert, "moe.combine"
        if self.etp.size > 1:
            y_RH = unpermute(y_RH, by_expert)
            y_RH = collectives.reduce_scatter(y_RH, self.etp, plan.lane_rows, caller=caller)
            by_expert = None
        return start_way(
            y_RH,
            Homeward(relay, caller, by_expert=by_expert),
            Outward(relay, caller, by_expert=by_expert),
        )
