"""The closed forms: what is sent is received, textbook factors where sizes divide, times."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moemesh.config.layout import shard_sizes
from moemesh.trace import wire

worlds = st.integers(1, 9)


def balanced(everyone) -> None:
    """What all ranks send, all ranks receive."""
    assert sum(one.wire_bytes for one in everyone) == sum(one.received_bytes for one in everyone)


@given(st.integers(0, 40), worlds, st.sampled_from([1, 2, 8]))
def test_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather(num_elements, size, width):
    everyone = [wire.all_reduce(num_elements, width, size, index) for index in range(size)]
    balanced(everyone)
    assert sum(one.wire_bytes for one in everyone) == 2 * (size - 1) * num_elements * width
    assert all(one.payload_bytes == num_elements * width for one in everyone)
    # The message-by-message truth: step s of each half sends one chunk on to the right.
    chunks = shard_sizes(num_elements, size)
    for index, one in enumerate(everyone):
        steps = range(2 * (size - 1))
        assert one.wire_bytes == width * sum(chunks[(index - 1 - step) % size] for step in steps)
        assert one.received_bytes == width * sum(
            chunks[(index - 2 - step) % size] for step in steps
        )
    if num_elements % size == 0:
        assert all(one[1] == 2 * (size - 1) * num_elements * width // size for one in everyone)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_all_gather_and_reduce_scatter_mirror_each_other(blocks):
    size = len(blocks)
    gathers = [wire.all_gather(blocks, index) for index in range(size)]
    scatters = [wire.reduce_scatter(blocks, index) for index in range(size)]
    balanced(gathers)
    for gather, scatter in zip(gathers, scatters, strict=True):
        assert gather == (scatter.payload_bytes, scatter.received_bytes, scatter.wire_bytes)
        assert gather.payload_bytes == sum(blocks)
    assert sum(one.wire_bytes for one in gathers) == (size - 1) * sum(blocks)


@given(st.integers(1, 6).flatmap(lambda n: st.lists(
    st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=n, max_size=n)))  # fmt: skip
def test_all_to_all_by_splits(splits):
    size = len(splits)
    everyone = [
        wire.all_to_all(splits[index], [row[index] for row in splits], index)
        for index in range(size)
    ]
    balanced(everyone)
    for index, one in enumerate(everyone):
        assert one.payload_bytes == sum(splits[index])
        assert one.wire_bytes == sum(splits[index]) - splits[index][index]
        assert one.received_bytes == sum(
            splits[other][index] for other in range(size) if other != index
        )


@given(worlds.flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))))
def test_the_tree_reaches_everybody_once_in_few_rounds(world):
    size, root = world
    rounds = {root: 0}
    busy_until: dict[int, int] = {}
    for sender, receiver in wire.tree_messages(size, root):
        assert sender in rounds and receiver not in rounds
        start = max(rounds[sender], busy_until.get(sender, 0))
        busy_until[sender] = rounds[receiver] = start + 1
    assert sorted(rounds) == list(range(size))
    assert max(rounds.values()) <= ceil(log2(size))
    down = [wire.broadcast(7, size, index, root) for index in range(size)]
    up = [wire.reduce(7, size, index, root) for index in range(size)]
    balanced(down)
    assert sum(one.wire_bytes for one in down) == 7 * (size - 1)
    assert down[root].received_bytes == 0 and up[root].wire_bytes == 0
    assert [(one[2], one[1]) for one in down] == [(one[1], one[2]) for one in up]


def test_messages():
    assert wire.send(5) == (5, 5, 0)
    assert wire.receive(5) == (5, 0, 5)


def test_times():
    alpha, beta, size, num_bytes = 2.0, 0.5, 4, 64.0
    labels = (size, num_bytes, alpha, beta)
    assert wire.ring_all_reduce_seconds(*labels) == 6 * 2 + 1.5 * 32
    assert wire.ring_all_gather_seconds(*labels) == 3 * 2 + 0.75 * 32
    assert wire.ring_reduce_scatter_seconds(*labels) == 3 * 2 + 0.75 * 32
    assert wire.double_tree_all_reduce_seconds(*labels) == 2 * 2 * 2 + 2 * 32
    assert wire.halving_doubling_all_reduce_seconds(*labels) == 2 * 2 * 2 + 1.5 * 32
    assert wire.tree_broadcast_seconds(*labels) == 2 * (2 + 32)
    assert wire.tree_broadcast_seconds(5, num_bytes, alpha, beta) == 3 * (2 + 32)
    assert wire.tree_reduce_seconds(*labels) == 2 * (2 + 32)
    assert wire.ring_broadcast_seconds(*labels) == 3 * 2 + 32
    assert wire.scatter_all_gather_broadcast_seconds(*labels) == (2 + 3) * 2 + 1.5 * 32
    assert wire.all_to_all_seconds(*labels) == 3 * 2 + 0.75 * 32
    # S of the global tensor: (n-1)/n^2
    assert wire.all_to_all_seconds(size, num_bytes / size, 0, beta) == 3 / 16 * 32
    two_level = wire.two_level_all_reduce_seconds(
        2, 3, 60.0, local_alpha=1, local_beta=0.1, remote_alpha=5, remote_beta=1
    )
    assert two_level == pytest.approx(2 * (1 + 3) + 4 * 5 + 4 / 3 * 30)


@pytest.mark.parametrize("name", [name for name in dir(wire) if name.endswith("_seconds")])
def test_one_rank_takes_no_time(name):
    function = getattr(wire, name)
    if name.startswith("two_level"):
        seconds = function(
            1, 1, 64.0, local_alpha=1.0, local_beta=1.0, remote_alpha=1.0, remote_beta=1.0
        )
    else:
        seconds = function(1, 64.0, 1.0, 1.0)
    assert seconds == 0


def test_halving_doubling_wants_a_power_of_two():
    with pytest.raises(ValueError, match="a power of two of ranks, not 6"):
        wire.halving_doubling_all_reduce_seconds(6, 1.0, 1.0, 1.0)


def test_a_tree_wins_for_short_messages_and_a_ring_for_long_ones():
    short, long = 100.0, 1e9
    alpha, beta = 1e-5, 1e-10
    assert wire.tree_broadcast_seconds(16, short, alpha, beta) < wire.ring_broadcast_seconds(
        16, short, alpha, beta
    )
    assert wire.tree_broadcast_seconds(16, long, alpha, beta) > wire.ring_broadcast_seconds(
        16, long, alpha, beta
    )
