"""Clipping, which parity cannot judge: every plan and its reference clip by the same function."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from moemesh.comm.mesh import Mesh
from moemesh.parallel.norm import _SPAN, clip_gradients, gradient_norm, sums_of_squares
from moemesh.parallel.placement import OwnRange, Placement


@pytest.mark.parametrize("limit", [0.5, 4.0, 6.0])
def test_gradients_are_clipped_as_torch_does(limit: float) -> None:
    """Also below a limit of 1; and a norm below the limit is not raised to it."""
    ours = {"a": torch.tensor([3.0]).double(), "b": torch.tensor([[4.0]]).double()}
    theirs = [torch.nn.Parameter(torch.zeros_like(one)) for one in ours.values()]
    for parameter, gradient in zip(theirs, ours.values(), strict=True):
        parameter.grad = gradient.clone()
    clip_gradients(ours, float(clip_grad_norm_(theirs, limit)), limit)
    for parameter, gradient in zip(theirs, ours.values(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-14, atol=0)


def test_a_norm_is_that_of_all_numbers_or_not_finite() -> None:
    where = {"w": Placement(name="w", shape=(2,), shards={}, summed_over="stage")}
    own = {"w": OwnRange(numbers=range(2), is_first=True)}
    for last, expected in ((4.0, 5.0), (torch.nan, None)):
        gradients = {"w": torch.tensor([3.0, last])}
        norm = gradient_norm(gradients, where, own, Mesh.single("cpu"))
        assert norm.is_finite == (expected is not None)
        assert expected in (None, norm.value)


def test_no_limit_and_no_gradient_change_nothing() -> None:
    ours = {"a": torch.tensor([3.0])}
    clip_gradients(ours, 3.0, 0.0)
    assert ours["a"].item() == 3.0
    clip_gradients({}, 3.0, 1.0)


@pytest.mark.parametrize("scale", [1.0, 1e25])
def test_squares_of_gradients_of_any_size_are_summed(scale: float) -> None:
    """Also where the square of a finite float32 number is none."""
    sizes = ((1, 0), (1, 3), (1, _SPAN), (2, 2 * _SPAN + 1), (3, _SPAN // 2 + 1))
    pieces = [scale * torch.randn(size) for size in sizes]
    exact = torch.cat([piece.double().square().sum(1) for piece in pieces])
    torch.testing.assert_close(sums_of_squares(pieces), exact, rtol=1e-5, atol=0)
    alone = [row[None] for piece in pieces for row in piece]
    assert torch.equal(sums_of_squares(alone), sums_of_squares(pieces)), "a row has its own bits"
    pieces[1][0, 0] = pieces[3][1, 5] = torch.inf
    finite = [True, False, True, True, False, True, True, True]
    assert sums_of_squares(pieces).isfinite().tolist() == finite
