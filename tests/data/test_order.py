"""The order of samples: sources interleaved by weight, small ones repeated, nothing by chance."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moemesh.data import order
from moemesh.data.order import (
    LONGEST_PERIOD,
    Epochs,
    IdRanges,
    Interleaving,
    Permutation,
    held_out_blocks,
)


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([1.0], [1]),
        ([0.7, 0.3], [7, 3]),
        ([2.0, 1.0, 1.0], [2, 1, 1]),
        ([0.1, 0.2, 0.3], [1, 2, 3]),
        ([1e-3, 1.0], [1, 1000]),
        ([5.0, 5.0], [1, 1]),
    ],
)
def test_shares_are_those_of_the_weights_exactly(weights: list[float], counts: list[int]) -> None:
    mix = Interleaving(weights)
    assert mix.counts.tolist() == counts and mix.period == sum(counts)
    sources, _ = mix.draws(np.arange(3 * mix.period))
    assert np.bincount(sources).tolist() == [3 * count for count in counts]


def test_the_interleaving_stays() -> None:
    """Another one would be another order of every run of several sources."""
    sources, draws = Interleaving([3.0, 1.0, 1.0]).draws(np.arange(10))
    assert sources.tolist() == [0, 0, 1, 2, 0, 0, 0, 1, 2, 0]
    assert draws.tolist() == [0, 1, 0, 0, 2, 3, 4, 1, 1, 5]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=6), st.integers(0, 10**12))
def test_any_weights_any_position(weights: list[float], start: int) -> None:
    mix = Interleaving(weights)
    assert mix.period <= LONGEST_PERIOD + len(weights) and (mix.counts > 0).all()
    total = sum(Fraction(str(weight)) for weight in weights)
    for weight, count in zip(weights, mix.counts.tolist(), strict=True):
        wanted = Fraction(str(weight)) / total
        assert abs(Fraction(count, mix.period) - wanted) <= Fraction(len(weights), LONGEST_PERIOD)
    # Draws of a source are numbered on without a gap, from any position on.
    before, after = mix.drawn(start), mix.drawn(start + 500)
    sources, draws = mix.draws(np.arange(start, start + 500))
    for source in range(len(weights)):
        expected = np.arange(before[source], after[source])
        assert np.array_equal(draws[sources == source], expected)


def test_every_stretch_has_nearly_the_shares() -> None:
    weights = np.array([0.5, 0.3, 0.15, 0.05])
    sources, _ = Interleaving(weights.tolist()).draws(np.arange(400))
    for length in (1, 7, 50, 333):
        for start in range(400 - length):
            counts = np.bincount(sources[start : start + length], minlength=4)
            assert np.abs(counts - weights * length).max() < 2


def test_a_position_far_away_costs_nothing() -> None:
    mix = Interleaving([0.3, 0.7])
    _, draws = mix.draws(np.array([10**15]))
    assert draws[0] > 10**14  # a walk there would have no end


def test_epochs_hold_every_id_once_and_differ_between_sources() -> None:
    ids = np.arange(100, 137)
    held = IdRanges(ids[:1], ids[-1:] + 1)
    epochs = Epochs(held, seed=3)
    first, second = epochs.at(np.arange(37)), epochs.at(np.arange(37, 74))
    assert sorted(first) == sorted(second) == ids.tolist() and not np.array_equal(first, second)
    assert np.array_equal(epochs.at(np.arange(30, 50)), np.r_[first[30:], second[:13]])
    # From any draw on, without the draws before.
    assert np.array_equal(Epochs(held, seed=3).at(np.arange(40, 60)), second[3:23])
    assert not np.array_equal(Epochs(held, seed=3, source=1).at(np.arange(37)), first)


# --- large permutations and sets of ids ------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 5))
def test_computed_permutations_are_permutations(size: int, seed: int, epoch: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "LARGEST_TABLE", 0)
        whole = Permutation(size, seed, 2, epoch).at(np.arange(size))
        assert sorted(whole.tolist()) == list(range(size))
        some = np.array([size - 1, 0, size // 2])
        assert np.array_equal(Permutation(size, seed, 2, epoch).at(some), whole[some])


def test_computed_permutations_look_random() -> None:
    """Randomness by position, by difference of neighbours, and between epochs."""
    size = 3_000_000_000
    places = np.arange(100_000)
    permuted = Permutation(size, 7, 2, 0).at(places)
    other = Permutation(size, 7, 2, 1).at(places)
    for numbers in (permuted, np.diff(permuted) % size, (permuted - other) % size, permuted[::64]):
        counts = np.histogram(numbers, bins=100, range=(0, size))[0]
        expected = len(numbers) / 100
        # Chi-square of 99 degrees of freedom: 99 +- 14, and below 170 but once in 80,000.
        assert ((counts - expected) ** 2 / expected).sum() < 170
    assert len(np.unique(permuted)) == len(permuted)
    assert np.unique(permuted & 1, return_counts=True)[1].min() > 49_000


def test_a_computed_order_of_a_seed_stays() -> None:
    """Other numbers would be another order of every large run."""
    permuted = Permutation(10**12, 3, 2, 1).at(np.array([0, 1, 10**12 - 1]))
    assert permuted.tolist() == [229610656527, 887308079916, 356167207873]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), max_size=60), st.data())
def test_ranges_are_the_ids_they_stand_for(chosen: list[bool], data: st.DataObject) -> None:
    ids = np.flatnonzero(np.array(chosen, dtype=bool)) + 5
    breaks = np.flatnonzero(np.diff(ids, prepend=0, append=0) != 1)
    ranges = IdRanges(ids[breaks[:-1]], ids[breaks[1:] - 1] + 1)
    assert len(ranges) == len(ids) and np.array_equal(ranges.spread(len(ids)), ids)
    count = data.draw(st.integers(0, len(ids)))
    blocks = held_out_blocks(len(ids), count, seed=1)
    inside, outside = ranges.divided(blocks)
    assert len(inside) == count
    assert sorted([*inside.spread(len(ids)), *outside.spread(len(ids))]) == ids.tolist()
    places = [place for start, stop in blocks.tolist() for place in range(start, stop)]
    assert np.array_equal(inside.spread(len(ids)), ids[places] if places else ids[:0])


def test_trillions_of_tokens_cost_no_memory() -> None:
    size = 4_000_000_000
    ranges = IdRanges(np.array([10]), np.array([10 + size]))
    held, training = ranges.divided(held_out_blocks(size, size // 20, seed=1))
    assert len(held) == size // 20 and len(training) == size - size // 20
    ids = Epochs(training, seed=1).at(np.arange(10**11, 10**11 + 1000))
    assert len(np.unique(ids)) == 1000
