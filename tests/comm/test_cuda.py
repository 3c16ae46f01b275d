"""Devices that ranks cannot have are refused in one sentence, before anything is read."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moemesh.comm import cuda, launch
from moemesh.monitor.devices import DeviceError

CPU = "--set train.device=cpu"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two H100s in the answers of torch, which are the attributes of the result."""
    facts = SimpleNamespace(
        num_devices=2, gpus=2, capability=(9, 0), arch=["sm_75", "sm_90"], build="12.8", nccl=True
    )

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\n.")

    for name, answer in {
        "is_available": lambda: facts.num_devices > 0,
        "device_count": lambda: facts.num_devices,
        "get_device_capability": lambda device=None: facts.capability,
        "get_device_name": lambda device=None: "Some GPU",
        "get_arch_list": lambda: facts.arch,
        "get_device_properties": lambda device: SimpleNamespace(uuid=f"uuid-{device.index}"),
        "set_device": lambda device: None,
        "init": init,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.version, "cuda", facts.build)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: facts.nccl)
    monkeypatch.setattr(cuda, "num_gpus", lambda: facts.gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return facts


@pytest.mark.parametrize(
    ("keys", "dtype", "words"),
    [
        ({"num_devices": 0}, "float32", "driver on your system is too old (found version 11040)"),
        (
            {"num_devices": 1},
            "float32",
            "2 rank(s) on this machine want a CUDA device each, 1 found",
        ),
        ({"capability": (7, 5)}, "bfloat16", "capability 7.5) is too old for train.dtype"),
        ({"capability": (6, 1)}, "float32", "has kernels for (7.5 and newer)"),
        ({"nccl": False}, "float32", "has no NCCL, which 2 ranks on GPUs need"),
    ],
)
def test_devices_that_will_not_do(
    machine: Any, keys: dict[str, Any], dtype: str, words: str
) -> None:
    for device in ("auto", "cuda"):
        cuda.check(device, 2, dtype)
    vars(machine).update(keys)
    for device in ("auto", "cuda"):
        with pytest.raises(DeviceError) as error:
            cuda.check(device, 2, dtype)
        assert words in str(error.value)
        assert CPU in str(error.value) or 'train.device = "cpu"' in str(error.value)
    cuda.check("cpu", 2, dtype)


def test_a_build_without_cuda(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.num_devices = 0
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match=r"build without CUDA: .*cu128.*train\.device=cpu"):
        cuda.check("auto", 1)
    # Who hides the GPUs means the CPU, and so does a machine that has none.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cuda.check("auto", 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    machine.gpus = 0
    cuda.check("auto", 4)


def test_a_launcher_may_show_each_rank_one_device(
    machine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert cuda.choose("auto", 1, 2, "bfloat16") == torch.device("cuda", 1)
    machine.num_devices = 1
    assert cuda.choose("auto", 1, 2, "bfloat16") == torch.device("cuda", 0)
    assert not caplog.records
    machine.capability = (8, 0)
    cuda.choose("auto", 1, 2, "bfloat16")
    assert "from 9.0 on" in caplog.text


def test_ranks_have_devices_of_one_kind_and_of_their_own(machine: Any) -> None:
    store, soon = dist.HashStore(), timedelta(seconds=5)
    first, second, cpu = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")
    cuda.agree(store, 0, first, soon)
    cuda.agree(store, 1, second, soon)
    with pytest.raises(DeviceError, match="have the same GPU"):
        cuda.agree(store, 2, first, soon)
    with pytest.raises(DeviceError, match=r"computes on cuda, rank 3 on .* cpu: use"):
        cuda.agree(store, 3, cpu, soon)
    machine.capability = (8, 0)
    with pytest.raises(DeviceError, match=r"compute capability 9\.0, rank 4 on .* 8\.0"):
        cuda.agree(store, 4, torch.device("cuda", 2), soon)


def test_ranks_may_share_a_device_over_gloo(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """MOEMESH_COMM=gloo: ranks take turns with the devices, and no process group is of NCCL."""
    machine.nccl = False
    chosen = [cuda.choose("cuda", rank, 4, "bfloat16", shares=True).index for rank in range(4)]
    assert chosen == [0, 1, 0, 1]
    cuda.check("cuda", 4, "bfloat16", shares=True)
    machine.capability = (7, 5)
    with pytest.raises(DeviceError, match=r"too old for train\.dtype"):
        cuda.check("cuda", 4, "bfloat16", shares=True)
    store, soon = dist.HashStore(), timedelta(seconds=5)
    for rank in range(3):
        cuda.agree(store, rank, torch.device("cuda", 0), soon, shares=True)
    monkeypatch.setenv("MOEMESH_COMM", "gloo")
    assert launch.shares_devices()
    monkeypatch.setenv("MOEMESH_COMM", "nccl")
    with pytest.raises(launch.RankError, match='MOEMESH_COMM is "nccl": it must be "gloo"'):
        launch.shares_devices()
    monkeypatch.delenv("MOEMESH_COMM")
    assert not launch.shares_devices()


@pytest.mark.parametrize(("shared", "backend"), [("", "nccl"), ("gloo", "gloo")])
def test_the_backend_of_ranks_with_a_device(
    shared: str, backend: str, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = dict[str, Any]()
    monkeypatch.setattr(
        dist, "init_process_group", lambda name, **given: made.update(given, name=name)
    )
    monkeypatch.setattr(launch, "joined", lambda: True)
    monkeypatch.setattr(launch, "attach", lambda: None)
    monkeypatch.setattr(launch, "launched", lambda: False)
    monkeypatch.setattr(launch, "_connect", lambda *given: dist.HashStore())
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MOEMESH_COMM", shared)
    ranks = launch.start("cuda", 5.0)
    assert made["name"] == backend and ranks.device == torch.device("cuda", 0)
    assert made["device_id"] == (ranks.device if backend == "nccl" else None)
