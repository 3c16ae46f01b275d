"""Replicas and moves of experts change who computes what, and no result: not by one rounding more.

Routing is replayed from the skewed workloads W2 to W6, so that replicas are many and plans differ
from microbatch to microbatch. Float64; clipping is active in every run.
"""

from functools import cache
from typing import Any

import pytest

from moemesh.trace.loads import max_over_mean
from tests.parity.balancing import Case, Trained, difference, train
from tests.parity.models import MODEL, TRAIN
from tests.parity.training import Shape, rows

#: Two hot experts on one rank get half of all tokens.
SKEWED = MODEL | {"num_experts": 16, "num_shared_experts": 0, "num_layers": 4}
ADAM = TRAIN | {"optimizer": "adamw", "steps": 40, "lr": 3e-3, "warmup_steps": 5}
EQUAL = 1e-12

PAIR: dict[str, Any] = {"dp": 2, "ep": 2, "spare_slots": 1}
#: "own": the choices of the router itself.
REPLICAS = rows(
    """
    *W2 | dp=2 ep=2 spare_slots=1
    W6 | dp=2 tp=2 ep=2 etp=2 spare_slots=2 microbatches=2
    W6 | pp=2 dp=2 ep=2 spare_slots=1 schedule=dualpipe_v microbatches=4
    W2 | dp=4 ep=4 spare_slots=2 recompute=full dispatch_chunks=2
    W3 | tp=4 ep=4 spare_slots=1 dispatcher=auto
    W5 | dp=2 tp=2 ep=4 spare_slots=3
    own | dp=2 tp=2 ep=2 spare_slots=2
    W6 | pp=2 dp=2 ep=2 spare_slots=1 schedule=zb_h1 microbatches=3
    W2 | dp=2 tp=2 ep=2 spare_slots=1 recompute=selective
    """
)
MOVES = rows(
    """
    *W2 | dp=2 ep=2
    W6p16 | dp=2 tp=2 ep=2 etp=2 dispatcher=all_gather
    W2 | dp=4 ep=2 dispatcher=low_latency
    W6 | dp=4 ep=4 dispatcher=hierarchical ranks_per_node=2 spare_slots=0
    W6 | pp=2 dp=2 ep=2 schedule=dualpipe microbatches=4 recompute=full
    own | pp=2 tp=2 ep=2 spare_slots=1 microbatches=2
    """
)
TRAINS = {"sgd": TRAIN, "adam": ADAM, "seven": ADAM | {"steps": 7}}


@cache
def alone(workload: str, keys: str = "sgd", width: int = 16) -> Trained:
    """The plain run on one rank."""
    model = SKEWED | {"expert_intermediate_size": width}
    return train(Case(model, {}, TRAINS[keys], workload=workload))


@pytest.mark.parametrize(("workload", "plan", "_"), REPLICAS)
def test_replicas_change_no_result(workload: str, plan: dict[str, Any], _: Shape) -> None:
    expected = alone(workload)
    got = train(Case(SKEWED, plan, TRAIN, workload=workload))
    assert difference(got, expected) <= EQUAL
    sent = sum(
        entry.wire_bytes
        for ledger in got.ledgers
        for entry in ledger.entries()
        if entry.caller == "moe.replicas"
    )
    assert sent > 0, "no replica was needed: nothing was tested"
    for counts_LE, rank_LP in zip(got.counts, got.rank_tokens, strict=True):
        assert rank_LP.sum(1).tolist() == counts_LE.sum(1).tolist()


def test_shadows_change_no_result() -> None:
    """Narrow experts are cheap to send: FasterMoE's rule then copies the hot ones everywhere."""
    model = SKEWED | {"expert_intermediate_size": 2}
    plan = PAIR | {"spare_slots": 3, "spare_policy": "shadow"}
    got = train(Case(model, plan, TRAIN, workload="W2"))
    assert difference(got, alone("W2", width=2)) <= EQUAL
    sent = sum(ledger.total(caller="moe.replicas").wire_bytes for ledger in got.ledgers)
    assert sent > 0


@pytest.mark.parametrize(("workload", "plan", "_"), MOVES)
def test_moved_experts_change_no_result(workload: str, plan: dict[str, Any], _: Shape) -> None:
    keys = ADAM | {"rebalance_every": 3, "steps": 7}
    got = train(Case(SKEWED, plan, keys, workload=workload))
    assert got.num_moved > 0, "no expert moved: nothing was tested"
    assert difference(got, alone(workload, "seven")) <= EQUAL


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 5], ids=["replicas", "and moves"])
def test_40_steps_of_adam_end_at_the_same_weights(every: int) -> None:
    got = train(Case(SKEWED, PAIR, ADAM | {"rebalance_every": every}, workload="W6"))
    assert bool(got.num_moved) == bool(every)
    assert difference(got, alone("W6", "adam")) <= EQUAL


def test_moves_even_out_the_ranks() -> None:
    """A permutation without any replica pays when the heat stays where it is."""
    keys = TRAIN | {"rebalance_every": 1, "steps": 2}
    got = train(Case(SKEWED, {"dp": 2, "ep": 2}, keys, workload="W2"))
    assert got.num_moved > 0
    before, after = (max_over_mean(tokens[0].tolist()) for tokens in got.rank_tokens)
    assert before > 1.3
    assert after < 1.1
