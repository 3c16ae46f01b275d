"""Expected copies of a token, and counts from the choices of a run."""

from __future__ import annotations

import random

import pytest

from moemesh.config.layout import Layout
from moemesh.config.model import ModelConfig
from moemesh.planner.traffic.dispatch_traffic import uniform_routing
from moemesh.sharding.dispatchers import visit_probability
from tests.planner.closed_forms import expected_nodes, remote_copies
from tests.twins.predictions import chosen_routing

#: DeepSeek-V3, 256 experts on 8 nodes, 8 chosen: as published.
COPIES = [
    ({"deduplicated": False}, "7.00", 202),
    ({}, "4.63", 134),
    ({"kept": 4}, "3.18", 92),
]


@pytest.mark.parametrize(("keys", "printed", "mebibytes"), COPIES)
def test_deepseek_v3_remote_copies(keys: dict[str, int], printed: str, mebibytes: int) -> None:
    copies = remote_copies(256, 8, 8, **keys)  # type: ignore[arg-type]
    assert f"{copies:.2f}" == printed
    # 4,096 tokens in fp8: a byte a channel and a 4-byte scale for every 128.
    per_token = 7168 * (1 + 4 / 128)
    assert round(copies * 4096 * per_token / 2**20) in (mebibytes, mebibytes - 1, mebibytes + 1)


def test_expected_nodes_by_simulation() -> None:
    draw = random.Random(1)
    rounds = 20_000
    visited = sum(len({expert // 4 for expert in draw.sample(range(32), 3)}) for _ in range(rounds))
    assert visited / rounds == pytest.approx(expected_nodes(32, 3, 8), rel=0.01)


def test_limits() -> None:
    assert expected_nodes(8, 1, 8) == 1
    assert expected_nodes(8, 8, 4) == 4
    assert expected_nodes(64, 8, 1) == 1
    assert visit_probability(8, 2, 8) == 1
    with pytest.raises(ValueError, match="8 experts do not divide over 3 nodes"):
        expected_nodes(8, 2, 3)


def test_chosen_counts() -> None:
    config = ModelConfig(num_experts=8, experts_per_token=2)
    layout = Layout(dp=4, ep=4, ranks_per_node=2)
    choices = {(0, 0, 1): [[0, 1], [2, 7], [-1, 5]]}
    sent = chosen_routing(config, layout, choices)(0, 0, 1, 3, 0, 1)
    assert sent.by_expert == (1, 1, 1, 0, 0, 1, 0, 1)
    assert sent.rows == (2, 1, 1, 1)
    assert sent.visits == (1, 1, 1, 1)
    assert sent.node_visits == (2, 2)
    with pytest.raises(ValueError, match="3 tokens chose, not 4"):
        chosen_routing(config, layout, choices)(0, 0, 1, 4, 0, 1)


def test_uniform_counts_are_the_mean_of_many_choices() -> None:
    config = ModelConfig(num_experts=8, experts_per_token=3)
    layout = Layout(dp=4, ep=4, ranks_per_node=2)
    draw, tokens = random.Random(2), 20_000
    choices = {(0, 0, 1): [draw.sample(range(8), 3) for _ in range(tokens)]}
    found = chosen_routing(config, layout, choices)(0, 0, 1, tokens, 0, 1)
    expected = uniform_routing(config, layout)(0, 0, 1, tokens, 0, 1)
    for have, want in ((found.rows, expected.rows), (found.visits, expected.visits)):
        assert have == pytest.approx(want, rel=0.03)
    assert found.node_visits == pytest.approx(expected.node_visits, rel=0.03)
