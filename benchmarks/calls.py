"""Host work of a MoE layer and of a whole step: calls of Python functions, operations of ATen.

Counted on a simulated CUDA device (:mod:`benchmarks.simulated_device`), beside transformers' with
the same sizes. A device that computes little waits for this work. Each row is counted in the third
turn: caches are filled in the first, operations counted in the second. A call of a compiled
function is one operation and one call; torch 2.13 itself makes 77 more around it, which the rows
"nothing compiled" avoid and do not hide.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.device import CONTENDERS
from benchmarks.settings import DeviceSettings, StepSettings
from benchmarks.shapes import SHAPES
from benchmarks.simulated_device import CUDA, SimulatedDevice
from benchmarks.simulated_device import __file__ as _simulation
from benchmarks.step import our_step
from benchmarks.step_peer import peer_step, write_model
from benchmarks.turns import tokens_of_round
from moemesh.comm.mesh import Mesh

#: Sizes of the counted step: the counts depend on the layers alone.
STEP = StepSettings(
    layers=4, hidden=64, width=32, experts=4, top_k=2, vocabulary=256, sequences=2, seq_len=16,
    dtype="bfloat16", device="cuda",
)  # fmt: skip

#: Contenders that run on a simulated device.
_COUNTED = [name for name, contender in CONTENDERS.items() if contender.is_counted]
_SIMULATION = str(Path(_simulation).parent)
#: Files of torch that only run because the simulated device is a subclass of Tensor.
_OF_SUBCLASSES = ("torch/overrides.py", "torch/_library/simple_registry.py")


@dataclass
class HostWork:
    """Calls of Python functions, operations of ATen, and waits for the device."""

    calls: int = 0
    operations: int = 0
    waits: int = 0


class _CountOperations(TorchDispatchMode):
    def __init__(self, device: SimulatedDevice, work: HostWork) -> None:
        super().__init__()
        self.device, self.work = device, work

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.work.operations += not self.device.is_inside
        return func(*args, **(kwargs or {}))


def _is_simulated(apply: FrameType) -> bool:
    """Whether a Function of autograd is the simulation's own, forward or backward."""
    function = apply.f_locals.get("cls") or apply.f_locals.get("self")
    module = getattr(function, "_forward_cls", function).__module__
    return module.startswith("benchmarks.simulated_device")


@contextmanager
def _count_calls(work: HostWork) -> Iterator[None]:
    """Count calls that a real device would see, too: none from inside of the simulation, but those
    of a backward, which the simulation starts."""
    counted = [True]

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            file, is_counted = frame.f_code.co_filename, counted[-1]
            if file.startswith(_SIMULATION) or file.endswith(_OF_SUBCLASSES):
                is_counted = False
            elif file.endswith("autograd/function.py") and frame.f_code.co_name == "apply":
                is_counted = not _is_simulated(frame)
            work.calls += is_counted
            counted.append(is_counted)
        elif event == "return" and len(counted) > 1:
            counted.pop()

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


def host_work(
    device: SimulatedDevice,
    *parts: Callable[[], object],
    before: Callable[[], object] = lambda: None,
) -> list[HostWork]:
    """The work of each part; they run one after another, three times, `before` in front of each."""
    work = [HostWork() for _ in parts]
    for turn in range(3):
        before()
        for place, part in enumerate(parts):
            with device.region(f"{place} {turn}") as totals:
                if turn == 1:
                    with _CountOperations(device, work[place]):
                        part()
                elif turn == 2:
                    with _count_calls(work[place]):
                        part()
                else:
                    part()
            work[place].waits = totals.waits
    return work


def run(settings: DeviceSettings) -> dict[str, Any]:
    """Rows of the layer (forward, backward) and of the step."""
    return {
        "shape": settings.shape,
        "torch": torch.__version__,
        "layer": [_row(name, _layer_work(name, settings.shape)) for name in _COUNTED],
        "step_layers": STEP.layers,
        "step": [_row(name, _step_work(name)) for name in _COUNTED],
    }


def _row(name: str, work: list[HostWork]) -> dict[str, Any]:
    keys = ("calls", "operations", "waits")
    return {"name": name} | {key: [getattr(part, key) for part in work] for key in keys}


def _layer_work(name: str, shape_name: str) -> list[HostWork]:
    contender, shape = CONTENDERS[name], SHAPES[shape_name].counted
    with SimulatedDevice(fuses=contender.fuses) as device:
        made = contender.make(shape)
        if made is None:
            return []
        module, forward = made
        x_TH = torch.randn(shape.tokens, shape.hidden, device=CUDA, dtype=torch.bfloat16)
        x_TH.requires_grad_()
        upstream_TH = torch.ones_like(x_TH)
        results: list[torch.Tensor] = []

        def run_forward() -> None:
            results.append(forward(x_TH))

        def run_backward() -> None:
            results.pop().backward(upstream_TH)

        def without_gradients() -> None:
            module.zero_grad(set_to_none=True)
            x_TH.grad = None

        return host_work(device, run_forward, run_backward, before=without_gradients)


def _step_work(name: str) -> list[HostWork]:
    contender = CONTENDERS[name]
    with (
        tempfile.TemporaryDirectory(prefix="moemesh-calls-") as folder,
        SimulatedDevice(fuses=contender.fuses) as device,
    ):
        path = Path(folder)
        write_model(path, STEP)
        if contender.is_ours:
            step = our_step(Mesh.single(CUDA), STEP, path, STEP.dtype)
        else:
            step = peer_step(SimpleNamespace(**STEP.to_json()), path, STEP.dtype, CUDA)
        tokens_BS = tokens_of_round(STEP, 0)
        return host_work(device, lambda: step(tokens_BS))
