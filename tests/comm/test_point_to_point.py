"""Messages between two ranks, one by one and in pairs, their ledger, and pending work."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from moemesh.comm import point_to_point, staged, transfers
from moemesh.comm.mesh import Axis, Mesh
from moemesh.config.layout import Layout
from moemesh.monitor import progress
from moemesh.monitor.progress import RANK_BYTES, read_record
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


def staged_messages(mesh: Mesh) -> None:
    with mock.patch.object(staged, "is_staged", return_value=True):
        messages(mesh)
        x = torch.arange(2.0) + 10 * mesh.rank
        rows = transfers.all_to_all(x, mesh["pp"], phase="forward", caller="test")
    assert rows.tolist() == [mesh.rank, 10.0 + mesh.rank]


def test_messages_through_copies_on_the_host():
    mesh_on_ranks(Layout(pp=2), staged_messages)


def test_pending_work_ends_once_and_shows_what_it_waits_for():
    memory, seen = bytearray(RANK_BYTES), list[object]()

    def is_inside() -> bool:
        record = read_record(memory, 0)
        assert record is not None
        return bool(record.inside)

    work = SimpleNamespace(wait=lambda: seen.append(is_inside()), is_completed=lambda: False)
    progress.attach_memory(memory, 0)
    try:
        ticket = progress.entered("all_reduce", "dp", "test", (0, 1), 8)
        pending = staged.PendingWork([work, work], then=lambda: seen.append("then"), ticket=ticket)
        assert not pending.is_completed() and not is_inside()
        pending.wait()
        pending.wait()
        assert seen == [True, True, "then"] and pending.is_completed() and not is_inside()
    finally:
        progress.detach()
