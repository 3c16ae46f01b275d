"""Bytes that each rank sends and receives in a collective: closed forms, exact to the byte.

The functions of collectives return a `WireBytes` for one rank (`index` of `size`), exact also
where sizes do not divide. The algorithms that the ledger states:

all_reduce          ring: reduce-scatter, then all-gather, over chunks of balanced size
                    (`moemesh.config.layout.shard_sizes` of the number of elements)
all_gather          direct: every rank sends its own block to each other rank
reduce_scatter      direct: every rank sends each other rank its block of the partial sums
all_to_all          direct, by splits
broadcast           minimum spanning tree (recursive halving of the ranks)
send_receive        one message

`tests/trace/test_wire.py` follows the ring and the tree message by message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moemesh.config.layout import shard_sizes


class WireBytes(NamedTuple):
    """The three byte columns of the ledger (defined in `moemesh.trace.ledger`)."""

    payload_bytes: int
    wire_bytes: int
    received_bytes: int


def all_reduce(num_elements: int, element_size: int, size: int, index: int) -> WireBytes:
    """Ring all-reduce of `num_elements` elements of `element_size` bytes.

    In the reduce-scatter, a rank sends every chunk but its own and receives every chunk but its
    left neighbour's; in the all-gather it sends every chunk but its right neighbour's and receives
    every chunk but its own. With equal chunks that is 2(n-1)/n of the tensor each way.
    """
    chunks = shard_sizes(num_elements, size)
    left, chunk, right = chunks[index - 1], chunks[index], chunks[(index + 1) % size]
    return WireBytes(
        num_elements * element_size,
        (2 * num_elements - chunk - right) * element_size,
        (2 * num_elements - chunk - left) * element_size,
    )


def all_gather(block_bytes: Sequence[int], index: int) -> WireBytes:
    """All-gather of blocks of `block_bytes[i]` bytes, one for each rank."""
    block, total = block_bytes[index], sum(block_bytes)
    return WireBytes(total, block * (len(block_bytes) - 1), total - block)


def reduce_scatter(block_bytes: Sequence[int], index: int) -> WireBytes:
    """Reduce-scatter in which rank i keeps the sum of block i, of `block_bytes[i]` bytes."""
    block, total = block_bytes[index], sum(block_bytes)
    return WireBytes(total, total - block, block * (len(block_bytes) - 1))


def all_to_all(input_bytes: Sequence[int], output_bytes: Sequence[int], index: int) -> WireBytes:
    """All-to-all: `input_bytes[i]` are sent to rank i, `output_bytes[i]` received from rank i."""
    sent, received = sum(input_bytes), sum(output_bytes)
    return WireBytes(sent, sent - input_bytes[index], received - output_bytes[index])


def tree_messages(size: int, root: int) -> Iterator[tuple[int, int]]:
    """(sender, receiver) of a minimum-spanning-tree broadcast from `root`, parents first.

    The ranks are halved; the root sends to the far end of the other half; both halves recurse.
    """
    spans = [(0, size - 1, root)]
    while spans:
        left, right, sender = spans.pop(0)
        if left == right:
            continue
        middle = (left + right) // 2
        low_half = sender <= middle
        receiver = right if low_half else left
        yield sender, receiver
        spans.append((left, middle, sender if low_half else receiver))
        spans.append((middle + 1, right, receiver if low_half else sender))


def broadcast(num_bytes: int, size: int, index: int, source_index: int) -> WireBytes:
    """Minimum-spanning-tree broadcast of `num_bytes` from `source_index`."""
    num_sent = sum(sender == index for sender, _ in tree_messages(size, source_index))
    return WireBytes(num_bytes, num_bytes * num_sent, num_bytes * (index != source_index))


class ServerTraffic(NamedTuple):
    """Bytes of one update on the busiest rank, a parameter server: sent and received while
    gradients are pushed to it, and while weights are pulled from it."""

    push_sent: float
    push_received: float
    pull_sent: float
    pull_received: float

    @property
    def link(self) -> float:
        """Bytes in the busier direction of the server's link, for a push followed by a pull."""
        return self.push_received + self.pull_sent


def parameter_server(
    gradient_bytes: float, weight_bytes: float, ranks: float, servers: float
) -> ServerTraffic:
    """Traffic of one update with `servers` of `ranks` ranks as parameter servers, which own equal
    parts of the weights and also train. Every rank pushes its gradients and, after the optimizer
    step, pulls the new weights. A server's link carries (ranks - 1) / servers times gradients and
    weights; a ring all-reduce moves less than twice the gradients over each link."""
    # A server sends gradients to `servers - 1` ranks, and receives them from `others`, not fewer.
    share, others = 1 / servers, ranks - 1
    return ServerTraffic(
        push_sent=gradient_bytes * (1 - share),
        push_received=gradient_bytes * share * others,
        pull_sent=weight_bytes * share * others,
        pull_received=weight_bytes * (1 - share),
    )
