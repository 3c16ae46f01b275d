"""One gradient norm, one clip factor and one skip decision for the whole world."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moemesh.comm.collectives import all_reduce_
from moemesh.comm.mesh import Mesh
from moemesh.ops.host_copy import constant
from moemesh.parallel.placement import OwnRange, Placement, part_of, rows

#: Numbers of a gradient whose squares are added up in its own dtype.
_SPAN = 1 << 14


@dataclass(frozen=True, kw_only=True)
class GradientNorm:
    """``value``: the square root of the sum of squares over unique logical elements;
    ``is_finite``: whether no rank saw an infinity or NaN; the same on every rank."""

    value: float
    is_finite: bool


@torch.no_grad()
def gradient_norm(
    gradients: Mapping[str, Tensor],
    placements: Mapping[str, Placement],
    owned: Mapping[str, OwnRange],
    mesh: Mesh,
    *,
    axis: str = "world",
    others: Tensor | None = None,
) -> GradientNorm:
    """The norm of all (already summed) gradients in `placements`, whose holders make up `axis`.

    Every logical tensor (each expert of a stack by itself) has a place in one float64 vector; each
    rank adds the squares of what it owns and counts (`owned`, `gradients`: those of its reducer).
    One SUM over the axis, one sum over the vector in its fixed order, one square root: the bits do
    not depend on which rank holds which expert. Norms are never averaged: sharded experts with
    norms a and b have the norm sqrt(a^2 + b^2). `others`: see :func:`gradient_squares`.
    """
    return norm_of(gradient_squares(gradients, placements, owned, mesh, others, axis=axis))


@torch.no_grad()
def gradient_squares(
    gradients: Mapping[str, Tensor],
    placements: Mapping[str, Placement],
    owned: Mapping[str, OwnRange],
    mesh: Mesh,
    others: Tensor | None = None,
    *,
    axis: str | None = None,
) -> Tensor:
    """The float64 vector of :func:`gradient_norm`, summed over `axis` (None: this rank's addend);
    the host has waited for nothing. The norm is not finite, either, if any of `others` on any rank
    (its losses, say) is not: ranks agree on both in one sum."""
    sizes = [where.shape[0] if where.is_expert else 1 for where in placements.values()]
    # The sums stay where the gradients are: no rank waits for its device, tensor by tensor.
    places: list[int] = []
    pieces: list[Tensor] = []
    start = 0
    for (name, where), size in zip(placements.items(), sizes, strict=True):
        own = owned.get(name)
        if own is not None and where.counts(own, mesh):
            local = math.prod(len(part) for part in where.slices(mesh))
            own_rows = where.rows(mesh) if where.is_expert else [0]
            for row, numbers in rows(len(own_rows), local // len(own_rows), own.numbers):
                places.append(start + own_rows[row])
                pieces.append(part_of(gradients[name], own, numbers))
        start += size
    squares = torch.zeros(sum(sizes), dtype=torch.float64, device=mesh.device)
    if pieces:
        squares[constant(places, mesh.device)] = sums_of_squares(pieces)
    if others is not None and len(squares):
        # Nothing is added for numbers that are finite: 0 x is 0, 0 NaN and 0 infinity are NaN.
        squares[:1] += (0.0 * others.double()).sum()
    if axis is not None:
        all_reduce_(squares, mesh[axis], caller="gradient_norm", phase="optimizer")
    return squares


def sums_of_squares(pieces: list[Tensor]) -> Tensor:
    """The sum of squares of each piece, float64."""
    if pieces[0].device.type != "cpu":
        # All in one kernel, where these would be three for each.
        return torch.stack(torch._foreach_norm(pieces, 2.0, dtype=torch.float64)).square()
    # A copy of a piece in float64 would cost more than the rest of its update. The norms of spans
    # are short sums of the piece's own dtype; what is added over spans is added in float64.
    norms: list[Tensor] = []
    places: list[int] = []
    for place, piece in enumerate(pieces):
        whole = piece.numel() // _SPAN * _SPAN
        flat = piece.reshape(-1)
        for part in (flat[:whole].view(-1, _SPAN), flat[None, whole:]):
            if part.numel():
                norms.append(torch.linalg.vector_norm(part, dim=1))
                places += [place] * len(part)
    sums = torch.zeros(len(pieces), dtype=torch.float64)
    sums.index_add_(0, torch.tensor(places), torch.cat(norms).double().square())
    if not torch.isfinite(sums).all():  # squares of finite float32 may not be finite in float32
        sums = torch.stack([piece.double().square().sum() for piece in pieces])
    return sums


def norm_of(squares: Tensor) -> GradientNorm:
    """The norm from the vector of all owners' addends, or from its sum."""
    total = float(squares.sum())
    return GradientNorm(value=math.sqrt(total), is_finite=math.isfinite(total))


@torch.no_grad()
def clip_gradients(gradients: Mapping[str, Tensor], norm: float, limit: float) -> None:
    """Scale all gradients by ``limit / (norm + 1e-6)``, as ``torch.nn.utils.clip_grad_norm_``
    does, when the norm exceeds the limit (0 = never)."""
    if limit > 0 and norm > limit and gradients:
        torch._foreach_mul_(list(gradients.values()), limit / (norm + 1e-6))
