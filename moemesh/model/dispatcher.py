"""The contract between a router's choice and the experts: plan, dispatch, combine.

Legend: T tokens, K slots per token, N source rows, R rows grouped by local expert, L local experts,
O owners (ranks whose tokens may come here), H hidden. Dispatchers are siblings that do not inherit
from one another; all pass one shared test.

| call | in | out | may communicate |
|---|---|---|---|
| plan | experts [T, K] | a plan: who sends what where; no gradient; replayable | ids and counts |
| dispatch | x [T, H], weights [T, K] | :class:`Rows` of the local experts | rows and weights |
| combine | y [R, H] | unweighted sum per token [T, H] | rows |

dispatch and combine return at once with something :class:`~moemesh.ops.pending.Pending`: a
dispatcher may have started an exchange that ends when it is waited for. The backward of dispatch is
a combine and the other way round, with the same plan. Rows of an expert ascend by owner and token.
Any T >= 0, any number of -1 per token and R = 0 are legal; the same collectives run in all cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from moemesh.ops.pending import Pending
from moemesh.ops.permute import RowMap, group_by_expert, unpermute


class Replicas(NamedTuple):
    """Experts computed here for this microbatch alone. ``home`` and ``spare`` split the map of all
    rows: those of own experts, and behind them those of replicas, ``counts_S`` rows each;
    ``weights`` fetches their gate_up [S, 2, F, H] and down [S, H, F]."""

    home: RowMap
    spare: RowMap
    counts_S: Tensor
    weights: Pending[tuple[Tensor, Tensor]]


class Rows(NamedTuple):
    """What the local experts compute on: rows that `map` copies from `source_NH`, by expert.

    ``counts_LO`` (rows per expert and owner) is set when the result must not depend on the layout:
    the experts then use it to add their weight gradients in a fixed order. ``replicas``: rows
    behind those of ``counts_L`` belong to experts that are only visiting.
    """

    source_NH: Tensor
    map: RowMap
    weights_R: Tensor
    counts_L: Tensor
    counts_LO: Tensor | None = None
    replicas: Replicas | None = None


class Dispatcher(Protocol):
    """See the table above. The type of a plan is the dispatcher's own business."""

    def plan(self, experts_TK: Tensor) -> Any: ...

    def dispatch(self, x_TH: Tensor, weights_TK: Tensor, plan: Any) -> Pending[Rows]: ...

    def combine(self, y_RH: Tensor, plan: Any) -> Pending[Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class LocalPlan:
    """Rows -> tokens, rows -> (token, slot) pairs, and rows per expert."""

    tokens: RowMap
    slot_R: Tensor
    counts_L: Tensor


class LocalDispatcher:
    """All experts are here: sort by expert, compute, sum back. Nothing is sent."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def plan(self, experts_TK: Tensor) -> LocalPlan:
        tokens, slot_R, counts_L = group_by_expert(experts_TK, self.num_experts)
        return LocalPlan(tokens=tokens, slot_R=slot_R, counts_L=counts_L)

    def dispatch(self, x_TH: Tensor, weights_TK: Tensor, plan: LocalPlan) -> Pending[Rows]:
        weights_R = pick_weights(weights_TK, plan.slot_R)
        return Pending.ready(Rows(x_TH, plan.tokens, weights_R, plan.counts_L))

    def combine(self, y_RH: Tensor, plan: LocalPlan) -> Pending[Tensor]:
        return Pending.ready(unpermute(y_RH, plan.tokens))


def pick_weights(weights_TK: Tensor, slot_R: Tensor) -> Tensor:
    """The router's weight of each row [R], fp32, with its gradient."""
    return weights_TK.reshape(-1).gather(0, slot_R)
