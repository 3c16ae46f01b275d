"""Cuts of sequences: lengths add up, times are equal, no slice is empty."""

from itertools import pairwise

import pytest

from moemesh.config.layout import shard_sizes
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.schedule.terapipe import MOST_PLACES, slice_lengths, stage_costs
from moemesh.sharding.stages import cut_layers

MODEL = ModelConfig(num_layers=8)


def plan_of(pp: int, **keys: int) -> Plan:
    return Plan(pp=pp, schedule="terapipe", **keys)


@pytest.mark.parametrize("seq_len", [4, 7, 64, 97, 1000, 8191])
@pytest.mark.parametrize("slices", [1, 3, 4])
def test_lengths_are_positive_and_add_up(seq_len: int, slices: int) -> None:
    lengths = slice_lengths(MODEL, plan_of(4, slices=slices), seq_len)
    assert len(lengths) == slices and sum(lengths) == seq_len and min(lengths) >= 1
    # Later slices look back at more: never longer, but for the grid on which cuts lie.
    grid = -(-seq_len // min(seq_len, MOST_PLACES))
    assert all(late <= early + grid for early, late in pairwise(lengths))


def test_slices_of_long_sequences_take_equal_times() -> None:
    seq_len, pp = 32768, 4
    lengths = slice_lengths(MODEL, plan_of(pp, microbatches=2), seq_len)
    costs = stage_costs(MODEL, cut_layers(MODEL, pp))

    def seconds(pieces: tuple[int, ...]) -> list[float]:
        starts = [sum(pieces[:index]) for index in range(len(pieces))]
        return [
            max(w * n + scores * n * (c + (n + 1) / 2) for w, scores in costs)
            for n, c in zip(pieces, starts, strict=True)
        ]

    assert lengths[0] > 1.2 * lengths[-1]
    times, even = seconds(lengths), seconds(shard_sizes(seq_len, pp))
    # A cut lies at most half a place beside the best one.
    assert max(times) / min(times) < 1 + 2 * pp / MOST_PLACES
    assert max(even) / min(even) > 1.5 > max(times) / min(times)


def test_the_default_is_a_slice_a_rank_and_many_slices_are_even() -> None:
    assert len(slice_lengths(MODEL, plan_of(8), 100)) == 8
    assert slice_lengths(MODEL, plan_of(2, slices=100), 250) == (3,) * 50 + (2,) * 50
    with pytest.raises(ValueError, match="100 slices of a sequence of 99"):
        slice_lengths(MODEL, plan_of(2, slices=100), 99)
    with pytest.raises(ValueError, match="num_slices"):
        slice_lengths(MODEL, plan_of(2, slices=10), 9)
