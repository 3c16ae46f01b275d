"""All-to-all expert parallelism: counts first, then each row straight to its expert's rank.

Legend: T own tokens, K slots per token, S rows sent, N rows received (gathered over etp), L local
experts, H hidden.

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| plan | experts T x K | splits, order | all_to_all of counts over ep | none |
| dispatch | T x H | N x H | all_to_all over ep, all_gather over etp | reduce_scatter, all_to_all |
| combine | N x H | T x H | reduce_scatter over etp, all_to_all over ep | all_gather, all_to_all |

With expert-tensor parallelism each lane (same etp index) exchanges its own tokens; the lanes of one
ep index then gather each other's rows, since each holds a shard of every local expert's width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moemesh.comm import collectives
from moemesh.comm.mesh import Axis
from moemesh.model.dispatcher import Rows, pick_weights
from moemesh.ops.permute import RowMap, group_by_expert, permutation, permute, unpermute


@dataclass(frozen=True, kw_only=True)
class AllToAllPlan:
    """Who sends what: rows sent -> own tokens and slots, splits, and the order at the experts."""

    tokens: RowMap
    slot_S: Tensor
    input_splits: list[int]
    output_splits: list[int]
    lane_rows: list[int]
    by_expert: RowMap
    counts_L: Tensor


class AllToAllDispatcher:
    """The reference dispatcher: exact for any load, K(EP-1)/EP rows per token on the wire."""

    def __init__(self, ep: Axis, etp: Axis, num_experts: int) -> None:
        self.ep, self.etp, self.num_experts = ep, etp, num_experts
        self.num_local = num_experts // ep.size

    def plan(self, experts_TK: Tensor) -> AllToAllPlan:
        # Experts are contiguous per rank: sorted by expert is sorted by destination.
        tokens, slot_S, counts_E = group_by_expert(experts_TK, self.num_experts)
        sent = counts_E.view(self.ep.size, self.num_local)
        received = collectives.exchange_counts(sent, self.ep, caller="moe.counts")
        # [etp, ep, L]: what each lane receives from each source for each local expert.
        lanes = collectives.all_gather(received[None], self.etp, caller="moe.counts")
        # Inside an expert, rows ascend by source rank (= ep * ETP + etp), hence by token id.
        places = (torch.arange(size, device=lanes.device) for size in lanes.shape)
        lane, source, expert = torch.meshgrid(*places, indexing="ij")
        key = (expert * self.ep.size + source) * self.etp.size + lane
        key_N = torch.repeat_interleave(key.flatten(), lanes.flatten())
        splits = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        return AllToAllPlan(
            tokens=tokens,
            slot_S=slot_S,
            input_splits=splits[0],
            output_splits=splits[1],
            lane_rows=lanes.sum((1, 2)).tolist(),
            by_expert=permutation(torch.argsort(key_N, stable=True)),
            counts_L=lanes.sum((0, 1)),
        )

    def dispatch(self, x_TH: Tensor, weights_TK: Tensor, plan: AllToAllPlan) -> Rows:
        x_NH = self._to_experts(permute(x_TH, plan.tokens), plan, "moe.dispatch")
        weights_S = pick_weights(weights_TK, plan.slot_S)
        weights_N = self._to_experts(weights_S, plan, "moe.dispatch.weights")
        weights_R = weights_N.gather(0, plan.by_expert.source_R)
        return Rows(x_NH, plan.by_expert, weights_R, plan.counts_L)

    def _to_experts(self, rows: Tensor, plan: AllToAllPlan, caller: str) -> Tensor:
        received = collectives.all_to_all(
            rows, self.ep, plan.input_splits, plan.output_splits, caller=caller
        )
        return collectives.all_gather(received, self.etp, plan.lane_rows, caller=caller)

    def combine(self, y_RH: Tensor, plan: AllToAllPlan) -> Tensor:
        y_NH = unpermute(y_RH, plan.by_expert)
        y_NH = collectives.reduce_scatter(y_NH, self.etp, plan.lane_rows, caller="moe.combine")
        y_SH = collectives.all_to_all(
            y_NH, self.ep, plan.output_splits, plan.input_splits, caller="moe.combine"
        )
        return unpermute(y_SH, plan.tokens)
