"""The closed forms: bytes sent equal bytes received, textbook factors where sizes divide."""

from __future__ import annotations

from math import ceil, log2

from hypothesis import given
from hypothesis import strategies as st

from moemesh.config.layout import shard_sizes
from moemesh.trace import wire

worlds = st.integers(1, 9)


def balanced(everyone) -> None:
    """Bytes sent by all ranks equal bytes received by all ranks."""
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
    balanced(down)
    assert sum(one.wire_bytes for one in down) == 7 * (size - 1)
    assert down[root].received_bytes == 0
