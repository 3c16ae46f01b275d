"""Expert products whose bits do not depend on the layout: the arithmetic behind `combine = exact`.

Two things make a grouped product depend on how experts are spread over ranks. A product of very few
rows takes another path through the BLAS (measured: below 4 rows), so small groups are padded. And a
weight gradient is a sum over rows that different ranks may hold parts of: here it is one product per
owner of the rows, added in a balanced binary tree over owners. Expert-parallel groups are contiguous
ranks, so for powers of two every group's sum is a subtree, and replicas add up to the same tree.

Legend: R rows ordered by expert, then by owner; E local experts, P owners, I in, O out.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

#: Groups of fewer rows are padded to this many.
MIN_ROWS = 16


def exact_gemm(x_RI: Tensor, weight_EIO: Tensor, counts_EP: Tensor) -> Tensor:
    """Rows of expert e times ``weight[e]``, [R, O]: each row's bits as if it were alone."""
    y_RO = x_RI.new_empty(x_RI.shape[0], weight_EIO.shape[2])
    start = 0
    for expert, count in enumerate(counts_EP.sum(1).tolist()):
        rows = slice(start, start + count)
        start += count
        if count >= MIN_ROWS:
            torch.mm(x_RI[rows], weight_EIO[expert], out=y_RO[rows])
        elif count:
            padded = x_RI.new_zeros(MIN_ROWS, x_RI.shape[1])
            padded[:count] = x_RI[rows]
            y_RO[rows] = (padded @ weight_EIO[expert])[:count]
    return y_RO


def exact_weight_gradient(grad_RO: Tensor, x_RI: Tensor, counts_EP: Tensor) -> Tensor:
    """``grad.T @ x`` of each expert, [E, O, I], added over owners in a binary tree."""
    splits = counts_EP.flatten().tolist()
    grads, xs = grad_RO.split(splits), x_RI.split(splits)
    num_experts, num_owners = counts_EP.shape
    total = x_RI.new_empty(num_experts, grad_RO.shape[1], x_RI.shape[1])
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
