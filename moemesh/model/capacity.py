"""Capacity: the choices that an expert keeps when more tokens of a sequence choose it than fit.

Legend: B sequences, S positions, K slots of a token, N = B * S * K choices, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moemesh.ops.permute import count_ids


def within_capacity(
    experts_BSK: Tensor, priority_BSK: Tensor | None, capacity_B: Tensor, num_experts: int
) -> Tensor:
    """Which choices stay: bool [B, S, K], False for no choice (-1).

    Each expert keeps at most `capacity_B` tokens of a sequence: those of highest priority, and
    among equals those of the lowest position (without priorities: the first). Counted over whole
    sequences, so the answer does not depend on the layout.
    """
    num_sequences = len(experts_BSK)
    sequence_B11 = torch.arange(num_sequences, device=experts_BSK.device)[:, None, None]
    queue_N = (sequence_B11 * num_experts + experts_BSK).flatten()
    none_N = (experts_BSK < 0).flatten()
    num_queues = num_sequences * num_experts
    queue_N = queue_N.masked_fill(none_N, num_queues)
    # Two stable sorts: into queues, and inside a queue by priority, then by position.
    order_N = torch.arange(queue_N.numel(), device=queue_N.device)
    if priority_BSK is not None:
        order_N = torch.sort(priority_BSK.flatten(), descending=True, stable=True).indices
    order_N = order_N[torch.sort(queue_N[order_N], stable=True).indices]
    counts = count_ids(queue_N, num_queues + 1)
    starts = counts.cumsum(0) - counts
    place_N = torch.empty_like(queue_N)
    place_N[order_N] = torch.arange(queue_N.numel(), device=queue_N.device)
    place_N -= starts[queue_N]
    limit_N = capacity_B[:, None, None].expand_as(experts_BSK).flatten()
    return ((place_N < limit_N) & ~none_N).view_as(experts_BSK)
