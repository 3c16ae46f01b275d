"""Shares on a fixed placement: the exact optimum of the linear program, and fair beyond it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.balance import load_shapes
from moemesh.balance import BalanceError, rebalance_experts, split_loads
from tests.balance.cases import hottest


def test_by_hand() -> None:
    """Expert 0 is on both GPUs, expert 1 (load 2) on the second: 0 fills up the first."""
    split = split_loads([[6.0, 2.0]], [[0, 0, 1, 1]], num_gpus=2)
    assert split.gpu_loads == [[6.0, 2.0]] and split.balance == (1.5,)
    split = split_loads([[6.0, 2.0]], [[0, 1, 0, 1]], num_gpus=2)
    assert split.gpu_loads == [[4.0, 4.0]]
    split = split_loads([[6.0, 2.0, 0.0]], [[0, 2, 0, 1]], num_gpus=2)
    assert split.gpu_loads == [[4.0, 4.0]]
    assert split.shares[0][0] == pytest.approx(4 / 6) and split.shares[0][1] == 1.0


def test_fair_beyond_the_hottest() -> None:
    """GPU 0 must carry 10; the other three can be equal, and are."""
    split = split_loads([[10.0, 3.0, 3.0]], [[0, 0, 1, 1, 1, 2, 2, 2]], num_gpus=4)
    assert split.gpu_loads[0] == pytest.approx([10.0, 2.0, 2.0, 2.0])


def test_no_load_at_all() -> None:
    split = split_loads(np.zeros((1, 2)), [[0, 1, 0, 1]], num_gpus=2)
    assert split.balance == (1.0,) and (split.shares == 0.5).all()


@pytest.mark.representative("zipf 1.0")
@pytest.mark.parametrize("name", ["flat", "zipf 1.0", "lognormal 1.0", "bursty"])
def test_equal_to_the_linear_program(name: str) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    loads = load_shapes(3, 32, seed=9)[name]
    slots = rebalance_experts(loads, 48, 1, 1, 16)[0]
    later = np.round(loads * np.exp(np.random.default_rng(0).normal(0, 0.4, loads.shape)))
    split = split_loads(later, slots, num_gpus=16)
    for layer in range(3):
        per_gpu = np.zeros((16, 49))
        per_gpu[np.arange(48) // 3, np.arange(48)] = 1
        per_gpu[:, 48] = -1
        whole = np.zeros((32, 49))
        whole[slots[layer], np.arange(48)] = 1
        best = optimize.linprog(
            [0] * 48 + [1], A_ub=per_gpu, b_ub=np.zeros(16), A_eq=whole, b_eq=later[layer]
        )
        assert split.gpu_loads[layer].max() == pytest.approx(best.fun, rel=1e-9)
        sums = np.bincount(slots[layer], split.shares[layer], minlength=32)
        assert sums == pytest.approx(np.ones(32)) and split.shares.min() >= 0


@given(st.data())
@settings(max_examples=80)
def test_nothing_can_be_poured_downhill(data: st.DataObject) -> None:
    """Optimal and fair, exactly if no replica with load is on a fuller GPU than its sibling."""
    gpus = data.draw(st.integers(1, 4))
    slots = np.array([data.draw(st.lists(st.integers(0, 3), min_size=gpus * 2, max_size=gpus * 2))])
    experts, slots[0] = np.unique(slots[0], return_inverse=True)
    size = len(experts)
    # Half of the least subnormal number is 0.
    number = st.integers(0, 50) | st.floats(0, 1e5, allow_subnormal=False)
    load = st.lists(number, min_size=size, max_size=size)
    loads = np.array([data.draw(load)], float)
    split = split_loads(loads, slots, num_gpus=gpus)
    at = split.gpu_loads[0]
    scale = max(loads.max(), 1e-300)
    assert at.sum() == pytest.approx(loads.sum())
    assert at.max() <= hottest(loads, slots, gpus)[0] * (1 + 1e-9)
    for one, expert in enumerate(slots[0]):
        carried = split.shares[0, one] * loads[0, expert]
        for two in np.flatnonzero(slots[0] == expert):
            assert carried <= 1e-9 * scale or at[one // 2] <= at[two // 2] + 1e-7 * scale


def test_mistakes() -> None:
    with pytest.raises(BalanceError, match="expert 1 has no slot"):
        split_loads([[1.0, 2.0]], [[0, 0]], num_gpus=2)
    with pytest.raises(BalanceError, match=r"num_gpus \(3\) must divide the 4 slots"):
        split_loads([[1.0, 2.0]], [[0, 0, 1, 1]], num_gpus=3)
