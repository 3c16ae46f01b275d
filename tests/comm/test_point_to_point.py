"""Messages between two ranks, one by one and in pairs, and their ledger."""

from __future__ import annotations

import torch
import torch.distributed as dist

from moemesh.comm import point_to_point
from moemesh.comm.mesh import Axis, Mesh
from moemesh.config.layout import Layout
from tests.ranks import mesh_on_ranks


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
