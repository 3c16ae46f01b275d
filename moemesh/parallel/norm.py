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
from moemesh.parallel.placement import OwnRange, Placement, part_of
from moemesh.sharding.boxes import rows

#: Length of spans of a gradient whose squares are summed in its own dtype on the CPU.
_SPAN = 1 << 14


@dataclass(frozen=True, kw_only=True)
class GradientNorm:
    """``value``: the square root of the sum of squares over unique logical elements;
    ``is_finite``: whether no rank saw an infinity or NaN; the same on every rank."""

    value: float
    is_finite: bool


@dataclass(frozen=True, kw_only=True)
class Addends:
    """Pieces of gradients whose sums of squares this rank adds to the vector of the norm, and the
    element of the vector to which each is added.

    The vector has an element for every logical tensor, and for a stack one for each expert. A rank
    adds the squares of the numbers that it owns and counts. The record does not depend on the
    gradients' values: all steps with the same placements use it.
    """

    #: Length of the vector.
    num_rows: int
    #: Element of the vector for each row of each piece.
    rows: tuple[int, ...]
    #: Name, number of rows, and range of the flattened local tensor (None: the owned range).
    pieces: tuple[tuple[str, int, range | None], ...]
    owned: Mapping[str, OwnRange]

    @classmethod
    def of(
        cls, placements: Mapping[str, Placement], owned: Mapping[str, OwnRange], mesh: Mesh
    ) -> Addends:
        """Addends of the parameters in `placements`, of which this rank owns the ranges `owned`."""
        elements: list[int] = []
        pieces: list[tuple[str, int, range | None]] = []
        start = 0
        for name, placement in placements.items():
            own = owned.get(name)
            if own is not None and placement.counts(own, mesh):
                local = math.prod(map(len, placement.slices(mesh)))  # numbers of the local tensor
                own_rows = placement.rows(mesh) if placement.is_expert else [0]
                if len(own.numbers) == local and local:
                    elements += [start + row for row in own_rows]
                    pieces.append((name, len(own_rows), None))
                else:
                    for row, numbers in rows(len(own_rows), local // len(own_rows), own.numbers):
                        elements.append(start + own_rows[row])
                        pieces.append((name, 1, numbers))
            start += placement.shape[0] if placement.is_expert else 1
        return cls(num_rows=start, rows=tuple(elements), pieces=tuple(pieces), owned=owned)


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

    One SUM of the vector of :class:`Addends` over the axis, one sum over the vector in its fixed
    order, one square root: the bits do not depend on which rank holds which expert. Norms are never
    averaged: sharded experts with norms a and b have the norm sqrt(a^2 + b^2). `others`: see
    :func:`gradient_squares`.
    """
    addends = Addends.of(placements, owned, mesh)
    return norm_of(gradient_squares(gradients, addends, mesh, others, axis=axis))


def gradient_squares(
    gradients: Mapping[str, Tensor],
    addends: Addends,
    mesh: Mesh,
    others: Tensor | None = None,
    *,
    axis: str | None = None,
) -> Tensor:
    """The float64 vector of :func:`gradient_norm`, summed over `axis` (None: this rank's addend),
    without a wait of the host. The norm is non-finite, too, if any of `others` on any rank (its
    losses, for example) is: ranks agree on both in one sum."""
    # The sums stay where the gradients are: no rank waits for its device, tensor by tensor.
    squares = torch.zeros(addends.num_rows, dtype=torch.float64, device=mesh.device)
    if addends.pieces:
        pieces = [  # views [rows, numbers]
            gradients[name].view(num_rows, -1)
            if numbers is None
            else part_of(gradients[name], addends.owned[name], numbers)[None]
            for name, num_rows, numbers in addends.pieces
        ]
        squares[constant(addends.rows, mesh.device)] = sums_of_squares(pieces)
    if others is not None and addends.num_rows:
        # Finite numbers add nothing: 0 x is 0, 0 NaN and 0 infinity are NaN.
        squares[:1] += (0.0 * others.double()).sum()
    if axis is not None:
        all_reduce_(squares, mesh[axis], caller="gradient_norm", phase="optimizer")
    return squares


def sums_of_squares(pieces: list[Tensor]) -> Tensor:
    """The sum of squares of each row of each piece [rows, numbers], float64 [all rows]."""
    if pieces[0].device.type != "cpu":
        # Pieces of one row in one kernel for all, instead of three for each.
        single = [piece for piece in pieces if piece.shape[0] == 1]
        norms = iter(torch._foreach_norm(single, 2.0, dtype=torch.float64) if single else ())
        norms_of_pieces = [
            next(norms).view(1)
            if piece.shape[0] == 1
            else torch.linalg.vector_norm(piece, dim=1, dtype=torch.float64)
            for piece in pieces
        ]
        return torch.cat(norms_of_pieces).square()
    # A float64 copy of a piece would take longer than the rest of its update. Spans are summed in
    # the piece's own dtype, which is exact enough for short sums, and added up in float64.
    norms_of_spans: list[Tensor] = []
    span_rows: list[int] = []
    num_rows = 0
    for piece in pieces:
        spanned = piece.shape[1] // _SPAN * _SPAN
        spans = [piece[:, :spanned].unflatten(1, (-1, _SPAN)), piece[:, None, spanned:]]
        for part in spans:
            if part.numel():
                norms_of_spans.append(torch.linalg.vector_norm(part, dim=2).flatten())
                piece_rows = range(num_rows, num_rows + len(piece))
                span_rows += [row for row in piece_rows for _ in range(part.shape[1])]
        num_rows += len(piece)
    sums = torch.zeros(num_rows, dtype=torch.float64)
    sums.index_add_(0, torch.tensor(span_rows), torch.cat(norms_of_spans).double().square())
    if not torch.isfinite(sums).all():  # squares of finite float32 may not be finite in float32
        sums = torch.cat([piece.double().square().sum(1) for piece in pieces])
    return sums


def norm_of(squares: Tensor) -> GradientNorm:
    """The norm from the vector of :func:`gradient_squares`, summed over all ranks."""
    total = float(squares.sum())
    return GradientNorm(value=math.sqrt(total), is_finite=math.isfinite(total))


def clip_gradients(gradients: Mapping[str, Tensor], norm: float, limit: float) -> None:
    """Scale all gradients by ``limit / (norm + 1e-6)``, as ``torch.nn.utils.clip_grad_norm_``
    does, when the norm exceeds the limit (0 = never)."""
    if limit > 0 and norm > limit and gradients:
        torch._foreach_mul_(list(gradients.values()), limit / (norm + 1e-6))
