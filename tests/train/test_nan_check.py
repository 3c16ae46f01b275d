"""No update sees a number that is not finite; its rank, layer, expert and microbatch are named."""

from __future__ import annotations

import math
from typing import Any

import pytest

from moemesh.config.plan import Plan
from tests.ranks import mesh_on_ranks
from tests.train.injecting import IDS, Injection, Outcome, inject_on_rank

NAN, INF = math.nan, math.inf


def check(where: Injection, outcomes: list[Outcome]) -> None:
    """Of one injection on all ranks."""
    hits = [hit for outcome in outcomes for hit in outcome.hits]
    finding = outcomes[0].finding
    assert all(outcome.finding == finding for outcome in outcomes), "ranks differ"
    if not hits:  # the rank does not hold the layer or the expert, or had no rows
        assert not outcomes[0].skipped
        return
    assert all(outcome.skipped for outcome in outcomes), where
    if where.kind != "weight":
        assert all(outcome.is_unchanged for outcome in outcomes), where
    assert not finding.num_alike, "one sequence alone was spoiled"
    if where.kind == "loss":
        assert finding.phase == "loss" and finding.samples, finding
        return
    phase = {"activation": "forward", "weight gradient": "gradient", "gradient": "backward"}
    assert finding.phase == phase.get(where.kind, where.kind), (where, finding)
    assert where.rank in finding.ranks, (where, finding)
    assert finding.rank == where.rank or len(finding.ranks) > 1, (where, finding)
    assert finding.layer == where.layer, (where, finding)
    assert finding.value == ("NaN" if math.isnan(where.value) else "infinite"), (where, finding)
    if where.kind != "weight":
        assert finding.microbatch == where.microbatch, (where, finding)
    if where.kind in ("activation", "gradient"):
        assert finding.name == f"layers.{where.layer}.{where.module}", (where, finding)
        samples = {hit.sample for hit in hits if hit.sample is not None}
        assert samples <= set(finding.samples) <= set(IDS), (where, finding, samples)
    if where.expert is not None:
        assert finding.expert == where.expert, (where, finding)


def injections(plan: Plan, ranks: list[int], layers: list[int]) -> list[Injection]:
    found: list[Injection] = [Injection("loss", 0, token, 0, value=INF) for token in (3, 5)]
    for number, rank in enumerate(ranks):
        for layer in layers:
            microbatch = (number + layer) % plan.microbatches
            value = (NAN, INF)[(number + layer) % 2]
            at = (rank, layer, microbatch)
            found.append(Injection("weight", *at, expert=None, value=value))
            found.append(Injection("weight gradient", *at, expert=None, value=value))
            for expert in (0, 3):
                found.append(Injection("weight", *at, expert=expert, value=value))
                found.append(Injection("weight gradient", *at, expert=expert, value=value))
            for module in ("attention", "feed_forward"):
                found.append(Injection("activation", *at, module=module, value=value))
                found.append(Injection("gradient", *at, module=module, value=value))
            found.append(Injection("activation", *at, module="feed_forward.experts", value=value))
    return found


def run(plan_keys: dict[str, Any], ranks: list[int], layers: list[int], **keys: Any) -> int:
    plan = Plan(**plan_keys)
    cases = injections(plan, ranks, layers)
    if plan.schedule in ("chimera", "dualpipe", "terapipe"):
        # Gradients of weights do not come once a microbatch on every rank.
        cases = [case for case in cases if case.kind != "weight gradient"]
    found = mesh_on_ranks(plan.layout, inject_on_rank, plan_keys, cases, keys)
    for number, where in enumerate(cases):
        check(where, [rank[number] for rank in found])
    return sum(any(rank[number].hits for rank in found) for number in range(len(cases)))


def test_one_rank() -> None:
    assert run({"microbatches": 2}, [0], [1, 2]) >= 18


def test_four_ranks() -> None:
    assert run({"dp": 2, "tp": 2, "ep": 2}, [1], [1]) >= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 2, "ep": 2, "microbatches": 2},
        {"pp": 2, "dp": 2, "ep": 2, "microbatches": 3},
        {"pp": 2, "tp": 2, "microbatches": 2, "schedule": "zb_h1"},
        {"pp": 2, "stages_per_rank": 2, "microbatches": 2, "schedule": "interleaved_1f1b"},
        {"pp": 2, "microbatches": 4, "schedule": "chimera"},
        {"pp": 2, "dp": 2, "ep": 2, "microbatches": 4, "schedule": "dualpipe"},
        {"pp": 2, "microbatches": 2, "schedule": "terapipe", "slices": 2},
        {"dp": 4, "ep": 4, "dispatcher": "hierarchical", "ranks_per_node": 2},
        {"dp": 4, "ep": 2, "dispatcher": "low_latency", "recompute": "full"},
        {"dp": 2, "ep": 2, "dispatcher": "all_gather", "recompute": "full"},
        {"dp": 2, "cp": 2, "ep": 4},
        {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
        {"dp": 2, "data": "zero1", "microbatches": 2},
        {"dp": 2, "ep": 2, "data": "zero2", "microbatches": 2},
        {"dp": 2, "ep": 2, "data": "zero3", "microbatches": 2},
        {"dp": 4, "data": "parameter_server", "microbatches": 2},
    ],
    ids=str,
)
def test_every_kind_of_plan(plan: dict[str, Any]) -> None:
    last = Plan(**plan).world_size - 1
    assert run(plan, [0, last], [1, 2, 3]) >= 20
