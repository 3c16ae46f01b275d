"""Expert migration: which rank holds which expert, and moving its weights and optimizer state.

Legend: E experts of a layer, P ranks of ep, L = E / P experts of a rank (in `counts_LE`: layers).

Places are numbered over the ranks of ep: rank p holds the places ``p L .. (p + 1) L``. The model's
router, losses and loads, the norm and checkpoints name experts by logical id; a MoE layer turns ids
into places right before its dispatcher, so dispatchers do not depend on the placement.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from moemesh.balance import schedule_transfers
from moemesh.comm.mesh import Axis
from moemesh.comm.point_to_point import exchange
from moemesh.model.transformer import Transformer
from moemesh.parallel.placement import Placement

#: Layer -> the logical expert in each place; layers whose experts are in order may be left out.
Homes: TypeAlias = dict[int, tuple[int, ...]]


def set_homes(
    model: Transformer,
    placements: MutableMapping[str, Placement],
    homes: Homes,
    layer: int,
    places: Sequence[int],
    device: torch.device,
) -> None:
    """Record that place i of `layer` holds expert ``places[i]``: for the routing of tokens and for
    names in checkpoints. All ranks call, whether they hold the layer or not. The caller moves the
    weights."""
    assert sorted(places) == list(range(len(places))), places
    homes[layer] = tuple(places)
    for name in stacks_of_experts(placements, layer):
        placements[name] = replace(placements[name], places=tuple(places))
    if (moe := model.moe_layers().get(layer)) is not None:
        moe.place_E = torch.argsort(torch.tensor(places, device=device))


def stacks_of_experts(placements: Mapping[str, Placement], layer: int) -> list[str]:
    """Names of the parameters that stack the experts of `layer`."""
    prefix = f"layers.{layer}.feed_forward.experts."
    return [name for name in placements if name.startswith(prefix)]


def rank_tokens(counts_LE: Tensor, layers: Sequence[int], homes: Homes, num_ranks: int) -> Tensor:
    """Tokens of each rank's experts [layers, P], from the tokens of each expert `counts_LE`."""
    tokens = [
        counts_E if layer not in homes else counts_E[list(homes[layer])]
        for layer, counts_E in zip(layers, counts_LE, strict=True)
    ]
    if not tokens:
        return counts_LE.new_zeros(0, num_ranks)
    return torch.stack(tokens).view(len(tokens), num_ranks, -1).sum(2)


@torch.no_grad()
def move_experts(
    tensors: Sequence[Tensor], before: Sequence[int], after: Sequence[int], axis: Axis
) -> None:
    """Bring every expert from its place `before` to its place `after`, in all `tensors` [L, ...]
    (weights, masters, moments: all tensors of an expert), in place.

    An expert is one message. In each round a rank exchanges with one peer at most. Received experts
    are staged until the last round, so a place is not overwritten before its expert has left.
    """
    # Widest dtypes first: then every part of a message is aligned.
    tensors = sorted(tensors, key=lambda tensor: -tensor.element_size())
    num_local = len(before) // axis.size
    first = axis.index * num_local
    rounds = schedule_transfers(list(before), list(after), axis.size)
    staged: dict[int, Tensor] = {}
    for transfers in rounds:
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        for transfer in transfers:
            if transfer.source_gpu == axis.index:
                packed = _pack(tensors, transfer.source_slot - first)
                sends.append((packed, transfer.target_gpu))
            if transfer.target_gpu == axis.index:
                place = transfer.target_slot - first
                staged[place] = torch.empty_like(_pack(tensors, place))  # all experts have one size
                receives.append((staged[place], transfer.source_gpu))
        for work in exchange(sends, receives, axis, phase="optimizer", caller="moe.homes"):
            work.wait()
    old = before[first : first + num_local]
    for place, expert in enumerate(after[first : first + num_local]):
        if place not in staged and old[place] != expert:
            staged[place] = _pack(tensors, old.index(expert))
    sizes = [tensor[0].numel() * tensor.element_size() for tensor in tensors]
    for place, packed in staged.items():
        for tensor, part in zip(tensors, packed.split(sizes), strict=True):
            tensor[place] = part.view(tensor.dtype).view_as(tensor[place])


def _pack(tensors: Sequence[Tensor], place: int) -> Tensor:
    """All tensors of the expert in `place`, as one row of bytes."""
    return torch.cat([tensor[place].flatten().view(torch.uint8) for tensor in tensors])
