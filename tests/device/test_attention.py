"""Attention within documents and windows on an accelerator: one kernel, the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.simulated_device import SimulatedDevice
from moemesh.model.attention_core import attention
from moemesh.model.visibility import Visibility, document_starts

B, L, HEADS, KV_HEADS, SIZE = 2, 40, 4, 2, 16
#: Documents, window, sinks, size of values.
CASES = {
    "documents": (True, None, False, SIZE),
    "window": (False, 7, False, SIZE),
    "all": (True, 5, True, SIZE),
    "window of one": (True, 1, False, SIZE),
    "narrow values": (True, None, True, 8),
}


def inputs(value_size: int) -> tuple[Tensor, ...]:
    """Query, key, value, the gradient of the output, sinks; laid out by token, as models do."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, value_size), (HEADS, value_size))
    tensors = [torch.randn(B, L, *size, generator=generator).bfloat16() for size in sizes]
    return *(x.transpose(1, 2) for x in tensors), torch.randn(HEADS, generator=generator).bfloat16()


def visibility(packed: bool, window: int | None, device: str = "cpu") -> Visibility:
    begins = torch.zeros(B, L, dtype=torch.int64)
    begins[0, [3, 4, 30]] = 1
    begins[1, 17] = 1
    starts = document_starts(begins.cumsum(1)) if packed else None
    there = None if starts is None else starts.to(device)
    visible = Visibility((range(L),), (range(L),), starts_BL=there, host_starts_BL=starts)
    return visible if window is None else visible.within(window)


def results(
    visible: Visibility, has_sinks: bool, value_size: int, device: str = "cpu"
) -> list[Tensor]:
    """The output and all gradients."""
    query, key, value, upstream, sinks = inputs(value_size)
    tensors = [query, key, value, *([sinks] if has_sinks else [])]
    tensors, upstream = [x.to(device) for x in tensors], upstream.to(device)
    for x in tensors:
        x.requires_grad_()
    y = attention(tuple(tensors[:3]), visible, sinks_N=tensors[3] if has_sinks else None)
    torch.autograd.backward([y], [upstream])
    return [y.detach(), *(x.grad for x in tensors)]


@pytest.mark.parametrize("name", CASES)
def test_documents_and_windows_are_one_kernel(name: str) -> None:
    packed, window, has_sinks, value_size = CASES[name]
    expected = results(visibility(packed, window), has_sinks, value_size)
    with SimulatedDevice() as device:
        visible = visibility(packed, window, "cuda")
        with device.region("attention"):
            measured = results(visible, has_sinks, value_size, "cuda")
        totals = device.totals("attention")
        kernels = [kernel.name for kernel in totals.launched]
        assert kernels.count("_flash_attention_forward") == 1, kernels
        assert kernels.count("_flash_attention_backward") == 1, kernels
        waits = [wait for wait in totals.waited if "tests/" not in wait.line]
        assert "bmm" not in kernels and not waits, (kernels, waits)
        numbers = [x.numbers for x in measured]
    for have, want in zip(numbers, expected, strict=True):
        assert have.dtype == want.dtype
        torch.testing.assert_close(have.float(), want.float(), rtol=0.03, atol=0.03)


def test_an_older_device_computes_the_same_without_the_kernel() -> None:
    with SimulatedDevice(capability=(7, 5)):
        numbers = results(visibility(True, 5, "cuda"), True, SIZE, "cuda")[0].numbers
    expected = results(visibility(True, 5), True, SIZE)[0]
    torch.testing.assert_close(numbers.float(), expected.float(), rtol=0.03, atol=0.03)
