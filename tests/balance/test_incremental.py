"""Few replicas move, loads return to the tolerance, transfers do not contend."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.balance import load_shapes
from moemesh.balance import (
    BalanceError,
    Replan,
    lower_bound,
    rebalance_experts,
    rebalance_incremental,
    replan_from_scratch,
    schedule_transfers,
)
from moemesh.balance.incremental import relabel
from tests.balance.cases import Floats, Ints, check_groups, check_maps, hottest

PLACES = ((80, 4, 2, 16), (72, 1, 1, 8))
#: Sizes to which the figures of docs/balancing.md refer; minutes.
LARGE = pytest.param((288, 8, 4, 32), marks=pytest.mark.slow)


def drifted(loads: Floats, seed: int) -> Floats:
    noise = np.random.default_rng(seed).normal(0, 0.15, loads.shape)
    return np.round(loads * np.exp(noise))


def carry_out(replan: Replan, previous: Ints, num_gpus: int) -> None:
    """Play the rounds: sources hold what they send, one peer a round, and the result is right."""
    slots = np.asarray(replan.physical_to_logical)
    per_gpu = slots.shape[1] // num_gpus
    for old, new, rounds in zip(previous, slots, replan.transfers, strict=True):
        arrived: dict[int, int] = {}
        for step in rounds:
            peers: dict[int, set[int]] = {}
            for transfer in step:
                assert old[transfer.source_slot] == transfer.expert == new[transfer.target_slot]
                assert transfer.source_slot // per_gpu == transfer.source_gpu
                assert transfer.target_slot // per_gpu == transfer.target_gpu
                peers.setdefault(transfer.source_gpu, set()).add(transfer.target_gpu)
                peers.setdefault(transfer.target_gpu, set()).add(transfer.source_gpu)
                assert transfer.target_slot not in arrived
                arrived[transfer.target_slot] = transfer.expert
            assert all(len(others) == 1 for others in peers.values())
            senders = [transfer.source_gpu for transfer in step]
            assert len(set(senders)) == len(senders)
        for gpu in range(num_gpus):
            own = range(gpu * per_gpu, (gpu + 1) * per_gpu)
            kept = [arrived.get(slot) for slot in own if slot in arrived]
            local = [old[slot] for slot in own]
            for slot in own:
                if slot not in arrived and new[slot] != old[slot]:
                    assert new[slot] in local, "neither on this GPU nor among its transfers"
            assert sorted(kept) == sorted(set(kept))


@pytest.mark.representative("uniform-(72, 1, 1, 8)")
@pytest.mark.parametrize("place", [*PLACES, LARGE], ids=str)
@pytest.mark.parametrize("name", ["uniform", "zipf 0.8", "lognormal 1.0", "bursty"])
def test_few_moves_within_the_tolerance(name: str, place: tuple[int, int, int, int]) -> None:
    replicas, groups, nodes, gpus = place
    where = {"num_gpus": gpus, "num_groups": groups, "num_nodes": nodes}
    experts = 64 if replicas < 100 else 256
    loads = load_shapes(1, experts, seed=4)[name]
    before = np.asarray(rebalance_experts(loads, *place)[0])
    few = many = 0
    for step in range(3):
        loads = drifted(loads, step)
        rebalanced = rebalance_incremental(loads, before, 0.05, **where)
        check_maps(
            (
                rebalanced.physical_to_logical,
                rebalanced.logical_to_physical,
                rebalanced.replica_count,
            ),
            experts,
            replicas,
        )
        check_groups(rebalanced.physical_to_logical, experts, groups, nodes)
        top = hottest(loads, rebalanced.physical_to_logical, gpus)
        scratch = replan_from_scratch(loads, before, **where)
        reachable = hottest(loads, scratch.physical_to_logical, gpus)
        bound = lower_bound(loads, *place)
        assert (top <= np.maximum(bound, reachable) * 1.05 * (1 + 1e-9)).all()
        assert np.allclose(rebalanced.after, top * gpus / loads.sum(axis=1))
        carry_out(rebalanced, before, gpus)
        carry_out(scratch, before, gpus)
        few += sum(rebalanced.moved)
        many += sum(scratch.moved)
        before = np.asarray(rebalanced.physical_to_logical)
    assert few * 4 <= many


def test_nothing_moves_without_need() -> None:
    loads = load_shapes(2, 64, seed=4)["lognormal 1.0"]
    slots = rebalance_experts(loads, 80, 1, 1, 16)[0]
    same = rebalance_incremental(loads, slots, num_gpus=16)
    assert same.moved == (0, 0) and np.array_equal(same.physical_to_logical, slots)
    assert same.transfers == ((), ())
    skewed = drifted(loads, 0)
    assert sum(rebalance_incremental(skewed, slots, num_gpus=16).moved) > 0
    # A large tolerance, or a gain that is not worth it.
    assert sum(rebalance_incremental(skewed, slots, 10.0, num_gpus=16).moved) == 0
    assert sum(rebalance_incremental(skewed, slots, num_gpus=16, min_gain=0.9).moved) == 0


def test_margin_against_moving_again() -> None:
    """With a margin the layer ends below the limit, so that it is not touched at the next drift."""
    loads = load_shapes(1, 64, seed=6)["uniform"]
    slots = rebalance_experts(loads, 80, 1, 1, 16)[0]
    later = drifted(loads, 1)
    reached = {
        margin: rebalance_incremental(later, slots, 0.05, num_gpus=16, margin=margin)
        for margin in (0.0, 0.5)
    }
    for margin, result in reached.items():
        assert result.after[0] <= result.bound[0] * (1 + 0.05 * (1 - margin)) * (1 + 1e-9)
    assert sum(reached[0.0].moved) <= sum(reached[0.5].moved)


def test_groups_that_changed_nodes_are_planned_from_scratch() -> None:
    """A placement that breaks the group rule cannot be repaired in place."""
    loads = load_shapes(1, 64, seed=6)["zipf 1.0"]
    slots = rebalance_experts(loads, 80, 1, 1, 16)[0]
    rebalanced = rebalance_incremental(loads, slots, 0.0, num_gpus=16, num_groups=4, num_nodes=2)
    check_groups(rebalanced.physical_to_logical, 64, 4, 2)


def test_kinds_and_the_three_maps() -> None:
    loads = load_shapes(1, 16)["uniform"]
    maps = rebalance_experts(loads.tolist(), 24, 1, 1, 4)
    rebalanced = rebalance_incremental(loads[:, ::-1].tolist(), maps, num_gpus=4)
    assert isinstance(rebalanced.physical_to_logical, list)


@pytest.mark.parametrize(
    ("previous", "more", "message"),
    [
        ([[0, 1, 2]], {}, r"num_gpus \(2\) must divide the 3 slots of previous"),
        ([[0, 1, 2, 0], [0, 1, 2, 0]], {}, r"previous must be 1 layers x slots, and is 2 x 4"),
        ([[0, 1, 2, 3]], {}, r"previous names expert 3: there are experts 0 to 2"),
        ([[0, 1, 1, 0]], {}, r"previous: expert 2 has no slot in layer 0"),
        ([[0, 1]], {}, r"expert 2 has no slot"),
        ([0, 1, 2, 0], {}, r"previous must be 1 layers x slots, and is 4"),
        ([[0, 1, 2, 0.5]], {}, r"whole numbers"),
        ([[0, 1, 2, float("nan")]], {}, r"whole numbers"),
        ([[0, 1, 2, 0]], {"tolerance": -0.1}, r"tolerance must be at least 0, and is -0.1"),
        ([[0, 1, 2, 0]], {"margin": 1.0}, r"margin must be at least 0 and below 1"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_mistakes(previous: list, more: dict, message: str) -> None:
    with pytest.raises(BalanceError, match=message):
        rebalance_incremental([[3.0, 2.0, 1.0]], previous, num_gpus=2, **more)


@given(
    st.sampled_from([(1, 1), (1, 4), (1, 5), (2, 3), (3, 2)]),
    st.integers(1, 4),
    st.integers(0, 1000),
)
@settings(max_examples=60)
def test_relabelling_moves_least(gpus_of: tuple[int, int], per_gpu: int, seed: int) -> None:
    """Against all permutations of nodes and of the GPUs in them."""
    nodes, node_gpus = gpus_of
    random = np.random.default_rng(seed)
    gpus = nodes * node_gpus
    old, new = random.integers(0, 5, (2, gpus * per_gpu))
    best = gpus * per_gpu
    for outer in permutations(range(nodes)):
        for inner in np.ndindex(*[len(list(permutations(range(node_gpus))))] * nodes):
            every = list(permutations(range(node_gpus)))
            order = [
                outer[node] * node_gpus + every[inner[node]][place]
                for node in range(nodes)
                for place in range(node_gpus)
            ]
            moved = 0
            for gpu, source in enumerate(order):
                held = list(old[gpu * per_gpu : (gpu + 1) * per_gpu])
                for expert in new[source * per_gpu : (source + 1) * per_gpu]:
                    if expert in held:
                        held.remove(expert)
                    else:
                        moved += 1
            best = min(best, moved)
    slots = new.copy()
    assert relabel(slots, old, nodes, gpus) == best
    assert sorted(slots.tolist()) == sorted(new.tolist())


def test_sources_are_near_and_shared_out() -> None:
    """Expert 0 lives on GPUs 0 and 2; GPU 1 is on the node of 0, GPU 3 on that of 2."""
    rounds = schedule_transfers([0, 1, 0, 2], [0, 0, 0, 0], num_gpus=4, num_nodes=2)
    assert [(t.source_gpu, t.target_gpu) for step in rounds for t in step] == [(0, 1), (2, 3)]
    assert len(rounds) == 1
    # One source for three targets: three rounds, in any order.
    assert len(schedule_transfers([0, 1, 2, 3], [0, 0, 0, 0], num_gpus=4)) == 3
    # A swap is one round: the peers talk both ways.
    assert len(schedule_transfers([0, 1], [1, 0], num_gpus=2)) == 1
    # A move inside a GPU sends nothing.
    assert schedule_transfers([0, 1, 2, 3], [1, 0, 2, 3], num_gpus=2) == ()
