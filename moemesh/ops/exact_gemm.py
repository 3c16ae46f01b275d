"""Expert products whose bits do not depend on the layout: the arithmetic behind `combine = exact`.

Three things make an expert's result depend on how experts are spread over ranks. A matrix product
takes other paths through the BLAS for the last few rows (measured: row counts that are no multiple
of 4 in float64, fewer than 4 rows in float32), and a vectorised pointwise operation for the last
few numbers: so rows are laid out in :class:`PaddedRows`. And a weight gradient is a sum over rows
that several ranks may hold parts of: here it is one product per owner of the rows, added in a
balanced binary tree over owners. Expert-parallel groups are contiguous ranks, so for powers of two
the sum of a group is a subtree, and the replicas' sums complete the same tree.

Legend: R rows ordered by expert, then by owner; Q padded rows; E local experts, P owners, I in,
O out.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from moemesh.sharding.dispatchers import EXACT_ROWS


class PaddedRows:
    """The place of each of R rows among Q padded ones, so that no row is among a product's last."""

    def __init__(self, counts_EP: Tensor) -> None:
        counts_E = counts_EP.sum(1)
        padded_E = (counts_E + EXACT_ROWS - 1) // EXACT_ROWS * EXACT_ROWS
        shift_E = padded_E.cumsum(0) - padded_E - (counts_E.cumsum(0) - counts_E)
        rows = torch.arange(int(counts_E.sum()), device=counts_EP.device)
        self.place_R = rows + torch.repeat_interleave(shift_E, counts_E)
        self.per_expert: list[int] = padded_E.tolist()
        self.num_padded = -(-sum(self.per_expert) // (4 * EXACT_ROWS)) * 4 * EXACT_ROWS

    def pad(self, x_R: Tensor) -> Tensor:
        """[R, ...] -> [Q, ...], zeros between."""
        padded = x_R.new_zeros(self.num_padded, *x_R.shape[1:])
        padded[self.place_R] = x_R
        return padded

    def unpad(self, x_Q: Tensor) -> Tensor:
        """[Q, ...] -> [R, ...]."""
        return x_Q[self.place_R]

    def gemm(self, x_QI: Tensor, weight_EIO: Tensor) -> Tensor:
        """Rows of expert e times ``weight[e]``, [Q, O]."""
        y_QO = x_QI.new_zeros(self.num_padded, weight_EIO.shape[2])
        start = 0
        for expert, count in enumerate(self.per_expert):
            if count:
                rows = slice(start, start + count)
                torch.mm(x_QI[rows], weight_EIO[expert], out=y_QO[rows])
            start += count
        return y_QO


def exact_weight_gradient(grad_RO: Tensor, x_RI: Tensor, counts_EP: Tensor) -> Tensor:
    """``grad.T @ x`` of each expert, [E, O, I], added over owners in a binary tree; at least fp32.

    Rounding a rank's sum to bfloat16 would tell which owners it was made of.
    """
    wide = torch.promote_types(x_RI.dtype, torch.float32)
    splits = counts_EP.flatten().tolist()
    grads, xs = grad_RO.to(wide).split(splits), x_RI.to(wide).split(splits)
    num_experts, num_owners = counts_EP.shape
    total = x_RI.new_empty(num_experts, grad_RO.shape[1], x_RI.shape[1], dtype=wide)
    for expert in range(num_experts):
        pieces = slice(expert * num_owners, (expert + 1) * num_owners)
        total[expert] = tree_sum(
            grad.t() @ x for grad, x in zip(grads[pieces], xs[pieces], strict=True)
        )
    return total


def tree_sum(parts: Iterable[Tensor]) -> Tensor:
    """Sum in a balanced binary tree over the order given; holds log2(parts) partial sums."""
    stack: list[tuple[int, Tensor]] = []
    for part in parts:
        level, value = 0, part
        while stack and stack[-1][0] == level:
            value = stack.pop()[1] + value
            level += 1
        stack.append((level, value))
    _, total = stack.pop()
    while stack:
        total = stack.pop()[1] + total
    return total
