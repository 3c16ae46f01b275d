"""One matrix product per expert over rows grouped by expert: reference loops, and the fast path.

Legend: R rows (grouped by expert, ascending), E local experts, I in, O out, B rows of one expert
with padding. ``ends_E`` (int32) is the running total of rows: expert e has the rows ``ends[e-1] :
ends[e]``, maybe none.
"""

from __future__ import annotations

import functools
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

#: Multiple to which a CPU pads the rows of 16-bit products, if they are this many or more: oneDNN
#: builds and caches a kernel for each number of rows, and an expert's number changes in every step
#: (docs/results/layer.md).
ROWS = 32
_FAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def product_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Write ``left @ right`` to `out`."""
    if torch._C._len_torch_dispatch_stack():
        # Dispatch modes see the results of operations, not what these write to `out`: selective
        # checkpointing returns saved results, and FLOP counters know no other products.
        out.copy_(left @ right)
    else:
        torch.mm(left, right, out=out)


def grouped_gemm_loop(
    x_RI: Tensor, weight_EIO: Tensor, ends_E: Tensor, out: Tensor | None = None
) -> Tensor:
    """Reference for :func:`grouped_gemm`, and its path for any dtype and alignment."""
    y_RO = x_RI.new_empty(x_RI.shape[0], weight_EIO.shape[2]) if out is None else out
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        product_into(y_RO[start:end], x_RI[start:end], weight_EIO[expert])
        start = end
    return y_RO


def grouped_weight_gradient_loop(
    grad_RO: Tensor,
    x_RI: Tensor,
    ends_E: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """``grad.T @ x`` of each expert, [E, O, I]; exact zeros for an expert without rows."""
    shape = (len(ends_E), grad_RO.shape[1], x_RI.shape[1])
    grad_EOI = x_RI.new_empty(shape) if out is None else out
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        product_into(grad_EOI[expert], grad_RO[start:end].t(), x_RI[start:end])
        start = end
    return grad_EOI


def _rounded(num_rows: int) -> int:
    """`num_rows`, rounded up to a multiple of ROWS unless it is smaller."""
    return num_rows if num_rows < ROWS else -(-num_rows // ROWS) * ROWS


def _with_zeros(x_RI: Tensor, size: int) -> Tensor:
    """`x_RI`, and zeros up to `size` rows."""
    if len(x_RI) == size:
        return x_RI
    padded_BI = x_RI.new_empty(size, x_RI.shape[1])
    padded_BI[: len(x_RI)] = x_RI
    padded_BI[len(x_RI) :] = 0
    return padded_BI


def _has_fast_path(*tensors: Tensor) -> bool:
    # F.grouped_mm: no float64, and every stride but that of the inner dim a multiple of 16 bytes.
    for tensor in tensors:
        size = tensor.itemsize
        if tensor.dtype not in _FAST_DTYPES or tensor.data_ptr() % 16:
            return False
        steps = tensor.stride()
        if steps.count(1) > 1:
            return False
        for step in steps:  # a comprehension would add twelve calls to a layer: its frames
            if step != 1 and step * size % 16:
                return False
    return True


def grouped_gemm(
    x_RI: Tensor, weight_EIO: Tensor, ends_E: Tensor, out: Tensor | None = None
) -> Tensor:
    """Rows of expert e times ``weight_EIO[e]``: [R, O], written to `out` if given."""
    if not x_RI.shape[0]:  # kernels differ for zero rows
        return x_RI.new_empty(0, weight_EIO.shape[2]) if out is None else out
    if x_RI.device.type == "cpu" and x_RI.itemsize == 2:
        y_RO = x_RI.new_empty(x_RI.shape[0], weight_EIO.shape[2]) if out is None else out
        # Extra rows are those of the next experts, whose products then overwrite the extra results;
        # at the end of all rows a copy has zeros there.
        for expert, (start, end) in enumerate(pairwise([0, *ends_E.tolist()])):
            stop, weight_IO = start + _rounded(end - start), weight_EIO[expert]
            if stop <= len(x_RI):
                product_into(y_RO[start:stop], x_RI[start:stop], weight_IO)
            else:
                padded_RI = _with_zeros(x_RI[start:end], stop - start)
                y_RO[start:end] = (padded_RI @ weight_IO)[: end - start]
        return y_RO
    # On a CPU F.grouped_mm is the same loop, but cannot write to `out`; on a device the loop would
    # wait for `ends_E`.
    if (out is None or out.device.type != "cpu") and _has_fast_path(x_RI, weight_EIO):
        y_RO = F.grouped_mm(x_RI, weight_EIO, offs=ends_E)
        return y_RO if out is None else out.copy_(y_RO)
    return grouped_gemm_loop(x_RI, weight_EIO, ends_E, out)


def grouped_weight_gradient(
    grad_RO: Tensor,
    x_RI: Tensor,
    ends_E: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """``grad[rows of e].T @ x[rows of e]``: [E, O, I], zeros without rows; `out` if given."""
    shape = (ends_E.shape[0], grad_RO.shape[1], x_RI.shape[1])
    if not x_RI.shape[0]:
        return x_RI.new_zeros(shape) if out is None else out.zero_()
    if x_RI.shape[1] == 1:  # product kernels fail for one input channel
        counts_E = torch.diff(ends_E.long(), prepend=ends_E.new_zeros(1, dtype=torch.int64))
        wide = torch.promote_types(grad_RO.dtype, torch.float32)
        rows_RO = grad_RO.to(wide) * x_RI.to(wide)
        # unsafe: without a check of the lengths, for which the host would wait.
        sums_EO = torch.segment_reduce(rows_RO, "sum", lengths=counts_E, axis=0, unsafe=True)
        gradient = sums_EO.to(grad_RO.dtype)[..., None]
        return gradient if out is None else out.copy_(gradient)
    if x_RI.device.type == "cpu" and x_RI.itemsize == 2:
        grad_EOI = x_RI.new_empty(shape) if out is None else out
        for expert, (start, end) in enumerate(pairwise([0, *ends_E.tolist()])):
            size = _rounded(end - start)
            grad_BO, x_BI = (_with_zeros(rows[start:end], size) for rows in (grad_RO, x_RI))
            product_into(grad_EOI[expert], grad_BO.t(), x_BI)
        return grad_EOI
    if (out is None or out.device.type != "cpu") and _has_fast_path(grad_RO, x_RI):
        gradient = F.grouped_mm(grad_RO.t(), x_RI, offs=ends_E)
        if grad_RO.is_cuda and leaves_empty_experts(grad_RO.device):
            counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
            gradient.masked_fill_((counts_E == 0)[:, None, None], 0)
        return gradient if out is None else out.copy_(gradient)
    return grouped_weight_gradient_loop(grad_RO, x_RI, ends_E, out)


@functools.cache
def leaves_empty_experts(device: torch.device) -> bool:
    """Whether gradients of empty experts may be wrong (pytorch issue 172439)."""
    return torch.cuda.get_device_capability(device) >= (10, 0)
