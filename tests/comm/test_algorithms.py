"""The ring and the tree, message by message, against torch's collectives and the closed forms."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moemesh.comm import collectives, point_to_point
from moemesh.comm.mesh import Axis, Mesh
from moemesh.config.layout import Layout
from moemesh.trace import wire
from moemesh.trace.ledger import Ledger
from tests.comm import algorithms
from tests.ranks import mesh_on_ranks

WORLDS = [2, 3, 4, 5]
SIZES = [0, 1, 2, 7, 12]


def values(rank: int, size: int, shape: tuple[int, ...] = ()) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, *shape, generator=generator, dtype=torch.float64)


def measured(ledger: Ledger, caller: str) -> tuple[int, int]:
    total = ledger.total(op="send_receive", caller=caller)
    return total.wire_bytes, total.received_bytes


def entered(ledger: Ledger, op: str, caller: str) -> tuple[int, int]:
    total = ledger.total(op=op, caller=caller)
    assert total.count == 1
    return total.wire_bytes, total.received_bytes


def ring(mesh: Mesh) -> None:
    axis = mesh["dp"]
    for size in SIZES:
        name = f"size {size}"
        x = values(mesh.rank, size)
        ours = algorithms.ring_all_reduce(x, axis, phase="forward", caller=name)
        theirs = collectives.all_reduce(x, axis, caller=name)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(ours, sum(values(rank, size) for rank in range(axis.size)))
        formula = wire.all_reduce(size, 8, axis.size, axis.index)
        assert (
            measured(axis.ledger, name) == formula[1:] == entered(axis.ledger, "all_reduce", name)
        )


@pytest.mark.representative("3")
@pytest.mark.parametrize("world", WORLDS)
def test_ring_all_reduce_sends_what_the_ledger_says(world):
    mesh_on_ranks(Layout(dp=world), ring)


def tree(mesh: Mesh) -> None:
    axis = mesh["dp"]
    for root in range(axis.size):
        name = f"root {root}"
        x = values(mesh.rank, 5, (3,))
        ours = algorithms.tree_broadcast(x, axis, root, phase="forward", caller=f"{name} down")
        assert torch.equal(ours, values(root, 5, (3,)))
        ours = algorithms.tree_reduce(x, axis, root, phase="forward", caller=f"{name} up")
        total = sum(values(rank, 5, (3,)) for rank in range(axis.size))
        torch.testing.assert_close(ours, total if axis.index == root else torch.zeros_like(total))
        down = wire.broadcast(120, axis.size, axis.index, root)
        ledger = axis.ledger
        assert measured(ledger, f"{name} down") == down[1:]
        # A reduce is the same messages, backwards in order and direction.
        assert measured(ledger, f"{name} up") == down[:0:-1]


@pytest.mark.representative("4")
@pytest.mark.parametrize("world", WORLDS)
def test_tree_broadcast_and_reduce_send_what_the_ledger_says(world):
    mesh_on_ranks(Layout(dp=world), tree)


def messages(mesh: Mesh) -> None:
    axis: Axis = mesh["pp"]
    labels = {"phase": "forward", "caller": "stage"}
    x = torch.arange(6.0).reshape(2, 3)
    if axis.index == 0:
        point_to_point.send(x.t(), axis, 1, **labels)
        point_to_point.start_send(x, axis, 1, **labels, tag=2).wait()
    else:
        late = point_to_point.start_receive(torch.empty(2, 3), axis, 0, **labels, tag=2)
        first = point_to_point.receive(torch.empty(3, 2), axis, 0, **labels)
        late.wait()
        assert torch.equal(first, x.t())
    arrived = torch.empty(4)
    own = torch.full((4,), float(axis.index))
    other = 1 - axis.index
    for work in point_to_point.exchange([(own, other)], [(arrived, other)], axis, **labels):
        work.wait()
    assert arrived.tolist() == [float(other)] * 4
    total = axis.ledger.total(axis="pp", op="send_receive", phase="forward", caller="stage")
    there, back = (64, 16) if axis.index == 0 else (16, 64)
    assert (total.count, total.payload_bytes) == (4, 80)
    assert (total.wire_bytes, total.received_bytes) == (there, back)
    dist.barrier()


def test_messages_between_two_ranks():
    mesh_on_ranks(Layout(pp=2), messages)
