"""Receives of a pipeline: a few ahead where they block no rank, none ahead as kernels."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch

from moemesh.comm.collectives import barrier
from moemesh.comm.mesh import Mesh
from moemesh.comm.point_to_point import Channels as RealChannels
from moemesh.config.layout import Layout
from moemesh.parallel.pipeline import messenger
from moemesh.parallel.pipeline.messenger import AHEAD, OrderedMessenger, Wire
from moemesh.parallel.pipeline.program import TensorSpec
from moemesh.schedule.action import Op
from moemesh.schedule.generators import one_f_one_b
from tests.ranks import mesh_on_ranks
from tests.waiting import until


class Work:
    def wait(self) -> None:
        return None


class Channels:
    """Those of the last stage; it counts the receives that were started."""

    def __init__(self, *, tagged: bool) -> None:
        self.tagged, self.num_received = tagged, 0
        self.axis = type("Axis", (), {"index": 1, "device": Mesh.single("cpu").device})()

    def receive(self, into: torch.Tensor, source: int, **_: str) -> Work:
        self.num_received += 1
        return Work()


class Program:
    def output_specs(self, op: Op) -> list[TensorSpec]:
        return [TensorSpec((1,), torch.float32)]


@pytest.mark.parametrize("tagged, ahead", [(True, AHEAD), (False, 0)])
def test_a_receive_that_occupies_the_device_is_started_when_it_is_needed(
    tagged: bool, ahead: int
) -> None:
    channels: Any = Channels(tagged=tagged)
    program: Any = Program()
    ordered = OrderedMessenger(one_f_one_b(2, 8), channels)
    for microbatch in range(3):
        ordered.take(program, Op("F", 1, microbatch))
        assert channels.num_received == microbatch + 1 + ahead


def _received_sends(mesh: Mesh) -> list[float]:
    """Rank 0 sends; its tensors are freed when rank 1 has them, before the end of the step."""
    channels, received = RealChannels(mesh, "pp", [(0, 1)]), list[float]()
    wire = Wire(channels)
    for _ in range(2):  # the second step begins after the end of the first
        if mesh.rank == 0:
            tensors = [torch.full((8,), float(number)) for number in range(6)]
            alive = [weakref.ref(tensor) for tensor in tensors]
            wire.send(tensors, 1, "F")
            tensors.clear()
            assert all(tensor() is not None for tensor in alive)
            barrier(mesh["world"])
            until(lambda alive=alive: not any(tensor() is not None for tensor in alive))
        else:
            barrier(mesh["world"])
            specs = [TensorSpec((8,), torch.float32)] * 6
            tensors, works = wire.receive(specs, 0, "F")
            for work in works:
                work.wait()
            received += [tensor[7].item() for tensor in tensors]
        wire.flush()
    return received


def test_a_send_that_has_arrived_is_freed_before_the_step_ends() -> None:
    _, received = mesh_on_ranks(Layout(pp=2), _received_sends)
    assert received == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] * 2


def _threads_after_a_step_that_raised(mesh: Mesh) -> list[str]:
    """Rank 0 sends what rank 1 does not receive. Its exit ends the thread that waits: one that came
    back later, while the interpreter ends, would abort the process."""
    wire = Wire(RealChannels(mesh, "pp", [(0, 1)]))
    if mesh.rank == 0:
        wire.send([torch.zeros(1 << 20)] * 2, 1, "F")
    barrier(mesh["world"])
    if mesh.rank == 0:
        messenger._end_threads()
    return [thread.name for thread in threading.enumerate() if "_wait" in thread.name]


def test_the_end_of_a_process_ends_the_wait_for_sends() -> None:
    ended = mesh_on_ranks(Layout(pp=2), _threads_after_a_step_that_raised, fresh=True)
    assert ended == [[], []]
