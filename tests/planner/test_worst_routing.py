"""Rows that a router sends: the bound for one rank, against adversarial routings, and the mean."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import moemesh as mm
from moemesh.config.layout import Layout
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.planner.estimate import of_own_run
from moemesh.planner.traffic.dispatch_traffic import (
    Routing,
    SentRows,
    capacity_of,
    count_choices,
    uniform_routing,
)
from moemesh.planner.traffic.own_memory import LayerMemory
from moemesh.planner.traffic.tensors import StagePlacement
from tests.twins.predictions import chosen_routing

SEQ_LEN, BATCH = 16, 8
PLANS: list[dict[str, Any]] = [
    {"dp": 4, "ep": 4},
    {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
    {"dp": 4, "ep": 4, "recompute": "selective"},
    {"dp": 2, "ep": 2, "dispatch_chunks": 2},
    {"pp": 2, "dp": 2, "ep": 2, "microbatches": 4},
    {"dp": 4, "ep": 2, "dispatcher": "low_latency"},
]


def drawn(config: ModelConfig, plan: Plan, rng: np.random.Generator) -> Routing:
    """Routings of all degrees of skew towards the experts of one rank, drawn per token."""
    favourites = rng.random(config.num_experts) < rng.random()
    skew = rng.choice([0.0, 2.0, 50.0])

    def sent(rank: int, forward: int, layer: int, tokens: int, chunk: int, chunks: int) -> SentRows:
        scores = rng.random((len(range(chunk, tokens, chunks)), config.num_experts))
        order = np.argsort(-(scores + skew * favourites), axis=1)
        chosen = order[:, : config.experts_per_token].tolist()
        k = config.experts_per_token
        return count_choices(chosen, config.num_experts, plan.layout, slots=k)

    return sent


@pytest.mark.parametrize("keys", PLANS, ids=str)
def test_no_routing_holds_more(keys: dict[str, Any]) -> None:
    rng, plan = np.random.default_rng(0), Plan(**keys)
    config = ModelConfig(num_layers=4, expert_intermediate_size=96)
    worst = of_own_run(config, plan, seq_len=SEQ_LEN, global_batch=BATCH, dtype="float32", rank=0)
    placement = StagePlacement(config, plan, SEQ_LEN)
    step: dict[str, Any] = {"placement": placement, "global_batch": BATCH, "w": 4}
    held = [
        sum(LayerMemory(**step, rank=rank, given_routing=routing).at_peak().values())
        for rank in range(plan.layout.ep)
        for routing in (drawn(config, plan, rng) for _ in range(12))
    ]
    assert max(held) <= worst.activation_bytes
    k = config.experts_per_token
    assert worst.times_mean == plan.ep * min(k, config.num_experts // plan.ep) / k
    assert worst.more_bytes > 0


def test_capacity_bounds_the_rows_of_an_expert() -> None:
    config = ModelConfig(capacity_factor=1.25)
    plan = Plan(dp=4, ep=4)
    common: dict[str, Any] = {"seq_len": SEQ_LEN, "global_batch": BATCH, "dtype": "float32"}
    common["rank"] = 0
    capped, free = (of_own_run(model, plan, **common) for model in (config, ModelConfig()))
    assert capped.rows < free.rows and capped.rows + capped.dropped_choices == free.rows
    # Of 16 tokens of 2 choices among 8 experts each takes ceil(16 * 2 * 1.25 / 8).
    assert capacity_of(config, plan.layout, 2 * SEQ_LEN, SEQ_LEN) == 2 * 5


def test_estimate_says_it() -> None:
    common: dict[str, Any] = {"model": "qwen3-30b-a3b", "cluster": "dgx_h100", "seq_len": 4096}
    estimates = {
        ep: mm.estimate(plan=f"dp=8,ep={ep},data=zero3", global_batch=8, **common) for ep in (1, 8)
    }
    balanced, crowded = (estimates[ep]["memory"]["worst_routing"] for ep in (1, 8))
    assert balanced["more_bytes"] == 0 and balanced["times_mean"] == 1
    assert crowded["times_mean"] == 8 and crowded["blocks"] == 4
    needed = estimates[8].memory_bytes + crowded["more_bytes"]
    assert crowded["needed_bytes"] == needed > estimates[8].memory_bytes
    dense = mm.estimate(plan="dp=8,data=zero3", global_batch=8, **common | {"model": "llama3-8b"})
    assert dense["memory"]["worst_routing"] is None


def test_uniform_counts_are_the_mean_of_many_choices() -> None:
    config = ModelConfig(num_experts=8, experts_per_token=3)
    layout = Layout(dp=4, ep=4, ranks_per_node=2)
    draw, tokens = random.Random(2), 20_000
    choices = {(0, 0, 1): [draw.sample(range(8), 3) for _ in range(tokens)]}
    counts = chosen_routing(config, layout, choices)(0, 0, 1, tokens, 0, 1)
    expected = uniform_routing(config, layout)(0, 0, 1, tokens, 0, 1)
    for have, want in ((counts.rows, expected.rows), (counts.visits, expected.visits)):
        assert have == pytest.approx(want, rel=0.03)
    assert counts.node_visits == pytest.approx(expected.node_visits, rel=0.03)
