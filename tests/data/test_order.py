"""The order of samples: sources interleaved by weight, small ones repeated, nothing by chance."""

from __future__ import annotations

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moemesh.data.order import LONGEST_PERIOD, Epochs, Interleaving


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
    start = time.monotonic()
    _, draws = mix.draws(np.array([10**15]))
    assert draws[0] > 10**14 and time.monotonic() - start < 0.1


def test_epochs_hold_every_id_once_and_differ_between_sources() -> None:
    ids = np.arange(100, 137)
    epochs = Epochs(ids, seed=3)
    first, second = epochs.at(np.arange(37)), epochs.at(np.arange(37, 74))
    assert sorted(first) == sorted(second) == ids.tolist() and not np.array_equal(first, second)
    assert np.array_equal(epochs.at(np.arange(30, 50)), np.r_[first[30:], second[:13]])
    # From any draw on, without the draws before.
    assert np.array_equal(Epochs(ids, seed=3).at(np.arange(40, 60)), second[3:23])
    assert not np.array_equal(Epochs(ids, seed=3, source=1).at(np.arange(37)), first)
