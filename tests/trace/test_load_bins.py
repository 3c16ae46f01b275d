"""Bins of steps: exact sums, bounded number, repeated steps."""

from __future__ import annotations

import random

import pytest

from moemesh.trace.loads import LayerLoads, LoadBins, neighbours, total


def step_loads(step: int, layer: int = 0, experts: int = 4) -> LayerLoads:
    chance = random.Random(step * 31 + layer)
    tokens = tuple(chance.randrange(100) for _ in range(experts))
    half = experts // 2
    ranks = (sum(tokens[:half]), sum(tokens[half:]))
    return LayerLoads(
        step=step, layer=layer, tokens_per_expert=tokens, tokens_per_rank=ranks, dropped=step % 3
    )


def test_sums_are_exact_and_ratios_are_means_of_the_steps() -> None:
    steps = [step_loads(step) for step in range(1, 8)]
    merged = total(steps)
    assert (merged.step, merged.steps, merged.first_step) == (7, 7, 1)
    for expert in range(4):
        assert merged.tokens_per_expert[expert] == sum(s.tokens_per_expert[expert] for s in steps)
    assert sum(merged.tokens_per_rank) == sum(merged.tokens_per_expert)
    assert merged.dropped == sum(one.dropped for one in steps)
    mean = sum(one.expert_max_over_mean for one in steps) / 7
    assert merged.expert_max_over_mean == pytest.approx(mean, rel=1e-12)
    assert merged.rank_max_over_mean == pytest.approx(
        sum(one.rank_max_over_mean for one in steps) / 7, rel=1e-12
    )
    assert merged.highest_max_over_mean == max(one.expert_max_over_mean for one in steps)
    assert LayerLoads.from_json(merged.to_json()) == merged
    assert total([total(steps[:3]), total(steps[3:])]).tokens_per_expert == merged.tokens_per_expert


def test_layers_have_no_sum_with_others() -> None:
    with pytest.raises(ValueError, match="layer 0 and layer 1"):
        step_loads(1).plus(step_loads(2, layer=1))


@pytest.mark.parametrize("seed", range(20))
def test_neighbours_cover_everything_in_order_and_keep_borders(seed: int) -> None:
    chance = random.Random(seed)
    widths = [chance.choice((1, 1, 2, 7, 50)) for _ in range(chance.randrange(1, 300))]
    most = chance.randrange(1, 40)
    borders = {chance.randrange(len(widths)) for _ in range(chance.randrange(4))}
    parts = neighbours(widths, most, borders)
    assert [place for part in parts for place in range(len(widths))[part]] == list(
        range(len(widths))
    )
    assert len(parts) <= most + len(borders)
    assert borders <= {part.stop - 1 for part in parts}


@pytest.mark.parametrize("num_steps", [1, 7, 8, 9, 100, 1001])
def test_a_reader_keeps_a_bounded_number_of_bins_with_exact_sums(num_steps: int) -> None:
    bins = LoadBins(most=8)
    for step in range(1, num_steps + 1):
        for layer in (0, 1):
            bins.add(step_loads(step, layer))
    kept = bins.all()
    for layer in (0, 1):
        own = [one for one in kept if one.layer == layer]
        assert min(num_steps, 3) <= len(own) <= 8
        assert [one.first_step for one in own[1:]] == [one.step + 1 for one in own[:-1]]
        assert sum(sum(one.tokens_per_expert) for one in own) == sum(
            sum(step_loads(step, layer).tokens_per_expert) for step in range(1, num_steps + 1)
        )


def test_wide_models_have_fewer_bins() -> None:
    bins = LoadBins(most=256, most_numbers=2 * 66 * 10)
    for step in range(1, 101):
        for layer in (0, 1):
            bins.add(step_loads(step, layer, experts=64))
    assert sum(len(one.tokens_per_expert) for one in bins.all()) <= 2 * 66 * 10
    assert {one.layer: one.step for one in bins.all()} == {0: 100, 1: 100}


def test_steps_that_were_done_again_count_once() -> None:
    bins = LoadBins(most=8)
    for step in (1, 2, 3, 2, 3, 4):
        bins.add(step_loads(step))
    assert [one.step for one in bins.all()] == [1, 2, 3, 4]
