"""Every fast path equals its slow truth, forward and backward, in float64 and float32."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from moemesh.ops.cross_entropy import cross_entropy, cross_entropy_reference
from moemesh.ops.expert_mlp import expert_mlp
from moemesh.ops.expert_weights import ExpertWeights
from moemesh.ops.grouped_gemm import (
    ROWS,
    grouped_gemm,
    grouped_gemm_loop,
    grouped_weight_gradient,
    grouped_weight_gradient_loop,
)
from moemesh.ops.linear import linear
from moemesh.ops.permute import (
    gather_rows,
    group_by_expert,
    map_from_sources,
    permute,
    sum_rows_loop,
    unpermute,
)
from moemesh.ops.saved import SavedForBackward
from moemesh.ops.weight_gradient import WeightGradientQueue, deferral
from moemesh.trace.memory_profile import LOGITS, LOSS_ROWS, logits_per_token

torch.manual_seed(0)
EXPERTS_TK = torch.tensor([[2, 0], [0, 3], [-1, -1], [3, -1], [0, 2]])  # expert 1 idle, token 2 pad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 0], [8, 0, 0], [40, 0, 77], [33, 100, 3]])
@pytest.mark.parametrize(
    ("width", "outputs"),
    [(16, 8), (6, 8), (4, 1), (1, 1)],  # 6 float32 numbers misalign: 24 bytes, not 16 n
)
def test_grouped_products_equal_the_loop(
    dtype: torch.dtype, counts: list[int], width: int, outputs: int
) -> None:
    rows = sum(counts)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    x, weight = torch.randn(rows, width, dtype=dtype), torch.randn(3, width, outputs, dtype=dtype)
    grad = torch.randn(rows, outputs, dtype=dtype)
    assert_close(grouped_gemm(x, weight, ends), grouped_gemm_loop(x, weight, ends))
    assert_close(
        grouped_weight_gradient(grad, x, ends), grouped_weight_gradient_loop(grad, x, ends)
    )


def test_products_of_16_bits_have_few_numbers_of_rows() -> None:
    """Whatever an expert is given, and where the last rows end."""
    weight = torch.randn(4, 16, 8, dtype=torch.bfloat16)
    sizes = set[int]()
    multiply = torch.mm

    def noted(x: torch.Tensor, *others: Any, **out: Any) -> torch.Tensor:
        sizes.update((x.shape[0], others[0].shape[0]))
        return multiply(x, *others, **out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "mm", noted)
        for extra in range(40):
            ends = torch.tensor([40 + extra, 0, 71 - extra, 50]).cumsum(0, dtype=torch.int32)
            x = torch.randn(int(ends[-1]), 16, dtype=torch.bfloat16)
            y = grouped_gemm(x, weight, ends)
            grouped_weight_gradient(y, x, ends)
    assert {size for size in sizes if size >= ROWS and size % ROWS} == set()


def test_rows_are_grouped_by_expert_stably_and_padding_gets_none() -> None:
    rows, flat, counts = group_by_expert(EXPERTS_TK, 4)
    assert counts.tolist() == [3, 0, 2, 2]
    assert rows.source_R.tolist() == [0, 1, 4, 0, 4, 1, 3]
    assert flat.tolist() == [1, 2, 8, 0, 9, 3, 6]
    source = torch.randn(5, 3, dtype=torch.float64)
    copied = gather_rows(source, rows)
    assert_close(unpermute(copied, rows), sum_rows_loop(copied, rows))
    assert_close(unpermute(copied, rows), source * torch.tensor([2, 2, 0, 1, 2.0])[:, None])


def test_permute_and_unpermute_are_each_others_gradient() -> None:
    rows, _, _ = group_by_expert(EXPERTS_TK, 4)
    source = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    copies = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: permute(x, rows), source)
    assert torch.autograd.gradcheck(lambda x: unpermute(x, rows), copies)
    again = map_from_sources(rows.source_R, 5)
    assert_close(unpermute(copies, again), unpermute(copies, rows))


def test_deferred_weight_gradients_are_bitwise_those_of_a_fused_backward() -> None:
    rows, _, counts = group_by_expert(EXPERTS_TK, 4)
    x = torch.randn(5, 8, dtype=torch.float64)
    parameters = [
        torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))
        for shape in [(2, 4, 8), (4, 2, 12, 8), (4, 8, 12), (9, 8)]
    ]

    def loss() -> torch.Tensor:
        wide, gate_up, down, head = parameters
        hidden = linear(x, wide)
        y = expert_mlp(
            hidden, rows, torch.ones(7, dtype=x.dtype), counts, ExpertWeights(gate_up, down)
        )
        return cross_entropy(unpermute(y, rows), head, torch.arange(5), chunk=4).sum()

    loss().backward()
    fused = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    with WeightGradientQueue() as queue:
        loss().backward()
    assert all(p.grad is None for p in parameters) and len(queue) == 4
    queue.run()
    assert len(queue) == 0
    for p, expected in zip(parameters, fused, strict=True):
        assert torch.equal(p.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(24, 16), (4, 3, 2, 16)])
def test_products_outside_of_queues_have_the_same_bits(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = [torch.randn(size, dtype=dtype, requires_grad=True) for size in ((7, 16), shape)]
    y = linear(*leaves)
    monkeypatch.setattr(deferral, "is_possible", False)
    plain = linear(*leaves)
    assert torch.equal(y, plain)
    assert "_Linear" in str(y.grad_fn) and "_Linear" not in str(plain.grad_fn)
    upstream = torch.randn_like(y)
    for ours, theirs in zip(
        *(torch.autograd.grad(output, leaves, upstream) for output in (y, plain)), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_the_loss_holds_the_logits_and_the_gradient_of_one_chunk() -> None:
    vocab, tokens = 2 * LOSS_ROWS + 5, 6
    x = torch.randn(tokens, 4, requires_grad=True)
    weight = torch.randn(vocab, 4, requires_grad=True)
    with SavedForBackward([weight]) as saved:
        cross_entropy(x, weight, torch.arange(tokens)).sum().backward()
    size = tokens * x.element_size()
    assert saved.peak_by_kind[LOGITS] == logits_per_token(vocab) * size == 2 * LOSS_ROWS * size


@pytest.mark.parametrize("chunk", [3, 8, 100])
def test_cross_entropy_equals_the_reference_for_any_chunk(chunk: int) -> None:
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(10, 4, dtype=torch.float64, requires_grad=True)
    targets, upstream = torch.tensor([0, 9, 3, 2, 8, 5]), torch.randn(6, dtype=torch.float64)
    chunked = cross_entropy(x, weight, targets, chunk=chunk)
    whole = cross_entropy_reference(x, weight, targets)
    assert_close(chunked, whole)
    for got, expected in zip(
        torch.autograd.grad(chunked, [x, weight], upstream),
        torch.autograd.grad(whole, [x, weight], upstream),
        strict=True,
    ):
        assert_close(got, expected)


def test_no_tokens_is_legal() -> None:
    weight = torch.randn(10, 4, requires_grad=True)
    cross_entropy(torch.randn(0, 4), weight, torch.zeros(0, dtype=torch.int64)).sum().backward()
    assert weight.grad.abs().max() == 0
    rows, _, counts = group_by_expert(torch.zeros(0, 2, dtype=torch.int64), 4)
    gate_up, down = torch.randn(4, 2, 8, 4, requires_grad=True), torch.randn(4, 4, 8)
    y = expert_mlp(torch.randn(0, 4), rows, torch.zeros(0), counts, ExpertWeights(gate_up, down))
    unpermute(y, rows).sum().backward()
    assert gate_up.grad.abs().max() == 0
