"""Changing layouts: the table of the module, and several axes."""

from __future__ import annotations

import pytest

from moemesh.planner.operators.resharding import MeshAxis, reshard_seconds

ONE = (MeshAxis(name="t", size=4, seconds_per_byte=1.0),)
TWO = (MeshAxis(name="d", size=2, seconds_per_byte=10.0), ONE[0])


@pytest.mark.parametrize(
    ("source", "target", "forward", "backward"),
    [
        ("S0", "R", 12, 0),
        ("S0", "B", 12, 12),
        ("R", "S0", 0, 12),
        ("R", "B", 0, 24),
        ("P", "R", 24, 0),
        ("P", "S0", 12, 12),
        ("P", "B", 24, 24),
        ("S0", "S1", 3, 3),
        ("S1", "S1", 0, 0),
        ("R", "P", 0, 0),
    ],
)
def test_one_axis(source: str, target: str, forward: float, backward: float) -> None:
    # 16 bytes over 4 ranks at 1 s a byte: a gather moves 12, an all-reduce 24, an all-to-all 3.
    ends = (source,), (target,)
    assert reshard_seconds(16, *ends, ONE, backward=False) == forward
    assert reshard_seconds(16, *ends, ONE) == forward + backward


def test_latency_counts_messages() -> None:
    axes = (MeshAxis(name="t", size=4, latency=1.0, seconds_per_byte=0.0),)
    assert reshard_seconds(16, ("S0",), ("R",), axes, backward=False) == 3
    assert reshard_seconds(16, ("P",), ("R",), axes, backward=False) == 6


def test_the_cheapest_order_of_steps_is_taken() -> None:
    # Reduce-scatter over the fast axis first: 12 s, then a quarter over the slow one: 20 s.
    assert reshard_seconds(16, ("P", "P"), ("S0", "S1"), TWO, backward=False) == 32
    # Slice before the gather: half of the tensor over the fast axis.
    assert reshard_seconds(16, ("R", "S0"), ("S1", "R"), TWO, backward=False) == 6


def test_only_the_inner_piece_of_a_dim_may_move() -> None:
    # Both axes cut dim 0. Gathering the outer one alone (10 s a byte of the result: 20 s) would
    # leave scattered rows. Instead: gather the inner pieces (half the tensor, 6 s), pad with zeros,
    # cut along the inner axis again, and add up over the outer one (all-reduce of 4 bytes, 40 s).
    both, inner = ("S0", "S0"), ("R", "S0")
    assert reshard_seconds(16, both, inner, TWO, backward=False) == 6 + 40
    assert reshard_seconds(16, both, ("S0", "R"), TWO, backward=False) == 6


def test_axes_of_one_rank_are_free() -> None:
    axes = (MeshAxis(name="t", size=1, latency=1.0, seconds_per_byte=1.0),)
    assert reshard_seconds(16, ("P",), ("S0",), axes) == 0
