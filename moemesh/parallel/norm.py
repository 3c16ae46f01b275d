"""One gradient norm, one clip factor and one skip decision for the whole world."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moemesh.comm.collectives import all_reduce_
from moemesh.comm.mesh import Mesh
from moemesh.parallel.placement import Placement


@dataclass(frozen=True, kw_only=True)
class GradientNorm:
    """``value``: the square root of the sum of squares over unique logical elements;
    ``is_finite``: whether no rank saw an infinity or NaN; the same on every rank."""

    value: float
    is_finite: bool


@torch.no_grad()
def gradient_norm(
    gradients: Mapping[str, Tensor], placements: Mapping[str, Placement], mesh: Mesh
) -> GradientNorm:
    """The norm of all (already summed) gradients.

    Each rank adds, in float64, the elements it owns (index 0 on the axis that replicates them);
    one SUM over the world, one square root. Norms are never averaged: sharded experts with norms
    a and b have the norm sqrt(a^2 + b^2).
    """
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for name, gradient in gradients.items():
        if placements[name].is_owner(mesh):
            square = gradient.double().square().sum()
            totals[0] += square
            totals[1] += ~torch.isfinite(square)
    all_reduce_(totals, mesh["world"], caller="gradient_norm", phase="optimizer")
    square, bad = totals.tolist()
    return GradientNorm(value=math.sqrt(square) if square >= 0 else math.nan, is_finite=bad == 0)


@torch.no_grad()
def clip_gradients(gradients: Mapping[str, Tensor], norm: float, limit: float) -> None:
    """Scale all gradients by ``limit / norm`` when the norm exceeds the limit (0 = never)."""
    if limit > 0 and norm > limit:
        for gradient in gradients.values():
            gradient.mul_(limit / norm)
