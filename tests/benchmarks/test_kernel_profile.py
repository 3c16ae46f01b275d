"""The profile of a step by operation: time, bytes and FLOPs."""

import torch

from benchmarks.kernel_profile import profile_step
from benchmarks.text import profile_text


def test_operations_have_their_bytes_and_flops() -> None:
    a, b = torch.randn(64, 48), torch.randn(48, 80)

    def step() -> None:
        for _ in range(3):
            (a @ b).relu_()

    measured = profile_step(step, torch.device("cpu"), 5)
    rows = {row["name"]: row for row in measured["operations"]}
    assert set(rows) == {"aten::mm", "aten::relu_"} and measured["kernels"] == []
    assert rows["aten::mm"]["flops"] == 3 * 2 * 64 * 48 * 80
    assert rows["aten::mm"]["bytes"] == 3 * 4 * (64 * 48 + 48 * 80 + 64 * 80)
    assert rows["aten::mm"]["calls"] == 3 and rows["aten::relu_"]["flops"] == 0
    seconds = [row["seconds"] for row in measured["operations"]]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] > 0
    text = profile_text(measured)
    assert "aten::mm" in text and "in these 2 operations" in text
    assert len(profile_step(step, torch.device("cpu"), 1)["operations"]) == 1
