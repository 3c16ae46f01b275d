"""Expected copies of a token, and counts from the choices of a run."""

from __future__ import annotations

import random

import pytest

from moemesh.config.layout import Layout
from moemesh.config.model import ModelConfig
from moemesh.planner.traffic.dispatch_traffic import uniform_routing
from tests.twins.predictions import chosen_routing


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
