"""Lower bound of a MoE layer: its expert products and its exchanges, and nothing else.

Legend: R rows grouped by expert, N rows received, L local experts, H hidden, F width, G = 2 F.
Everything that is read or written is there before the clock starts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moemesh.comm.mesh import Axis


class BareGemms:
    """The six kinds of products of the experts, forward and backward, one expert after another."""

    def __init__(self, counts: Sequence[int], hidden: int, width: int, dtype: torch.dtype) -> None:
        """`counts` are the rows of each expert, as the measured layer's router gave them."""
        num_rows, num_experts, doubled = sum(counts), len(counts), 2 * width

        def made(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float32).to(dtype)

        self.counts = list(counts)
        self.x_RH, self.h_RG = made(num_rows, hidden), made(num_rows, doubled)
        self.product_RF, self.grad_RH = made(num_rows, width), made(num_rows, hidden)
        self.gate_up_LGH = made(num_experts, doubled, hidden)
        self.down_LHF = made(num_experts, hidden, width)
        self.into_RH, self.into_RG = torch.empty_like(self.x_RH), torch.empty_like(self.h_RG)
        self.into_RF = torch.empty_like(self.product_RF)
        self.into_LGH = torch.empty_like(self.gate_up_LGH)
        self.into_LHF = torch.empty_like(self.down_LHF)

    def __call__(self) -> None:
        start = 0
        for expert, count in enumerate(self.counts):
            rows, start = slice(start, start + count), start + count
            if count:
                self._forward(expert, rows)
        start = 0
        for expert, count in enumerate(self.counts):
            rows, start = slice(start, start + count), start + count
            if count:
                self._backward(expert, rows)

    def _forward(self, expert: int, rows: slice) -> None:
        torch.mm(self.x_RH[rows], self.gate_up_LGH[expert].t(), out=self.into_RG[rows])
        torch.mm(self.product_RF[rows], self.down_LHF[expert].t(), out=self.into_RH[rows])

    def _backward(self, expert: int, rows: slice) -> None:
        torch.mm(self.grad_RH[rows], self.down_LHF[expert], out=self.into_RF[rows])
        torch.mm(self.grad_RH[rows].t(), self.product_RF[rows], out=self.into_LHF[expert])
        torch.mm(self.h_RG[rows].t(), self.x_RH[rows], out=self.into_LGH[expert])
        torch.mm(self.h_RG[rows], self.gate_up_LGH[expert], out=self.into_RH[rows])


class BareAllToAll:
    """The four exchanges of rows: dispatch, combine and their backwards.

    Calls torch directly, not through :mod:`moemesh.comm`: a bound must not contain what it bounds.
    """

    def __init__(
        self,
        axis: Axis,
        input_splits: Sequence[int],
        output_splits: Sequence[int],
        hidden: int,
        dtype: torch.dtype,
    ) -> None:
        self.axis = axis
        self.splits = list(input_splits), list(output_splits)
        self.own = torch.zeros(sum(input_splits), hidden, dtype=dtype)
        self.received = torch.zeros(sum(output_splits), hidden, dtype=dtype)

    def __call__(self) -> None:
        inputs, outputs = self.splits
        group = self.axis.group
        for _ in range(2):  # forward and backward carry the same rows
            dist.all_to_all_single(self.received, self.own, outputs, inputs, group=group)
            dist.all_to_all_single(self.own, self.received, inputs, outputs, group=group)

    @property
    def bytes_sent(self) -> int:
        """Bytes that leave this rank in one call; rows for itself do not."""
        leaving = [
            rows
            for splits in self.splits
            for index, rows in enumerate(splits)
            if index != self.axis.index
        ]
        return 2 * sum(leaving) * self.own.shape[1] * self.own.element_size()
