"""Functions that are compiled on a device: not once more for no row, or for one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moemesh.ops import fusion


def test_no_row_and_one_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def compiled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            asked.append(x.shape[0])
            return function(x)

        return call

    monkeypatch.setattr(fusion, "compiled", compiled)
    doubled = fusion.fused(lambda x: x * 2)
    for rows in (0, 1, 2, 3):
        assert doubled(torch.empty(rows, 4, device="meta")).shape == (rows, 4)
    assert doubled(torch.ones(3)).tolist() == [2.0] * 3 and asked == [2, 3]
