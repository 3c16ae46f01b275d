"""The routed experts: stacked SwiGLU MLPs over whatever rows a dispatcher brings.

Legend: R rows by expert, L experts held here, H hidden, F expert width.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from moemesh.model.dispatcher import Rows
from moemesh.ops.exact_experts import exact_experts
from moemesh.ops.expert_mlp import Later, expert_mlp

#: gate_up and down of some experts.
Weights: TypeAlias = tuple[Tensor, Tensor]


class Experts(nn.Module):
    """``gate_up`` [L, 2, F, H] and ``down`` [L, H, F].

    ``max_rows`` bounds memory under any routing: more rows than that are computed in blocks, each
    once more in the backward instead of kept. Slower, but one rank that gets the rows of all never
    has more than ``max_rows`` x 2 F numbers of its own beside the rows it was sent. None: no bound.
    """

    def __init__(self, num_experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2, width, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.max_rows: int | None = None

    def forward(self, rows: Rows, put_off: Later | None = None) -> Tensor:
        """[R, H]; calls of one layer that are given the same `put_off` compute their
        weight gradients together, at its end."""
        if rows.counts_LO is not None:
            return exact_experts(
                rows.source_NH, rows.weights_R, rows.counts_LO, self.gate_up, self.down
            )
        own = self.gate_up, self.down
        if rows.replicas is None:
            return self._compute(rows, own, put_off)
        home, spare, counts_S, weights = rows.replicas
        home_weights_R, spare_weights_R = rows.weights_R.split([home.num_rows, spare.num_rows])
        y_RH = self._compute(
            Rows(rows.source_NH, home, home_weights_R, rows.counts_L), own, put_off
        )
        # Behind the rows of own experts: weights come, and their gradients leave, meanwhile.
        fetched = weights.wait()
        if not len(counts_S):
            return torch.cat([y_RH, _NoRows.apply(*fetched)])
        replicas = Rows(rows.source_NH, spare, spare_weights_R, counts_S)
        return torch.cat([y_RH, self._compute(replicas, fetched, None)])

    def _compute(self, rows: Rows, weights: Weights, put_off: Later | None) -> Tensor:
        return expert_mlp(
            rows.source_NH,
            rows.map,
            rows.weights_R,
            rows.counts_L,
            *weights,
            put_off,
            self.max_rows,
        )


class _NoRows(torch.autograd.Function):
    """No replica is here, but the exchange that brought none has a backward to take part in."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, down: Tensor) -> Tensor:
        # Saved so that a forward that is computed again gets as far as waiting for the exchange.
        ctx.save_for_backward(gate_up, down)
        return gate_up.new_empty(0, down.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, down = ctx.saved_tensors
        return torch.zeros_like(gate_up), torch.zeros_like(down)
