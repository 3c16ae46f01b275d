"""The published algorithm: ours, compiled, against the torch transcription of the benchmark."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.balance import load_shapes
from moemesh.balance import rebalance_published
from tests.balance.cases import hottest


@pytest.mark.representative("(96, 8, 4, 16)", "(80, 1, 1, 16)")
@pytest.mark.parametrize(
    "place",
    [(96, 8, 4, 16), (80, 1, 1, 16), (64, 4, 2, 8), (128, 8, 8, 64), (96, 4, 1, 96)],
    ids=str,
)
def test_equal_to_the_transcription(place: tuple[int, int, int, int]) -> None:
    """Slot by slot where loads differ; with ties (torch's sort is not stable) in the load reached.

    Equal loads of different experts are interchangeable.
    """
    torch = pytest.importorskip("torch")
    from benchmarks.balance import torch_published

    several = load_shapes(3, 64, seed=8)
    several["all different"] = np.exp(np.random.default_rng(0).normal(0, 1, (3, 64)))
    for name, loads in several.items():
        for factor in (1.0, 1 / 3):
            weight = torch.from_numpy(loads * factor).float()
            expected = torch_published(weight, *place)
            placement = rebalance_published(loads * factor, *place)[0]
            gpus = place[3]
            reached = [hottest(loads, slots, gpus) for slots in (placement, expected.numpy())]
            assert reached[0] == pytest.approx(reached[1], rel=1e-5), (name, factor)
            if name == "all different":
                assert np.array_equal(placement, expected.numpy()), (name, factor)
