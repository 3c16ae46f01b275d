"""Ring and minimum-spanning-tree collectives, message by message: the oracle of the ledger.

Not for speed. `moemesh.trace.wire` states in closed form what these send; the tests hold the two
together. Source: E. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn, "Collective communication:
theory, practice, and experience" (2007).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moemesh.comm import point_to_point
from moemesh.comm.mesh import Axis
from moemesh.config.layout import shard_sizes
from moemesh.trace.wire import tree_messages


def ring_all_reduce(x: Tensor, axis: Axis, *, phase: str, caller: str) -> Tensor:
    """The sum over the axis: n-1 steps of reduce-scatter, then n-1 of all-gather, around a ring.

    Every chunk travels to the right and is added to at each rank; rank i ends the first half with
    the sum of chunk i, and the second half hands the sums round.
    """
    total = x.clone(memory_format=torch.contiguous_format)
    chunks = list(total.view(-1).split(list(shard_sizes(total.numel(), axis.size))))
    right, left = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    for step in range(2 * (axis.size - 1)):
        reducing = step < axis.size - 1
        sent = chunks[(axis.index - 1 - step) % axis.size]
        target = chunks[(axis.index - 2 - step) % axis.size]
        arrived = torch.empty_like(target)
        sending = point_to_point.start_send(sent, axis, right, phase=phase, caller=caller)
        point_to_point.receive(arrived, axis, left, phase=phase, caller=caller)
        sending.wait()
        target.copy_(target + arrived if reducing else arrived)
    return total


def tree_broadcast(x: Tensor, axis: Axis, source_index: int, *, phase: str, caller: str) -> Tensor:
    """The tensor of rank `source_index`, passed on along a minimum spanning tree."""
    copy = x.clone(memory_format=torch.contiguous_format)
    for sender, receiver in tree_messages(axis.size, source_index):
        if sender == axis.index:
            point_to_point.send(copy, axis, receiver, phase=phase, caller=caller)
        elif receiver == axis.index:
            point_to_point.receive(copy, axis, sender, phase=phase, caller=caller)
    return copy


def tree_reduce(
    x: Tensor, axis: Axis, destination_index: int, *, phase: str, caller: str
) -> Tensor:
    """The sum over the axis on rank `destination_index`, zeros elsewhere: a broadcast mirrored."""
    total = x.clone(memory_format=torch.contiguous_format)
    for parent, child in reversed(list(tree_messages(axis.size, destination_index))):
        if child == axis.index:
            point_to_point.send(total, axis, parent, phase=phase, caller=caller)
        elif parent == axis.index:
            arrived = torch.empty_like(total)
            total += point_to_point.receive(arrived, axis, child, phase=phase, caller=caller)
    return total if axis.index == destination_index else torch.zeros_like(total)
