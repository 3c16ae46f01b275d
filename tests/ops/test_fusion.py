"""Functions that are compiled on a device: not recompiled for no row, or for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.ops import fusion
from moemesh.sharding.load_run import load_run
from moemesh.train.opening import construct


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


def test_train_compile_turns_compilation_off() -> None:
    built: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        built.append(graph)
        return graph.forward

    doubled = torch.compile(lambda x: 2 * x, backend=backend)
    try:
        for key, expected in (("false", 0), ("true", 0)):  # a setting of the process stays
            config = load_run([], [f"train.compile={key}", "model.num_layers=1"], {}).config
            construct(config, Mesh.single("cpu"))
            assert doubled(torch.ones(3)).tolist() == [2.0] * 3 and len(built) == expected
        torch.compiler.set_stance("default")
        assert doubled(torch.ones(3)).tolist() == [2.0] * 3 and len(built) == 1
    finally:
        torch.compiler.set_stance("default")
