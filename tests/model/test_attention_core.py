"""Attention over positions equals the obvious form, whatever is visible, in value and gradient."""

from dataclasses import replace

import pytest
import torch

from moemesh.config.model import ModelConfig
from moemesh.model import attention_core
from moemesh.model.attention_core import (
    LocalPass,
    attend_to,
    attention,
    attention_with_lse,
    gradients_of,
)
from moemesh.model.batch import Batch
from moemesh.model.initialization import initialize
from moemesh.model.transformer import Transformer
from moemesh.model.visibility import Visibility, document_starts
from moemesh.ops import attention as blocks
from moemesh.ops.attention import Partial, merge

L = 23
WHOLE = (range(L),)
#: Runs of queries: a sequence, its end, two chunks as a rank of context parallelism holds them.
QUERIES = {
    "whole": WHOLE,
    "end": (range(9, L),),
    "chunks": (range(3, 6), range(17, L)),
    "across": (range(2, 20),),
    "none": (range(4, 4),),
}
KEYS = {
    "whole": WHOLE,
    "chunks": (range(6), range(17, L), range(6, 17)),
    "empty run": (range(0), range(5, L), range(5)),
}


def documents(kind, num_sequences):
    if kind is None:
        return None
    generator = torch.Generator().manual_seed(5)
    begins = torch.rand(num_sequences, L, generator=generator) < 0.2
    return document_starts(begins.long().cumsum(1))


def places(runs):
    return [position for run in runs for position in run]


def obvious(query, key, value, visible, sinks, scale):
    """All logits in one matrix, masked pair by pair."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    logits = query @ key.transpose(2, 3) * scale
    seen = torch.zeros(len(query), len(places(visible.queries)), key.shape[2], dtype=torch.bool)
    for b in range(len(query)):
        for i, p in enumerate(places(visible.queries)):
            first = 0 if visible.starts_BL is None else int(visible.starts_BL[b, p])
            if visible.window is not None:
                first = max(first, p - visible.window + 1)
            for j, c in enumerate(places(visible.keys)):
                seen[b, i, j] = first <= c <= p
    logits = logits.masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], dim=3)
        value = torch.cat([value, torch.zeros_like(value[:, :, :1])], dim=2)
    return logits.softmax(3) @ value, logits.logsumexp(3)


def tensors(queries, keys, heads=4, kv_heads=2, size=8, value_size=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(2, *shape, generator=generator, dtype=dtype).requires_grad_()

    return (
        draw(heads, len(places(queries)), size),
        draw(kv_heads, len(places(keys)), size),
        draw(kv_heads, len(places(keys)), value_size),
    )


def small_tiles(monkeypatch):
    monkeypatch.setattr(attention_core, "TILE_QUERIES", 5)
    monkeypatch.setattr(attention_core, "TILE_KEYS", 7)


def compare(found, wanted, leaves):
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    gradient = torch.randn(
        found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(2)
    )
    for one, other in zip(
        torch.autograd.grad(found, leaves, gradient, retain_graph=True),
        torch.autograd.grad(wanted, leaves, gradient),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("packed", [None, "documents"])
@pytest.mark.parametrize("window", [None, 1, 4, 11])
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("queries", QUERIES)
def test_attention_is_the_obvious_form(monkeypatch, queries, keys, window, packed, sinks):
    small_tiles(monkeypatch)
    runs = QUERIES[queries], KEYS[keys]
    visible = Visibility(*runs, window, documents(packed, 2))
    leaves = tensors(*runs)
    sinks_N = torch.randn(4, dtype=torch.float64).requires_grad_() if sinks else None
    wanted, lse = obvious(*leaves, visible, sinks_N, 0.3)
    result = attention_with_lse(leaves, LocalPass(visible, 0.3), sinks_N)
    torch.testing.assert_close(result.lse_BNS, lse, rtol=1e-11, atol=1e-12)
    assert not result.lse_BNS.requires_grad
    compare(result.y_BNSD, wanted, leaves if sinks_N is None else (*leaves, sinks_N))


@pytest.mark.parametrize("value_size", [3, 8, 13])
@pytest.mark.parametrize("fused", [True, False], ids=["kernel", "reference"])
def test_head_sizes(monkeypatch, value_size, fused):
    if not fused:
        monkeypatch.setattr(blocks, "is_fused", lambda *_: False)
        monkeypatch.setattr(attention_core, "is_fused", lambda *_: False)
    for queries in ("whole", "chunks"):
        runs = QUERIES[queries], WHOLE
        leaves = tensors(*runs, heads=6, kv_heads=3, value_size=value_size)
        output = attention(leaves, Visibility(*runs))
        assert output.shape[-1] == value_size
        compare(output, obvious(*leaves, Visibility(*runs), None, 8**-0.5)[0], leaves)


def test_a_whole_sequence_runs_in_one_fused_call(monkeypatch):
    monkeypatch.setattr(attention_core, "attention_with_lse", None)
    leaves = tensors(WHOLE, WHOLE)
    attention(leaves, Visibility(WHOLE, WHOLE, window=L))


@pytest.mark.parametrize("kv_heads", [2, 6])
@pytest.mark.parametrize("value_size", [3, 8])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_backward_in_rows_is_the_obvious_one(monkeypatch, rows, value_size, kv_heads):
    backward, calls = blocks.backward_in_rows, []

    def counted(*given, **options):
        calls.append(given)
        return backward(*given, **options)

    monkeypatch.setattr(attention_core, "rows_pay", lambda _: True)
    monkeypatch.setattr(attention_core, "backward_in_rows", counted)
    monkeypatch.setattr(blocks, "ROWS", rows)
    leaves = tensors(WHOLE, WHOLE, heads=6, kv_heads=kv_heads, value_size=value_size)
    visible = Visibility(WHOLE, WHOLE)
    output = attention(leaves, visible, scale=0.3)
    compare(output, obvious(*leaves, visible, None, 0.3)[0], leaves)
    assert len(calls) == 1


@pytest.mark.parametrize("length", [96, 128, 144])
@pytest.mark.parametrize("size", [1.0, 3.0], ids=["small logits", "large logits"])
def test_a_backward_in_rows_in_bfloat16(length, size):
    """It takes short sequences; its gradients are nearly as exact as those of the kernel."""
    runs = ((range(length),),) * 2
    leaves = [size * x.detach() for x in tensors(*runs, dtype=torch.bfloat16)]
    assert blocks.rows_pay(leaves[0]) == (length <= 128)
    upstream = torch.randn(leaves[0].shape, dtype=torch.bfloat16)

    def gradients(dtype):
        inputs = [x.to(dtype).requires_grad_() for x in leaves]
        output = attention(inputs, Visibility(*runs))
        return torch.autograd.grad(output, inputs, upstream.to(dtype))

    for ours, exact in zip(gradients(torch.bfloat16), gradients(torch.float64), strict=True):
        assert (ours.double() - exact).norm() < 0.015 * exact.norm()


@pytest.mark.parametrize("packed", [None, "documents"])
@pytest.mark.parametrize("window", [None, 4])
def test_partial_attention_merges_exactly(window, packed):
    """Keys in three parts, one of which many queries do not see at all."""
    query, key, value = (x.detach() for x in tensors(WHOLE, WHOLE))
    visible = Visibility(WHOLE, WHOLE, window, documents(packed, 2))
    wanted = attend_to((query, key, value), visible, scale=0.3)
    gradient = torch.randn_like(wanted.y_BNSD)
    gradients = gradients_of(gradient, wanted, (query, key, value), visible, scale=0.3)
    parts = [(range(15, L),), (range(4), range(9, 15)), (range(4, 9),)]
    merged, total = None, torch.zeros_like(query)
    for runs in parts:
        held = places(runs)
        own = visible.between(WHOLE, runs)
        inputs = query, key[:, :, held], value[:, :, held]
        part = attend_to(inputs, own, scale=0.3)
        merged = part if merged is None else merge(merged, part)
        partial = gradients_of(gradient, wanted, inputs, own, scale=0.3)
        total += partial.query_BNSD
        torch.testing.assert_close(partial.key_BMCD, gradients.key_BMCD[:, :, held])
        torch.testing.assert_close(partial.value_BMCD, gradients.value_BMCD[:, :, held])
    assert isinstance(merged, Partial)
    for one, other in zip(merged, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total, gradients.query_BNSD, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype):
    runs = QUERIES["chunks"], KEYS["chunks"]
    leaves = tensors(*runs, dtype=dtype)
    visible = Visibility(*runs, 11, documents("documents", 2))
    result = attention_with_lse(leaves, LocalPass(visible, 0.3))
    wanted, lse = obvious(*(x.double() for x in leaves), visible, None, 0.3)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert result.y_BNSD.dtype == dtype and result.lse_BNS.dtype == torch.float32
    torch.testing.assert_close(result.y_BNSD.double(), wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(result.lse_BNS.double(), lse, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda(dtype, queries, window):
    runs = QUERIES[queries], KEYS["chunks"]
    visible = Visibility(*runs, window)
    leaves = tensors(*runs, dtype=dtype)
    wanted, lse = obvious(*(x.double() for x in leaves), visible, None, 0.3)
    there = [x.detach().cuda().requires_grad_() for x in leaves]
    result = attention_with_lse(there, LocalPass(visible, 0.3))
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(result.lse_BNS.double().cpu(), lse, rtol=tolerance, atol=tolerance)
    gradient = torch.randn_like(wanted)
    ours = torch.autograd.grad(result.y_BNSD, there, gradient.to(result.y_BNSD))
    theirs = torch.autograd.grad(wanted, leaves, gradient)
    for one, other in zip((result.y_BNSD, *ours), (wanted, *theirs), strict=True):
        one, other = one.double().cpu(), other.double()
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_no_sequences():
    query, key, value = (x[:0] for x in tensors(QUERIES["chunks"], WHOLE))
    visible = Visibility(QUERIES["chunks"], WHOLE, 4, documents("documents", 0))
    y = attention((query, key, value), visible)
    y.sum().backward()
    assert y.shape == (0, 4, 9, 8)


def test_document_starts():
    numbers = torch.tensor([[3, 3, 1, 1, 1, 3], [0, 1, 2, 2, 2, 2]])
    assert document_starts(numbers).tolist() == [[0, 0, 2, 2, 2, 5], [0, 1, 2, 2, 2, 2]]


def test_packed_documents_are_alone():
    """Every document of a packed sequence has the losses that it has as a sequence of its own."""
    config = ModelConfig(
        vocab_size=32, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2,
        intermediate_size=24, num_experts=4, experts_per_token=2, expert_intermediate_size=8,
    )  # fmt: skip
    model = Transformer(config)
    initialize(model, seed=1, dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(32, (2, 1, 11), generator=generator)
    numbers = torch.tensor([[4, 4, 4, 4, 7, 2, 2, 2, 2, 2, 2]])
    packed = Batch(
        tokens_BS=tokens, targets_BS=targets, sequences_B=torch.arange(1), documents_BS=numbers
    )
    losses_T = model(packed).losses_T
    for start, stop in ((0, 4), (4, 5), (5, 11)):
        alone = Batch(
            tokens_BS=tokens[:, start:stop],
            targets_BS=targets[:, start:stop],
            sequences_B=torch.arange(1),
        )
        torch.testing.assert_close(losses_T[start:stop], model(alone).losses_T)
    whole = replace(packed, documents_BS=None)
    assert (model(whole).losses_T - losses_T)[4:].abs().min() > 1e-6
