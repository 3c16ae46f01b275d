"""GPUs of a machine as a process may use them, and the variables that go with them."""

from __future__ import annotations

import pytest

from moemesh.monitor import devices
from moemesh.monitor.devices import num_visible_gpus, settings_for_gpus


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose driver shows eight GPUs."""
    monkeypatch.setattr(devices, "num_gpus", lambda: 8)
    monkeypatch.setattr(devices, "signs_of_gpus", lambda: ["/dev/nvidiactl"])


@pytest.mark.parametrize(
    "chosen, count",
    [
        *[(None, 8), ("0,1", 2), (" 3 ", 1), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("0,9,1", 1)],
        *[("GPU-1a,GPU-2b", 2), ("MIG-1a", 1)],
    ],
)
def test_gpus_are_counted_as_far_as_they_are_visible(
    driver: None, chosen: str | None, count: int
) -> None:
    assert num_visible_gpus({} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}) == count


def test_settings_of_the_user_stay(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert settings_for_gpus({}) == both
    assert settings_for_gpus({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}).keys() == {"PYTORCH_ALLOC_CONF"}
    assert "PYTORCH_ALLOC_CONF" not in settings_for_gpus({"PYTORCH_CUDA_ALLOC_CONF": ""})
    monkeypatch.setattr(devices, "signs_of_gpus", list)
    assert settings_for_gpus({}) == {}
