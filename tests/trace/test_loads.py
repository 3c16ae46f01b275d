"""Expert loads: derived numbers by hand, legal zeros, the JSONL round trip."""

import math

import pytest

from moemesh.trace.loads import LayerLoads, read_loads


def loads(experts: list[int], ranks: list[int] | None = None, **details: int) -> LayerLoads:
    known = {"step": 1, "layer": 0} | details
    return LayerLoads(tokens_per_expert=tuple(experts), tokens_per_rank=tuple(ranks or ()), **known)


SKEW = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)


@pytest.mark.parametrize(
    ("experts", "ranks", "ratios", "entropy", "dead"),
    [
        ([6, 2, 0, 0], [8, 0], (3.0, 2.0), SKEW, 2),
        ([5, 5, 5], [], (1.0, 1.0), 1.0, 0),
        ([0, 9, 0], [], (3.0, 1.0), 0.0, 2),
        # Nothing to route is legal.
        ([0, 0, 0], [0, 0], (1.0, 1.0), 1.0, 3),
        ([], [], (1.0, 1.0), 1.0, 0),
        ([7], [], (1.0, 1.0), 1.0, 0),
    ],
)
def test_by_hand(experts, ranks, ratios, entropy, dead):
    layer = loads(experts, ranks)
    assert (layer.expert_max_over_mean, layer.rank_max_over_mean) == ratios
    assert layer.entropy == pytest.approx(entropy, rel=1e-14)
    assert layer.dead_experts == dead


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
