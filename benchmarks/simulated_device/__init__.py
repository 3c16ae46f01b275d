"""A simulated CUDA device: tensors say ``cuda:0``, are on the CPU, and what they do is counted.

    with SimulatedDevice() as device:
        x = torch.randn(8, 8, device="cuda")
        with device.region("forward"):
            y = x @ x
    device.totals("forward").kernels      # 1

Code runs the branches of an accelerator without one. A tensor is a wrapper: Python sees the device,
torch's autograd engine the CPU, which is why it needs no accelerator. Counted are

* *kernels*: operations of ATen that are no view and allocate more than they compute. A bound from
  above of what a device launches, but for operations that a library cuts in several kernels;
* *bytes*: inputs and outputs of each, which a device whose memory bounds it moves;
* *waits*: operations for which the host waits until the device has done all that was queued:
  numbers read by the host, sizes that depend on data, copies between the device and memory that is
  not pinned, each with the line that caused it.

An operation on a device tensor and a tensor of the CPU of more than 0 dims raises
:class:`MixedDevices`, as it does on a real device. Collectives run through the process group of the
CPU (gloo) on the numbers themselves.
"""

from benchmarks.simulated_device.counts import Kernel
from benchmarks.simulated_device.device import SimulatedDevice
from benchmarks.simulated_device.streams import CUDA
from benchmarks.simulated_device.tensor import DeviceTensor, MixedDevices

__all__ = ["CUDA", "DeviceTensor", "Kernel", "MixedDevices", "SimulatedDevice"]
