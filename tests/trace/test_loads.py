"""Expert loads: derived numbers by hand, legal zeros, the JSONL round trip."""

import math

import pytest

from moemesh.trace.loads import LayerLoads, read_loads


def loads(experts: list[int], ranks: list[int] | None = None, **details: int) -> LayerLoads:
    known = {"step": 1, "layer": 0} | details
    return LayerLoads(tokens_per_expert=tuple(experts), tokens_per_rank=tuple(ranks or ()), **known)


def test_by_hand():
    layer = loads([6, 2, 0, 0], [8, 0])
    assert layer.expert_max_over_mean == 3.0
    assert layer.rank_max_over_mean == 2.0
    assert layer.dead_experts == 2
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert layer.entropy == pytest.approx(entropy, rel=1e-14)


def test_extremes():
    assert loads([5, 5, 5]).entropy == pytest.approx(1.0)
    assert loads([5, 5, 5]).expert_max_over_mean == 1.0
    assert loads([0, 9, 0]).entropy == 0.0
    assert loads([0, 9, 0]).expert_max_over_mean == 3.0


def test_nothing_to_route_is_legal():
    layer = loads([0, 0, 0], [0, 0])
    assert (layer.expert_max_over_mean, layer.rank_max_over_mean, layer.entropy) == (1, 1, 1)
    assert layer.dead_experts == 3
    assert loads([]).expert_max_over_mean == 1.0
    assert loads([7]).entropy == 1.0


def test_lines_round_trip():
    written = [loads([1, 0], [1]), loads([0, 0], [0], step=2, layer=3, dropped=4)]
    lines = [item.to_line() for item in written]
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in lines)
    assert list(read_loads([lines[0], "\n", lines[1]])) == written


def test_a_bad_line_is_named():
    with pytest.raises(ValueError, match="line 2"):
        list(read_loads([loads([1]).to_line(), '{"step": 2}']))
    with pytest.raises(ValueError, match="line 1"):
        list(read_loads(["[1, 2]"]))
    with pytest.raises(ValueError, match="-3"):
        loads([1, -3])
