"""Operator graphs: construction, and HiGHS against brute force."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moemesh.config.cluster import load_cluster
from moemesh.planner.operators.blocks import EMBEDDING, HEAD, STREAM
from moemesh.planner.operators.graph import least_seconds, solve
from moemesh.planner.operators.resharding import MeshAxis, reshard_seconds
from moemesh.planner.operators.strategies import CostModel, GraphBuilder
from moemesh.planner.shapes.load_shape import load_model
from moemesh.planner.stages.division import best_division
from moemesh.planner.stages.two_level import StageMesh
from tests.planner.graphs import brute_force, graph_of, random_graph


def test_a_choice_adds_up_nodes_and_edges_of_all_copies() -> None:
    graph = graph_of(
        [[1, 2], [10, 20, 30]],
        {(0, 1): [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]},
        state=[[1, 2], [3, 4, 5]],
        saved=[[7, 8], [9, 10, 11]],
        groups=["once", "often"],
        counts={"often": 5},
    )
    cost = graph.cost([1, 2])
    assert cost.seconds == pytest.approx(2 + 5 * (30 + 0.6))
    assert (cost.state_bytes, cost.saved_bytes) == (2 + 5 * 5, 8 + 5 * 11)
    assert cost.memory_bytes(3) == 27 + 3 * 63
    assert graph.group_costs([1, 2])["often"].seconds == pytest.approx(30.6)


def test_links_are_priced_by_the_layouts_of_their_ends() -> None:
    # 16 bytes over 4 ranks at 1 s a byte: a gather moves 12, an all-to-all 3.
    axis = MeshAxis(name="t", size=4, seconds_per_byte=1.0)
    builder = GraphBuilder(CostModel(axes=(axis,), compute_seconds=max))
    first = builder.port("first", {0: 4, 1: 4}, 16.0)
    builder.link(builder.port("ids", {0: 4, 1: 4}, 16.0, constant=True), first)
    (constant,) = builder.edges
    # R, S0, S1 to R, S0, S1: nothing comes back to data.
    assert constant.seconds.tolist() == [[0, 0, 0], [12, 0, 3], [12, 3, 0]]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_operators=st.integers(1, 6),
    price=st.sampled_from([0.0, 0.003, 0.1, 10.0]),
    in_flight=st.sampled_from([1.0, 3.0]),
)
def test_highs_equals_brute_force(
    seed: int, num_operators: int, price: float, in_flight: float
) -> None:
    graph = random_graph(seed, num_operators)
    solution = solve(graph, byte_price=price, in_flight=in_flight)
    total = solution.cost.seconds + price * solution.cost.memory_bytes(in_flight)
    assert total == pytest.approx(brute_force(graph, price, in_flight), rel=1e-7)
    assert solution.cost == graph.cost(solution.choices)


@given(seed=st.integers(0, 2**20), num_operators=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_no_assignment_undercuts_the_least_seconds_of_a_group(
    seed: int, num_operators: int
) -> None:
    graph = random_graph(seed, num_operators)
    choices = product(*(range(len(one.strategies)) for one in graph.operators))
    costs = [graph.group_costs(choice) for choice in choices]
    for group, seconds in least_seconds(graph).items():
        assert seconds == pytest.approx(min(cost[group].seconds for cost in costs), rel=1e-6)


def mesh_of(cap_bytes: float, last: float, *, microbatches: int) -> StageMesh:
    """Two stages of six layers on a stream in one of two layouts. In the first a layer takes 1.0
    seconds and 4 bytes, in the second 1.02 and 1. The head takes `last` in the first, else 0.9."""
    mesh = object.__new__(StageMesh)
    far = [[0.0, np.inf], [np.inf, 0.0]]
    mesh.graph = graph_of(
        [[0.0, 0.0], [0.0, 0.0], [1.0, 1.02], [last, 0.9]],
        {(0, 1): far, (0, 2): far, (0, 3): far},
        state=[[0, 0], [0, 0], [4, 1], [0, 0]],
        groups=[STREAM, EMBEDDING, "dense layer", HEAD],
        counts={"dense layer": 6},
    )
    cluster = load_cluster("dgx_h100")
    free = {"inter_node_latency": 0.0, "intra_node_latency": 0.0, "intra_node_bandwidth": 1e30}
    shape = load_model("llama3-8b").shape.truncated(6)
    mesh.search = SimpleNamespace(
        shape=shape, cluster=cluster.model_copy(update=free), cap_bytes=cap_bytes
    )
    mesh.blocks = SimpleNamespace(stream_bytes=0.0)
    mesh.num_stages, mesh.devices, mesh.microbatches = 2, 1, microbatches
    mesh.in_flight, mesh.assignments = (1.0, 1.0), []
    mesh.add(0.0)
    mesh.unlimited_seconds = best_division(mesh.costs(np.inf).table(), microbatches).seconds
    return mesh


def test_the_bound_of_a_mesh_holds_if_stages_take_several_assignments() -> None:
    """A lighter assignment than the fastest one is faster in the stage of the head."""
    undercut = 0
    for cap, last, microbatches in product((6.0, 12.0, 16.0, 99.0), (0.9, 0.95, 1.0), (1, 4, 32)):
        mesh = mesh_of(cap, last, microbatches=microbatches)
        division = best_division(mesh.refined.table(), microbatches)
        assert division is not None
        assert mesh.lower_bound <= division.seconds * (1 + 1e-9)
        undercut += division.seconds < mesh.unlimited_seconds * (1 - 1e-9)
    assert undercut > 0


def test_forbidden_strategies_are_not_taken() -> None:
    graph = graph_of([[1.0, 9.0], [np.inf, 1.0]], {(0, 1): [[0.0, np.inf], [0.0, 0.0]]})
    assert solve(graph).choices == (1, 1)
    with pytest.raises(AssertionError, match="no choice of strategies is feasible"):
        solve(graph_of([[1.0], [1.0]], {(0, 1): [[np.inf]]}))


# Changing layouts: the table of the module, and several axes.


ONE = (MeshAxis(name="t", size=4, seconds_per_byte=1.0),)
TWO = (MeshAxis(name="d", size=2, seconds_per_byte=10.0), ONE[0])


@pytest.mark.parametrize(
    ("source", "target", "forward", "backward"),
    [
        ("S0", "R", 12, 0),
        ("S0", "B", 12, 12),
        ("R", "S0", 0, 12),
        ("R", "B", 0, 24),
        ("P", "R", 24, 0),
        ("P", "S0", 12, 12),
        ("P", "B", 24, 24),
        ("S0", "S1", 3, 3),
        ("S1", "S1", 0, 0),
        ("R", "P", 0, 0),
    ],
)
def test_one_axis(source: str, target: str, forward: float, backward: float) -> None:
    # 16 bytes over 4 ranks at 1 s a byte: a gather moves 12, an all-reduce 24, an all-to-all 3.
    ends = (source,), (target,)
    assert reshard_seconds(16, *ends, ONE, backward=False) == forward
    assert reshard_seconds(16, *ends, ONE) == forward + backward


def test_latency_counts_messages() -> None:
    axes = (MeshAxis(name="t", size=4, latency=1.0, seconds_per_byte=0.0),)
    assert reshard_seconds(16, ("S0",), ("R",), axes, backward=False) == 3
    assert reshard_seconds(16, ("P",), ("R",), axes, backward=False) == 6


def test_the_cheapest_order_of_steps_is_taken() -> None:
    # Reduce-scatter over the fast axis first: 12 s, then a quarter over the slow one: 20 s.
    assert reshard_seconds(16, ("P", "P"), ("S0", "S1"), TWO, backward=False) == 32
    # Slice before the gather: half of the tensor over the fast axis.
    assert reshard_seconds(16, ("R", "S0"), ("S1", "R"), TWO, backward=False) == 6


def test_only_the_inner_piece_of_a_dim_may_move() -> None:
    # Both axes cut dim 0. Gathering the outer one alone (10 s a byte of the result: 20 s) would
    # leave scattered rows. Instead: gather the inner pieces (half the tensor, 6 s), pad with zeros,
    # cut along the inner axis, and add up over the outer one (all-reduce of 4 bytes, 40 s).
    both, inner = ("S0", "S0"), ("R", "S0")
    assert reshard_seconds(16, both, inner, TWO, backward=False) == 6 + 40
    assert reshard_seconds(16, both, ("S0", "R"), TWO, backward=False) == 6


def test_axes_of_one_rank_are_free() -> None:
    axes = (MeshAxis(name="t", size=1, latency=1.0, seconds_per_byte=1.0),)
    assert reshard_seconds(16, ("P",), ("S0",), axes) == 0
