"""Attention over spread positions is attention over whole sequences, in value and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout
from moemesh.model.attention_core import attention
from moemesh.model.visibility import Visibility, document_starts
from moemesh.parallel.context import CONTEXTS, in_position_order, in_rank_order
from moemesh.sharding.context import context_runs, context_sizes, head_share
from tests.ranks import mesh_on_ranks

#: num_heads, num_kv_heads, head size, value head size.
HEADS = {"grouped": (8, 4, 8, 8), "one key": (4, 1, 6, 6), "across": (12, 6, 4, 4)}
LATENT = {"latent": (4, 4, 12, 8), "wide values": (8, 2, 4, 10)}

#: Name of the heads, positions, window, packed, sinks.
Case = tuple[str, int, int | None, bool, bool]
CASES: list[Case] = [
    ("grouped", 29, None, False, False),
    ("grouped", 29, 5, False, True),
    ("grouped", 8, 1, True, False),
    ("one key", 29, 40, True, True),
    ("across", 16, None, True, False),
    ("latent", 29, 7, True, True),
    ("latent", 5, None, False, False),
    ("wide values", 29, None, True, True),
    ("wide values", 3, 2, False, True),
]


def inputs(case: Case, num_sequences: int = 2) -> tuple[list[Tensor], Tensor, Visibility]:
    """Query, key, value and sinks of whole sequences, a gradient of the output, what is seen."""
    name, length, window, packed, _ = case
    heads, kv_heads, size, value_size = (HEADS | LATENT)[name]
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    starts = None
    if packed:
        begins = torch.rand(num_sequences, length, generator=generator) < 0.2
        starts = document_starts(begins.cumsum(1))
    visible = Visibility((range(length),), (range(length),), window, starts, length)
    leaves = [
        draw(num_sequences, heads, length, size),
        draw(num_sequences, kv_heads, length, size),
        draw(num_sequences, kv_heads, length, value_size),
        draw(heads),
    ]
    return leaves, draw(num_sequences, heads, length, value_size), visible


def results(
    attend: Any, leaves: list[Tensor], gradient: Tensor, visible: Visibility, *, has_sinks: bool
) -> list[Tensor]:
    """The output and the gradients of all inputs."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    *qkv, sinks = leaves
    y = attend(*qkv, visible, sinks_N=sinks if has_sinks else None, scale=0.4)
    y.backward(gradient)
    return [y.detach(), *(leaf.grad for leaf in (leaves if has_sinks else qkv))]


def attend_on_rank(mesh: Mesh, context: str, num_sequences: int) -> None:
    axis = mesh["cp"]
    for case in CASES:
        if context == "all_to_all" and (HEADS | LATENT)[case[0]][0] % axis.size:
            continue
        leaves, gradient, visible = inputs(case, num_sequences)
        expected = results(attention, leaves, gradient, visible, has_sinks=case[4])
        runs = context_runs(case[1], axis.size, axis.index)
        held = [position for run in runs for position in run]
        own = [x[:, :, held] for x in leaves[:3]]
        found = results(
            CONTEXTS[context](axis).attend,
            [*own, leaves[3]],
            gradient[:, :, held],
            visible.between(runs, runs),
            has_sinks=case[4],
        )
        for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            if place == 4:
                # Every rank has the part of its own queries, or of its own heads.
                torch.distributed.all_reduce(ours)
            else:
                theirs = theirs[:, :, held]
            worst = float((ours - theirs).abs().max()) if ours.numel() else 0.0
            assert worst <= 1e-11, f"{case}: result {place} differs by {worst:.1e}"


@pytest.mark.parametrize("num_sequences", [2, 0])
@pytest.mark.parametrize("context", CONTEXTS)
def test_attention_over_spread_positions(context: str, num_sequences: int) -> None:
    mesh_on_ranks(Layout(cp=4), attend_on_rank, context, num_sequences)


@pytest.mark.slow
@pytest.mark.parametrize("cp", [2, 3])
@pytest.mark.parametrize("context", CONTEXTS)
def test_attention_on_other_numbers_of_ranks(context: str, cp: int) -> None:
    mesh_on_ranks(Layout(cp=cp), attend_on_rank, context, 2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("length", [0, 1, 5, 16, 37, 1000])
def test_every_position_is_held_once(length: int, ranks: int) -> None:
    runs = [context_runs(length, ranks, index) for index in range(ranks)]
    positions = [position for held in runs for run in held for position in run]
    assert sorted(positions) == list(range(length))
    sizes = context_sizes(length, ranks)
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == -(-length // ranks)
    for held in runs:
        assert all(run for run in held)
        assert [run.start for run in held] == sorted(run.start for run in held)
    x = torch.arange(length)
    assert in_rank_order(x, ranks).tolist() == positions
    assert torch.equal(in_position_order(in_rank_order(x, ranks), ranks), x)


def test_zigzag() -> None:
    assert [context_runs(16, 4, index) for index in range(4)] == [
        (range(2), range(14, 16)),
        (range(2, 4), range(12, 14)),
        (range(4, 6), range(10, 12)),
        (range(6, 10),),
    ]


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize(("length", "window"), [(4096, None), (4099, None), (32768, 1024)])
def test_attention_is_balanced(length: int, window: int | None, cp: int) -> None:
    """The busiest rank does at most 5 % more than the mean, in pairs of a query and a key."""
    pairs = [
        sum(min(p + 1, window or length) for run in context_runs(length, cp, index) for p in run)
        for index in range(cp)
    ]
    assert max(pairs) <= 1.05 * sum(pairs) / cp


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(8, 8, 4), (8, 2, 4), (8, 1, 8), (12, 6, 4)]
)
def test_heads_find_their_keys(heads: int, kv_heads: int, ranks: int) -> None:
    shares = [head_share(heads, kv_heads, ranks, index) for index in range(ranks)]
    assert [head for share in shares for head in share.queries] == list(range(heads))
    for share in shares:
        assert set(share.keys) == {head * kv_heads // heads for head in share.queries}
