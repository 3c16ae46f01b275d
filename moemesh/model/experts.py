"""The routed experts: stacked SwiGLU MLPs over the rows that a dispatcher delivers.

Legend: R rows by expert, L experts held here, H hidden, F expert width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moemesh.config.lora import NO_ADAPTERS, LoraConfig
from moemesh.model.dispatcher import DispatchedRows, ExpertRows, LocalRows
from moemesh.model.layers import AdaptedModule
from moemesh.ops.expert_kernels import ExpertKernel, computes
from moemesh.ops.expert_mlp import DeferredProducts
from moemesh.ops.expert_weights import ExpertWeights
from moemesh.ops.swiglu import PLAIN, SwigluForm


class Experts(AdaptedModule):
    """``gate_up`` [L, 2, F, H] and ``down`` [L, H, F]; with `bias` ``gate_up_bias`` [L, 2, F] and
    ``down_bias`` [L, H], which is added to a row before the row is weighted.

    If the width of experts is sharded, a rank computes a partial sum of each row, and holds and
    adds only the channels of ``down_bias`` from ``column`` on.

    ``max_rows`` bounds memory under any routing: more rows are computed in blocks, each recomputed
    in the backward instead of kept. This is slower, but numbers of the experts' width then exist
    for at most ``max_rows`` rows, also on a rank that gets the rows of all others. None: unbounded.
    ``recomputes``: only rows and their weights are kept for the backward, which recomputes the
    rest.
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        width: int,
        *,
        bias: bool = False,
        form: SwigluForm = PLAIN,
        lora: LoraConfig = NO_ADAPTERS,
    ) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2, width, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.gate_up_bias = nn.Parameter(torch.empty(num_experts, 2, width)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, hidden)) if bias else None
        self.add_adapters(lora, "gate_up", "down", is_stack=True)
        #: Whether a :class:`~moemesh.ops.expert_mlp.DeferredProducts` can take weight gradients.
        self.can_defer = True
        #: Frozen experts of the layer, after these in the order of rows, if only these train.
        self.rest: Experts | None = None
        self.form, self.column = form, 0
        self.max_rows: int | None = None
        #: Number of calls with more than `max_rows` rows; reset by its reader.
        self.num_bounded = 0
        self.recomputes = False
        #: A kernel of another package, used for calls that it supports; None: :mod:`moemesh.ops`.
        self.kernel: ExpertKernel | None = None

    def forward(self, rows: ExpertRows, deferred: DeferredProducts | None = None) -> Tensor:
        """Weighted outputs [R, H]; calls with one `deferred` share a weight gradient."""
        # With padding, the dispatcher has bounded the number of rows before the routing is known.
        max_rows = None if rows.map.has_rest else self.max_rows
        weights, num_rows = self.weights, rows.map.source_R.shape[0]
        if max_rows is not None and num_rows > max_rows:
            self.num_bounded += 1
        elif self.kernel is not None and not self.recomputes and computes(weights):
            routing = rows.as_routing() if isinstance(rows, LocalRows | DispatchedRows) else None
            if routing is not None and num_rows:
                return self.kernel(*routing, weights.gate_up, weights.down)
        return rows.compute(
            weights, deferred=deferred, max_rows=max_rows, recomputes=self.recomputes
        )

    @torch.no_grad()
    def split(self, own: Sequence[int], others: Sequence[int]) -> None:
        """Keep the experts in the places `own`, in this order; move those in `others` to `rest`."""
        rest = Experts.__new__(Experts)
        AdaptedModule.__init__(rest)
        for name, parameter in list(self.named_parameters(recurse=False)):
            setattr(rest, name, nn.Parameter(parameter[list(others)]))
            setattr(self, name, nn.Parameter(parameter[list(own)]))
        self.rest = rest

    @property
    def weights(self) -> ExpertWeights:
        """Inputs of the experts' products."""
        adapters = (*self.adapters("gate_up"), *self.adapters("down")) if self.lora.rank else ()
        return ExpertWeights(
            self.gate_up,
            self.down,
            self.gate_up_bias,
            self.down_bias,
            self.form,
            self.column,
            adapters,
            self.scaling,
            () if self.rest is None else tuple(self.rest.parameters()),
        )
