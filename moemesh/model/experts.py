"""The routed experts: stacked SwiGLU MLPs over the rows that a dispatcher delivers.

Legend: R rows by expert, L experts held here, H hidden, F expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moemesh.model.dispatcher import ExpertRows
from moemesh.ops.expert_mlp import Deferred


class Experts(nn.Module):
    """``gate_up`` [L, 2, F, H] and ``down`` [L, H, F].

    ``max_rows`` bounds memory under any routing: more rows than that are computed in blocks, each
    once more in the backward instead of kept. Slower, but one rank that gets the rows of all never
    has more than ``max_rows`` x 2 F numbers of its own beside the rows it was sent. None: no bound.
    ``recomputes``: so are all rows; of the forward only the rows and their weights are kept.
    """

    def __init__(self, num_experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2, width, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.max_rows: int | None = None
        self.recomputes = False

    def forward(self, rows: ExpertRows, deferred: Deferred | None = None) -> Tensor:
        """Weighted outputs [R, H]; calls of one layer that are given the same `deferred` compute
        their weight gradients together, at its end."""
        return rows.compute(self.gate_up, self.down, deferred, self.max_rows, self.recomputes)
