"""Receives of a pipeline: a few ahead where they block no rank, none ahead as kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moemesh.comm.mesh import Mesh
from moemesh.parallel.pipeline.messenger import AHEAD, OrderedMessenger
from moemesh.parallel.pipeline.program import TensorSpec
from moemesh.schedule.action import Op
from moemesh.schedule.generators import one_f_one_b


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
    messenger = OrderedMessenger(one_f_one_b(2, 8), channels)
    for microbatch in range(3):
        messenger.take(program, Op("F", 1, microbatch))
        assert channels.num_received == microbatch + 1 + ahead
