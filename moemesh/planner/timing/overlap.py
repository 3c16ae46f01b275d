"""Two kinds of work at once: what runs beside what, and what sticks out.

Overlap is never free: published slowdowns of kernels that share a device with a transfer are 2 to
15 %, and more where the transfer's kernels take multiprocessors. Per unit (bucket, chunk, layer):

    T = max(compute + κ transfer, transfer + κ/4 compute)

A transfer slows the computation beside it by κ of its own length; computation slows a transfer far
less, which is what remains when the transfer is the longer one. κ = 0 is perfect overlap.
"""

from __future__ import annotations

from moemesh.planner.arithmetic import Number, maximum

#: How much less a transfer suffers from computation than computation from it.
_TRANSFER_SHARE = 0.25


def overlapped(compute: Number, transfer: Number, slowdown: Number) -> Number:
    """Seconds of one unit whose transfer runs beside its computation; `slowdown` is κ."""
    bound_by_compute = compute + slowdown * transfer
    bound_by_transfer = transfer + slowdown * _TRANSFER_SHARE * compute
    return maximum(bound_by_compute, bound_by_transfer)


def exposed(transfer: Number, share: Number) -> Number:
    """Seconds of a transfer that computation does not hide."""
    return transfer * share
