"""The simulated device refuses what a real one refuses, and counts what a real one does."""

import pytest
import torch

from benchmarks.simulated_device import CUDA, DeviceTensor, MixedDevices, SimulatedDevice
from moemesh.ops.host_copy import HostCopy, upload


def test_tensors_say_cuda_and_compute_as_the_cpu() -> None:
    with SimulatedDevice() as device:
        x = torch.randn(4, 3, device="cuda", requires_grad=True)
        assert isinstance(x, DeviceTensor) and x.is_cuda and x.device == CUDA
        weight = torch.nn.Linear(3, 2).to("cuda").weight
        with device.region("forward"):
            y = (x @ weight.t()).relu()
        y.sum().backward()
        assert x.grad is not None and x.grad.device == CUDA and x.grad.shape == (4, 3)
        expected = (x.numbers.detach() @ weight.numbers.detach().t()).relu()
        assert torch.equal(y.numbers.detach(), expected)
        assert [kernel.name for kernel in device.totals("forward").launched] == ["mm", "relu"]
        assert device.totals("forward").launched[0].flops == 2 * 4 * 3 * 2
        assert device.totals("forward").launched[0].bytes == 4 * (12 + 6 + 8)


def test_an_optimizer_asks_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA build of torch on a machine without a device, the most frequent case."""

    def without_driver(*_: object) -> None:
        raise RuntimeError("Found no NVIDIA driver on your system")

    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch._C, "_accelerator_getDeviceIndex", without_driver)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", without_driver)
    with SimulatedDevice():
        weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
        weight.grad = torch.ones(3, device="cuda")
        torch.optim.AdamW([weight], lr=0.5).step()
        assert float(weight.detach().sum()) < 3
        assert not torch.cuda.is_current_stream_capturing()  # other optimizers call this


def test_tensors_of_the_cpu_are_refused() -> None:
    with SimulatedDevice() as device:
        x, y = torch.ones(3, device="cuda"), torch.ones(3)
        with pytest.raises(MixedDevices, match=r"test_instrument\.py"):
            x + y
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        assert (x * torch.tensor(2.0)).is_cuda  # of 0 dims it may be
        assert device.here.waits == 0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("item", "_local_scalar_dense"),
        ("tolist", "tolist"),
        ("nonzero", "nonzero"),
        ("mask", "index with a mask"),
        ("bincount", "bincount"),
        ("repeat", "repeat_interleave without output_size"),
        ("cpu", "copy to the CPU"),
        ("to", "copy from the CPU"),
        ("tensor", "torch.tensor from the CPU"),
        ("grouped", "grouped_mm of float32"),
    ],
)
def test_waits_are_counted_with_their_line(name: str, why: str) -> None:
    with SimulatedDevice() as device:
        x = torch.arange(4, device="cuda")
        weight, ends = torch.ones(1, 4, 4, device="cuda"), torch.ones(1, device="cuda").int()
        with device.region("here"):
            match name:
                case "item":
                    x[1].item()
                case "tolist":
                    x.tolist()
                case "nonzero":
                    x.nonzero()
                case "mask":
                    x[x > 1]
                case "bincount":
                    torch.bincount(x)
                case "repeat":
                    torch.repeat_interleave(x, x)
                case "cpu":
                    x.cpu()
                case "to":
                    torch.ones(3).to("cuda")
                case "tensor":
                    torch.tensor([1, 2], device="cuda")
                case "grouped":
                    torch.nn.functional.grouped_mm(weight[0, :1], weight, offs=ends)
        (wait,) = device.totals("here").waited
        assert wait.why == why and "device/test_instrument.py" in wait.line


def test_asynchronous_copies_wait_when_they_are_read() -> None:
    with SimulatedDevice() as device:
        with device.region("start"):
            x = upload(torch.arange(4), CUDA)
            copied = HostCopy(x)
        with device.region("read"):
            assert copied.tolist() == copied.tolist() == [0, 1, 2, 3]
        assert device.totals("start").waits == 0
        assert [wait.why for wait in device.totals("read").waited] == ["Event.synchronize"]


def test_the_process_is_left_as_it_was() -> None:
    cuda_is_available = torch.cuda.is_available
    with SimulatedDevice():
        assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.is_available is cuda_is_available
    x = torch.ones(2)
    assert type(x) is torch.Tensor and x.is_cpu
