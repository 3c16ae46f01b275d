"""Products of experts and SwiGLU as an accelerator runs them."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.simulated_device import SimulatedDevice
from moemesh.model import rope
from moemesh.ops import cross_entropy, swiglu
from moemesh.ops.fusion import or_else
from moemesh.ops.grouped_gemm import grouped_gemm, grouped_weight_gradient
from moemesh.ops.swiglu import PLAIN, SwigluForm


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_products_into_memory_that_is_there_do_not_wait(capability: tuple[int, int]) -> None:
    with SimulatedDevice(capability=capability) as device:
        x, weight = (torch.randn(*shape).bfloat16().to("cuda") for shape in ((6, 8), (3, 8, 16)))
        grad = torch.randn(6, 16).bfloat16().to("cuda")
        ends = torch.tensor([4, 0, 2]).to("cuda").cumsum(0, dtype=torch.int32)
        into = torch.empty(6, 16, dtype=torch.bfloat16, device="cuda")
        with device.region("products"):
            grouped_gemm(x, weight, ends, into)
            gradient = grouped_weight_gradient(grad, x, ends)
            assert not len(grouped_gemm(x[:0], weight, ends * 0))
            nothing = grouped_weight_gradient(grad[:0], x[:0], ends * 0)
        totals = device.totals("products")
        assert not totals.waited
        # Newer devices leave what they like where an expert has no rows.
        names = [kernel.name for kernel in totals.launched]
        assert ("masked_fill_" in names) == (capability >= (10, 0)), names
        assert torch.equal(into.numbers, grouped_gemm(x, weight, ends).numbers)
        assert not gradient.numbers[1].any() and not nothing.numbers.any()


ROWS, WIDTH = 65, 48


def arguments(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    grad, h = (torch.randn(ROWS, n * WIDTH, generator=generator).to(dtype) for n in (1, 2))
    return grad, 4 * h, torch.rand(ROWS, generator=generator)


Results = tuple[Tensor, Tensor, Tensor, Tensor]


def as_written(dtype: torch.dtype, form: SwigluForm) -> Results:
    grad, h, weights = arguments(torch.bfloat16 if dtype == torch.float64 else dtype)
    if dtype == torch.float64:
        grad, h, weights = grad.double(), h.double(), weights.double()
    if form == PLAIN:
        forward = swiglu.swiglu_on_device(h, weights)
        return forward, *swiglu.swiglu_backward_on_device(grad, h, weights)
    forward = swiglu.swiglu_of_form_on_device(h, weights, form)
    return forward, *swiglu.swiglu_backward_of_form_on_device(grad, h, weights, form)


def compiled(dtype: torch.dtype, form: SwigluForm) -> Results:
    """Results of the kernels of an accelerator, compiled for the CPU."""
    grad, h, weights = arguments(dtype)

    def fast(name: str) -> Callable[..., Any]:
        return torch.compile(getattr(swiglu, name), dynamic=True)

    if form == PLAIN:
        forward = fast("swiglu_on_device")(h, weights)
        backward = fast("swiglu_backward_on_device")(grad, h, weights)
    else:
        forward = fast("swiglu_of_form_on_device")(h, weights, form)
        backward = fast("swiglu_backward_of_form_on_device")(grad, h, weights, form)
    assert torch.equal(grad, arguments(dtype)[0]), "what comes in is only read"
    return forward, *backward


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
@pytest.mark.slow
def test_the_compiled_swiglu_is_the_one_as_written() -> None:
    """One after the other in one process, as the layers of a model may come. Inductor keeps more
    digits between operations than what is written, which rounds after each."""
    for form in (PLAIN, SwigluForm(7.0, 1.702, 1.0), SwigluForm(0.0, 1.3, 0.5)):
        full = compiled(torch.float32, form), as_written(torch.float32, form)
        for one, other in zip(*full, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        bits = torch.bfloat16
        half = compiled(bits, form), as_written(bits, form), as_written(torch.float64, form)
        for one, other, exact in zip(*half, strict=True):
            assert one.dtype == other.dtype
            unit = torch.finfo(bits).eps * exact.abs().max()
            error, own = ((found.double() - exact).abs().max() for found in (one, other))
            # No further from the exact numbers than the form as written, but for one rounding.
            assert error <= own + unit, (form, float(error), float(own))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
def test_compiled_rotations_and_cross_entropy_are_those_as_written() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rotated = torch.compile(rope._rotate_one, dynamic=True)
    functions = (cross_entropy._chunk_gradient, cross_entropy._with_chunk)
    gradient, with_chunk = (torch.compile(f.__wrapped__, dynamic=True) for f in functions)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2.0**-7)):
        for rows, columns in ((16, 40), (33, 24)):  # compiled once for both
            x, tables = draw(2, rows, 3, 10).to(dtype), draw(2, rows, 1, 8).to(dtype).unbind()
            for options in itertools.product((False, True), repeat=2):
                pair = rotated(x, *tables, *options), rope._rotate_one(x, *tables, *options)
                torch.testing.assert_close(*pair, rtol=tolerance, atol=4 * tolerance)
            lse, grad, target = draw(rows).exp() + 3, draw(rows), draw(rows)
            place = torch.randint(columns, (rows,), generator=generator), draw(rows) > 0
            logits = draw(rows, columns).to(dtype)
            pair = gradient(logits, lse, grad, *place), functions[0](logits, lse, grad, *place)
            torch.testing.assert_close(*pair, rtol=tolerance, atol=tolerance)
            arguments = logits, lse, target, *place
            for pair in zip(with_chunk(*arguments), functions[1](*arguments), strict=True):
                torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-6)


def test_what_fails_to_compile_runs_as_written_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[object] = []

    def broken(*given: object) -> Tensor:
        calls.append(given)
        raise RuntimeError("no compiler here\nat all")

    function = or_else(broken, swiglu.swiglu_on_device)
    _, h, weights = arguments(torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(function(h, weights), swiglu.swiglu_on_device(h, weights))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "swiglu_on_device could not be compiled and runs operation by operation: no compiler here"
    )
    assert len(calls) == 1


def test_a_device_that_fails_is_not_taken_for_a_compiler_that_does() -> None:
    def failing(*_: object) -> Tensor:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError):
        or_else(failing, swiglu.swiglu_on_device)(torch.ones(1, 2), torch.ones(1))
