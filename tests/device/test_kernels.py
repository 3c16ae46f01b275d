"""Kernels and bytes of a MoE layer: their counts are fixed, so that an added one shows."""

import pytest
import torch

from benchmarks.device import roofline_seconds, run
from benchmarks.settings import DeviceSettings
from benchmarks.simulated_device import Kernel, SimulatedDevice
from benchmarks.simulated_device.timeline import LAUNCH_SECONDS
from moemesh.config.cluster import load_cluster
from moemesh.config.train import TrainConfig
from moemesh.train.optimizer import Optimizer


def test_bench_device_counts_the_layer_and_its_peer() -> None:
    report = run(DeviceSettings(shape="tiny", ranks=1))
    assert report is not None
    rows = {row["name"]: row for row in report["rows"]}
    ours, plain = rows["moemesh"], rows["moemesh, nothing compiled"]
    assert ours["waits"] == plain["waits"] == [0, 0]
    assert ours["kernels"][0] <= 24 and ours["kernels"][1] <= 16
    assert plain["kernels"][0] <= 26 and plain["kernels"][1] <= 28
    assert rows["transformers, grouped_mm"]["kernels"] == [24, 34]


def test_the_roofline_takes_the_slower_of_products_and_memory() -> None:
    machine = load_cluster("dgx_h100")
    peak, bandwidth = machine.peak_flops["bfloat16"], machine.memory_bandwidth
    product = Kernel("mm", int(2 * peak), 8, torch.bfloat16, "")
    copy = Kernel("clone", 0, int(3 * bandwidth), torch.bfloat16, "")
    seconds = roofline_seconds([product, copy], machine)
    assert seconds == pytest.approx(5 + 2 * LAUNCH_SECONDS)


def test_resumed_adamw_has_its_step_on_the_device() -> None:
    with SimulatedDevice():
        weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
        optimizer = Optimizer({"w": weight}, TrainConfig(optimizer="adamw"))
        moments = {kind: {"w": torch.zeros(3, device="cuda")} for kind in ("exp_avg", "exp_avg_sq")}
        optimizer.load_state(moments, num_updates=7)
        state = optimizer._torch.state[optimizer.masters["w"]]
        assert state["step"].is_cuda and float(state["step"]) == 7
        optimizer.step({"w": torch.ones(3, device="cuda")}, lr=0.1)
        assert float(state["step"]) == 8
