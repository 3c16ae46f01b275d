"""Rules of asynchronous schedules: every mistake names its numbers and a way out."""

from __future__ import annotations

from typing import Any

import pytest

from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan

TWO = {"schedule": "pipedream_2bw", "pp": 4, "microbatches": 12}
AMPNET = {"schedule": "ampnet", "pp": 2, "microbatches": 4}


@pytest.mark.parametrize(
    "keys",
    [
        TWO,
        TWO | {"update_window": 6},
        AMPNET | {"update_window": 1, "max_in_flight": 9, "ampnet_backward": "live"},
        AMPNET | {"replay": "runs/tiny"},
        {"schedule": "pipedream", "pp": 2},
    ],
)
def test_legal(keys: dict[str, Any]) -> None:
    assert Plan(**keys).check(ModelConfig()) == []


@pytest.mark.parametrize(
    ("keys", "key", "words", "fix"),
    [
        (
            TWO | {"update_window": 5},
            "update_window",
            "update_window (5) must divide microbatches (12)",
            "update_window = 4 or 6",
        ),
        (
            TWO | {"update_window": 2},
            "update_window",
            "pipedream_2bw needs update_window (2) >= pp (4)",
            "update_window = 4",
        ),
        (
            {"schedule": "pipedream", "update_window": 2, "microbatches": 2},
            "update_window",
            "a key of schedule pipedream_2bw or ampnet, the schedule is pipedream",
            "leave update_window out",
        ),
        ({"max_in_flight": 2}, "max_in_flight", "the schedule is 1f1b", "schedule = ampnet"),
        ({"replay": "there"}, "replay", "the schedule is 1f1b", "schedule = ampnet"),
        (AMPNET | {"max_in_flight": 0}, "max_in_flight", "at least 1", "max_in_flight = 1"),
        (
            AMPNET | {"ampnet_backward": "live", "recompute": "full"},
            "ampnet_backward",
            "recompute = full does not",
            'ampnet_backward = "recompute"',
        ),
    ],
)
def test_mistakes(keys: dict[str, Any], key: str, words: str, fix: str) -> None:
    (problem,) = Plan(**keys).check(ModelConfig())
    assert problem.key == f"plan.{key}"
    assert words in problem.message and fix in problem.fix


def test_weights_that_two_stages_share() -> None:
    tied = ModelConfig(tied_embeddings=True)
    (problem,) = Plan(**AMPNET).check(tied)
    assert "tied embeddings put a weight on the first and the last of pp = 2" in problem.message
    assert Plan(**AMPNET | {"pp": 1}).check(tied) == []
    live = Plan(**AMPNET | {"ampnet_backward": "live"})
    (problem,) = live.check(ModelConfig(router_dtype="model"))
    assert "rounded copy" in problem.message
