"""The routed experts: stacked SwiGLU MLPs over whatever rows a dispatcher brings.

Legend: R rows by expert, L experts held here, H hidden, F expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moemesh.model.dispatcher import Rows
from moemesh.ops.exact_experts import exact_experts
from moemesh.ops.expert_mlp import GradientSum, expert_mlp
from moemesh.ops.permute import slice_map


class Experts(nn.Module):
    """``gate_up`` [L, 2, F, H] and ``down`` [L, H, F].

    ``max_rows`` bounds memory under any routing: more rows than that are computed piece by piece,
    each piece once more in the backward instead of kept. Slower, but one rank that gets the rows of
    all keeps no more than ``max_rows`` x 2 F numbers of its own beside the rows it was sent. None:
    no bound.
    """

    def __init__(self, num_experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2, width, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.max_rows: int | None = None

    def forward(self, rows: Rows, total: GradientSum | None = None) -> Tensor:
        """[R, H]; calls of one layer that are given the same `total` share a weight gradient."""
        if rows.counts_LO is not None:
            return exact_experts(
                rows.source_NH, rows.weights_R, rows.counts_LO, self.gate_up, self.down
            )
        if self.max_rows is None or rows.map.num_rows <= self.max_rows:
            return self._compute(rows, total)
        return torch.cat(
            [
                checkpoint(self._piece, rows, start, use_reentrant=False)
                for start in range(0, rows.map.num_rows, self.max_rows)
            ]
        )

    def _compute(self, rows: Rows, total: GradientSum | None = None) -> Tensor:
        weights = self.gate_up, self.down
        return expert_mlp(rows.source_NH, rows.map, rows.weights_R, rows.counts_L, *weights, total)

    def _piece(self, rows: Rows, start: int) -> Tensor:
        assert self.max_rows is not None
        stop = min(start + self.max_rows, rows.map.num_rows)
        ends_L = rows.counts_L.cumsum(0).clamp(start, stop)
        counts_L = torch.diff(ends_L, prepend=ends_L.new_tensor([start]))
        return self._compute(
            Rows(
                rows.source_NH,
                slice_map(rows.map, start, stop),
                rows.weights_R[start:stop],
                counts_L,
            )
        )
