"""The blocks of the expert MLP: any cut gives the loop's result, and nothing whole is kept."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from moemesh.ops import expert_blocks as blocks_module
from moemesh.ops import expert_mlp as module
from moemesh.ops.exact_experts import exact_experts
from moemesh.ops.expert_blocks import expert_blocks
from moemesh.ops.expert_mlp import expert_mlp, expert_mlp_loop
from moemesh.ops.expert_weights import ExpertWeights
from moemesh.ops.linear import Adapted, Adapter, SwigluOf, linear, swiglu
from moemesh.ops.permute import group_by_expert, identity
from moemesh.ops.swiglu import PLAIN, SwigluForm
from moemesh.ops.weight_gradient import WeightGradientQueue

HIDDEN, WIDTH, NUM_EXPERTS = 8, 12, 6


def make(dtype: torch.dtype) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Leaves (source, weights, gate_up, down) and (experts, upstream); expert 3 has no row."""
    generator = torch.Generator().manual_seed(3)
    experts_TK = torch.tensor([[0, 1], [4, 5], [0, 2], [5, 0], [1, 4], [0, 5], [2, -1]])

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    num_rows = int((experts_TK >= 0).sum())
    shapes = [
        (7, HIDDEN),
        (num_rows,),
        (NUM_EXPERTS, 2, WIDTH, HIDDEN),
        (NUM_EXPERTS, HIDDEN, WIDTH),
    ]
    return [random(*shape) for shape in shapes], (experts_TK, random(num_rows, HIDDEN))


def drawn(*shape: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()


def backward(y: Tensor, upstream: Tensor, weights: Sequence[Tensor], *, is_queued: bool) -> None:
    """The backward; a queue takes the gradients of weights."""
    queue = WeightGradientQueue()
    with queue if is_queued else nullcontext():
        y.backward(upstream)
    assert not is_queued or all(weight.grad is None for weight in weights)
    queue.run()


def run(function, leaves: list[Tensor], experts_TK: Tensor, upstream: Tensor, is_queued=False):
    """Output and gradients, those of the weights through a queue or not."""
    rows, _, counts = group_by_expert(experts_TK, NUM_EXPERTS)
    source, weights, gate_up, down = (leaf.clone().requires_grad_() for leaf in leaves)
    y = function(source, rows, weights, counts, ExpertWeights(gate_up, down))
    backward(y, upstream, (gate_up, down), is_queued=is_queued)
    return [y.detach(), source.grad, weights.grad, gate_up.grad, down.grad]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("max_rows", [None, 1, 4, 12])
@pytest.mark.parametrize("block_rows", [1, 3, 5, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_cut_into_blocks_gives_the_loops_result(
    monkeypatch: pytest.MonkeyPatch,
    block_rows: int,
    dtype: torch.dtype,
    max_rows: int | None,
    recomputes: bool,
) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_ROWS", block_rows)
    leaves, (experts, upstream) = make(dtype)
    slow = run(expert_mlp_loop, leaves, experts, upstream)
    mlp = partial(expert_mlp, max_rows=max_rows, recomputes=recomputes)
    fast = run(mlp, leaves, experts, upstream)
    later = run(mlp, leaves, experts, upstream, is_queued=True)
    for got, deferred, expected in zip(fast, later, slow, strict=True):
        assert_close(got, expected)
        assert torch.equal(got, deferred)


def test_blocks_cover_experts_and_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_ROWS", 4)
    blocks = expert_blocks(torch.tensor([1, 0, 9, 3, 2, 0]), 15)
    assert [(b.experts.start, b.experts.stop) for b in blocks] == [(0, 3), (3, 5), (5, 6)]
    assert [(b.rows.start, b.rows.stop) for b in blocks] == [(0, 10), (10, 15), (15, 15)]
    assert [b.ends_D.tolist() for b in blocks] == [[1, 1, 10], [3, 5], [0]]
    assert len(expert_blocks(torch.zeros(3, dtype=torch.int64), 0)) == 1


def test_blocks_of_wide_experts_in_16_bits_are_larger_and_their_numbers_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for dtype, width, larger in (
        (torch.bfloat16, 256, True),
        (torch.bfloat16, 255, False),
        (torch.float32, 256, False),
    ):
        assert (blocks_module.block_rows(dtype, width) > blocks_module.BLOCK_ROWS) == larger
    rows, hidden, width = [256, 300, 0, 257], 16, 256
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    counts = torch.tensor(rows)
    source, upstream = made(sum(rows), hidden), made(sum(rows), hidden)
    weights = torch.rand(sum(rows), generator=generator)
    gate_up, down = made(len(rows), 2, width, hidden), made(len(rows), hidden, width)
    results: list[list[Tensor]] = []
    for block in (256, 2048):
        monkeypatch.setattr(blocks_module, "SHORT_BLOCK_ROWS", block)
        leaves = [one.clone().requires_grad_() for one in (source, weights, gate_up, down)]
        experts = ExpertWeights(*leaves[2:])
        y = expert_mlp(leaves[0], identity(sum(rows), source.device), leaves[1], counts, experts)
        y.backward(upstream)
        results.append([y, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert len(results[0]) == 5
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("max_rows", [1, 4, 14])
def test_bounded_blocks_cut_experts_where_they_must(max_rows: int) -> None:
    blocks = expert_blocks(torch.tensor([1, 0, 9, 3, 2, 0]), 15, max_rows)
    assert [row for b in blocks for row in range(15)[b.rows]] == list(range(15))
    assert all(b.rows.stop - b.rows.start <= max_rows for b in blocks)
    counts = torch.zeros(6, dtype=torch.int64)
    for b in blocks:
        counts[b.experts] += torch.diff(b.ends_D, prepend=b.ends_D.new_zeros(1))
    assert counts.tolist() == [1, 0, 9, 3, 2, 0]


@pytest.mark.parametrize(
    ("max_rows", "recomputes", "keeps_h"),
    [(None, False, True), (13, False, True), (12, False, False), (None, True, False)],
)
def test_saved_for_backward_is_the_source_and_h(
    max_rows: int | None, recomputes: bool, keeps_h: bool
) -> None:
    leaves, (experts, upstream) = make(torch.float32)
    num_rows, saved = len(upstream), []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mlp = partial(expert_mlp, max_rows=max_rows, recomputes=recomputes)
        run(mlp, leaves, experts, upstream)
    big = sorted(t.numel() for t in saved if t.dim() == 2)
    assert num_rows == 13
    assert big == sorted([leaves[0].numel(), *([num_rows * 2 * WIDTH] if keeps_h else [])])


@pytest.mark.parametrize("max_rows", [None, 5])
@pytest.mark.parametrize("through_queue", [False, True])
def test_several_calls_share_one_weight_gradient(through_queue: bool, max_rows: int | None) -> None:
    """Three chunks of tokens, one of them empty, backward twice: the gradient of a single call."""
    leaves, (experts, _) = make(torch.float64)
    source, _, gate_up, down = (leaf.clone().requires_grad_() for leaf in leaves)

    def outputs(cuts: list[int], *, together: bool) -> Tensor:
        deferred = module.defer(ExpertWeights(gate_up, down)) if together else None
        chunks = []
        for x, chosen in zip(source.split(cuts), experts.split(cuts), strict=True):
            rows, _, counts = group_by_expert(chosen, NUM_EXPERTS)
            weights = torch.full((rows.num_rows,), 0.5, dtype=torch.float64)
            weights.requires_grad_()
            y = expert_mlp(
                x, rows, weights, counts, ExpertWeights(gate_up, down), deferred, max_rows
            )
            chunks.append(y.square().sum())
        return torch.stack(chunks).sum()

    outputs([7], together=False).backward()
    expected = [leaf.grad for leaf in (source, gate_up, down)]
    source.grad = gate_up.grad = down.grad = None
    loss = outputs([3, 0, 4], together=True)
    for twice in (False, True):
        queue = WeightGradientQueue()
        with queue if through_queue else nullcontext():
            loss.backward(retain_graph=True)
        queue.run()
        for leaf, once in zip((source, gate_up, down), expected, strict=True):
            assert leaf.grad is not None and once is not None
            assert_close(leaf.grad, once * (1 + twice))


GPT_OSS = SwigluForm(limit=0.7, alpha=1.702, offset=1.0)


FORMS = [PLAIN, GPT_OSS, SwigluForm(limit=0.5)]
#: Kind of experts, dtype, form: with biases, or with adapters of up and down.
EXPERTS = [("biases", *pair) for pair in product((torch.float64, torch.float32), FORMS)]
EXPERTS += [("adapters", torch.float64, PLAIN)]


@pytest.mark.parametrize("how", ["kept", "bounded", "recomputed", "deferred", "queue", "exact"])
@pytest.mark.parametrize(("kind", "dtype", "form"), EXPERTS, ids=str)
def test_experts_equal_autograd(kind: str, dtype: torch.dtype, form: SwigluForm, how: str) -> None:
    """Forward and backward equal the loop's; the limit bites, and an expert has no row."""
    draw = partial(drawn, dtype=dtype, generator=torch.Generator().manual_seed(5))
    near = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {}
    source, weights, *stacks = draw(11, 6), draw(11), draw(4, 2, 5, 6), draw(4, 6, 5)
    if kind == "biases":
        # As of the second of two ranks that share the width: its bias is that of the last channels.
        experts = ExpertWeights(*stacks, draw(4, 2, 5), draw(4, 3), form=form, column=3)
    else:
        of_up, of_down = (draw(4, 3, 6), draw(4, 1, 5, 3)), (draw(4, 3, 5), draw(4, 6, 3))
        adapters = Adapter(*of_up, 0, 1, 1), Adapter(*of_down)
        experts = ExpertWeights(*stacks, adapters=adapters, scale=0.7)
    counts, rows = torch.tensor([3, 0, 6, 2]), identity(11, source.device)
    leaves, upstream = (source, weights, *experts.tensors), draw(11, 6).detach()
    expected_y = expert_mlp_loop(source, rows, weights, counts, experts)
    expected = torch.autograd.grad(expected_y, leaves, upstream)
    if how == "exact":
        owners = torch.tensor([[1, 2], [0, 0], [6, 0], [1, 1]])
        y = exact_experts(source, weights, owners, experts)
    else:
        deferred = module.defer(experts) if how == "deferred" else None
        limits = {"max_rows": 4 if how == "bounded" else None, "recomputes": how == "recomputed"}
        y = expert_mlp(source, rows, weights, counts, experts, deferred, **limits)
    assert_close(y, expected_y, **near)
    backward(y, upstream, experts.tensors, is_queued=how == "queue")
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert_close(leaf.grad, gradient, **near)


@pytest.mark.parametrize("form", [PLAIN, GPT_OSS], ids=str)
def test_a_dense_swiglu_of_any_form_equals_autograd(form: SwigluForm) -> None:
    generator = torch.Generator().manual_seed(6)
    h, weight = (
        torch.randn(*s, dtype=torch.float64, generator=generator) for s in [(7, 10), (4, 5)]
    )
    upstream = torch.randn(7, 4, dtype=torch.float64, generator=generator)

    def run(function: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        leaves = [leaf.clone().requires_grad_() for leaf in (h, weight)]
        y = function(*leaves)
        return [y, *torch.autograd.grad(y, leaves, upstream)]

    def by_definition(h: Tensor, weight: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=1)
        if form.limit:
            gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
        return gate * torch.sigmoid(form.alpha * gate) * (up + form.offset) @ weight.t()

    expected = run(by_definition)
    for function in (
        lambda h, weight: linear(swiglu(h, form), weight),
        lambda h, weight: linear(SwigluOf(h, form), weight),
    ):
        assert_close(run(function), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_queued", [False, True])
@pytest.mark.parametrize("is_product", [False, True])
def test_adapters_of_a_product_equal_the_merged_weight(is_queued: bool, is_product: bool) -> None:
    draw = partial(drawn, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    width = 8 if is_product else 4
    x, weight, upstream = draw(9, width), draw(2, 3, 5, 4), draw(9, 30).detach()
    (a, b), (c, d) = (draw(3, 4), draw(2, 2, 5, 3)), (draw(3, 4), draw(2, 1, 5, 3))
    delta = torch.cat([b @ a, d @ c], dim=1)
    entered = swiglu(x) if is_product else x
    expected_y = entered @ (weight + 0.7 * delta).reshape(30, 4).t()
    leaves = x, weight, a, b, c, d
    expected = torch.autograd.grad(expected_y, leaves, upstream)
    adapted = Adapted(weight, (Adapter(a, b, 1, 0, 2), Adapter(c, d, 1, 2, 1)), 0.7)
    y = linear(SwigluOf(x) if is_product else x, adapted)
    assert_close(y, expected_y)
    backward(y, upstream, (weight, a), is_queued=is_queued)
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert_close(leaf.grad, gradient)


@pytest.mark.parametrize("how", ["blocks", "exact"])
def test_nothing_is_deferred_for_weights_that_do_not_train(how: str) -> None:
    leaves, (experts_TK, upstream) = make(torch.float64)
    rows, _, counts = group_by_expert(experts_TK, NUM_EXPERTS)
    source, weights, gate_up, down = leaves
    source.requires_grad_()
    down.requires_grad_()
    experts = ExpertWeights(gate_up, down)
    if how == "exact":
        y = exact_experts(source[rows.source_R], weights, counts[:, None], experts)
    else:
        y = expert_mlp(source, rows, weights, counts, experts)
    with WeightGradientQueue() as queue:
        y.backward(upstream)
    taken: list[Tensor] = []
    queue.run(lambda weight, gradient: taken.append(weight))
    assert [weight is down for weight in taken] == [True]
